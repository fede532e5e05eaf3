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

import torch
import torch.nn.functional as F
from torch import nn

from .transforms import autocast_dtype, is_transformed
from .weight_sum import WeightSum

Begun = tuple[WeightSum, torch.Tensor | None]  # a sum, and its token; none within a captured group
_of_thread = threading.local()  # backward passes run in threads of their own


class SharedWeights:
    """The weights of one call. Sums are kept of weights below float32, and under autocast of products of all weights.

    `recomputed` are modules that compute segments again in the backward pass. `sums` is False for a call of a single
    chunk, whose weights have one use.
    """

    def __init__(self, recomputed: Sequence[nn.Module] = (), sums: bool = True):
        self.recomputed, self.sums = recomputed, sums
        self.versions = _versions(recomputed)
        self._checked_pass: int | None = None
        self._begun: dict[tuple[int, bool], Begun] = {}  # by id: sums keep their weights
        self._casts: dict[int, torch.Tensor] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Makes uses of weights within it add to these sums."""
        before, _of_thread.weights = active_weights(), self
        try:
            yield
        finally:
            _of_thread.weights = before

    def begin(self, weights: Sequence[torch.Tensor], is_stack: bool = False) -> Begun:
        """Returns the sum of a weight, or of the weights that share memory with a stack [M, ...], and its token."""
        key = id(weights[0]), is_stack
        if key not in self._begun:
            self._begun[key] = begin(WeightSum(weights, is_stack))
        return self._begun[key]

    def begun(self, weight: torch.Tensor) -> Begun | None:
        """Returns the sum of a weight and its token, if the call has used the weight."""
        return self._begun.get((id(weight), False))

    def cast(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the weight in a dtype; cast once for all uses, as autocast does."""
        if weight.dtype == dtype:
            return weight
        if id(weight) not in self._casts:
            self._casts[id(weight)] = weight.detach().to(dtype)
        return self._casts[id(weight)]

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
    if (dtype or first.dtype).itemsize >= torch.float32.itemsize:
        return None
    plain = all(type(weight) is nn.Parameter for weight in weights)
    return sums if plain and any(weight.requires_grad for weight in weights) else None


def use_weight(weight: torch.Tensor) -> torch.Tensor:
    """Returns the weight, for a use whose gradient is summed."""
    sums = sums_of(weight)
    if sums is None or hasattr(weight, "ds_id"):  # a view of a weight that ZeRO-3 gathers would outlive it
        return weight
    one, token = sums.begin([weight])
    return _Use.apply(weight, token, one, None)


def used_part(part_mx: torch.Tensor, begun: Begun, layers: slice) -> torch.Tensor:
    """Returns a part of a stack, the parameters of some layers, for such a use."""
    one, token = begun
    return _Use.apply(part_mx, token, one, layers)


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
    bias_O = None if bias_O is None else use_weight(bias_O).to(dtype)
    return _Product.apply(input_xI.to(dtype), sums.cast(weight_OI, dtype), weight_OI, bias_O, token, one)


def summed_embedding(sums: SharedWeights, ids: torch.Tensor, embedding: nn.Embedding) -> torch.Tensor:
    """Works as `embedding(ids)`, but gradients of a use are smaller than the weight."""
    one, token = sums.begin([embedding.weight])
    return _Embedding.apply(ids, embedding.weight, token, one, embedding.padding_idx)


def begin(weight_sum: WeightSum) -> Begun:
    """Returns the sum, and a token that leads from its uses to the weights."""
    return weight_sum, _Begin.apply(weight_sum, *weight_sum.weights)


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
