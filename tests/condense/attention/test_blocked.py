"""Attention by blocks of heads against the plain formula's own gradients, and when "auto" takes it."""

import pytest
import torch

from condense import CondenseForCausalLM, to_llama
from condense.attention import IMPLEMENTATIONS, AttentionMask, attend, blocked, choose_attention, dispatch

from ..models import random_durations, random_ids, tiny_config, tiny_model
from .test_implementations import CHUNKS, LENGTH

ROWS, KEY_HEADS, HEADS, WIDTH = 2, 4, 8, 4
MATRIX = HEADS // KEY_HEADS * LENGTH * 2 * LENGTH * 8  # bytes of the scores of one key head at most


@pytest.fixture(autouse=True)
def _no_luck_with_memory():
    """Memory that is read before it was written holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs(chunk, with_durations, heads=HEADS):
    generator = torch.Generator().manual_seed(0)
    keys = chunk.visible_keys if chunk.uniform else slice(None)
    shapes = (ROWS, heads, chunk.width, WIDTH), *[(ROWS, KEY_HEADS, 2 * LENGTH, WIDTH)] * 2
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    durations = 0.1 + torch.rand(ROWS, 2 * LENGTH, generator=generator, dtype=torch.float64)
    mask = AttentionMask(chunk, durations[:, keys].log() if with_durations else None)
    return tensors, keys, mask


def output_and_gradients(implementation, chunk, *options):
    (query, key, value), keys, mask = inputs(chunk, *options)
    # As the model has them: queries with heads behind tokens, keys a part of a buffer.
    query_RTHE = query.transpose(1, 2).contiguous()
    buffers = key[:, :, keys], value[:, :, keys]
    output = attend(implementation, query_RTHE.transpose(1, 2), *buffers, mask, 0.3, 0.0)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return [output, *torch.autograd.grad((output * weights).sum(), (query, key, value))]


@pytest.mark.parametrize("block_bytes", [1, 3 * MATRIX, 5 * MATRIX, 100 * MATRIX], ids=["1", "2", "4", "8"])
@pytest.mark.parametrize("heads", [HEADS, KEY_HEADS], ids=["grouped", "not grouped"])
@pytest.mark.parametrize("with_durations", [False, True], ids=["unit", "durations"])
@pytest.mark.parametrize("name", CHUNKS)
def test_values_and_gradients(name, with_durations, heads, block_bytes, monkeypatch):
    """A key head at a time, two of four, a whole row of the two, and everything at once."""
    monkeypatch.setattr(blocked, "BLOCK_BYTES", block_bytes)
    case = CHUNKS[name], with_durations, heads
    expected = output_and_gradients("eager", *case)
    for ours, plain in zip(output_and_gradients("blocked", *case), expected, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-12, rtol=1e-12)


def test_blocks_are_as_large_as_they_may_be(monkeypatch):
    sizes = []
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda left, right, out: sizes.append(len(left)) or bmm(left, right, out=out))
    (query, key, value), _, mask = inputs(CHUNKS["memory"], False)
    for block_bytes, expected in {1: [1] * 8, 3 * MATRIX: [2] * 4, 7 * MATRIX: [4] * 2, 8 * MATRIX: [8]}.items():
        sizes.clear()
        monkeypatch.setattr(blocked, "BLOCK_BYTES", block_bytes)
        IMPLEMENTATIONS["blocked"](query, key, value, mask, 0.3, 0.0)
        assert sizes == expected


def test_nothing_of_the_size_of_the_scores_waits_for_the_backward_pass():
    (query, key, value), _, mask = inputs(CHUNKS["memory"], True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor.data_ptr()) or tensor, lambda t: t
    ):
        IMPLEMENTATIONS["blocked"](query, key, value, mask, 0.3, 0.0)
    assert saved == [tensor.data_ptr() for tensor in (query, key, value)]


def test_dropout_is_refused():
    (query, key, value), _, mask = inputs(CHUNKS["memory"], False)
    with pytest.raises(ValueError, match=r"attention_dropout=0.1 to 0 or use sdpa"):
        IMPLEMENTATIONS["blocked"](query, key, value, mask, 0.3, 0.1)


@pytest.mark.parametrize("schedule", ["sequential", "wavefront"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_trains_as_with_sdpa(schedule, checkpointing):
    """Segments, waves, checkpoints and durations, in float64."""
    ids, durations = random_ids(2, 23), random_durations(2, 23)
    found = []
    for implementation in ("sdpa", "blocked"):
        model = tiny_model(schedule=schedule).train()
        model.set_attn_implementation(implementation)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(ids, labels=ids, durations=durations).loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("implementation", ["auto", "blocked"])
@torch.no_grad()
def test_autocast_over_what_was_read_without_it(implementation, monkeypatch):
    monkeypatch.setattr(dispatch, "CPU_MULTIPLIES_BFLOAT16", True)
    monkeypatch.setattr(dispatch, "BLOCKED_PRODUCTS", 1)
    ids, logits = random_ids(2, 12), []
    for name in ("sdpa", implementation):
        model = tiny_model(torch.float32, attn_implementation=name)
        cache = model(ids).past_key_values
        with torch.autocast("cpu", torch.bfloat16):
            logits.append(model(ids, past_key_values=cache).logits.float())
    sdpa, ours = logits
    assert (ours - sdpa).pow(2).mean() < 0.05**2 * sdpa.pow(2).mean()


@torch.no_grad()
def test_bfloat16_is_as_good_as_the_formula_written_out():
    """Root mean square error against float64 of weights' averages: no more than eager's, which rounds the same."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 6, 40, 16, generator=generator).bfloat16() for _ in range(3))
    chunk = CHUNKS["first segment"]
    exact = IMPLEMENTATIONS["eager"](query.double(), key.double(), value.double(), AttentionMask(chunk), 0.25, 0.0)
    errors = {
        name: (IMPLEMENTATIONS[name](query, key, value, AttentionMask(chunk), 0.25, 0.0).double() - exact).pow(2).mean()
        for name in ("eager", "blocked")
    }
    assert errors["blocked"] <= 1.1 * errors["eager"]


