"""Static decoding steps give the logits and the state of ordinary steps, and read nothing back from the device.

A CUDA graph is replaced by a recording that replays on the CPU.
"""

import copy
import pickle

import pytest
import torch

from condense import FoldedCache
from condense.attention import dispatch
from condense.execution import static_decoding
from condense.execution.static_decoding import StaticDecoding, static_step

from ..generation.test_generation import NUM_NEW, generated
from ..models import padded_batch, random_durations, random_ids, tiny_model
from .recording import recorded_graphs
from .test_waits import num_copies, on_meta

pytestmark = pytest.mark.usefixtures("no_grad")

LENGTHS = [3, 13, 7, 20, 5]
BUFFERS = ("keys", "values", "next_keys", "next_values")


def written_by(compute):
    """The tensors that a step changes."""
    _, layers, _, positions_2B, _ = compute.args
    return [positions_2B, *(getattr(layer, name) for layer in layers for name in BUFFERS)]


@pytest.fixture(params=["calls", "recording"])
def counts(request, monkeypatch):
    """Runs steps as calls or from a recording; counts the warm-ups, captures and replays of recordings."""
    if request.param == "calls":
        return None
    return recorded_graphs(monkeypatch, written_by)


@pytest.fixture
def static_decodings(noted):
    return noted(StaticDecoding, "run")


def prefilled_cache(model, lengths=LENGTHS):
    _, ids, mask = padded_batch(lengths, "left")
    return model(ids.to(model.device), attention_mask=mask.to(model.device)).past_key_values


def both(model):
    """The same model twice: with ordinary steps, and with static steps."""
    static = copy.copy(model)
    static.fixed_decoding = True
    return model, static


def assert_same_state(found, expected, atol=1e-10, rtol=0):
    positions = expected.positions
    assert (found.positions.offsets, found.positions.segments) == (positions.offsets, positions.segments)
    assert found.num_columns == expected.num_columns and found.num_bytes == expected.num_bytes
    torch.testing.assert_close(found.last_hidden_BD, expected.last_hidden_BD, atol=atol, rtol=rtol)
    for name in BUFFERS:
        of_layers = ([getattr(layer, name) for layer in cache.layers] for cache in (found, expected))
        torch.testing.assert_close(*of_layers, atol=atol, rtol=rtol)


def assert_same_steps(ordinary, static, lengths=LENGTHS, num_tokens=NUM_NEW, atol=1e-10, rtol=0):
    """Logits and state after each new token; returns the cache of the static steps."""
    ordinary_cache, static_cache = (prefilled_cache(model, lengths) for model in (ordinary, static))
    for n in range(num_tokens):
        ids = random_ids(len(lengths), 1, seed=n).to(ordinary.device)
        expected = ordinary(ids, past_key_values=ordinary_cache).logits
        torch.testing.assert_close(static(ids, past_key_values=static_cache).logits, expected, atol=atol, rtol=rtol)
        assert_same_state(static_cache, ordinary_cache, atol, rtol)
    return static_cache


FIELDS = {
    "plain": {},
    "eager": {"attn_implementation": "eager"},
    "layer_input": {"memory_source": "layer_input"},
    "shares": {"memory_share": [1.0, 0.0, 0.3]},
    "segment 1": {"segment_length": 1},
    "other weights": {
        "num_key_value_heads": 4,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "bptt_segments": 1,
    },
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("lengths", [LENGTHS, [3, 3]], ids=str)
def test_static_steps_give_the_logits_and_state_of_ordinary_steps(fields, lengths, counts, static_decodings):
    """Rows have different offsets or the same offset, also at the start of a segment, with and without a memory."""
    assert_same_steps(*both(tiny_model(**fields)), lengths)
    assert len(static_decodings) == NUM_NEW
    assert counts in (None, {"warm_up": 1, "capture": 1, "replay": NUM_NEW - 1})


OPTIONS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 0, "num_return_sequences": 2},
    "chunks": {"prefill_chunk_size": 4},
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_generate_gives_the_same_tokens(side, options, counts, static_decodings):
    model = tiny_model()
    _, ids, mask = padded_batch(LENGTHS, side)
    outputs = []
    for each in both(model):
        torch.manual_seed(0)
        outputs.append(generated(each, ids, attention_mask=mask, eos_token_id=7, **options))
    assert torch.equal(*outputs)
    assert len(static_decodings) >= NUM_NEW - 2
    if counts:
        assert (counts["replay"] > 0) == ("num_beams" not in options)


