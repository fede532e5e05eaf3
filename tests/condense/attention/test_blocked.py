"""Blocked attention against eager attention and its gradients, and the choice of "auto"."""

import pytest
import torch

from condense import CondenseForCausalLM, to_stock
from condense.attention import IMPLEMENTATIONS, AttentionMask, attend, blocked, choose_attention, dispatch

from ..models import gradients, random_durations, random_ids, tiny_config, tiny_model
from .test_implementations import CHUNKS, LENGTH

pytestmark = pytest.mark.unit

ROWS, NUM_KEY_HEADS, NUM_HEADS, HEAD_DIM = 2, 4, 8, 4
SCORE_BYTES = NUM_HEADS // NUM_KEY_HEADS * LENGTH * 2 * LENGTH * 8  # of one key head, at most


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan():
    """Deterministic algorithms fill new memory with NaN, so that reads before writes change the results."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs(chunk, with_durations, heads=NUM_HEADS):
    generator = torch.Generator().manual_seed(0)
    keys = chunk.visible_keys if chunk.uniform else slice(None)
    shapes = (ROWS, heads, chunk.width, HEAD_DIM), *[(ROWS, NUM_KEY_HEADS, 2 * LENGTH, HEAD_DIM)] * 2
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    durations = 0.1 + torch.rand(ROWS, 2 * LENGTH, generator=generator, dtype=torch.float64)
    return tensors, keys, AttentionMask(chunk, durations[:, keys].log() if with_durations else None)


def output_and_gradients(implementation, chunk, *options):
    (query, key, value), keys, mask = inputs(chunk, *options)
    # Memory layouts as in the model: queries are [R, T, H, E] in memory, keys are part of a buffer.
    query_RTHE = query.transpose(1, 2).contiguous()
    buffers = key[:, :, keys], value[:, :, keys]
    output = attend(implementation, query_RTHE.transpose(1, 2), *buffers, mask, 0.3, 0.0)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return [output, *torch.autograd.grad((output * weights).sum(), (query, key, value))]


@pytest.mark.parametrize("score_matrices", [0, 3, 5, 100], ids=["1", "2", "4", "8"])
@pytest.mark.parametrize("heads", [NUM_HEADS, NUM_KEY_HEADS], ids=["grouped", "not grouped"])
@pytest.mark.parametrize("with_durations", [False, True], ids=["unit", "durations"])
@pytest.mark.parametrize("name", CHUNKS)
def test_outputs_and_gradients_equal_those_of_eager(name, with_durations, heads, score_matrices, monkeypatch):
    """Blocks of one key head, of two of the four key heads, of one of the two rows, and of both rows."""
    monkeypatch.setattr(blocked, "BLOCK_BYTES", score_matrices * SCORE_BYTES + 1)
    found = [output_and_gradients(each, CHUNKS[name], with_durations, heads) for each in ("blocked", "eager")]
    torch.testing.assert_close(*found, atol=1e-12, rtol=1e-12)


def test_blocks_have_the_largest_size_within_the_limit(monkeypatch, noted):
    products = noted(torch, "bmm")
    (query, key, value), _, mask = inputs(CHUNKS["memory"], False)
    expected_sizes = {1: [1] * 8, 3 * SCORE_BYTES: [2] * 4, 7 * SCORE_BYTES: [4] * 2, 8 * SCORE_BYTES: [8]}
    for block_bytes, expected in expected_sizes.items():
        products.clear()
        monkeypatch.setattr(blocked, "BLOCK_BYTES", block_bytes)
        IMPLEMENTATIONS["blocked"](query, key, value, mask, 0.3, 0.0)
        assert [len(call.arguments[0]) for call in products] == expected


def test_no_scores_are_saved_for_the_backward_pass():
    (query, key, value), _, mask = inputs(CHUNKS["memory"], True)
    saved = []
    noted = lambda tensor: saved.append(tensor.data_ptr()) or tensor  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        IMPLEMENTATIONS["blocked"](query, key, value, mask, 0.3, 0.0)
    assert saved == [tensor.data_ptr() for tensor in (query, key, value)]


@pytest.mark.parametrize("schedule", ["sequential", "wavefront"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_models_gradients_equal_those_of_sdpa(schedule, checkpointing):
    """The model has both schedules, gradient checkpointing and durations, in float64."""
    ids, durations = random_ids(2, 23), random_durations(2, 23)
    found = []
    for implementation in ("sdpa", "blocked"):
        model = tiny_model(schedule=schedule)
        model.set_attn_implementation(implementation)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False, "checkpoint_segments": 2})
        found.append(gradients(model, ids, durations=durations)[1])
    torch.testing.assert_close(*found, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("implementation", ["auto", "blocked"])
@torch.no_grad()
def test_autocast_continues_from_a_cache_without_autocast(implementation, monkeypatch):
    monkeypatch.setattr(dispatch, "CPU_MULTIPLIES_BFLOAT16", True)
    monkeypatch.setattr(dispatch, "BLOCKED_PRODUCTS", 1)
    ids, logits = random_ids(2, 12), []
    for name in ("sdpa", implementation):
        model = tiny_model(torch.float32, attn_implementation=name)
        cache = model(ids).past_key_values
        with torch.autocast("cpu", torch.bfloat16):
            logits.append(model(ids, past_key_values=cache).logits.float())
    sdpa, blocked_logits = logits
    assert (blocked_logits - sdpa).pow(2).mean() < 0.05**2 * sdpa.pow(2).mean()


@torch.no_grad()
def test_the_bfloat16_error_is_at_most_that_of_eager():
    """The error is the mean square difference from float64; eager rounds the same values."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 6, 40, 16, generator=generator).bfloat16() for _ in range(3))
    chunk = CHUNKS["first segment"]
    exact = IMPLEMENTATIONS["eager"](query.double(), key.double(), value.double(), AttentionMask(chunk), 0.25, 0.0)
    found = [IMPLEMENTATIONS[name](query, key, value, AttentionMask(chunk), 0.25, 0.0) for name in ("eager", "blocked")]
    of_eager, of_blocked = ((output.double() - exact).pow(2).mean() for output in found)
    assert of_blocked <= 1.1 * of_eager


