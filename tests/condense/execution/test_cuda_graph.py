"""New tokens by the fixed step: what the ordinary path says, without a look at the device, from a tape too."""

import copy
import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from condense import FoldedCache
from condense.attention import dispatch
from condense.execution import cuda_graph
from condense.execution.cuda_graph import Graphs, StaticDecoding, static_step

from ..models import padded_batch, random_durations, random_ids, tiny_model
from ..test_generation import NEW
from .test_waits import copies, on_meta

LENGTHS = [3, 13, 7, 20, 5]
BUFFERS = ("keys", "values", "next_keys", "next_values")


class Tape(TorchDispatchMode):
    """What a CUDA graph is, on a CPU: the operations of one step, run again on the tensors they ran on."""

    def __init__(self, compute):
        super().__init__()
        _, layers, _, positions_2B = compute.args
        written = [positions_2B, *(getattr(layer, name) for layer in layers for name in BUFFERS)]
        before = [tensor.clone() for tensor in written]
        self.records = []
        with self:
            self.outputs = compute()
        for tensor, was in zip(written, before, strict=True):
            tensor.copy_(was)  # a capture computes nothing
        for output in self.outputs:
            output.zero_()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten._local_scalar_dense.default, "the host reads a number"
        result = function(*args, **(kwargs or {}))
        self.records.append((function, args, kwargs or {}, result))
        return result

    def replay(self):
        made = {}

        def now(items):
            return tree_map_only(torch.Tensor, lambda tensor: made.get(id(tensor), tensor), items)

        for function, args, kwargs, result in self.records:
            again = function(*now(args), **now(kwargs))
            made |= {id(old): new for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True)}
        with torch.inference_mode():  # where they may have been made
            for output in self.outputs:
                output.copy_(now(output))


@pytest.fixture(params=["calls", "tape"])
def replayed(request, monkeypatch):
    """Both ways to run steps; returns how often steps were warmed up, captured and replayed."""
    counts = {"warm_up": 0, "capture": 0, "replay": 0}

    def warm_up(compute, device):
        counts["warm_up"] += 1
        return compute()

    def capture(compute, device):
        counts["capture"] += 1
        tape = Tape(compute)

        def replay():
            counts["replay"] += 1
            tape.replay()

        return replay, tape.outputs

    if request.param == "tape":
        monkeypatch.setitem(cuda_graph.GRAPHS, "cpu", Graphs(warm_up, capture))
    return counts if request.param == "tape" else None


@pytest.fixture
def static_decodings(monkeypatch):
    """How many steps were fixed ones."""
    run, count = StaticDecoding.run, []
    monkeypatch.setattr(StaticDecoding, "run", lambda step, *args: count.append(1) or run(step, *args))
    return count


def started(model, side="left", lengths=LENGTHS):
    _, ids, mask = padded_batch(lengths, side)
    cache = FoldedCache(model.config)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
    return cache


def both(model):
    """The same model, once with ordinary steps and once with fixed ones."""
    twin = copy.copy(model)
    twin.fixed_decoding = True
    return model, twin


def assert_same_state(ours, theirs):
    assert (ours.positions.offsets, ours.positions.segments) == (theirs.positions.offsets, theirs.positions.segments)
    assert ours.num_columns == theirs.num_columns and ours.num_bytes == theirs.num_bytes
    torch.testing.assert_close(ours.last_hidden_BD, theirs.last_hidden_BD, atol=1e-10, rtol=0)
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        for name in BUFFERS:
            torch.testing.assert_close(getattr(a, name), getattr(b, name), atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"attn_implementation": "eager"},
        {"memory_source": "layer_input"},
        {"segment_length": 1},
        {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True, "bptt_segments": 1},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ],
    ids=["plain", "eager", "layer_input", "segment 1", "other weights", "linear rope"],
)
@pytest.mark.parametrize("lengths", [LENGTHS, [3, 3]], ids=str)
@torch.no_grad()
def test_logits_and_state_are_those_of_the_ordinary_path(fields, lengths, replayed, static_decodings):
    """Rows at different places, and at the same one; at the beginning of a segment too, with and without a memory."""
    ordinary, fixed = both(tiny_model(**fields))
    theirs, ours = started(ordinary, lengths=lengths), started(fixed, lengths=lengths)
    for n in range(NEW):
        ids = random_ids(len(lengths), 1, seed=n)
        expected = ordinary(ids, past_key_values=theirs).logits
        torch.testing.assert_close(fixed(ids, past_key_values=ours).logits, expected, atol=1e-10, rtol=0)
        assert_same_state(ours, theirs)
    assert len(static_decodings) == NEW
    assert replayed in (None, {"warm_up": 1, "capture": 1, "replay": NEW - 1})


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 0, "num_return_sequences": 2}, {"prefill_chunk_size": 4}],
    ids=["greedy", "beams", "sampling", "chunks"],
)
def test_generate_gives_the_same_tokens(side, options, replayed, static_decodings):
    model = tiny_model()
    _, ids, mask = padded_batch(LENGTHS, side)
    answers = []
    for each in both(model):
        torch.manual_seed(0)
        answers.append(
            each.generate(
                ids, attention_mask=mask, max_new_tokens=NEW, **{"do_sample": False, **options}, eos_token_id=7
            )
        )
    assert torch.equal(*answers)
    assert len(static_decodings) >= NEW - 2
    if replayed:
        assert (replayed["replay"] > 0) == ("num_beams" not in options)


