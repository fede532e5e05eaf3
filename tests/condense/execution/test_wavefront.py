"""The wavefront schedule gives the results of the sequential order and of the equations (`condense.reference`)."""

import copy
import gc
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from condense import CondenseForCausalLM, FoldedCache, to_llama
from condense.execution import choose_schedule, stacking, wavefront
from condense.layers import RMSNorm
from condense.reference import reference_logits
from condense.segmentation import SegmentPositions

from ..models import (
    assert_same_gradients,
    gradients,
    random_durations,
    random_ids,
    reference_gradients,
    tiny_model,
    weights,
)

LENGTHS = (3, 5, 10, 15, 23, 40, 43)  # with segments of 5: no whole segment, one, several, more than layers


def with_wavefront(model: CondenseForCausalLM) -> CondenseForCausalLM:
    """A copy of the model that runs every call as a wavefront."""
    copied = copy.deepcopy(model)
    copied.config.schedule = "wavefront"
    return copied


@pytest.fixture
def bands(monkeypatch):
    """The (first, end) of every band of layers that runs."""
    recorded = []
    band = stacking.Stack.band

    def recorded_band(self, first, end):
        recorded.append((first, end))
        return band(self, first, end)

    monkeypatch.setattr(stacking.Stack, "band", recorded_band)
    return recorded


@pytest.mark.parametrize("durations", [False, True], ids=["unit", "durations"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"memory_source": "layer_input"},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"num_hidden_layers": 1},
        {"num_hidden_layers": 6, "num_key_value_heads": 4},
        {"position_anchor": "start", "attn_implementation": "eager"},
        {"bptt_segments": 1},
        {"bptt_segments": 3, "num_hidden_layers": 5},
    ],
    ids=lambda fields: ",".join(f"{name}={value}" for name, value in fields.items()) or "plain",
)
def test_logits_losses_and_gradients_equal_those_of_the_sequential_order(fields, durations):
    model = tiny_model(**fields)
    other = with_wavefront(model)
    for num_tokens in LENGTHS:
        ids = random_ids(2, num_tokens)
        inputs = {"durations": random_durations(2, num_tokens)} if durations else {}
        for mode in ("train", "eval"):
            one, two = (getattr(m, mode)()(ids, labels=ids, logits_to_keep=0, **inputs) for m in (model, other))
            for name in ("loss", "logits", "segment_losses"):
                torch.testing.assert_close(two[name], one[name], atol=1e-10, rtol=1e-10, msg=f"{name}, {num_tokens}")
            assert two.segment_targets.tolist() == one.segment_targets.tolist()
        assert_same_gradients(gradients(other, ids, **inputs), gradients(model, ids, **inputs), 1e-10)


@pytest.mark.parametrize("memory_source", ["layer_output", "layer_input"])
def test_logits_and_gradients_follow_the_equations(memory_source):
    model = tiny_model(memory_source=memory_source, num_hidden_layers=4)
    model.config.schedule = "wavefront"
    ids = random_ids(1, 38)
    logits = model(ids, use_cache=False).logits
    torch.testing.assert_close(logits[0], reference_logits(weights(model), model.config, ids[0]), atol=1e-5, rtol=1e-5)
    assert_same_gradients(gradients(model, ids), reference_gradients(model, ids), 1e-5)


@pytest.mark.parametrize(("segments", "layers"), [(1, 3), (2, 4), (4, 2), (7, 3), (3, 1)])
def test_each_diagonal_is_one_band_and_each_cell_runs_once(bands, segments, layers):
    model = tiny_model(num_hidden_layers=layers)
    model.config.schedule = "wavefront"
    model(random_ids(1, 5 * segments), use_cache=False)
    assert len(bands) == segments + layers - 1
    cells = Counter(layer for first, end in bands for layer in range(first, end))
    assert cells == dict.fromkeys(range(layers), segments)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@torch.no_grad()
