"""The wavefront schedule gives the results of the sequential order and of the equations (`condense.reference`)."""

import copy
from collections import Counter

import pytest
import torch

from condense import CondenseForCausalLM, FoldedCache
from condense.execution import wavefront
from condense.ops.kernels import rms_norm

from ...refusals import assert_refused
from ..models import (
    MEMORIES,
    assert_same_gradients,
    expected_logits,
    gradients,
    gradients_of,
    logits_in_parts,
    random_durations,
    random_ids,
    reference_gradients,
    tiny_model,
    torch_checkpoint,
)

LENGTHS = (3, 5, 10, 15, 23, 38)  # with segments of 5: no whole segment, one, several, more than layers


def with_wavefront(model: CondenseForCausalLM) -> CondenseForCausalLM:
    """A copy of the model that runs every call as a wavefront."""
    copied = copy.deepcopy(model)
    copied.config.schedule = "wavefront"
    return copied


FIELDS = [
    {},
    {"memory_source": "layer_input"},
    {"memory_share": 0.2},
    {"memory_share": [1.0, 0.6, 0.3], "bptt_segments": 2},
    {"memory_share": [0.3, 1.0, 1.0, 0.7], "num_hidden_layers": 4},
    {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    {"num_hidden_layers": 1},
    {"num_hidden_layers": 6, "num_key_value_heads": 4},
    {"position_anchor": "start", "attn_implementation": "eager"},
    {"bptt_segments": 1},
    {"bptt_segments": 3, "num_hidden_layers": 5},
]


@pytest.mark.parametrize("durations", [False, True], ids=["unit", "durations"])
@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_logits_losses_and_gradients_equal_those_of_the_sequential_order(fields, durations):
    """Each field with each length, half of them with durations."""
    model = tiny_model(**fields)
    other = with_wavefront(model)
    for num_tokens in LENGTHS[(FIELDS.index(fields) + durations) % 2 :: 2]:
        ids = random_ids(2, num_tokens)
        inputs = {"durations": random_durations(2, num_tokens)} if durations else {}
        for mode in ("eval", "train"):
            with torch.set_grad_enabled(mode == "train"):
                one, two = (getattr(m, mode)()(ids, labels=ids, logits_to_keep=0, **inputs) for m in (model, other))
            for name in ("loss", "logits", "segment_losses"):
                torch.testing.assert_close(two[name], one[name], atol=1e-10, rtol=1e-10, msg=f"{name}, {num_tokens}")
            assert two.segment_targets.tolist() == one.segment_targets.tolist()
        for trained, output in ((other, two), (model, one)):
            trained.zero_grad()
            output.loss.backward()
        torch.testing.assert_close(gradients_of(other), gradients_of(model), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)
def test_logits_and_gradients_follow_the_equations(memory):
    model = tiny_model(**memory)
    model.config.schedule = "wavefront"
    ids = random_ids(1, 38)
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected_logits(model, ids), atol=1e-10, rtol=0)
    assert_same_gradients(gradients(model, ids), reference_gradients(model, ids), 1e-10)


@pytest.mark.parametrize(("segments", "layers"), [(1, 3), (2, 4), (4, 2), (7, 3), (3, 1)])
def test_each_diagonal_is_one_band_and_each_cell_runs_once(noted, segments, layers):
    model, bands = tiny_model(num_hidden_layers=layers, schedule="wavefront"), noted(wavefront, "run_band")
    model(random_ids(1, 5 * segments), use_cache=False)
    assert len(bands) == segments + layers - 1
    cells = Counter(layer for band in bands for layer in range(layers)[band.arguments[0].layers])
    assert cells == dict.fromkeys(range(layers), segments)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@torch.no_grad()