@torch.no_grad()
def test_calls_of_all_kinds_alternate_on_one_cache(replayed, static_decodings):
    """Steps, texts of several tokens, padding, chosen rows, gradients, inference mode: each goes on from the other."""
    ordinary, fixed = both(tiny_model())
    theirs, ours = started(ordinary), started(fixed)

    def call(size, mask=None, embeds=False, mode=torch.no_grad, times=3):
        before = len(static_decodings)
        for _ in range(times):
            ids = random_ids(ours.batch_size, size, seed=ours.num_columns)
            given = {"inputs_embeds": fixed.model.embed_tokens(ids)} if embeds else {"input_ids": ids}
            with mode():
                logits = [
                    each(**given, attention_mask=mask, past_key_values=cache).logits.detach().clone()
                    for each, cache in ((ordinary, theirs), (fixed, ours))
                ]
            torch.testing.assert_close(*logits, atol=1e-10, rtol=0)
            with torch.no_grad():
                assert_same_state(ours, theirs)
        return len(static_decodings) - before

    assert call(1) == 3
    assert call(7) == 0
    assert call(1) == 3
    assert call(1, mask=torch.tensor([[1], [0], [1], [1], [0]])) == 0
    assert call(1, mask=torch.ones(5, 1)) == 3
    assert call(1, embeds=True) == 0
    assert call(1, mode=torch.enable_grad) == 0
    assert call(1) == 2  # the first one makes the buffers writable
    assert call(1, mode=torch.inference_mode) == 3
    for cache in (ours, theirs):
        cache.reorder_cache(torch.tensor([4, 0, 0, 2, 3, 1]))
    assert call(1) == 3
    ours, theirs = copy.deepcopy(ours), copy.deepcopy(theirs)
    assert ours.static_decoding is None and call(1) == 3
    ours = pickle.loads(pickle.dumps(ours))
    assert ours.static_decoding is None and call(1, mode=torch.inference_mode) == 3
    assert call(1) == 3
    for cache in (ours, theirs):
        cache.batch_repeat_interleave(2)
    assert call(1) == 3
    with torch.inference_mode():
        ours, theirs = started(fixed), started(ordinary)
        ours_again, theirs_again = copy.deepcopy(ours), copy.deepcopy(theirs)
    assert call(1, mode=torch.inference_mode) == 3
    ours, theirs = ours_again, theirs_again
    assert call(1) == 2  # no buffer of inference mode can be written outside of it


@torch.no_grad()
def test_where_it_does_not_apply_the_ordinary_path_runs(static_decodings):
    _, model = both(tiny_model())
    timed = FoldedCache(model.config)
    for _ in range(3):
        model(random_ids(2, 1), durations=random_durations(2, 1), past_key_values=timed)
        model(random_ids(2, 1), past_key_values=timed)
        model(random_ids(2, 1))
        model(random_ids(2, 1), past_key_values=FoldedCache(model.config))
        model(random_ids(5, 1), labels=random_ids(5, 1), past_key_values=started(model))
    with torch.autocast("cpu"):
        model(random_ids(5, 1), past_key_values=started(model))
    assert not static_decodings
    with pytest.raises(ValueError, match="holds 5 texts and the input 2"):
        model(random_ids(2, 1), past_key_values=started(model))


@torch.no_grad()
def test_settings_without_such_a_step_are_refused():
    _, model = both(tiny_model(attn_implementation="flex_attention"))
    with pytest.raises(ValueError, match=r"'flex_attention'.*set_attn_implementation"):
        model(random_ids(5, 1), past_key_values=started(model))
    _, model = both(tiny_model(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}))
    with pytest.raises(ValueError, match=r"'dynamic'.*fixed_decoding = False"):
        model(random_ids(5, 1), past_key_values=started(model))