def test_static_steps_and_other_calls_alternate_on_one_cache(counts, static_decodings):
    """Texts of several tokens, padding, selected rows, gradients and inference mode continue from static steps."""
    ordinary, static = both(tiny_model())
    ordinary_cache, static_cache = prefilled_cache(ordinary), prefilled_cache(static)

    def call(size, mask=None, embeds=False, mode=torch.no_grad, times=3):
        before = len(static_decodings)
        for _ in range(times):
            ids = random_ids(static_cache.batch_size, size, seed=static_cache.num_columns)
            inputs = {"inputs_embeds": static.model.embed_tokens(ids)} if embeds else {"input_ids": ids}
            with mode():
                logits = [
                    each(**inputs, attention_mask=mask, past_key_values=cache).logits.detach().clone()
                    for each, cache in ((ordinary, ordinary_cache), (static, static_cache))
                ]
            torch.testing.assert_close(*logits, atol=1e-10, rtol=0)
            assert_same_state(static_cache, ordinary_cache)
        return len(static_decodings) - before

    assert call(1) == 3
    assert call(7) == 0
    assert call(1) == 3
    assert call(1, mask=torch.tensor([[1], [0], [1], [1], [0]])) == 0
    assert call(1, mask=torch.ones(5, 1)) == 3
    assert call(1, embeds=True) == 0
    assert call(1, mode=torch.enable_grad) == 0
    assert call(1) == 2  # the first call makes the buffers writable
    assert call(1, mode=torch.inference_mode) == 3
    for cache in (static_cache, ordinary_cache):
        cache.reorder_cache(torch.tensor([4, 0, 0, 2, 3, 1]))
    assert call(1) == 3
    static_cache, ordinary_cache = copy.deepcopy(static_cache), copy.deepcopy(ordinary_cache)
    assert static_cache.static_decoding is None and call(1) == 3
    static_cache = pickle.loads(pickle.dumps(static_cache))
    assert static_cache.static_decoding is None and call(1, mode=torch.inference_mode) == 3
    assert call(1) == 3
    for cache in (static_cache, ordinary_cache):
        cache.batch_repeat_interleave(2)
    assert call(1) == 3
    with torch.inference_mode():
        static_cache, ordinary_cache = prefilled_cache(static), prefilled_cache(ordinary)
        static_copy, ordinary_copy = copy.deepcopy(static_cache), copy.deepcopy(ordinary_cache)
    assert call(1, mode=torch.inference_mode) == 3
    static_cache, ordinary_cache = static_copy, ordinary_copy
    assert call(1) == 2  # buffers of inference mode can't be written outside it


def test_calls_that_are_no_static_step_run_as_ordinary_steps(static_decodings):
    _, model = both(tiny_model())
    cache_with_durations = FoldedCache(model.config)
    for _ in range(3):
        model(random_ids(2, 1), durations=random_durations(2, 1), past_key_values=cache_with_durations)
        model(random_ids(2, 1), past_key_values=cache_with_durations)
        model(random_ids(2, 1))
        model(random_ids(2, 1), past_key_values=FoldedCache(model.config))
        model(random_ids(5, 1), labels=random_ids(5, 1), past_key_values=prefilled_cache(model))
    with torch.autocast("cpu"):
        model(random_ids(5, 1), past_key_values=prefilled_cache(model))
    assert not static_decodings
    with pytest.raises(ValueError, match="holds 5 texts and the input 2"):
        model(random_ids(2, 1), past_key_values=prefilled_cache(model))


def test_settings_without_a_static_step_are_refused():
    _, model = both(tiny_model(attn_implementation="flex_attention"))
    with pytest.raises(ValueError, match=r"'flex_attention'.*set_attn_implementation"):
        model(random_ids(2, 1), past_key_values=prefilled_cache(model, lengths=[3, 3]))


@pytest.mark.parametrize("counts", ["recording"], indirect=True)
@pytest.mark.parametrize("change", ["data", "in place", "attention", "module", "hook", "model", "nothing"])
def test_a_changed_model_is_captured_again(change, counts):
    ordinary, static = both(tiny_model())
    ordinary_cache, static_cache, ids, called = prefilled_cache(ordinary), prefilled_cache(static), random_ids(5, 1), []
    for n in range(9):
        if n == 4:
            attention = ordinary.model.layers[1].self_attn
            if change == "data":
                attention.v_proj.weight.data = attention.v_proj.weight.data * 1.5
            elif change == "in place":
                attention.v_proj.weight.mul_(1.5)
            elif change == "attention":
                ordinary.set_attn_implementation("eager")
            elif change == "module":
                attention.v_proj = copy.deepcopy(attention.v_proj)
            elif change == "hook":
                attention.v_proj.register_forward_hook(lambda *_: called.append(1))
            elif change == "model":
                ordinary, static = both(tiny_model(seed=1))
        expected = ordinary(ids, past_key_values=ordinary_cache).logits
        called.clear()
        torch.testing.assert_close(static(ids, past_key_values=static_cache).logits, expected, atol=1e-10, rtol=0)
        assert (change == "hook" and n >= 4) == bool(called)
    captured_again = change not in ("in place", "hook", "nothing")
    assert counts["capture"] == 1 + captured_again


