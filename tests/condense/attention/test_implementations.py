"""Every attention implementation against a loop in float64.

Axes: R rows of a chunk, T tokens of a chunk (queries), H query heads, G key/value heads, L segment length, E head
dimension.
"""

import sys
import types
from contextlib import suppress

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from condense.attention import IMPLEMENTATIONS, AttentionMask, attend, flex, packed, sdpa, varlen
from condense.segmentation import Chunk

from ...refusals import assert_refused
from ..models import random_durations, random_ids, tiny_model

pytestmark = pytest.mark.unit

LENGTH = 6


@pytest.fixture
def flash_attn(monkeypatch):
    """The two functions of flash-attn as its documentation describes them.

    Tensors are [rows, tokens, heads, head dimension]. Causal masks are aligned to the lower right. There may be fewer
    key heads than query heads. `cu_seqlens` are the borders of packed rows.
    """

    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0
        k, v = (tensor.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for tensor in (k, v))
        scores = torch.einsum("bqhe,bkhe->bhqk", q.double(), k.double()) * softmax_scale
        if causal:
            queries, keys = scores.shape[-2:]
            hidden = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
            scores = scores.masked_fill(hidden, float("-inf"))
        return torch.einsum("bhqk,bkhe->bqhe", scores.softmax(-1), v.double()).to(q.dtype)

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False
    ):
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == cu_seqlens_k.diff().max()
        outputs = []
        for row in range(len(cu_seqlens_q) - 1):
            queries = slice(cu_seqlens_q[row], cu_seqlens_q[row + 1])
            keys = slice(cu_seqlens_k[row], cu_seqlens_k[row + 1])
            row_qkv = q[None, queries], k[None, keys], v[None, keys]
            outputs.append(flash_attn_func(*row_qkv, 0.0, softmax_scale, causal)[0])
        return torch.cat(outputs)

    module = types.ModuleType("flash_attn")
    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)


@pytest.fixture(params=[True, False], ids=["grouped heads", "equal heads"])
def torch_varlen(request, flash_attn, monkeypatch):
    """torch's function for rows of any length, on the CPU and in any dtype; that of torch 2.11 has no grouped heads."""
    package = sys.modules["flash_attn"].flash_attn_varlen_func

    def varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
    ):
        assert window_size in ((-1, -1), (-1, 0)) and (enable_gqa or query.shape[1] == key.shape[1])
        return package(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, scale, causal=window_size[1] == 0)

    def without_groups(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        return varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)

    function = varlen_attn if request.param else without_groups
    monkeypatch.setattr(varlen, "torch_varlen", lambda: types.SimpleNamespace(varlen_attn=function))
    varlen._takes_groups.cache_clear()
    yield
    varlen._takes_groups.cache_clear()


def chunk(counts, offsets, segments):
    rows = list(range(len(counts)))
    return Chunk(len(rows), LENGTH, rows, [0] * len(rows), counts, offsets, segments)


CHUNKS = {
    "first segment": chunk([6, 6], [0, 0], [0, 0]),
    "memory": chunk([6, 6], [0, 0], [1, 3]),
    "short segment": chunk([4, 4], [0, 0], [1, 1]),
    "mid segment": chunk([3, 3], [2, 2], [1, 1]),
    "mid segment, no memory": chunk([3, 3], [2, 2], [0, 0]),
    "one token": chunk([1, 1], [4, 4], [2, 2]),
    "different offsets": chunk([3, 1], [1, 4], [2, 1]),
    "different offsets, one without memory": chunk([2, 3], [3, 0], [0, 4]),
    "different offsets, one token": chunk([1, 1], [0, 5], [0, 1]),
}


def naive_attention(query, key, value, chunk, durations, scale):
    """[R, T, H * E] by the definition, at the tokens of a chunk; `key` is the whole buffer [R, G, 2L, E]."""
    group = query.shape[1] // key.shape[1]
    output = torch.zeros(query.shape[0], query.shape[2], query.shape[1], query.shape[3], dtype=torch.float64)
    for r, t in zip(*chunk.token_indices, strict=True):
        first = LENGTH if chunk.segments[r] == 0 else 0
        keys = slice(first, LENGTH + chunk.offsets[r] + t + 1)
        for h in range(query.shape[1]):
            scores = key[r, h // group, keys].double() @ query[r, h, t].double() * scale
            weights = (scores + durations[r, keys].double().log()).softmax(-1)
            output[r, t, h] = weights @ value[r, h // group, keys].double()
    return output.flatten(2)


ZEROS = torch.zeros(2, 4, 6, 8), torch.zeros(2, 2, 6, 8), torch.zeros(2, 2, 6, 8)


@pytest.mark.parametrize("with_durations", [False, True], ids=["unit", "durations"])
@pytest.mark.parametrize("name", CHUNKS)
def test_varlen_follows_the_definition(with_durations, name, torch_varlen):
    assert_definition("varlen", with_durations, name)


@pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if name != "varlen"])
@pytest.mark.parametrize("with_durations", [False, True], ids=["unit", "durations"])
@pytest.mark.parametrize("name", CHUNKS)
def test_implementations_follow_the_definition(implementation, with_durations, name, flash_attn):
    assert_definition(implementation, with_durations, name)