@pytest.mark.parametrize("replayed", ["tape"], indirect=True)
@pytest.mark.parametrize("change", ["data", "in place", "attention", "module", "hook", "model", "nothing"])
@torch.no_grad()
def test_a_changed_model_is_captured_anew(change, replayed):
    ordinary, fixed = both(tiny_model())
    theirs, ours, ids, called = started(ordinary), started(fixed), random_ids(5, 1), []
    for n in range(9):
        if n == 4:
            projection = ordinary.model.layers[1].self_attn.v_proj
            if change == "data":
                projection.weight.data = projection.weight.data * 1.5
            elif change == "in place":
                projection.weight.mul_(1.5)
            elif change == "attention":
                ordinary.set_attn_implementation("eager")
            elif change == "module":
                ordinary.model.layers[1].self_attn.v_proj = copy.deepcopy(projection)
            elif change == "hook":
                projection.register_forward_hook(lambda *given: called.append(1))
            elif change == "model":
                ordinary, fixed = both(tiny_model(seed=1))
        expected = ordinary(ids, past_key_values=theirs).logits
        called.clear()
        torch.testing.assert_close(fixed(ids, past_key_values=ours).logits, expected, atol=1e-10, rtol=0)
        assert (change == "hook" and n >= 4) == bool(called)
    anew = change not in ("in place", "hook", "nothing")
    assert replayed["capture"] == 1 + anew


@torch.no_grad()
def test_answers_are_not_written_over(replayed):
    _, model = both(tiny_model())
    cache = started(model)
    answers, kept = [], []
    for n in range(4):
        answers += [model(random_ids(5, 1, seed=n), past_key_values=cache).logits, cache.last_hidden_BD]
        kept += [tensor.clone() for tensor in answers[-2:]]
    assert all(torch.equal(*pair) for pair in zip(answers, kept, strict=True))


@pytest.mark.parametrize(
    ("implementation", "dtype", "tolerance"),
    [("sdpa", torch.float64, 1e-10), ("eager", torch.float64, 1e-10), ("auto", torch.bfloat16, 0.2)],
)
@torch.no_grad()
def test_one_compiled_graph_serves_all_tokens(implementation, dtype, tolerance, monkeypatch):
    """No break and no second graph: nothing in the step depends on a number of the device, or of the host."""
    monkeypatch.setattr(dispatch, "CPU_MULTIPLIES_BFLOAT16", True)
    monkeypatch.setattr(dispatch, "BLOCKED_PRODUCTS", 1)
    torch.compiler.reset()
    model = tiny_model(dtype, attn_implementation=implementation)
    theirs, ours = started(model), started(model)
    compiled = torch.compile(static_step, fullgraph=True, backend="aot_eager")
    positions_2B = torch.tensor(cuda_graph.position_lists(ours.positions))
    try:
        for n in range(NEW):
            ids = random_ids(5, 1, seed=n)
            expected = model(ids, past_key_values=theirs).logits
            for chunk in ours.positions.chunks([1] * 5):
                with torch.compiler.set_stance("fail_on_recompile" if n else "default"):
                    _, logits = compiled(model, ours.layers, ids, positions_2B)
                for layer in ours.layers:
                    layer.roll(chunk)
            torch.testing.assert_close(logits, expected, atol=tolerance, rtol=0)
    finally:
        torch.compiler.reset()


@torch.no_grad()
def test_a_step_copies_its_tokens_to_the_device_and_nothing_else():
    """On a device that holds no numbers: reading one back would fail."""
    _, model = both(on_meta())
    cache = FoldedCache(model.config)
    model(random_ids(2, 13).to("meta"), past_key_values=cache)
    model(random_ids(2, 1).to("meta"), past_key_values=cache)
    for _ in range(12):  # over two borders
        ids = random_ids(2, 1)
        assert copies(lambda ids=ids: model(ids.to("meta"), past_key_values=cache)) == 1
    assert isinstance(cache.static_decoding, StaticDecoding)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="asks for a GPU")
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_a_cuda_graph_answers_as_the_ordinary_path(implementation):
    ordinary, fixed = both(tiny_model(attn_implementation=implementation).to("cuda"))
    caches = []
    for model in (ordinary, fixed):
        _, ids, mask = padded_batch(LENGTHS, "left")
        caches.append(FoldedCache(model.config))
        model(ids.to("cuda"), attention_mask=mask.to("cuda"), past_key_values=caches[-1])
    for n in range(NEW):
        ids = random_ids(5, 1, seed=n).to("cuda")
        expected, found = (m(ids, past_key_values=c).logits for m, c in zip((ordinary, fixed), caches, strict=True))
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
        assert_same_state(*caches)
    assert caches[1].static_decoding.replay is not None