def test_every_attention_implementation_gives_the_same_logits(implementation):
    model, ids = tiny_model(torch.float32, attn_implementation=implementation), random_ids(2, 18)
    torch.testing.assert_close(with_wavefront(model)(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("segments", [None, 2, 3, 100])
@pytest.mark.parametrize("bptt_segments", [None, 2])
def test_gradients_of_padded_batches_with_checkpointing(segments, bptt_segments):
    """Rows have 4, 8 and 2 segments and begin at different columns: waves have three rows, then two, then one."""
    model = tiny_model(bptt_segments=bptt_segments)
    other = with_wavefront(model)
    ids, mask = random_ids(3, 41), torch.ones(3, 41, dtype=torch.long)
    mask[0, :21] = 0
    mask[2, 4:11] = mask[2, 20:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    for m in (model, other):
        m.train()
        if segments:
            m.gradient_checkpointing_enable({"use_reentrant": False, "checkpoint_segments": segments})
        m(ids, attention_mask=mask, labels=labels).loss.backward()
    torch.testing.assert_close(gradients_of(other), gradients_of(model), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("durations", [False, True], ids=["unit", "durations"])
@torch.no_grad()
def test_the_state_across_calls_equals_that_of_the_sequential_order(durations):
    """Calls begin and end within segments and at borders; some have a single token."""
    model = tiny_model()
    other = with_wavefront(model)
    ids = random_ids(2, 90)
    one, two, start = FoldedCache(model.config), FoldedCache(other.config), 0
    for size in (15, 5, 7, 23, 10, 1, 1, 20, 8):
        part = slice(start, start + size)
        inputs = {"durations": random_durations(2, size, seed=start)} if durations else {}
        expected = model(ids[:, part], past_key_values=one, **inputs).logits
        actual = other(ids[:, part], past_key_values=two, **inputs).logits
        torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)
        start += size
        seen = 5 + one.positions.offsets[0]
        states = [[(each.keys[:, :, :seen], each.values[:, :, :seen]) for each in cache.layers] for cache in (one, two)]
        torch.testing.assert_close(*states, atol=1e-10, rtol=1e-10)
        assert two.num_bytes == one.num_bytes and two.positions.segments == one.positions.segments
    assert start == 90


@torch.no_grad()
def test_generation_after_padded_prompts_gives_the_same_tokens():
    model = tiny_model()
    ids, mask = random_ids(3, 27), torch.ones(3, 27, dtype=torch.long)
    mask[0, :11] = mask[1, :2] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(with_wavefront(model).generate(**inputs), model.generate(**inputs))


def test_gradients_through_the_cache_are_the_same():
    model, results = tiny_model(), []
    for each in (model, with_wavefront(model)):
        logits_in_parts(each, random_ids(1, 40), [20, 20])[0].square().sum().backward()
        results.append(gradients_of(each))
    torch.testing.assert_close(*results, atol=1e-8, rtol=1e-8)


def test_the_bfloat16_error_is_that_of_the_sequential_order():
    model, ids = tiny_model(torch.bfloat16, hidden_size=32, initializer_range=0.1), random_ids(2, 40)
    one, two = gradients(model, ids), gradients(with_wavefront(model), ids)
    for name, gradient in gradients(model.double(), ids)[1].items():
        errors = [(found[1][name].double() - gradient).norm() / gradient.norm() for found in (one, two)]
        assert errors[1] < 1.5 * errors[0] + 0.01, name


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_has_the_same_gradients(backend):
    model = tiny_model(torch.float32, num_hidden_layers=2)
    model.config.schedule = "wavefront"
    ids = random_ids(2, 20)
    expected = gradients(model, ids)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    model.zero_grad()
    loss = compiled(ids, labels=ids).loss
    loss.backward()
    assert_same_gradients((loss.detach(), gradients_of(model)), expected, 1e-10)
    torch._dynamo.reset()


def test_autocast_with_biases_gives_the_same_dtypes():
    """Keys and values of the cache have autocast's dtype in both schedules."""
    ids, types = random_ids(1, 60), []
    for schedule in ("sequential", "wavefront"):
        model = tiny_model(torch.float32, attention_bias=True, schedule=schedule)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            cache = model(ids).past_key_values
        types.append([(layer.keys.dtype, layer.values.dtype) for layer in cache.layers])
    assert types[0] == types[1] == [(torch.bfloat16, torch.bfloat16)] * 3


@torch.no_grad()
def test_the_cache_of_an_interrupted_wave_is_refused(monkeypatch):
    model, ids = tiny_model(schedule="wavefront"), random_ids(1, 60)
    cache, calls = FoldedCache(model.config), []
    norm = type(model.model.norm).forward

    def interrupted(self, hidden):
        calls.append(self is model.model.norm)
        if sum(calls) == 3:
            raise KeyboardInterrupt
        return norm(self, hidden)

    with monkeypatch.context() as patch:
        patch.setattr(type(model.model.norm), "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(ids, past_key_values=cache)
    assert_refused("was interrupted.*reset", model, ids, past_key_values=cache)
    cache.reset()
    expected = tiny_model(schedule="sequential")(ids).logits
    torch.testing.assert_close(model(ids, past_key_values=cache).logits, expected, atol=1e-10, rtol=1e-10)


def test_an_unknown_schedule_is_refused():
    model = tiny_model()
    model.config.schedule = "wave"
    assert_refused("schedule='wave' is not known", model, random_ids(1, 5))


def test_dropout_changes_the_loss_in_training():
    model = with_wavefront(tiny_model(attention_dropout=0.5)).train()
    ids = random_ids(1, 40)
    first, second = (model(ids, labels=ids).loss for _ in range(2))
    assert first != second
    assert model.eval()(ids, labels=ids).loss == model.eval()(ids, labels=ids).loss


def test_checkpointing_repeats_dropout():
    model = with_wavefront(tiny_model(attention_dropout=0.3))
    torch.manual_seed(0)
    expected = gradients(model, random_ids(1, 40))
    # One group: the order of the cells, and of their random numbers, is that without.
    model._set_gradient_checkpointing(True, torch_checkpoint(checkpoint_segments=8))
    torch.manual_seed(0)
    assert_same_gradients(gradients(model, random_ids(1, 40)), expected, 1e-12)


def test_a_diagonal_sees_the_first_segment_without_a_memory(monkeypatch):
    model = tiny_model()
    seen, band_metadata = [], wavefront.band_metadata

    def recorded(in_flight, num_with_memory, low):
        seen.append((len(in_flight), num_with_memory))  # now: the list changes
        return band_metadata(in_flight, num_with_memory, low)

    monkeypatch.setattr(wavefront, "band_metadata", recorded)
    with_wavefront(model)(random_ids(1, 25), use_cache=False)
    # 5 segments, 3 layers: the first segment of the text has no memory.
    assert seen == [(1, 0), (2, 1), (3, 2), (3, 3), (3, 3), (2, 2), (1, 1)]


@pytest.mark.parametrize("schedule", ["sequential", "wavefront"])
def test_fused_norms_give_the_same_gradients(schedule, monkeypatch):
    """CUDA runs fused norms; on the CPU, torch's fallback computes them."""
    model, ids = tiny_model(schedule=schedule), random_ids(2, 23)
    expected = gradients(model, ids)
    monkeypatch.setattr(rms_norm, "is_one_operation", lambda hidden: True)
    assert_same_gradients(gradients(model, ids), expected, 1e-10)  # the Llama's norm goes through float32
