"""Implements a depth block: a flow dH/dtau = alpha F(H, tau, u) from tau = 0 to 1 in place of some layers.

The equations are in section 3.1 of the paper on continuous depth; alpha is a learned scalar, u the control.

Axes: R rows of a chunk, T tokens of a chunk, D hidden size, C components of the control, n tokens of all rows, x any
size.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from condense.attention import AttentionMetadata
from condense.configuration import CondenseConfig
from condense.decoder_stack import BlockCost
from condense.layers import CondenseDecoderLayer, RMSNorm, detach_rows
from condense.segmentation import Chunk, on_device
from condense.state.memory import KeyValueState, Memory

from .fields import MLPField, Tau
from .settings import DepthSettings
from .solvers import Solution, check_installed, num_fixed_evaluations, solve_adaptive, solve_fixed, solve_fixed_adjoint

REMEDY = "lower the learning rate, or use an earlier checkpoint or more steps"
BoundField = Callable[[Tau, torch.Tensor], torch.Tensor]  # a field with its control bound


class NotFiniteError(ValueError):
    """Raised if a flow receives or produces values that are not finite."""


class DepthFlow(nn.Module):
    """Integrates a field that treats each token separately; replaces layers in any decoder stack."""

    alpha: torch.Tensor

    def __init__(self, field: nn.Module, settings: DepthSettings):
        super().__init__()
        check_installed(settings)
        self.field, self.settings = field, settings
        alpha = torch.full((1,), float(settings.alpha))
        if settings.learn_alpha:
            self.alpha = nn.Parameter(alpha)
        else:  # not a parameter: loading a checkpoint makes all parameters trainable
            self.register_buffer("alpha", alpha)

    def flow(self, start_RTD: torch.Tensor, control_RTC: torch.Tensor | None, chunk: Chunk | None = None) -> Solution:
        """Returns the state at tau = 1 [R, T, D] and the number of evaluations, [R, T] if it differs by token.

        `control_RTC` may have one row or one token for all. Padding of a `chunk` is not checked. Raises
        `NotFiniteError` if the field's values are not finite, and `ValueError` if an adaptive solver needs too many
        evaluations.
        """
        if not self.settings.is_adaptive:
            return self.integrate(
                lambda tau, hidden: self.field(tau, hidden, control_RTC), start_RTD, control_RTC, chunk
            )
        shape = start_RTD.shape[:-1]
        control_nC = None if control_RTC is None else control_RTC.expand(*shape, -1).flatten(0, -2)
        derivative = self._derivative(lambda tau, hidden: self.field(tau, hidden, control_nC), start_RTD.dtype)
        start_nD = _accurate(start_RTD.flatten(0, -2))
        end_nD, evaluations_n = solve_adaptive(self._check(derivative), start_nD, self.settings)
        return Solution(end_nD.unflatten(0, shape).to(start_RTD.dtype), evaluations_n.unflatten(0, shape))

    def integrate(
        self, field: BoundField, start_RTD: torch.Tensor, control_RTC: torch.Tensor | None, chunk: Chunk | None = None
    ) -> Solution:
        """Integrates the flow with fixed steps."""
        settings, start = self.settings, _accurate(start_RTD)
        derivative = self._derivative(field, start_RTD.dtype)
        if settings.gradient == "adjoint" and torch.is_grad_enabled():
            inputs = [*self.parameters(), *([] if control_RTC is None else [control_RTC])]
            learned = [tensor for tensor in inputs if tensor.requires_grad]
            end = solve_fixed_adjoint(derivative, start, settings.solver, settings.steps, learned)
        else:
            end = solve_fixed(derivative, start, settings.solver, settings.steps)
        if not torch.compiler.is_compiling() and not _is_capturing(end) and not _is_finite(end, chunk):
            with torch.no_grad():  # again, to find the step
                solve_fixed(self._check(derivative), start, settings.solver, settings.steps)
            raise NotFiniteError(f"the flow of the field {settings.field!r} overflows: {REMEDY}.")
        return Solution(end.to(start_RTD.dtype), num_fixed_evaluations(settings))

    def _derivative(self, field: BoundField, dtype: torch.dtype) -> BoundField:
        """Returns alpha F; the field computes in the dtype of the hidden states."""
        return lambda tau, state: self.alpha * field(tau, state.to(dtype)).to(state.dtype)

    def _check(self, derivative: BoundField) -> BoundField:
        evaluations = 0

        def checked(tau: Any, state: torch.Tensor) -> torch.Tensor:
            nonlocal evaluations
            evaluations += 1
            slope = derivative(tau, state)
            if not bool(torch.isfinite(slope).all()):
                raise NotFiniteError(self._not_finite(tau, state, slope, evaluations))
            return slope

        return checked

    def _not_finite(self, tau: Any, state: torch.Tensor, slope: torch.Tensor, evaluation: int) -> str:
        if isinstance(tau, torch.Tensor):
            token = int(torch.isfinite(slope).all(-1).logical_not().nonzero()[0, 0])
            tau = float(tau[token, 0])
            where = f"at tau={tau:.3g}, evaluation {evaluation}"
        else:
            step = min(int(tau * self.settings.steps + 1e-6), self.settings.steps - 1) + 1
            where = f"at tau={tau:.3g}, step {step} of {self.settings.steps}"
        if evaluation == 1 and not bool(torch.isfinite(state).all()):
            return "the depth block receives hidden states that are not finite: check the layers before it."
        return (
            f"the field {self.settings.field!r} of the depth block gives values that are not finite {where}: {REMEDY}."
        )


class LayerField(CondenseDecoderLayer):
    """F(H, tau, u) = layer(H + W u) - (H + W u): the residual update of a decoder layer, with its attention.

    Queries see the memory and the current segment's keys and values from the same evaluation.
    """

    def __init__(self, config: CondenseConfig, settings: DepthSettings):
        super().__init__(config, settings.position)
        control_size = settings.control_size
        self.control_proj = nn.Linear(control_size, config.hidden_size, bias=False) if control_size else None

    def bind(
        self,
        control_RTC: torch.Tensor | None,
        key_values: KeyValueState | None,
        metadata: AttentionMetadata,
        num_evaluations: int,
    ) -> BoundField:
        """Returns the field of a chunk. Its calls are evaluations 0, 1, 2 ... of one flow."""
        numbers = itertools.cycle(range(num_evaluations))

        def field(tau: Tau, hidden_RTD: torch.Tensor) -> torch.Tensor:
            number = next(numbers)
            own = None if key_values is None else key_values.at_evaluation(number, num_evaluations)
            input_RTD = self._add_control(hidden_RTD, control_RTC)
            attention_RTD, _ = self.self_attn(self.input_layernorm(input_RTD), own, metadata)
            return attention_RTD + self.mlp(self.post_attention_layernorm(input_RTD + attention_RTD))

        return field

    def memory_of(self, source_RTD: torch.Tensor, control_RTC: torch.Tensor | None, metadata: AttentionMetadata):
        return self.project_memory(self._add_control(source_RTD, control_RTC), metadata)

    def _add_control(self, hidden_RTD: torch.Tensor, control_RTC: torch.Tensor | None) -> torch.Tensor:
        return hidden_RTD if self.control_proj is None else hidden_RTD + self.control_proj(control_RTC)


class DepthBlock(DepthFlow):
    """A member of a folded model's stack. With the field `layer`, its memory is the state at the end of the flow."""

    def __init__(self, config: CondenseConfig):
        assert config.depth is not None
        settings = DepthSettings.from_dict(config.depth)
        if settings.position >= config.num_hidden_layers:
            raise ValueError(
                f"depth: position={settings.position} in a stack of {config.num_hidden_layers} layers: choose a "
                "position in the stack, counted from 0."
            )
        config.depth = settings.to_dict()  # with defaults for omitted fields
        super().__init__(build_field(config, settings), settings)
        self.position = settings.position

    @property
    def attention_evaluations(self) -> int:
        """Returns how often a token's attention is computed."""
        return num_fixed_evaluations(self.settings) if isinstance(self.field, LayerField) else 0

    @staticmethod
    def cost(settings: Mapping[str, Any]) -> BlockCost:
        """Raises `ValueError` for an adaptive solver, because its evaluations depend on the text."""
        own = DepthSettings.from_dict(settings)
        if own.is_adaptive:
            raise ValueError(
                f"a plan counts evaluations before the run, and the depth block's solver {own.solver!r} chooses them "
                "by token: start the run without a plan, or convert with a fixed-step solver, such as euler."
            )
        width = 0 if own.field == "layer" else own.field_size
        assert width is not None
        return BlockCost(own.position, num_fixed_evaluations(own), width, own.gradient == "adjoint")

    def forward(
        self, input_RTD: torch.Tensor, key_values: KeyValueState | None, metadata: AttentionMetadata
    ) -> tuple[torch.Tensor, Memory | None]:
        """Returns the state at tau = 1 and, for the field `layer`, its keys and values for the next segment."""
        inputs = metadata.token_inputs
        assert inputs is not None, "a block is part of a model"
        control_RTC = inputs.control_RTC
        if not isinstance(self.field, LayerField):
            solution = self._flow_of_tokens(input_RTD, control_RTC, metadata.chunk)
            inputs.count_evaluations(solution.num_evaluations)
            return solution.end_xD, None
        bound = self.field.bind(control_RTC, key_values, metadata, num_fixed_evaluations(self.settings))
        solution = self.integrate(bound, input_RTD, control_RTC, metadata.chunk)
        inputs.count_evaluations(solution.num_evaluations)
        if not metadata.writes_memory:
            return solution.end_xD, None
        end_RTD = solution.end_xD
        remembered_RTD = input_RTD if metadata.is_sink else self.field.memory_share(input_RTD, end_RTD)
        return end_RTD, self.field.memory_of(detach_rows(remembered_RTD, metadata.detach_R), control_RTC, metadata)

    def _flow_of_tokens(self, input_RTD: torch.Tensor, control_RTC: torch.Tensor | None, chunk: Chunk) -> Solution:
        """Returns the flow. Adaptive solvers skip padding, which may need more steps than any token."""
        if chunk.rectangular or not self.settings.is_adaptive:
            return self.flow(input_RTD, control_RTC, chunk)
        index_n = tuple(on_device(index, input_RTD.device) for index in chunk.token_indices)
        if control_RTC is not None:
            control_RTC = control_RTC.expand(*input_RTD.shape[:2], -1)[index_n]
        end_nD, evaluations_n = self.flow(input_RTD[index_n], control_RTC)
        assert isinstance(evaluations_n, torch.Tensor)
        evaluations_RT = input_RTD.new_zeros(input_RTD.shape[:2], dtype=torch.long)
        return Solution(input_RTD.index_put(index_n, end_nD), evaluations_RT.index_put(index_n, evaluations_n))


def build_field(config: CondenseConfig, settings: DepthSettings) -> nn.Module:
    """Builds the field of a folded model's block, with random weights."""
    if settings.field == "layer":
        return LayerField(config, settings)
    if settings.field_size is None:
        raise ValueError(
            "depth: field_size is missing: pass the field's width, or make the model with convert_to_depth."
        )
    norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
    uses_tau = settings.field == "mlp_tau"
    return MLPField(norm, config.hidden_size, settings.field_size, settings.control_size, uses_tau)


def _accurate(state: torch.Tensor) -> torch.Tensor:
    return state.to(torch.promote_types(state.dtype, torch.float32))


def _is_finite(end_xD: torch.Tensor, chunk: Chunk | None) -> bool:
    """Returns whether all tokens are finite; ignores a chunk's padding."""
    if chunk is not None and not chunk.rectangular:
        end_xD = end_xD[tuple(on_device(index, end_xD.device) for index in chunk.token_indices)]
    return bool(torch.isfinite(end_xD).all())


def _is_capturing(tensor: torch.Tensor) -> bool:
    """Returns whether a CUDA graph is being captured, which can't read a value."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
