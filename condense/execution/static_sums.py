"""The gradients of a stack's weights in float32, on buffers that captured graphs add to.

    link = Begin.apply(sums, ..., *weights)    once for each call
    link, ... = _Group.apply(..., link, ...)   for each group; its backward pass adds to the buffers

A product of a segment's few tokens takes as long to write its sum as to compute it. So the gradients of a layer's
outputs wait, with its inputs, until there are `TOKENS` of them. Outputs with `rows` need no copy then.

The link leads from each group to the weights: autograd runs `Begin`'s node after the nodes of all groups. It passes on
copies, so that a buffer never becomes the gradient of a weight.

Axes: m layers of a band, n tokens of each, O and I output and input widths.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ..products import add_product, side_by_side
from ..shared_weights import Gradients, SharedWeights, WeightSum
from .adjacent_rows import BandRows, GroupRows
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
        trained = [one for one in stack.parameters.values() if any(weight.requires_grad for weight in one.all)]
        self._sums = {id(one.all[0]): WeightSum(one.all, is_stack=True, every_pass=True) for one in trained}
        for one in self._sums.values():
            one.total_or_zeros(one.weights[0])
        self._backward_pass: int | None = None
        self._waiting: dict[tuple, list[tuple[Gradients, torch.Tensor]]] = defaultdict(list)
        self._num_layers = len(stack.layers)
        self._rows: GroupRows | None = None

    @contextmanager
    def group(self, num_segments: int, tokens: int) -> Iterator[GroupRows]:
        """Makes uses of weights within it part of a group of segments: they add to these sums."""
        self._rows = GroupRows(self._num_layers, num_segments, kept=-(-TOKENS // tokens))
        try:
            with self.active():
                yield self._rows
        finally:
            self._rows = None

    def rows(self, weights: Sequence[torch.Tensor], members: slice, input_RTI: torch.Tensor) -> BandRows | None:
        """Returns None if no rows will wait, and for several texts in a wave: their rows aren't equally spaced."""
        num_layers, num_rows = members.stop - members.start, input_RTI.shape[0] * input_RTI.shape[1]
        waits = num_rows // num_layers < TOKENS and num_layers in (1, len(input_RTI))
        return self._rows.of_band(id(weights[0]), members) if waits and self._rows is not None else None

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
        """Adds the waiting gradients at the end of a captured backward pass."""
        for key in list(self._waiting):
            self._add_waiting(key)

    def _add_waiting(self, key: tuple) -> None:
        layer, sums = key
        found = self._waiting.pop(key)[::-1]  # the backward pass begins with the latest segment
        input_nI = _joined([one for _, one in found])
        for one, *gradients in zip(sums, *[of_layer for of_layer, _ in found], strict=True):
            if gradients[0] is not None:
                add_product(_known(one.total())[layer], _joined(gradients).t(), input_nI)

    def begin_pass(self) -> None:
        """Prepares a group's backward pass: another pass may have ended before it reached the weights."""
        backward_pass = torch._C._current_graph_task_id()
        if self._backward_pass != backward_pass:
            if totals := self._totals():  # none are trained
                torch._foreach_zero_(totals)
            self._backward_pass = backward_pass

    def end_pass(self) -> None:
        self._backward_pass = None

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