def test_later_steps_do_not_overwrite_returned_logits(counts):
    _, model = both(tiny_model())
    cache = prefilled_cache(model)
    outputs, copied = [], []
    for n in range(4):
        outputs += [model(random_ids(5, 1, seed=n), past_key_values=cache).logits, cache.last_hidden_BD]
        copied += [tensor.clone() for tensor in outputs[-2:]]
    assert all(torch.equal(*pair) for pair in zip(outputs, copied, strict=True))


@pytest.mark.parametrize(
    ("implementation", "dtype", "tolerance"),
    [("sdpa", torch.float64, 1e-10), ("eager", torch.float64, 1e-10), ("auto", torch.bfloat16, 0.2)],
)
def test_one_compiled_graph_serves_all_tokens(implementation, dtype, tolerance, monkeypatch):
    """There is no graph break and no second graph: the step depends on no number of the host or the device."""
    monkeypatch.setattr(dispatch, "CPU_MULTIPLIES_BFLOAT16", True)
    monkeypatch.setattr(dispatch, "BLOCKED_PRODUCTS", 1)
    torch.compiler.reset()
    model = tiny_model(dtype, attn_implementation=implementation, num_hidden_layers=2)
    ordinary_cache, static_cache = prefilled_cache(model), prefilled_cache(model)
    compiled = torch.compile(static_step, fullgraph=True, backend="aot_eager")
    positions_2B = torch.tensor(static_decoding.position_lists(static_cache.positions))
    try:
        for n in range(NUM_NEW):
            ids = random_ids(5, 1, seed=n)
            expected = model(ids, past_key_values=ordinary_cache).logits
            for chunk in static_cache.positions.chunks([1] * 5):
                with torch.compiler.set_stance("fail_on_recompile" if n else "default"):
                    _, logits = compiled(model, static_cache.layers, ids, positions_2B)
                for layer in static_cache.layers:
                    layer.roll(chunk)
            torch.testing.assert_close(logits, expected, atol=tolerance, rtol=0)
    finally:
        torch.compiler.reset()


def test_a_static_step_copies_only_its_tokens_to_the_device():
    """The meta device holds no numbers, so a call that reads one back fails."""
    _, model = both(on_meta())
    cache = model(random_ids(2, 13).to("meta")).past_key_values
    model(random_ids(2, 1).to("meta"), past_key_values=cache)
    for _ in range(12):  # across two segment borders
        ids = random_ids(2, 1)
        assert num_copies(lambda ids=ids: model(ids.to("meta"), past_key_values=cache)) == 1
    assert isinstance(cache.static_decoding, StaticDecoding)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_cuda_graph_gives_the_logits_of_ordinary_steps(implementation):
    ordinary, static = both(tiny_model(attn_implementation=implementation).to("cuda"))
    assert assert_same_steps(ordinary, static).static_decoding.replay is not None


def test_a_compiled_step_is_the_one_that_runs(monkeypatch):
    compiled, options = [], []

    def compile(function, **given):
        options.append(given)
        return lambda *arguments: compiled.append(1) or function(*arguments)

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(static_decoding, "_compiled_step", static_decoding._compiled_step.__wrapped__)
    ordinary, static = both(tiny_model(torch.float32))
    static.fixed_decoding = "compiled"
    assert_same_steps(ordinary, static, num_tokens=3, atol=1e-4, rtol=1e-4)
    assert len(compiled) == 3 and options[0] == {"dynamic": False}
    cache = prefilled_cache(static)
    static(random_ids(5, 1), past_key_values=cache)
    static.fixed_decoding = True  # the same cache goes on without it
    static(random_ids(5, 1), past_key_values=cache)
    assert len(compiled) == 4
    static.fixed_decoding = "compile"
    with pytest.raises(ValueError, match="fixed_decoding='compile': choose one of False, True, 'compiled'"):
        static(random_ids(5, 1), past_key_values=cache)


@pytest.mark.slow
def test_the_compiled_step_gives_the_same_tokens():
    """Over segment borders, rows at different offsets; a further cache compiles nothing anew."""
    ordinary, static = both(tiny_model(torch.float32))
    static.fixed_decoding = "compiled"
    assert_same_steps(ordinary, static, num_tokens=12, atol=1e-4, rtol=1e-4)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs >= 1 and not torch._dynamo.utils.counters["graph_break"]
    assert_same_steps(ordinary, static, num_tokens=3, atol=1e-4, rtol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
