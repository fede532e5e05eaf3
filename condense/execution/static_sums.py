"""The gradients of a stack's weights in float32, on buffers that captured graphs add to.

    link = Begin.apply(sums, ..., *weights)    once for each call
    link, ... = _Group.apply(..., link, ...)   for each group; its backward pass adds to the buffers

A product of a segment's few tokens takes as long to write its sum as to compute it. So the gradients of a layer's
outputs wait, with its inputs, until there are `TOKENS` of them. What is in memory from `rows` needs no copy then.
Gradients of norms are added to parts of their sums, which are added up at the end of a backward pass.

The link leads from each group to the weights: autograd runs `Begin`'s node after the nodes of all groups. It passes on
copies, so that a buffer never becomes the gradient of a weight.

Axes: m layers of a band, n tokens of each, O and I output and input widths.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from ..products import add_product, side_by_side
from ..shared_weights import Gradients, SharedWeights
from ..weight_sum import WeightSum, sum_dtype
from .adjacent_rows import BandRows, GroupRows, Place
from .stacked_parameters import JOINED
from .stacking import Stack

TOKENS = 4096  # of a layer, whose gradients wait


def check_gradient(gradient: torch.Tensor | None) -> None:
    """Raises `ValueError` in a backward pass that a captured graph can't take part in."""
    if torch.is_grad_enabled():
        reason = "create_graph=True: a captured CUDA graph has no second derivatives"
    elif gradient is not None and torch._C._functorch.is_legacy_batchedtensor(gradient):
        reason = "is_grads_batched=True: a captured CUDA graph computes the gradients of one vector at a time"
    else:
        return
    raise ValueError(f"{reason}. Set model.config.schedule='wavefront' (or 'sequential').")