def test_every_attention_implementation_gives_the_same_logits(implementation):
    model = tiny_model(torch.float32, attn_implementation=implementation)
    ids = random_ids(2, 33)
    torch.testing.assert_close(with_wavefront(model)(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("bptt_segments", [None, 2])
def test_gradients_of_padded_batches_with_checkpointing(checkpointing, bptt_segments):
    """Rows have 4, 8 and 2 segments and begin at different columns: waves have three rows, then two, then one."""
    model = tiny_model(bptt_segments=bptt_segments)
    other = with_wavefront(model)
    ids, mask = random_ids(3, 41), torch.ones(3, 41, dtype=torch.long)
    mask[0, :21] = 0
    mask[2, 4:11] = mask[2, 20:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    for m in (model, other):
        m.train()
        if checkpointing:
            m.activation_checkpointing_enable() if hasattr(m, "activation_checkpointing_enable") else (
                m.gradient_checkpointing_enable()
            )
        m(ids, attention_mask=mask, labels=labels).loss.backward()
    for (name, expected), actual in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, atol=1e-10, rtol=1e-10, msg=name)


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
        seen = slice(0, 5 + one.positions.offsets[0])
        for a, b in zip(one.layers, two.layers, strict=True):
            torch.testing.assert_close(b.keys[:, :, seen], a.keys[:, :, seen], atol=1e-10, rtol=1e-10)
            torch.testing.assert_close(b.values[:, :, seen], a.values[:, :, seen], atol=1e-10, rtol=1e-10)
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
    model = tiny_model()
    other, ids, results = with_wavefront(model), random_ids(1, 40), []
    for m in (model, other):
        cache = FoldedCache(m.config)
        parts = [m(part, past_key_values=cache).logits for part in ids.split(20, dim=1)]
        torch.cat(parts, dim=1).square().sum().backward()
        results.append([parameter.grad for parameter in m.parameters()])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(two, one, atol=1e-8, rtol=1e-8)


def test_the_bfloat16_error_is_that_of_the_sequential_order():
    model = tiny_model(torch.bfloat16, hidden_size=32, initializer_range=0.1)
    ids = random_ids(2, 40)
    one, two = gradients(model, ids), gradients(with_wavefront(model), ids)
    exact = gradients(model.double(), ids)
    for name, gradient in exact[1].items():
        errors = [(found[1][name].double() - gradient).norm() / gradient.norm() for found in (one, two)]
        assert errors[1] < 1.5 * errors[0] + 0.01, name


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
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
    found = loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_same_gradients(found, expected, 1e-4)
    torch._dynamo.reset()


def storage_bytes(model: nn.Module) -> int:
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(storages.values())


def test_parameters_are_moved_and_not_copied(tmp_path):
    model = tiny_model(num_hidden_layers=4, tie_word_embeddings=True)
    ids, size, names = random_ids(1, 30), storage_bytes(model), list(model.state_dict())
    expected, identities = model(ids).logits, [id(parameter) for parameter in model.parameters()]
    model.config.schedule = "wavefront"
    model(ids)
    assert storage_bytes(model) == size and list(model.state_dict()) == names
    assert [id(parameter) for parameter in model.parameters()] == identities
    up_weights = [layer.mlp.up_proj.weight for layer in model.model.layers]
    addresses = [weight.data_ptr() for weight in up_weights]
    assert {after - before for before, after in pairwise(addresses)} == {up_weights[0].nbytes}  # contiguous
    assert len({weight.untyped_storage()._cdata for weight in up_weights}) == 4  # one storage each, as for saving
    assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in up_weights)
    safetensors.torch.save_model(model, tmp_path / "whole.safetensors")
    with safetensors.safe_open(tmp_path / "whole.safetensors", "pt") as file:
        assert len(file.keys()) == len(names) - 1  # the head is the embedding

    model.save_pretrained(tmp_path)  # writes a shared storage once
    loaded = CondenseForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    assert (tmp_path / "model.safetensors").stat().st_size < 1.1 * size + 10_000
    assert (tmp_path / "state.pt").stat().st_size < 1.1 * size + 30_000
    for other in (loaded, copy.deepcopy(model), copy.deepcopy(model).float().double()):
        torch.testing.assert_close(other(ids).logits, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(to_llama(model)(ids[:, :5]).logits, expected[:, :5], atol=1e-5, rtol=1e-5)


def test_parameters_stay_trainable_after_inference_mode():
    model = tiny_model()
    model.config.schedule = "wavefront"
    with torch.inference_mode():
        model(random_ids(1, 30))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss, ids = [], random_ids(1, 30)
    for _ in range(3):
        optimizer.zero_grad()
        loss.append(model(ids, labels=ids).loss)
        loss[-1].backward()
        optimizer.step()
    assert loss[2] < loss[0]


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
def test_parameters_in_a_shared_storage_stay_there(even):
    """ZeRO keeps all parameters in one flat storage. A wavefront uses evenly spaced ones in place."""
    model = tiny_model()
    ids = random_ids(1, 30)
    expected = gradients(model, ids)
    parameters = list(model.parameters())
    flat = torch.empty(sum(p.numel() for p in parameters) + 3, dtype=torch.float64)
    offset = 0
    for number, parameter in enumerate(parameters):
        if not even and number == len(parameters) // 2:
            offset += 3
        flat[offset : offset + parameter.numel()] = parameter.detach().flatten()
        parameter.data = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    model.config.schedule = "wavefront"
    assert_same_gradients(gradients(model, ids), expected, 1e-10)
    start, end = flat.data_ptr(), flat.data_ptr() + 8 * len(flat)
    assert all(start <= parameter.data_ptr() < end for parameter in model.parameters())
    stack = stacking.stack_of(model.model.layers)
    assert (stack.weights_MOI["mlp.gate_proj.weight"] is not None) == even


def with_other_scale(layer):
    layer.self_attn.scale *= 2


def with_patched_forward(layer):
    layer.mlp.forward = lambda hidden: hidden


def with_empty_weight(layer):
    layer.mlp.up_proj.weight.data = torch.empty(0)


class Adapter(nn.Module):
    """A linear map with an additional one beside it, as in LoRA."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down = base, nn.Linear(base.in_features, 2)

    def forward(self, hidden):
        return self.base(hidden) + self.down(hidden).sum(-1, keepdim=True)


def with_adapter(layer):
    layer.mlp.up_proj = Adapter(layer.mlp.up_proj).double()


def with_parameter(layer):
    layer.mlp.extra = nn.Parameter(torch.zeros(3).double())


def with_buffer(layer):
    layer.mlp.up_proj.register_buffer("extra", torch.zeros(3))


def in_training_mode(layer):
    layer.train()


CHANGES = {
    "a hook": (lambda layer: layer.register_forward_hook(lambda *_: None), "has hooks"),
    "a hook inside": (
        lambda layer: layer.mlp.act_fn.register_forward_pre_hook(lambda *_: None),
        "'mlp.act_fn' has hooks",
    ),
    "a backward hook": (lambda layer: layer.mlp.register_full_backward_pre_hook(lambda *_: None), "'mlp' has hooks"),
    "a patched forward": (with_patched_forward, "a forward of its own"),
    "an unknown module": (
        lambda layer: setattr(layer.mlp, "up_proj", nn.Bilinear(2, 2, 2)),
        "a Bilinear|other settings",
    ),
    "another activation": (lambda layer: setattr(layer.mlp, "act_fn", nn.GELU()), "other settings than in layer 0"),
    "an adapter": (with_adapter, "other modules than"),
    "a parameter beside a module": (with_parameter, "a LlamaMLP, which a wavefront cannot stack"),
    "a buffer": (with_buffer, "a Linear, which a wavefront cannot stack"),
    "another dtype": (lambda layer: layer.mlp.float(), "float32"),
    "weights elsewhere": (with_empty_weight, "kept elsewhere"),
    "another scale": (with_other_scale, "other settings than in layer 0"),
    "another epsilon": (lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 0.1), "other settings"),
    "another mode": (in_training_mode, "other settings than in layer 0"),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("after_a_wave", [False, True])
def test_layers_that_can_not_be_stacked_are_refused(name, after_a_wave):
    """schedule="wavefront" names the layer's difference; "auto" takes the sequential order."""
    model, ids = tiny_model(), random_ids(1, 60)
    change, message = CHANGES[name]
    if after_a_wave:
        model(ids)
    change(model.model.layers[2])
    model.config.schedule = "wavefront"
    with pytest.raises(ValueError, match=message) as error:
        model(ids)
    assert "schedule='sequential'" in str(error.value)
    if name not in ("an unknown module", "another dtype", "weights elsewhere"):
        results = []
        for model.config.schedule in ("auto", "sequential"):
            results.append(model(ids, labels=ids).loss)
        assert torch.equal(*results)


@pytest.mark.parametrize(
    "change",
    [with_other_scale, with_patched_forward, with_adapter, in_training_mode],
    ids=lambda change: change.__name__,
)
def test_equal_changes_of_all_layers_take_effect(change):
    """All layers change in the same way after a first wave."""
    model, ids = tiny_model(), random_ids(1, 60)
    model(ids)
    for layer in model.model.layers:
        change(layer)
    results = []
    for model.config.schedule in ("auto", "sequential"):
        results.append(model(ids).logits)
    torch.testing.assert_close(*results, atol=1e-10, rtol=1e-10)


def test_weights_that_are_not_parameters_are_accepted():
    """`functional_call` and replicas have such weights; "auto" accepts them."""
    model, ids = tiny_model(), random_ids(1, 60)
    expected = model(ids).logits
    values = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    logits = torch.func.functional_call(model, values, (ids,)).logits
    torch.testing.assert_close(logits, expected, atol=1e-10, rtol=1e-10)
    logits.sum().backward()
    assert values["model.layers.1.mlp.up_proj.weight"].grad is not None
    with torch.inference_mode():
        inference_model = tiny_model()
        torch.testing.assert_close(inference_model(ids).logits, expected, atol=1e-10, rtol=1e-10)


def test_parameters_that_processes_share_stay_shared():
    model, ids = tiny_model(), random_ids(1, 60)
    expected = model(ids[:, :50]).logits
    model = tiny_model().share_memory()
    model.config.schedule = "wavefront"
    torch.testing.assert_close(model(ids[:, :50]).logits, expected, atol=1e-10, rtol=1e-10)
    assert all(parameter.is_shared() for parameter in model.parameters())


def test_weights_changed_before_the_backward_pass_are_noticed():
    model, ids = tiny_model(schedule="wavefront"), random_ids(1, 60)
    loss = model(ids, labels=ids).loss
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_partly_frozen_models_run_sequentially():
    model, ids = tiny_model(), random_ids(1, 60)
    for layer in model.model.layers[:2]:
        layer.requires_grad_(False)
    assert choose_schedule(model.config, model.model.layers, [60], SegmentPositions(1, 5), False) == "sequential"
    with torch.no_grad():
        assert choose_schedule(model.config, model.model.layers, [60], SegmentPositions(1, 5), False) == "wavefront"
    model.config.schedule = "wavefront"
    model(ids, labels=ids).loss.backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad is None
    assert model.model.layers[2].mlp.up_proj.weight.grad is not None


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
    with pytest.raises(ValueError, match="was interrupted.*reset"):
        model(ids, past_key_values=cache)
    cache.reset()
    expected = tiny_model(schedule="sequential")(ids).logits
    torch.testing.assert_close(model(ids, past_key_values=cache).logits, expected, atol=1e-10, rtol=1e-10)


def test_an_unknown_schedule_is_refused():
    model = tiny_model()
    model.config.schedule = "wave"
    with pytest.raises(ValueError, match="schedule='wave' is not known"):
        model(random_ids(1, 5))


def test_dropout_changes_the_loss_in_training():
    model = with_wavefront(tiny_model(attention_dropout=0.5)).train()
    ids = random_ids(1, 40)
    first, second = (model(ids, labels=ids).loss for _ in range(2))
    assert first != second
    assert model.eval()(ids, labels=ids).loss == model.eval()(ids, labels=ids).loss


def test_checkpointing_repeats_dropout():
    model, results = with_wavefront(tiny_model(attention_dropout=0.3)), []
    for checkpointing in (False, True):
        if checkpointing:
            model._set_gradient_checkpointing(True, partial(checkpoint, use_reentrant=False))
        torch.manual_seed(0)
        results.append(gradients(model, random_ids(1, 40)))
    assert_same_gradients(results[1], results[0], 1e-12)


def test_a_diagonal_sees_the_first_segment_without_a_memory(monkeypatch):
    model = tiny_model()
    seen, band_metadata = [], wavefront.band_metadata

    def recorded_metadata(in_flight, num_with_memory):
        seen.append((len(in_flight), num_with_memory))
        return band_metadata(in_flight, num_with_memory)

    monkeypatch.setattr(wavefront, "band_metadata", recorded_metadata)
    with_wavefront(model)(random_ids(1, 25), use_cache=False)
    # 5 segments, 3 layers: the first segment of the text has no memory.
    assert seen == [(1, 0), (2, 1), (3, 2), (3, 3), (3, 3), (2, 2), (1, 1)]


def test_layers_are_stacked_only_for_a_wave(monkeypatch):
    model = tiny_model()
    model.config.schedule = "wavefront"
    cache = FoldedCache(model.config)
    model(random_ids(1, 17), past_key_values=cache)
    stacked, stack_of = [], wavefront.stack_of
    monkeypatch.setattr(wavefront, "stack_of", lambda layers: stacked.append(layers) or stack_of(layers))
    model(random_ids(1, 1), past_key_values=cache)
    assert not stacked
    model(random_ids(1, 10), past_key_values=cache)
    assert stacked == [model.model.layers]


def test_a_stack_is_reused_until_a_weight_changes(monkeypatch):
    model, ids, made = tiny_model(), random_ids(1, 20), []
    model.config.schedule = "wavefront"
    stack = stacking.Stack
    monkeypatch.setattr(stacking, "Stack", lambda layers: made.append(1) or stack(layers))  # no reference
    model(ids), model(ids)
    assert len(made) == 1
    projection = model.model.layers[1].mlp.up_proj
    projection.weight = nn.Parameter(projection.weight.detach())  # another parameter at the same address
    model(ids, labels=ids).loss.backward()
    assert len(made) == 2 and projection.weight.grad is not None
    model.model.layers[0].mlp.up_proj.weight.data = 2 * model.model.layers[0].mlp.up_proj.weight.data
    changed = model(ids).logits
    assert len(made) == 3
    model.config.schedule = "sequential"
    torch.testing.assert_close(changed, model(ids).logits, atol=1e-10, rtol=1e-10)
    assert torch.equal(copy.deepcopy(model)(ids).logits, model(ids).logits)
    layers = weakref.ref(model.model.layers)
    hooked = model.model.layers[2].mlp.up_proj.weight
    hooked.register_hook(lambda gradient, model=model: gradient)  # as in training engines
    del model, changed, hooked
    gc.collect()
    assert layers() is None


@pytest.mark.parametrize("schedule", ["sequential", "wavefront"])
def test_fused_norms_give_the_same_gradients(schedule, monkeypatch):
    """CUDA runs fused norms; on the CPU, torch's fallback computes them."""
    model, ids = tiny_model(schedule=schedule), random_ids(2, 23)
    expected = gradients(model, ids)
    monkeypatch.setattr(RMSNorm, "forward", lambda self, hidden: self.fused(hidden))
    monkeypatch.setattr(stacking.StackedNorm, "normalize", stacking.StackedNorm.fused)
    assert_same_gradients(gradients(model, ids), expected, 1e-5)  # the Llama's norm goes through float32


@pytest.fixture
def mesh_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_sharded_models_train_sequentially(mesh_of_one):
    """FSDP on the root alone adds no hooks to the layers: waves would use weights that FSDP has replaced."""
    ids, losses = random_ids(1, 60), {}
    for schedule in ("sequential", "auto", "wavefront"):
        model = tiny_model(torch.float32, schedule=schedule)
        fully_shard(model, mesh=mesh_of_one)
        if schedule == "wavefront":
            with pytest.raises(ValueError, match="FSDP.*schedule='sequential'"):
                model(ids, labels=ids)
            continue
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses[schedule] = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses[schedule].append(loss.item())
    assert losses["auto"] == losses["sequential"] and losses["auto"][2] < losses["auto"][0]


@torch.no_grad()
def test_concurrent_first_waves_share_one_stack(monkeypatch):
    """Several threads run a new model at once: one of them makes the stack, and all get the same logits.

    The test slows down reads of the list of layers, which holds the stack, so that the threads overlap there.
    """
    described = stacking._described

    def slow_described(module):
        if isinstance(module, nn.ModuleList):
            for _ in module.__dict__.items():  # fails if another thread adds an attribute
                time.sleep(0.005)
        return described(module)

    monkeypatch.setattr(stacking, "_described", slow_described)
    model, ids = tiny_model(schedule="wavefront"), random_ids(1, 60)
    expected = tiny_model(schedule="sequential")(ids).logits
    barrier = threading.Barrier(4)

    def read(number):
        barrier.wait()
        time.sleep(0.02 * number)
        with torch.no_grad():
            return model(ids, use_cache=False).logits

    with ThreadPoolExecutor(4) as pool:
        for logits in pool.map(read, range(4)):
            torch.testing.assert_close(logits, expected, atol=1e-10, rtol=1e-10)
