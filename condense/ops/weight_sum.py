"""The float32 sum of the gradients of some weights in one backward pass.

Axes: x any axes, n rows and tokens together, I and O input and output widths, M layers, m consecutive ones of them, D
hidden size.
"""

from collections.abc import Sequence

import torch

from .products import add_product, add_products
from .transforms import join


class WeightSum:
    """The sum of the gradients of the uses of some weights, as one tensor, in one backward pass, or in a forward pass.

    A pass that asks for the gradients of other tensors never reaches the weights: the next pass begins a new sum.
    Autograd keeps this object, so it must not hold tensors of a graph.
    """

    def __init__(self, weights: Sequence[torch.Tensor], is_stack: bool = False):
        self.weights, self.is_stack = weights, is_stack
        self._backward_pass: int | None = None
        self._forget()

    def _forget(self) -> None:
        self._single: torch.Tensor | None = None
        self._sum: torch.Tensor | None = None
        self._rows: list[tuple[torch.Tensor, torch.Tensor]] = []

    def give(self, gradient: torch.Tensor) -> None:
        """Adds the gradient of a weight, and may overwrite it. A first gradient keeps its dtype until there is a
        second: it may be as large as a head."""
        if self.total() is None:
            self._single = gradient
        else:
            self.sum(gradient).add_(gradient)

    def add(self, gradient: torch.Tensor, members: slice | None = None) -> None:
        """Adds the gradient of a weight, or of some `members` [m, ...] of a stack."""
        if members is None and self.total() is None:
            self._sum = gradient.to(sum_dtype(gradient.dtype), copy=True)
        else:
            total = self.sum(gradient)
            (total if members is None else total[members]).add_(gradient)

    def add_product(self, left_xOn: torch.Tensor, right_xnI: torch.Tensor, members: slice | None = None) -> None:
        """Adds a product to the gradient of a weight, or m products to the gradients of some `members` of a stack."""
        if members is None and self.total() is None:
            self.add(left_xOn @ right_xnI)
        elif members is None:
            add_product(self.sum(left_xOn), left_xOn, right_xnI)
        else:
            add_products(self.sum(left_xOn)[members], left_xOn, right_xnI)

    def add_rows(self, index_n: torch.Tensor, gradient_nD: torch.Tensor) -> None:
        """Adds to rows of a matrix; an index may occur several times. Rows wait while there are fewer of them than the
        matrix has, because a full-size sum takes longer to write and read."""
        self.total()  # of this pass
        num_rows = sum(len(index) for index, _ in self._rows) + len(index_n)
        if self._sum is None and num_rows < len(self.weights[0]):
            self._rows.append((index_n, gradient_nD))
        else:
            total = self.sum(gradient_nD)
            total.index_add_(0, index_n, gradient_nD.to(total.dtype))

    def take(self) -> list[torch.Tensor | None]:
        """Returns the gradient of each weight in its dtype, None if there is none, and forgets the sum."""
        total, rows = self.total(), self._rows
        self._forget()
        if rows:
            total = torch.zeros_like(self.weights[0]) if total is None else total
            row_n, sum_nD = _sums_by_row(*map(join, zip(*rows, strict=True)))
            total.index_add_(0, row_n, sum_nD.to(total.dtype))
        if total is None:
            return [None] * len(self.weights)
        parts = total.unbind(0) if self.is_stack else [total]
        return [part.to(weight.dtype) for part, weight in zip(parts, self.weights, strict=True)]

    def total(self) -> torch.Tensor | None:
        """Returns what this pass has added so far, without waiting rows."""
        backward_pass = torch._C._current_graph_task_id()
        if self._backward_pass != backward_pass:
            self._forget()
            self._backward_pass = backward_pass
        return self._single if self._sum is None else self._sum

    def sum(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the sum to add to, in float32 for a gradient of fewer bits."""
        total, dtype = self.total(), sum_dtype(gradient.dtype)
        if total is None:
            first, stacked = self.weights[0], (len(self.weights),) if self.is_stack else ()
            self._sum = gradient.new_zeros((*stacked, *first.shape), dtype=dtype)
        elif self._sum is None:
            self._sum, self._single = total.to(dtype), None
        assert self._sum is not None
        return self._sum


def _sums_by_row(index_n: torch.Tensor, gradient_nD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each index once, and the sum [n, D] of its gradients in float32; the rest are zeros, for row 0. The host
    need not know the number of indices."""
    sorted_n, order_n = index_n.sort()
    place_n = torch.cat([sorted_n.new_zeros(1), (sorted_n.diff() != 0).cumsum(0)])
    sum_nD = gradient_nD.new_zeros(gradient_nD.shape, dtype=sum_dtype(gradient_nD.dtype))
    sum_nD.index_add_(0, place_n, gradient_nD[order_n].to(sum_nD.dtype))
    return torch.zeros_like(sorted_n).scatter_(0, place_n, sorted_n), sum_nD


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