class StaticSums(SharedWeights):
    def __init__(self, stack: Stack):
        super().__init__(every_pass=True, every_dtype=True)
        trained = {
            name: one.all for name, one in stack.parameters.items() if any(weight.requires_grad for weight in one.all)
        }
        self._zeroed: list[torch.Tensor] = []  # each sum, or the sums of an input's weights side by side
        self._sums: dict[int, WeightSum] = {}
        for names in _joined_names(trained):
            joint_MOx = _zeros([trained[name] for name in names])
            self._zeroed.append(joint_MOx)
            first = 0
            for weights in (trained[name] for name in names):
                total_MOx = joint_MOx[:, first : first + len(weights[0])]
                self._sums[id(weights[0])] = WeightSum(weights, is_stack=True, every_pass=True, total=total_MOx)
                first += len(weights[0])
        self._partials: dict[tuple[int, int], torch.Tensor] = {}  # [M, p, D], by the weight's id and p
        self._backward_pass: int | None = None
        self._waiting: dict[tuple, list[tuple[Gradients, torch.Tensor]]] = defaultdict(list)
        self._num_layers = len(stack.layers)
        self._rows: GroupRows | None = None

    @contextmanager
    def group(self, num_segments: int, tokens: int) -> Iterator[GroupRows]:
        """Makes uses of weights within it part of a group of segments: they add to these sums."""
        self._rows = GroupRows(self._num_layers, num_segments, kept=-(-TOKENS // tokens))
        self.collects_rows = True
        try:
            with self.active():
                yield self._rows
        finally:
            self._rows, self.collects_rows = None, False

    def rows(
        self, weights: Sequence[torch.Tensor], members: slice, like_RTx: torch.Tensor, of_gradients: bool
    ) -> BandRows | None:
        """Returns None if no rows will wait, and for several texts in a wave: their rows aren't equally spaced."""
        if self._rows is None or id(weights[0]) not in self._sums:
            return None
        num_layers, num_rows = members.stop - members.start, like_RTx.shape[0] * like_RTx.shape[1]
        if num_rows // num_layers >= TOKENS or num_layers not in (1, len(like_RTx)):
            return None
        return self._rows.of_band(Place(id(weights[0]), of_gradients), members)

    def partial_sums(self, weights: Sequence[torch.Tensor], members: slice) -> "BandPartialSums | None":
        return None if self._rows is None else BandPartialSums(self, id(weights[0]), members)

    def partials(self, weight: int, num_parts: int, width: int, like: torch.Tensor) -> torch.Tensor:
        """Returns the parts [M, num_parts, width] of the sum of a norm's weights."""
        key = weight, num_parts
        if key not in self._partials:
            self._partials[key] = like.new_zeros(self._num_layers, num_parts, width, dtype=torch.float32)
        return self._partials[key]

    @property
    def weights(self) -> list[nn.Parameter]:
        return [weight for one in self._sums.values() for weight in one.weights]

    def weight_versions(self) -> list[int]:
        """Returns the versions of the weights, which change when an optimizer changes weights in place."""
        return [weight._version for one in self._sums.values() for weight in one.weights]

    def begin(self, weights: Sequence[torch.Tensor], is_stack: bool = False) -> tuple[WeightSum, torch.Tensor]:
        """Returns a new token for each use, because autograd remembers the stream of a capture."""
        assert is_stack, "captured layers are bands of a stack"
        return self._sums[id(weights[0])], weights[0].new_empty(()).requires_grad_()

    def add_products(
        self, sums: Sequence[WeightSum], members: slice, gradients: Gradients, input_mnI: torch.Tensor
    ) -> None:
        tokens = input_mnI.shape[1]
        if tokens >= TOKENS:
            super().add_products(sums, members, gradients, input_mnI)
            return
        for number in range(len(input_mnI)):
            key = number + members.start, tuple(sums)
            of_layer = [None if one is None else one[number] for one in gradients]
            self._waiting[key].append((of_layer, input_mnI[number]))
            if len(self._waiting[key]) * tokens >= TOKENS:
                self._add_waiting(key)

    def add_waiting(self) -> None:
        """Adds the waiting gradients, and the parts of sums, at the end of a captured backward pass."""
        for key in list(self._waiting):
            self._add_waiting(key)
        for (weight, _), partial_MpD in self._partials.items():
            _known(self._sums[weight].total()).add_(partial_MpD.sum(1))
        self._partials.clear()  # they belong to a capture

    def _add_waiting(self, key: tuple) -> None:
        layer, sums = key
        found = self._waiting.pop(key)[::-1]  # the backward pass begins with the latest segment
        input_nI = _joined([one for _, one in found])
        totals = [_known(one.total())[layer] for one in sums]
        of_outputs: list[list[torch.Tensor | None]] = [list(one) for one in zip(*[of for of, _ in found], strict=True)]
        joint_OI, joint = side_by_side(totals, dim=0), [_joint_gradients(of_layer) for of_layer, _ in found]
        if joint_OI is not None and all(one is not None for one in joint):
            totals, of_outputs = [joint_OI], [joint]
        for total_OI, gradients in zip(totals, of_outputs, strict=True):
            known = [one for one in gradients if one is not None]
            if known:  # else the weights are frozen
                add_product(total_OI, _joined(known).t(), input_nI)

    def begin_pass(self) -> None:
        """Prepares a group's backward pass: another pass may have ended before it reached the weights."""
        backward_pass = torch._C._current_graph_task_id()
        if self._backward_pass != backward_pass:
            if self._zeroed:  # some weights are trained
                torch._foreach_zero_(self._zeroed)
            self._backward_pass = backward_pass

    def end_pass(self) -> None:
        """Ends a backward pass, or a capture, which may have run out of memory before it added what waits."""
        self._backward_pass = None
        self._waiting.clear()
        self._partials.clear()

    def take(self) -> Sequence[torch.Tensor | None]:
        """Returns copies of the gradients of `weights`; None if another call of the same pass has taken them."""
        if self._backward_pass != torch._C._current_graph_task_id():
            return [None] * len(self.weights)
        copies = [torch.empty_like(weight) for weight in self.weights]
        torch._foreach_copy_(copies, [part for total in self._totals() for part in total.unbind(0)])
        self.end_pass()
        return copies

    def _totals(self) -> list[torch.Tensor]:
        return [_known(one.total()) for one in self._sums.values()]


@dataclass(frozen=True)
class BandPartialSums:
    """The parts of the sum of a norm's weights, for the layers of a band."""

    sums: StaticSums
    weight: int  # the id of the first layer's
    layers: slice

    def memory(self, num_parts: int, width: int, like: torch.Tensor) -> torch.Tensor:
        return self.sums.partials(self.weight, num_parts, width, like)[self.layers]


def _joined_names(parameters: dict[str, list[nn.Parameter]]) -> list[tuple[str, ...]]:
    """Returns the names of all parameters; those with an input in common together, if they are of one kind."""
    joined = [tuple(name for name in names if name in parameters) for names in JOINED]
    joined = [names for names in joined if len({_kind(parameters[name][0]) for name in names}) == 1]
    return joined + [(name,) for name in parameters if not any(name in names for names in joined)]


def _kind(weight: torch.Tensor) -> tuple:
    return weight.shape[1:], weight.dtype, weight.device


def _zeros(members: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """Returns zeros [M, ...] with the rows of all members side by side, for one product that adds to all."""
    first = members[0][0]
    shape = len(members[0]), sum(len(weights[0]) for weights in members), *first.shape[1:]
    return first.new_zeros(shape, dtype=sum_dtype(first.dtype))


def _joint_gradients(gradients: Gradients) -> torch.Tensor | None:
    known = [one for one in gradients if one is not None]
    return side_by_side(known, dim=1) if len(known) == len(gradients) else None


def _known(total: torch.Tensor | None) -> torch.Tensor:
    assert total is not None
    return total


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    joined = side_by_side(parts, dim=0)
    return torch.cat(list(parts)) if joined is None else joined


class Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sums: StaticSums, link: torch.Tensor, *weights: torch.Tensor):
        ctx.sums = sums
        return link.clone()

    @staticmethod
    def backward(ctx, _):
        check_gradient(None)
        return None, None, *ctx.sums.take()