def assert_definition(implementation, with_durations, name):
    """In float32 with tolerance 1e-5. Masked keys have huge values, so that an error of the mask changes the output."""
    chunk, generator = CHUNKS[name], torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, chunk.width, 8, generator=generator)
    key, value = (torch.randn(2, 2, 2 * LENGTH, 8, generator=generator) for _ in range(2))
    for row in range(2):
        first, end = 0 if chunk.segments[row] else LENGTH, LENGTH + chunk.offsets[row] + chunk.counts[row]
        for tensor in (key, value):
            tensor[row, :, :first] = tensor[row, :, end:] = 1e3
    durations = 0.1 + torch.rand(2, 2 * LENGTH, generator=generator) if with_durations else torch.ones(2, 2 * LENGTH)
    expected = naive_attention(query, key, value, chunk, durations, 0.3)

    keys = chunk.visible_keys if chunk.uniform else slice(None)
    mask = AttentionMask(chunk, durations[:, keys].log() if with_durations else None)
    output = attend(implementation, query, key[:, :, keys], value[:, :, keys], mask, 0.3, 0.0)
    r, t = chunk.token_indices
    torch.testing.assert_close(output[r, t].double(), expected[r, t], atol=1e-5, rtol=1e-5)
    assert output.isfinite().all()


def test_gradients_through_varlen(torch_varlen):
    """Rows at different offsets, gathered and put back."""
    gradients = {}
    for implementation in ("sdpa", "varlen"):
        generator = torch.Generator().manual_seed(0)
        query = torch.randn(2, 4, 3, 8, generator=generator).requires_grad_()
        key, value = (torch.randn(2, 2, 2 * LENGTH, 8, generator=generator).requires_grad_() for _ in range(2))
        mask = AttentionMask(CHUNKS["different offsets"])
        output = attend(implementation, query, key, value, mask, 0.3, 0.0)
        (output[mask.chunk.token_indices] ** 2).sum().backward()
        gradients[implementation] = [tensor.grad for tensor in (query, key, value)]
    torch.testing.assert_close(gradients["varlen"], gradients["sdpa"], atol=1e-5, rtol=1e-5)


def test_rows_are_packed_once_for_all_layers(torch_varlen, noted):
    packings = noted(packed, "_pack")
    model, ids = tiny_model(torch.float32, attn_implementation="varlen"), random_ids(2, 4)
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    with torch.no_grad():
        cache = model(ids, attention_mask=mask).past_key_values
        model(ids, attention_mask=torch.cat([mask, torch.ones_like(mask)], 1), past_key_values=cache)
    assert 1 <= len(packings) <= 4  # once a chunk, and not in each of three layers


@pytest.mark.parametrize("implementation", ["blocked", "flex_attention", "varlen"])
def test_dropout_is_refused_where_there_is_none(implementation):
    arguments = *ZEROS, AttentionMask(CHUNKS["first segment"]), 1.0, 0.1
    assert_refused("set attention_dropout=0.1 to 0", attend, implementation, *arguments)


@torch.no_grad()
def test_flash_attention_gives_the_logits_of_sdpa(flash_attn):
    ids, durations = random_ids(3, 13), random_durations(3, 13).float()
    mask = torch.ones(3, 13, dtype=torch.long)
    mask[1, :4] = mask[2, 9:] = 0
    outputs = {}
    for implementation in ("sdpa", "flash_attention_2"):
        model = tiny_model(torch.float32, head_dim=8)
        model.config._attn_implementation = implementation
        first = model(ids, attention_mask=mask, durations=durations)
        second = model(random_ids(3, 4, seed=1), past_key_values=first.past_key_values)  # rows have different offsets
        outputs[implementation] = torch.cat([first.logits[mask.bool()], second.logits.flatten(0, 1)])
    torch.testing.assert_close(outputs["flash_attention_2"], outputs["sdpa"], atol=1e-4, rtol=1e-4)


