"""Attention a few heads at a time, each with its whole matrix of scores: for CPUs that multiply in bfloat16.

    forward    S = q k^T * scale + bias,  P = softmax(S),  y = P v
    backward   dP = dy v^T,  dS = P * (dP - rowsum(P * dP)),  dq = dS k,  dk = dS^T q,  dv = P^T dy

With segments the matrices are small: those of a few heads stay in the cache from one product to the next,
and the products run at the rate of the cores' bfloat16 units, which a kernel that works on tiles of a head
does not reach. Nothing of the size of a matrix of scores is kept: the backward pass computes P again.

Axes: R rows, G key/value heads, J query heads of each, T queries, K keys, E head width, b matrices of a block.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from .attention import Visibility

BLOCK_BYTES = 4 * 2**20  # of a block's scores: measured, docs/results/attention


def blocked_attention(query_RHTE, key_RGKE, value_RGKE, visibility: "Visibility", scale: float, dropout: float):
    if dropout:
        raise ValueError(f"blocked attention has no dropout: set attention_dropout={dropout} to 0 or use sdpa.")
    return _Blocked.apply(query_RHTE, key_RGKE, value_RGKE, visibility, scale)


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query_RHTE, key_RGKE, value_RGKE, visibility, scale):
        ctx.save_for_backward(query_RHTE, key_RGKE, value_RGKE)
        ctx.visibility, ctx.scale = visibility, scale
        query_RGxE = _of_each_key_head(query_RHTE, key_RGKE)
        output_RGxE = _room_for(query_RGxE)
        weigh = _Weights(query_RGxE, key_RGKE, query_RHTE.shape[2], visibility, scale)
        for block in weigh.blocks():
            weight_bxK = weigh(block)
            torch.bmm(weight_bxK, _matrices(value_RGKE, block), out=_place(output_RGxE, block))
        return output_RGxE.view(query_RHTE.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient_RHTE):
        query_RHTE, key_RGKE, value_RGKE = ctx.saved_tensors
        query_RGxE, gradient_RGxE = (_of_each_key_head(tensor, key_RGKE) for tensor in (query_RHTE, gradient_RHTE))
        weigh = _Weights(query_RGxE, key_RGKE, query_RHTE.shape[2], ctx.visibility, ctx.scale)
        weight_gradient_bxK = torch.empty_like(weigh.weight_bxK)
        gradients = [_room_for(tensor) for tensor in (query_RGxE, key_RGKE, value_RGKE)]
        for block in weigh.blocks():
            query, gradient, key, value = (
                _matrices(tensor, block) for tensor in (query_RGxE, gradient_RGxE, key_RGKE, value_RGKE)
            )
            to_query, to_key, to_value = (_place(tensor, block) for tensor in gradients)
            weight = weigh(block)
            torch.bmm(weight.mT, gradient, out=to_value)
            to_weight = torch.bmm(gradient, value.mT, out=weight_gradient_bxK[: len(weight)])
            to_score = torch._softmax_backward_data(
                to_weight, weight, -1, weight.dtype, grad_input=weigh.score_bxK[: len(weight)]
            )
            _scaled_product(to_score, key, ctx.scale, out=to_query)
            _scaled_product(to_score.mT, query, ctx.scale, out=to_key)
        to_query_RGxE, to_key_RGKE, to_value_RGKE = gradients
        return to_query_RGxE.view(query_RHTE.shape), to_key_RGKE, to_value_RGKE, None, None


Block = tuple[slice, slice]  # rows, key/value heads


class _Weights:
    """softmax(q k^T * scale + bias) [b, J * T, K] of a block, in the same two buffers for every block."""

    def __init__(self, query_RGxE, key_RGKE, num_queries: int, visibility: "Visibility", scale: float):
        self.query_RGxE, self.key_RGKE, self.scale = query_RGxE, key_RGKE, scale
        (num_rows, num_heads, width, _), num_keys = query_RGxE.shape, key_RGKE.shape[2]
        fitting = max(1, BLOCK_BYTES // (width * num_keys * query_RGxE.itemsize))
        self.heads_per_block = min(fitting, num_heads)
        self.rows_per_block = min(fitting // num_heads, num_rows) if fitting >= num_heads else 1
        size = self.rows_per_block * self.heads_per_block, width, num_keys
        self.score_bxK, self.weight_bxK = query_RGxE.new_empty(size), query_RGxE.new_empty(size)
        sees_all = num_queries == 1 and visibility.lower_right and visibility.log_duration_RK is None
        self.bias_R1TK = None
        if not sees_all:
            bias = visibility.bias(num_queries, num_keys, query_RGxE)
            self.bias_R1TK = bias.view(-1, 1, num_queries, num_keys)

    def blocks(self) -> Iterator[Block]:
        """Whole rows, or where one row's matrices are too many, some heads of a row."""
        num_rows, num_heads = self.query_RGxE.shape[:2]
        for row in range(0, num_rows, self.rows_per_block):
            for head in range(0, num_heads, self.heads_per_block):
                yield slice(row, row + self.rows_per_block), slice(head, head + self.heads_per_block)

    def __call__(self, block: Block) -> torch.Tensor:
        query_bxE, key_bKE = _matrices(self.query_RGxE, block), _matrices(self.key_RGKE, block)
        score_bxK, weight_bxK = (buffer[: len(query_bxE)] for buffer in (self.score_bxK, self.weight_bxK))
        _scaled_product(query_bxE, key_bKE.mT, self.scale, out=score_bxK)
        if self.bias_R1TK is not None:
            bias_R1TK = self.bias_R1TK if len(self.bias_R1TK) == 1 else self.bias_R1TK[block[0]]
            num_rows, _, num_queries, num_keys = bias_R1TK.shape
            score_bxK.view(num_rows, -1, num_queries, num_keys).add_(bias_R1TK)
        return torch.softmax(score_bxK, -1, out=weight_bxK)


def _of_each_key_head(tensor_RHTE: torch.Tensor, key_RGKE: torch.Tensor) -> torch.Tensor:
    """[R, G, J * T, E]: all queries that look at the same keys as rows of one matrix."""
    num_rows, _, _, head_width = tensor_RHTE.shape
    return tensor_RHTE.reshape(num_rows, key_RGKE.shape[1], -1, head_width)


def _matrices(tensor_RGxx: torch.Tensor, block: Block) -> torch.Tensor:
    """[b, x, x], to be read: may be a copy."""
    return tensor_RGxx[block].flatten(0, 1)


def _room_for(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _place(tensor_RGxx: torch.Tensor, block: Block) -> torch.Tensor:
    """[b, x, x], to be written."""
    return tensor_RGxx[block].view(-1, *tensor_RGxx.shape[2:])


def _scaled_product(left, right, scale: float, out: torch.Tensor) -> torch.Tensor:
    return torch.baddbmm(out, left, right, beta=0, alpha=scale, out=out)