CPU = torch.zeros(1, 4, 128, 8)
KEYS = torch.zeros(1, 2, 32, 8)


@pytest.mark.parametrize(
    ("query", "dropout", "multiplies_bfloat16", "expected"),
    [
        (CPU.bfloat16(), 0.0, True, "blocked"),
        (CPU.bfloat16(), 0.0, False, "sdpa"),
        (CPU.bfloat16()[:, :, :127], 0.0, True, "sdpa"),
        (CPU.bfloat16(), 0.1, True, "sdpa"),
        (CPU, 0.0, True, "sdpa"),
        (CPU.half(), 0.0, True, "sdpa"),
        (CPU.bfloat16().to("meta"), 0.0, True, "sdpa"),
    ],
)
def test_auto(query, dropout, multiplies_bfloat16, expected, monkeypatch):
    monkeypatch.setattr(dispatch, "CPU_MULTIPLIES_BFLOAT16", multiplies_bfloat16)
    assert choose_attention(query, KEYS, AttentionMask(CHUNKS["memory"]), dropout) == expected
    assert choose_attention(query.expand(9, -1, -1, -1), KEYS, AttentionMask(CHUNKS["memory"]), dropout) == expected


def test_auto_leaves_matrices_that_are_too_large(monkeypatch):
    monkeypatch.setattr(dispatch, "CPU_MULTIPLIES_BFLOAT16", True)
    query = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16).expand(1, 8, 1024, 64)
    for num_key_heads, expected in {8: "blocked", 2: "blocked", 1: "sdpa"}.items():  # 4, 16 and 32 MiB
        key = query[:, :num_key_heads, :1].expand(-1, -1, 2048, -1)
        assert choose_attention(query, key, AttentionMask(CHUNKS["memory"]), 0.0) == expected


class OnCuda:
    """What the rule asks of a query there."""

    device, is_cuda = torch.device("cuda"), True

    def __init__(self, num_queries, dtype):
        self.shape, self.dtype = (1, 4, num_queries, 8), dtype


@pytest.mark.parametrize("installed", [False, True])
def test_auto_on_cuda(installed, monkeypatch):
    """flash-attn where a mask would cost sdpa its own flash kernel."""
    monkeypatch.setattr(dispatch, "is_flash_attn_2_available", lambda: installed)
    apart, weighed = AttentionMask(CHUNKS["rows apart"]), AttentionMask(CHUNKS["memory"], torch.zeros(2, 12))
    package = "flash_attention_2" if installed else "sdpa"
    for mask in (apart, weighed):
        assert choose_attention(OnCuda(3, torch.bfloat16), KEYS, mask, 0.0) == package
        assert choose_attention(OnCuda(3, torch.float32), KEYS, mask, 0.0) == "sdpa"
        assert choose_attention(OnCuda(1, torch.bfloat16), KEYS, mask, 0.0) == "sdpa"
    assert choose_attention(OnCuda(3, torch.bfloat16), KEYS, AttentionMask(CHUNKS["memory"]), 0.0) == "sdpa"


def test_auto_is_what_models_have(tmp_path, monkeypatch):
    model = CondenseForCausalLM(tiny_config(attn_implementation=None))
    assert model.config._attn_implementation == "auto"
    model.save_pretrained(tmp_path)
    loaded = CondenseForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.config._attn_implementation == "auto"
    assert to_llama(loaded).config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="'nonsense' is not known: choose one of auto, blocked"):
        CondenseForCausalLM.from_pretrained(tmp_path, attn_implementation="nonsense")

    taken = []
    monkeypatch.setattr(dispatch, "CPU_MULTIPLIES_BFLOAT16", True)
    monkeypatch.setattr(dispatch, "BLOCKED_PRODUCTS", 1)
    blocked = IMPLEMENTATIONS["blocked"]
    monkeypatch.setitem(IMPLEMENTATIONS, "blocked", lambda *arguments: taken.append(1) or blocked(*arguments))
    with torch.no_grad():
        loaded(random_ids(1, 12))
        assert taken
        taken.clear()
        loaded.float()(random_ids(1, 12))
        assert not taken