QUERY = torch.zeros(1, 4, 128, 8)
KEYS = torch.zeros(1, 2, 32, 8)


@pytest.mark.parametrize(
    ("query", "dropout", "multiplies_bfloat16", "expected"),
    [
        (QUERY.bfloat16(), 0.0, True, "blocked"),
        (QUERY.bfloat16(), 0.0, False, "sdpa"),
        (QUERY.bfloat16()[:, :, :127], 0.0, True, "sdpa"),
        (QUERY.bfloat16(), 0.1, True, "sdpa"),
        (QUERY, 0.0, True, "sdpa"),
        (QUERY.half(), 0.0, True, "sdpa"),
        (QUERY.bfloat16().to("meta"), 0.0, True, "sdpa"),
    ],
)
def test_auto_chooses_on_cpu(query, dropout, multiplies_bfloat16, expected, monkeypatch):
    monkeypatch.setattr(dispatch, "CPU_MULTIPLIES_BFLOAT16", multiplies_bfloat16)
    assert choose_attention(query, KEYS, dropout) == expected
    assert choose_attention(query.expand(9, -1, -1, -1), KEYS, dropout) == expected


def test_auto_takes_sdpa_within_torch_func(monkeypatch):
    monkeypatch.setattr(dispatch, "CPU_MULTIPLIES_BFLOAT16", True)
    choices = []

    def choose(query):
        choices.append(choose_attention(query, KEYS, 0.0))
        return query

    choose(QUERY.bfloat16())
    torch.func.vmap(choose)(QUERY.bfloat16()[None])
    assert choices == ["blocked", "sdpa"]


def test_auto_takes_sdpa_for_large_score_matrices(monkeypatch):
    monkeypatch.setattr(dispatch, "CPU_MULTIPLIES_BFLOAT16", True)
    query = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16).expand(1, 8, 1024, 64)
    for num_key_heads, expected in {8: "blocked", 2: "blocked", 1: "sdpa"}.items():  # 4, 16 and 32 MiB
        key = query[:, :num_key_heads, :1].expand(-1, -1, 2048, -1)
        assert choose_attention(query, key, 0.0) == expected


def test_auto_is_the_default_of_models(tmp_path, monkeypatch, noted):
    model = CondenseForCausalLM(tiny_config(attn_implementation=None))
    assert model.config._attn_implementation == "auto"
    model.save_pretrained(tmp_path)
    loaded = CondenseForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.config._attn_implementation == "auto"
    assert to_stock(loaded).config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match='"nonsense"` is not supported: choose one of auto, blocked'):
        CondenseForCausalLM.from_pretrained(tmp_path, attn_implementation="nonsense")

    monkeypatch.setattr(dispatch, "CPU_MULTIPLIES_BFLOAT16", True)
    monkeypatch.setattr(dispatch, "BLOCKED_PRODUCTS", 1)
    calls = noted(IMPLEMENTATIONS, "blocked")
    with torch.no_grad():
        loaded(random_ids(1, 12))
        assert calls
        calls.clear()
        loaded.float()(random_ids(1, 12))
        assert not calls
