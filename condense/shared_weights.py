"""Weights that the segments of a call share: their gradients are summed in float32.

Autograd adds the gradients of a tensor's uses in the tensor's dtype. A sum in bfloat16 has 8 significant bits: after
some hundred segments it absorbs most further additions. So every use of a weight adds its gradient to a sum in float32,
and the weight receives the sum once.

    token = begin(weight)             once for each weight and call
    y = linear(x, weight, token)      for each segment; its backward pass adds to the sum, and returns no gradient

The token leads from each use to the weight. Autograd runs a node after all nodes that depend on it, so `begin`'s node
runs after all uses, and passes the sum on to the weight.

Axes: x any size, n rows and tokens together, I and O input and output widths, M layers, m consecutive ones of them, D
hidden size.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from .kernels.layout import PartialSums, Rows
from .products import side_by_side, stacked_products
from .transforms import autocast_dtype, is_transformed
from .weight_sum import WeightSum

Gradients = Sequence[torch.Tensor | None]
_of_thread = threading.local()  # backward passes run in threads of their own


class SharedWeights:
    """The weights of one call. Sums are kept of weights below float32, and under autocast of products of all weights.

    `recomputed` are modules that compute segments again in the backward pass. `every_pass`: the call has several
    backward passes, and `deliver` ends them. `sums` is False for a call of a single chunk, whose weights have one use.
    `every_dtype`: there are sums of weights in float32 and float64, too.
    """

    def __init__(
        self,
        recomputed: Sequence[nn.Module] = (),
        every_pass: bool = False,
        sums: bool = True,
        every_dtype: bool = False,
    ):
        self.every_pass, self.recomputed, self.sums, self.every_dtype = every_pass, recomputed, sums, every_dtype
        self.collects_rows = False
        self.versions = _versions(recomputed)
        self._checked_pass: int | None = None
        self._begun: dict[tuple[int, bool], tuple[WeightSum, torch.Tensor]] = {}  # by id: sums keep their weights
        self._casts: dict[int, torch.Tensor] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Makes uses of weights within it add to these sums."""
        before, _of_thread.weights = active_weights(), self
        try:
            yield
        finally:
            _of_thread.weights = before

    def begin(self, weights: Sequence[torch.Tensor], is_stack: bool = False) -> tuple[WeightSum, torch.Tensor]:
        """Returns the sum of a weight, or of the weights that share memory with a stack [M, ...], and its token."""
        key = id(weights[0]), is_stack
        if key not in self._begun:
            one = WeightSum(weights, is_stack, self.every_pass)
            token = weights[0].new_empty(()).requires_grad_() if self.every_pass else _Begin.apply(one, *weights)
            self._begun[key] = one, token
        return self._begun[key]

    def begun(self, weight: torch.Tensor) -> tuple[WeightSum, torch.Tensor] | None:
        """Returns the sum of a weight and its token, if the call has used the weight."""
        return self._begun.get((id(weight), False))

    def cast(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the weight in a dtype; cast once for all uses, as autocast does."""
        if weight.dtype == dtype:
            return weight
        if id(weight) not in self._casts:
            self._casts[id(weight)] = weight.detach().to(dtype)
        return self._casts[id(weight)]

    def deliver(self) -> None:
        """Adds the sums of all backward passes to the gradients of the weights."""
        for one, _ in self._begun.values():
            pairs = zip(one.weights, one.take(), strict=True)
            found = [(weight, gradient) for weight, gradient in pairs if weight.requires_grad and gradient is not None]
            if found:
                torch.autograd.backward([weight for weight, _ in found], [gradient for _, gradient in found])

    def rows(
        self, weights: Sequence[torch.Tensor], members: slice, like_RTx: torch.Tensor, of_gradients: bool
    ) -> Rows | None:
        """Returns the memory to write an input [R, T, I] of products with `members` to, or the gradients of all
        products with such an input; None for a new tensor."""
        return None

    def partial_sums(self, weights: Sequence[torch.Tensor], members: slice) -> PartialSums | None:
        """Returns the sum to add the gradients of a norm's weights to; None if they return them."""
        return None

    def add_products(
        self, sums: Sequence[WeightSum], members: slice, gradients: Gradients, input_mnI: torch.Tensor
    ) -> None:
        """Adds the products of gradients [m, n, O] with their common input to the sums of stacks."""
        for one, gradient_mnO in zip(sums, gradients, strict=True):
            if gradient_mnO is not None:
                one.add_product(gradient_mnO.transpose(1, 2), input_mnI, members)

    def check_unchanged(self) -> None:
        """Raises `ValueError` if a backward pass would compute segments again with other weights."""
        backward_pass = torch._C._current_graph_task_id()
        if self.versions is None or backward_pass in (-1, self._checked_pass):
            return
        if _versions(self.recomputed) not in (None, self.versions):
            raise ValueError(
                "gradient checkpointing computes segments again in the backward pass, and the model's weights have "
                "changed since the forward pass: call backward() before weights change, and within functional_call."
            )
        self._checked_pass = backward_pass


def _versions(modules: Sequence[nn.Module]) -> list[tuple[int, int]] | None:
    """Returns identity and version of each weight; None if ZeRO-3, FSDP or offloading replaces weights between uses."""
    weights = [weight for module in modules for weight in module.parameters()]
    for one in weights:
        if type(one) not in (nn.Parameter, torch.Tensor) or hasattr(one, "ds_id") or one.is_meta or one.is_inference():
            return None
    return [(id(one), one._version) for one in weights]


def share_weights(recomputed: Sequence[nn.Module] = (), sums: bool = True) -> AbstractContextManager[None]:
    """Activates a call's weights; does nothing without a backward pass, or if torch transforms the computation."""
    if is_transformed() or not torch.is_grad_enabled():
        return nullcontext()
    return SharedWeights(recomputed, sums=sums).active()


def active_weights() -> SharedWeights | None:
    return None if torch.compiler.is_compiling() else getattr(_of_thread, "weights", None)


def collects_rows() -> bool:
    """Returns whether some results have a place in memory beside those of other calls."""
    weights = active_weights()
    return weights is not None and weights.collects_rows


def for_recomputation(function: Callable) -> Callable:
    """Wraps a function that a checkpoint runs again: it gets the sums active now, and checks for changed weights."""
    if (weights := active_weights()) is None:
        return function

    def run(*arguments):
        weights.check_unchanged()
        with weights.active():
            return function(*arguments)

    return run


def sums_of(*weights: torch.Tensor, dtype: torch.dtype | None = None) -> SharedWeights | None:
    """Returns the active sums if they should contain uses of these weights in this dtype, by default their own.

    Sharded weights are excluded: the code that gathers them for each use also reduces their gradients for each use.
    """
    sums, first = active_weights(), weights[0]
    if sums is None or not sums.sums or not torch.is_grad_enabled():
        return None
    if (dtype or first.dtype).itemsize >= torch.float32.itemsize and not sums.every_dtype:
        return None
    plain = all(type(weight) is nn.Parameter for weight in weights)
    return sums if plain and any(weight.requires_grad for weight in weights) else None


def used(weight: torch.Tensor) -> torch.Tensor:
    """Returns the weight, for a use whose gradient is summed."""
    sums = sums_of(weight)
    if sums is None or hasattr(weight, "ds_id"):  # a view of a weight that ZeRO-3 gathers would outlive it
        return weight
    one, token = sums.begin([weight])
    return _Use.apply(weight, token, one, None)


def used_stack(
    sums: SharedWeights, stack_mx: torch.Tensor, weights: Sequence[torch.Tensor], members: slice
) -> torch.Tensor:
    """Returns a part [m, ...] of a stack, differentiable with respect to the weights, for such a use."""
    one, token = sums.begin(weights, is_stack=True)
    return _Use.apply(stack_mx, token, one, members)


def product_dtype(input_xI: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """Returns the dtype of a product with a weight: autocast's, except for float64."""
    cast = None if weight.dtype == torch.float64 else autocast_dtype(input_xI.device)
    return weight.dtype if cast is None else cast


def summed_linear(
    sums: SharedWeights,
    input_xI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Works as `F.linear`, in this dtype."""
    one, token = sums.begin([weight_OI])
    bias_O = None if bias_O is None else used(bias_O).to(dtype)
    return _Product.apply(input_xI.to(dtype), sums.cast(weight_OI, dtype), weight_OI, bias_O, token, one)


def summed_products(
    sums: SharedWeights,
    input_mnI: torch.Tensor,
    stacks: Sequence[tuple[torch.Tensor, Sequence[torch.Tensor]]],
    members: slice,
) -> Sequence[torch.Tensor]:
    """Returns m products [m, n, O] with the `members` [m, O, I] of each stack, which are differentiable with respect to
    the stack's weights."""
    begun = [sums.begin(weights, is_stack=True) for _, weights in stacks]
    add = partial(sums.add_products, [one for one, _ in begun], members)
    return _StackedProducts.apply(
        add, input_mnI, *[weight_mOI for weight_mOI, _ in stacks], *[token for _, token in begun]
    )


def summed_embedding(sums: SharedWeights, ids: torch.Tensor, embedding: nn.Embedding) -> torch.Tensor:
    """Works as `embedding(ids)`, but gradients of a use are smaller than the weight."""
    one, token = sums.begin([embedding.weight])
    return _Embedding.apply(ids, embedding.weight, token, one, embedding.padding_idx)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight_sum: WeightSum, *weights: torch.Tensor):
        ctx.set_materialize_grads(False)
        ctx.weight_sum = weight_sum
        return weights[0].new_empty(())

    @staticmethod
    def backward(ctx, _):
        return None, *ctx.weight_sum.take()


class _Use(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, token, weight_sum: WeightSum, members: slice | None):
        ctx.set_materialize_grads(False)
        ctx.weight_sum, ctx.members = weight_sum, members
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient):
        if gradient is None or not may_be_summed(gradient):
            return gradient, None, None, None
        ctx.weight_sum.add(gradient, ctx.members)
        return None, None, None, None


def may_be_summed(gradient: torch.Tensor) -> bool:
    """Returns whether to add in place: second derivatives need the gradient's own graph, and several gradients at once
    (`is_grads_batched`) need separate sums."""
    return not (torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(gradient))


class _Product(torch.autograd.Function):
    """A product with a weight [O, I]. `given` is the weight, or its cast."""

    @staticmethod
    def forward(ctx, input_xI, given, weight, bias_O, token, weight_sum: WeightSum):
        ctx.set_materialize_grads(False)
        ctx.weight_sum, ctx.dtype = weight_sum, weight.dtype
        ctx.save_for_backward(input_xI, given, weight)
        return F.linear(input_xI, given, bias_O)

    @staticmethod
    def backward(ctx, gradient_xO):
        of_input = of_weight = of_bias = None
        if gradient_xO is not None:
            input_xI, given, weight = ctx.saved_tensors
            if torch.is_grad_enabled():  # a cast is detached from the weight, which second derivatives must reach
                given = weight.to(given.dtype)
            if ctx.needs_input_grad[0]:
                of_input = gradient_xO @ given
            gradient_nO, input_nI = (x.reshape(-1, x.shape[-1]) for x in (gradient_xO, input_xI))
            if ctx.needs_input_grad[2] and not may_be_summed(gradient_xO):
                of_weight = (gradient_nO.t() @ input_nI).to(ctx.dtype)
            elif ctx.needs_input_grad[2]:
                ctx.weight_sum.add_product(gradient_nO.t(), input_nI)
            if ctx.needs_input_grad[3]:
                of_bias = gradient_nO.sum(0)
        return of_input, None, of_weight, of_bias, None, None


class _StackedProducts(torch.autograd.Function):
    """m products each with some weights [m, O, I]; the products add their gradients of the input."""

    @staticmethod
    def forward(ctx, add: Callable[[Gradients, torch.Tensor], None], input_mnI, *weights_and_tokens):
        ctx.set_materialize_grads(False)
        ctx.add = add
        weights = weights_and_tokens[: len(weights_and_tokens) // 2]
        ctx.save_for_backward(input_mnI, *weights)
        return tuple(stacked_products(input_mnI, weights))

    @staticmethod
    def backward(ctx, *gradients):
        input_mnI, *weights = ctx.saved_tensors
        needed = ctx.needs_input_grad[2 : 2 + len(weights)]
        known = [pair for pair in zip(gradients, weights, strict=True) if pair[0] is not None]
        in_place = all(may_be_summed(gradient_mnO) for gradient_mnO, _ in known)
        of_input = _sum_of_products(known, in_place) if ctx.needs_input_grad[1] and known else None
        of_weights: list[torch.Tensor | None] = [None] * len(weights)
        wanted = [one if need else None for one, need in zip(gradients, needed, strict=True)]
        if in_place:
            ctx.add(wanted, input_mnI)
        else:
            of_weights = [None if one is None else torch.bmm(one.transpose(1, 2), input_mnI) for one in wanted]
        return None, of_input, *of_weights, *[None] * len(weights)


def _sum_of_products(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], in_place: bool) -> torch.Tensor:
    """Returns the sum of products of gradients [m, n, O] and weights [m, O, I]: one product if both lie adjacent."""
    gradients, weights = zip(*pairs, strict=True)
    if in_place and len(pairs) > 1:
        joint_mnO, joint_mOI = side_by_side(gradients, dim=2), side_by_side(weights, dim=1)
        if joint_mnO is not None and joint_mOI is not None:
            return torch.bmm(joint_mnO, joint_mOI)
    total_mnI = torch.bmm(gradients[0], weights[0])
    for gradient_mnO, weight_mOI in pairs[1:]:
        if in_place:
            total_mnI.baddbmm_(gradient_mnO, weight_mOI)
        else:
            total_mnI = total_mnI + torch.bmm(gradient_mnO, weight_mOI)
    return total_mnI


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight, token, weight_sum: WeightSum, padding_idx: int | None):
        ctx.set_materialize_grads(False)
        ctx.weight_sum, ctx.padding_idx, ctx.num_rows = weight_sum, padding_idx, len(weight)
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx, gradient):
        if gradient is None:
            return None, None, None, None, None
        (ids,) = ctx.saved_tensors
        if not may_be_summed(gradient):
            padding_idx = -1 if ctx.padding_idx is None else ctx.padding_idx
            of_weight = torch.ops.aten.embedding_dense_backward(gradient, ids, ctx.num_rows, padding_idx, False)
            return None, of_weight, None, None, None
        gradient_nD, ids_n = gradient.reshape(-1, gradient.shape[-1]), ids.flatten()
        if ctx.padding_idx is not None:
            gradient_nD = gradient_nD.masked_fill((ids_n == ctx.padding_idx)[:, None], 0)
        ctx.weight_sum.add_rows(ids_n, gradient_nD)
        return None, None, None, None, None