def test_durations_keep_their_precision_in_bfloat16(flash_attn):
    """Channels of bfloat16 queries and keys hold log durations with the precision of float32."""
    chunk = CHUNKS["memory"]
    durations = 0.1 + torch.rand(2, 2 * LENGTH)
    query = torch.zeros(2, 4, chunk.width, 8, dtype=torch.bfloat16)
    key = torch.zeros(2, 2, 2 * LENGTH, 8, dtype=torch.bfloat16)
    value = torch.eye(12)[:, :8].expand(2, 2, -1, -1).bfloat16()  # the output is the attention weights
    mask = AttentionMask(chunk, durations.log())
    output = IMPLEMENTATIONS["flash_attention_2"](query, key, value, mask, 8**-0.5, 0.0)
    expected = durations[:, :8] / durations.sum(1, keepdim=True)
    torch.testing.assert_close(output[:, 0, -1].float(), expected.bfloat16().float(), atol=0, rtol=1e-2)
    scaled = IMPLEMENTATIONS["flash_attention_2"](query.double(), key.double(), value.double(), mask, 8**-0.5, 0.0)
    torch.testing.assert_close(scaled[:, 0, -1].float(), expected, atol=1e-6, rtol=1e-5)


def test_zero_durations_in_float16_follow_the_definition(flash_attn):
    chunk, durations = CHUNKS["memory"], torch.ones(2, 2 * LENGTH)
    durations[:, 3] = 0
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, 2 * LENGTH, 64, generator=generator).half() for _ in range(3))
    query = query[:, :, :LENGTH]
    output = attend("flash_attention_2", query, key, value, AttentionMask(chunk, durations.log()), 0.125, 0.0)
    expected = naive_attention(query, key, value, chunk, durations, 0.125)
    torch.testing.assert_close(output.double(), expected, atol=5e-3, rtol=5e-3)


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flash_attention_2"])
def test_autocast_gives_queries_keys_and_values_one_dtype(implementation, flash_attn, monkeypatch):
    """Rotary tables are float32, but rotated queries and keys must have the dtype of the values."""
    model = tiny_model(torch.float32)
    model.config._attn_implementation = implementation
    attention = IMPLEMENTATIONS[implementation]

    def checked(query, key, value, *rest):
        assert query.dtype == key.dtype == value.dtype == torch.bfloat16
        return attention(query, key, value, *rest)

    monkeypatch.setitem(IMPLEMENTATIONS, implementation, checked)
    with torch.autocast("cpu", torch.bfloat16):
        cached = model(random_ids(1, 13))
        assert cached.past_key_values.layers[0].keys.dtype == torch.bfloat16
        torch.testing.assert_close(cached.logits, model(random_ids(1, 13), use_cache=False).logits)


def test_masks_that_flex_attention_made_in_inference_mode_serve_training():
    flex._lower_right_block_mask.cache_clear()
    with torch.inference_mode():
        flex._lower_right_block_mask(3, 8, torch.device("cpu"))
    tensors = flex._lower_right_block_mask(3, 8, torch.device("cpu")).as_tuple()
    assert not any(one.is_inference() for one in tensors if isinstance(one, torch.Tensor))


class OnCuda(torch.Tensor):
    is_cuda = property(lambda self: True)


@pytest.mark.parametrize(
    ("offset", "tokens", "memory", "recurs"),
    [
        (0, LENGTH, False, True),  # a text's first segment
        (0, 3, False, False),  # a text of less than a segment
        (3, 1, True, False),  # a new token
        (0, LENGTH, True, True),
    ],
)
def test_sdpa_leaves_out_cudnn_where_shapes_do_not_recur(offset, tokens, memory, recurs, monkeypatch):
    enabled = []

    def attention(query, *_, **__):
        enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
        return query

    monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", attention)
    mask = AttentionMask(chunk([tokens], [offset], [int(memory)]))
    query = torch.zeros(1, 2, tokens, 4).as_subclass(OnCuda)
    key = torch.zeros(1, 2, LENGTH * memory + offset + tokens, 4)
    sdpa.sdpa_attention(query, key, key, mask, 0.5, 0.0)
    assert enabled == [recurs]
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_without_cudnn_leaves_it_as_it_was():
    try:
        torch.backends.cuda.enable_cudnn_sdp(False)
        with sdpa.without_cudnn():
            pass
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    with suppress(InterruptedError), sdpa.without_cudnn():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        raise InterruptedError
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_cudnn_stays_where_it_alone_is_permitted():
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), sdpa.without_cudnn():
        assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.gpu
def test_new_tokens_run_no_kernel_of_cudnn():
    model = tiny_model(torch.bfloat16, head_dim=64).to("cuda")  # a width that cuDNN takes
    ids = random_ids(1, 2 * model.config.segment_length).to("cuda")
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            for _ in range(3):
                model(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True)
    kernels = [event.key for event in trace.key_averages()]
    assert kernels and not [name for name in kernels if "cudnn" in name and "sdpa" in name]
