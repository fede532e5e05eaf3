"""Attention of a few heads at a time, each with its whole matrix of scores: for CPUs that multiply in bfloat16.

    forward    S = q k^T * scale + bias,  P = softmax(S),  y = P v
    backward   dP = dy v^T,  dS = P * (dP - rowsum(P * dP)),  dq = dS k,  dk = dS^T q,  dv = P^T dy

The matrices of a segment are small: the matrices of a few heads stay in the processor's cache from one product to the
next, and the products reach the rate of the cores' bfloat16 units. A kernel that works on tiles of one head does not
reach it. The backward pass computes P again, so nothing of the size of a score matrix is stored.

Axes: R rows, H query heads, G key/value heads, T queries, K keys, E head dimension, X = T * H / G queries of the
same keys, P = R * G pairs of a row and a key head, p pairs of a block.
"""

from collections.abc import Iterator
from itertools import chain, repeat

import torch
from torch.autograd.function import once_differentiable

from .mask import AttentionMask

BLOCK_BYTES = 4 * 2**20  # bytes of a block's scores; measured in docs/results/attention


def blocked_attention(query_RHTE, key_RGKE, value_RGKE, mask: AttentionMask, scale: float, dropout: float):
    assert not dropout
    # Under autocast a cache may hold keys of an earlier call's dtype.
    key_RGKE, value_RGKE = key_RGKE.to(query_RHTE.dtype), value_RGKE.to(query_RHTE.dtype)
    return _Blocked.apply(query_RHTE, key_RGKE, value_RGKE, mask, scale)


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(query_RHTE, key_RGKE, value_RGKE, mask, scale):
        blocks = _Blocks(query_RHTE, key_RGKE, mask, scale)
        output_PXE = torch.empty_like(blocks.query_PXE)
        for (_, weight_pXK), value_pKE, output_pXE in zip(
            blocks.weights(), *blocks.split(value_RGKE.flatten(0, 1), output_PXE), strict=True
        ):
            torch.bmm(weight_pXK, value_pKE, out=output_pXE)
        return output_PXE.view(query_RHTE.shape)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.mask, ctx.scale = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, output_gradient_RHTE):
        query_RHTE, key_RGKE, value_RGKE = ctx.saved_tensors
        blocks = _Blocks(query_RHTE, key_RGKE, ctx.mask, ctx.scale)
        output_gradient_PXE = output_gradient_RHTE.reshape(blocks.query_PXE.shape)
        query_gradient_PXE = torch.empty_like(blocks.query_PXE)
        key_gradient_RGKE, value_gradient_RGKE = (
            torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (key_RGKE, value_RGKE)
        )
        read = blocks.query_PXE, blocks.key_PKE, value_RGKE.flatten(0, 1), output_gradient_PXE
        written = query_gradient_PXE, key_gradient_RGKE.flatten(0, 1), value_gradient_RGKE.flatten(0, 1)
        buffer_pXK = torch.empty_like(blocks.score_pXK)
        for (score, weight), query, key, value, output_gradient, query_gradient, key_gradient, value_gradient in zip(
            blocks.weights(), *blocks.split(*read, *written), strict=True
        ):
            torch.bmm(weight.mT, output_gradient, out=value_gradient)
            weight_gradient = torch.bmm(output_gradient, value.mT, out=buffer_pXK[: len(weight)])
            score_gradient = torch._softmax_backward_data(weight_gradient, weight, -1, weight.dtype, grad_input=score)
            _scaled_product(score_gradient, key, ctx.scale, out=query_gradient)
            _scaled_product(score_gradient.mT, query, ctx.scale, out=key_gradient)
        return query_gradient_PXE.view(query_RHTE.shape), key_gradient_RGKE, value_gradient_RGKE, None, None


class _Blocks:
    """Blocks of whole rows or, if the matrices of one row do not fit, of equal parts of a row."""

    def __init__(self, query_RHTE, key_RGKE, mask: AttentionMask, scale: float):
        num_rows, num_heads, num_keys, head_width = key_RGKE.shape
        num_queries = query_RHTE.shape[2]
        self.query_PXE = query_RHTE.reshape(num_rows * num_heads, -1, head_width).contiguous()
        self.key_PKE, self.scale = key_RGKE.flatten(0, 1), scale
        matrix_bytes = self.query_PXE.shape[1] * num_keys * query_RHTE.itemsize
        fitting = min(max(1, BLOCK_BYTES // matrix_bytes), num_rows * num_heads)
        if fitting >= num_heads:
            self.size = fitting // num_heads * num_heads
        else:
            self.size = next(size for size in range(fitting, 0, -1) if num_heads % size == 0)
        # All blocks share one buffer: clearing new memory costs as much as a product.
        self.score_pXK = query_RHTE.new_empty(self.size, self.query_PXE.shape[1], num_keys)
        self.weight_pXK = torch.empty_like(self.score_pXK)
        self.bias_R1TK: torch.Tensor | None = None
        if num_queries > 1 or not mask.lower_right or mask.log_duration_RK is not None:
            bias = mask.additive(num_queries, num_keys, query_RHTE)
            self.bias_R1TK = bias.view(-1, 1, num_queries, num_keys)
        self.blocks_per_row, self.rows_per_block = max(1, num_heads // self.size), max(1, self.size // num_heads)

    def split(self, *tensors_Pxx: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        return [tensor_Pxx.split(self.size) for tensor_Pxx in tensors_Pxx]

    def weights(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields the scores S and softmax(S) of each block, each [p, X, K]."""
        queries, keys = self.split(self.query_PXE, self.key_PKE)
        for query_pXE, key_pKE, bias_R1TK in zip(queries, keys, self._biases(), strict=False):
            score_pXK, weight_pXK = self.score_pXK[: len(query_pXE)], self.weight_pXK[: len(query_pXE)]
            _scaled_product(query_pXE, key_pKE.mT, self.scale, out=score_pXK)
            if bias_R1TK is not None:
                num_rows, _, num_queries, num_keys = bias_R1TK.shape
                score_pXK.view(num_rows, -1, num_queries, num_keys).add_(bias_R1TK)
            yield score_pXK, torch.softmax(score_pXK, -1, out=weight_pXK)

    def _biases(self) -> Iterator[torch.Tensor | None]:
        """The bias of each block's rows, or the bias that all rows share."""
        if self.bias_R1TK is None or len(self.bias_R1TK) == 1:
            return repeat(self.bias_R1TK)
        parts = self.bias_R1TK.split(self.rows_per_block)
        return chain.from_iterable(repeat(part, self.blocks_per_row) for part in parts)


def _scaled_product(left, right, scale: float, out: torch.Tensor) -> torch.Tensor:
    return torch.baddbmm(out, left, right, beta=0, alpha=scale, out=out)
