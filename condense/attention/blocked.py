"""Attention a few heads at a time, each with its whole matrix of scores: for CPUs that multiply in bfloat16.

    forward    S = q k^T * scale + bias,  P = softmax(S),  y = P v
    backward   dP = dy v^T,  dS = P * (dP - rowsum(P * dP)),  dq = dS k,  dk = dS^T q,  dv = P^T dy

With segments the matrices are small: those of a few heads stay in the cache from one product to the next,
and the products run at the rate of the cores' bfloat16 units, which a kernel that works on tiles of a head
does not reach. Nothing of the size of a matrix of scores is kept: the backward pass computes P again.

Axes: R rows, H query heads, G key/value heads, T queries, K keys, E head width, X = T * H / G queries that look at
the same keys; M = R * G matrices, b of a block.
"""

from collections.abc import Iterator
from itertools import chain, repeat

import torch
from torch.autograd.function import once_differentiable

from .mask import Visibility

BLOCK_BYTES = 4 * 2**20  # of a block's scores: measured, docs/results/attention


def blocked_attention(query_RHTE, key_RGKE, value_RGKE, visibility: Visibility, scale: float, dropout: float):
    if dropout:
        raise ValueError(f"blocked attention has no dropout: set attention_dropout={dropout} to 0 or use sdpa.")
    # Under autocast a cache may hold what it was given before.
    key_RGKE, value_RGKE = key_RGKE.to(query_RHTE.dtype), value_RGKE.to(query_RHTE.dtype)
    return _Blocked.apply(query_RHTE, key_RGKE, value_RGKE, visibility, scale)


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(query_RHTE, key_RGKE, value_RGKE, visibility, scale):
        blocks = _Blocks(query_RHTE, key_RGKE, visibility, scale)
        output_MXE = torch.empty_like(blocks.query_MXE)
        for (_, weight_bXK), value_bKE, output_bXE in zip(
            blocks.weights(), *blocks.split(value_RGKE.flatten(0, 1), output_MXE), strict=True
        ):
            torch.bmm(weight_bXK, value_bKE, out=output_bXE)
        return output_MXE.view(query_RHTE.shape)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.visibility, ctx.scale = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, output_gradient_RHTE):
        query_RHTE, key_RGKE, value_RGKE = ctx.saved_tensors
        blocks = _Blocks(query_RHTE, key_RGKE, ctx.visibility, ctx.scale)
        output_gradient_MXE = output_gradient_RHTE.reshape(blocks.query_MXE.shape)
        query_gradient_MXE = torch.empty_like(blocks.query_MXE)
        key_gradient_RGKE, value_gradient_RGKE = (
            torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (key_RGKE, value_RGKE)
        )
        read = blocks.query_MXE, blocks.key_MKE, value_RGKE.flatten(0, 1), output_gradient_MXE
        written = query_gradient_MXE, key_gradient_RGKE.flatten(0, 1), value_gradient_RGKE.flatten(0, 1)
        buffer_bXK = torch.empty_like(blocks.score_bXK)
        for (score, weight), query, key, value, output_gradient, query_gradient, key_gradient, value_gradient in zip(
            blocks.weights(), *blocks.split(*read, *written), strict=True
        ):
            torch.bmm(weight.mT, output_gradient, out=value_gradient)
            weight_gradient = torch.bmm(output_gradient, value.mT, out=buffer_bXK[: len(weight)])
            score_gradient = torch._softmax_backward_data(weight_gradient, weight, -1, weight.dtype, grad_input=score)
            _scaled_product(score_gradient, key, ctx.scale, out=query_gradient)
            _scaled_product(score_gradient.mT, query, ctx.scale, out=key_gradient)
        return query_gradient_MXE.view(query_RHTE.shape), key_gradient_RGKE, value_gradient_RGKE, None, None


class _Blocks:
    """Whole rows at a time or, where a row's matrices are too many, equal parts of a row."""

    def __init__(self, query_RHTE, key_RGKE, visibility: Visibility, scale: float):
        num_rows, num_heads, num_keys, head_width = key_RGKE.shape
        num_queries = query_RHTE.shape[2]
        self.query_MXE = query_RHTE.reshape(num_rows * num_heads, -1, head_width).contiguous()
        self.key_MKE, self.scale = key_RGKE.flatten(0, 1), scale
        matrix_bytes = self.query_MXE.shape[1] * num_keys * query_RHTE.itemsize
        fitting = min(max(1, BLOCK_BYTES // matrix_bytes), num_rows * num_heads)
        if fitting >= num_heads:
            self.size = fitting // num_heads * num_heads
        else:
            self.size = next(size for size in range(fitting, 0, -1) if num_heads % size == 0)
        # Every block writes over the last one's: new memory would have to be cleared first, at the cost of a product.
        self.score_bXK = query_RHTE.new_empty(self.size, self.query_MXE.shape[1], num_keys)
        self.weight_bXK = torch.empty_like(self.score_bXK)
        self.bias_R1TK: torch.Tensor | None = None
        if num_queries > 1 or not visibility.lower_right or visibility.log_duration_RK is not None:
            bias = visibility.bias(num_queries, num_keys, query_RHTE)
            self.bias_R1TK = bias.view(-1, 1, num_queries, num_keys)
        self.blocks_per_row, self.rows_per_block = max(1, num_heads // self.size), max(1, self.size // num_heads)

    def split(self, *tensors_Mxx: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        return [tensor_Mxx.split(self.size) for tensor_Mxx in tensors_Mxx]

    def weights(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Of each block in turn, the scores S and softmax(S), each [b, X, K]."""
        queries, keys = self.split(self.query_MXE, self.key_MKE)
        for query_bXE, key_bKE, bias_R1TK in zip(queries, keys, self._biases(), strict=False):
            score_bXK, weight_bXK = self.score_bXK[: len(query_bXE)], self.weight_bXK[: len(query_bXE)]
            _scaled_product(query_bXE, key_bKE.mT, self.scale, out=score_bXK)
            if bias_R1TK is not None:
                num_rows, _, num_queries, num_keys = bias_R1TK.shape
                score_bXK.view(num_rows, -1, num_queries, num_keys).add_(bias_R1TK)
            yield score_bXK, torch.softmax(score_bXK, -1, out=weight_bXK)

    def _biases(self) -> Iterator[torch.Tensor | None]:
        """Of each block's rows, or for ever the one of all rows."""
        if self.bias_R1TK is None or len(self.bias_R1TK) == 1:
            return repeat(self.bias_R1TK)
        parts = self.bias_R1TK.split(self.rows_per_block)
        return chain.from_iterable(repeat(part, self.blocks_per_row) for part in parts)


def _scaled_product(left, right, scale: float, out: torch.Tensor) -> torch.Tensor:
    return torch.baddbmm(out, left, right, beta=0, alpha=scale, out=out)
