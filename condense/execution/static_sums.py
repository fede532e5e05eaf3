"""The sums of gradients of a stack's weights as memory that captured graphs add to.

The sums of weights that have an input in common lie side by side: one product adds to all of them.

Axes: M layers, O output widths of one or several weights, x the other axes of a weight.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch

from ..ops.weight_sum import WeightSum, sum_dtype
from .stacked_parameters import JOINED
from .stacking import Stack


class StaticSum(WeightSum):
    """A sum that is always in the same memory. A replay adds to it without a call of this code."""

    def __init__(self, weights: Sequence[torch.Tensor], memory_MOx: torch.Tensor):
        super().__init__(weights, is_stack=True)
        self.memory_MOx = memory_MOx

    def sum(self, gradient: torch.Tensor) -> torch.Tensor:
        return self.memory_MOx

    def begin_pass(self) -> None:
        """Zeroes the sum at the beginning of a backward pass. It may hold values of a pass that ended before it reached
        the weights, or of a capture's warm-up."""
        backward_pass = torch._C._current_graph_task_id()
        if self._backward_pass != backward_pass:
            self._backward_pass = backward_pass
            self.memory_MOx.zero_()

    def take(self) -> list[torch.Tensor | None]:
        """Returns copies, because a gradient of a weight must not be this memory; None if another call of the same pass
        has taken them."""
        if self._backward_pass != torch._C._current_graph_task_id():
            return [None] * len(self.weights)
        self._backward_pass = None
        copies = [torch.empty_like(weight) for weight in self.weights]
        torch._foreach_copy_(copies, self.memory_MOx.unbind(0))
        return list(copies)


def static_sums(stack: Stack) -> dict[str, StaticSum]:
    """Returns sums of the parameters that are trained, by name."""
    trained = {name: one.all for name, one in stack.parameters.items() if any(each.requires_grad for each in one.all)}
    joined = [names for names in JOINED if _are_alike([trained[name][0] for name in names if name in trained])]
    apart = [(name,) for name in trained if not any(name in names for names in joined)]
    sums: dict[str, StaticSum] = {}
    for names in [*joined, *apart]:
        members = {name: trained[name] for name in names if name in trained}
        ends, first = list(accumulate(len(weights[0]) for weights in members.values())), next(iter(members.values()))
        memory_MOx = first[0].new_zeros((len(first), ends[-1], *first[0].shape[1:]), dtype=sum_dtype(first[0].dtype))
        for (name, weights), end in zip(members.items(), ends, strict=True):
            sums[name] = StaticSum(weights, memory_MOx[:, end - len(weights[0]) : end])
    return sums


def _are_alike(weights: Sequence[torch.Tensor]) -> bool:
    return len({(weight.shape[1:], weight.dtype, weight.device) for weight in weights}) == 1
