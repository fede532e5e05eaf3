"""Stacked weights: the layers that can have them, the memory they take, and when they are made again."""

import copy
import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from condense import CondenseForCausalLM, to_stock
from condense.execution import choose_schedule, stacked_parameters, stacked_products, stacking, wavefront
from condense.ops import products
from condense.segmentation import SegmentPositions

from ..models import assert_same_gradients, gradients, random_ids, sgd_losses, tiny_model


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
    torch.testing.assert_close(to_stock(model)(ids[:, :5]).logits, expected[:, :5], atol=1e-5, rtol=1e-5)


def test_parameters_stay_trainable_after_inference_mode():
    model = tiny_model()
    model.config.schedule = "wavefront"
    with torch.inference_mode():
        model(random_ids(1, 30))
    losses = sgd_losses(model, random_ids(1, 30))
    assert losses[2] < losses[0]


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
def test_parameters_in_a_shared_storage_stay_there(even):
    """ZeRO keeps all parameters in one flat storage. A wavefront uses evenly spaced ones in place."""
    model, ids = tiny_model(), random_ids(1, 30)
    expected = gradients(model, ids)
    parameters = list(model.parameters())
    sizes, half = [parameter.numel() for parameter in parameters], len(parameters) // 2
    flat = torch.empty(sum(sizes) + 3, dtype=torch.float64)
    place_in(flat, parameters, [3 * (not even and number == half) for number in range(len(sizes))])
    model.config.schedule = "wavefront"
    assert_same_gradients(gradients(model, ids), expected, 1e-10)
    start, end = flat.data_ptr(), flat.data_ptr() + 8 * len(flat)
    assert all(start <= parameter.data_ptr() < end for parameter in model.parameters())
    stack = stacking.stack_of(model.model.layers)
    assert (stack.parameters["mlp.gate_proj.weight"].tensor_Mx is not None) == even


def place_in(flat, parameters, gaps=None):
    """Moves parameters into one storage, one after the other, with so many numbers before each."""
    offset = 0
    for parameter, gap in zip(parameters, gaps or [0] * len(parameters), strict=True):
        offset += gap
        part = flat[offset : offset + parameter.numel()]
        parameter.data = part.view(parameter.shape).copy_(parameter.data)
        offset += parameter.numel()


def with_other_scale(layer):
    layer.self_attn.scale *= 2


def with_patched_forward(layer):
    layer.mlp.forward = lambda hidden: hidden


class Adapter(nn.Module):
    """A linear map with an additional one beside it, as in LoRA."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down = base, nn.Linear(base.in_features, 2)

    def forward(self, hidden):
        return self.base(hidden) + self.down(hidden).sum(-1, keepdim=True)


def with_adapter(layer):
    layer.mlp.up_proj = Adapter(layer.mlp.up_proj).double()


CHANGES = {
    "a hook": (lambda layer: layer.register_forward_hook(lambda *_: None), "has hooks"),
    "a hook inside": (lambda layer: layer.mlp.act_fn.register_forward_pre_hook(print), "'mlp.act_fn' has hooks"),
    "a backward hook": (lambda layer: layer.mlp.register_full_backward_pre_hook(lambda *_: None), "'mlp' has hooks"),
    "a patched forward": (with_patched_forward, "a forward of its own"),
    "an unknown module": (lambda layer: setattr(layer.mlp, "up_proj", nn.Bilinear(2, 2, 2)), "a Bilinear|other set"),
    "another activation": (lambda layer: setattr(layer.mlp, "act_fn", nn.GELU()), "different settings from layer 0"),
    "an adapter": (with_adapter, "different modules from"),
    "a parameter beside a module": (
        lambda layer: setattr(layer.mlp, "extra", nn.Parameter(torch.zeros(3).double())),
        "a MLP, which a wave",
    ),
    "a buffer": (lambda layer: layer.mlp.up_proj.register_buffer("extra", torch.zeros(3)), "a Linear, which a wave"),
    "another dtype": (lambda layer: layer.mlp.float(), "float32"),
    "weights elsewhere": (lambda layer: setattr(layer.mlp.up_proj.weight, "data", torch.empty(0)), "kept elsewhere"),
    "another scale": (with_other_scale, "different settings from layer 0"),
    "another epsilon": (lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 0.1), "different settings"),
    "another mode": (nn.Module.train, "different settings from layer 0"),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("after_a_wave", [False, True])
def test_layers_that_can_not_be_stacked_are_refused(name, after_a_wave):
    """schedule="wavefront" names the layer's difference; "auto" takes the sequential order."""
    model, ids = tiny_model(), random_ids(1, 30)
    change, message = CHANGES[name]
    if after_a_wave:
        model(ids)
    change(model.model.layers[2])
    model.config.schedule = "wavefront"
    with pytest.raises(ValueError, match=message) as error:
        model(ids)
    assert "schedule='sequential'" in str(error.value)
    if name not in ("an unknown module", "another dtype", "weights elsewhere"):
        assert torch.equal(*(model(ids, labels=ids).loss for model.config.schedule in ("auto", "sequential")))


FOR_ALL = [with_other_scale, with_patched_forward, with_adapter, nn.Module.train]


@pytest.mark.parametrize("change", FOR_ALL, ids=lambda change: change.__name__)
def test_equal_changes_of_all_layers_take_effect(change):
    """All layers change in the same way after a first wave."""
    model, ids = tiny_model(), random_ids(1, 30)
    model(ids)
    for layer in model.model.layers:
        change(layer)
    results = [model(ids).logits for model.config.schedule in ("auto", "sequential")]
    torch.testing.assert_close(*results, atol=1e-10, rtol=1e-10)


def test_weights_that_are_not_parameters_are_accepted():
    """`functional_call` and replicas have such weights; "auto" accepts them."""
    model, ids = tiny_model(), random_ids(1, 30)
    expected = model(ids).logits
    values = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    logits = torch.func.functional_call(model, values, (ids,)).logits
    torch.testing.assert_close(logits, expected, atol=1e-10, rtol=1e-10)
    logits.sum().backward()
    assert values["model.layers.1.mlp.up_proj.weight"].grad is not None
    with torch.inference_mode():
        torch.testing.assert_close(tiny_model()(ids).logits, expected, atol=1e-10, rtol=1e-10)


def test_parameters_that_processes_share_stay_shared():
    model, ids = tiny_model(), random_ids(1, 60)
    expected = model(ids[:, :50]).logits
    model = tiny_model().share_memory()
    model.config.schedule = "wavefront"
    torch.testing.assert_close(model(ids[:, :50]).logits, expected, atol=1e-10, rtol=1e-10)
    assert all(parameter.is_shared() for parameter in model.parameters())


def test_partly_frozen_models_run_sequentially():
    model, ids = tiny_model(), random_ids(1, 30)
    for layer in model.model.layers[:2]:
        layer.requires_grad_(False)
    assert choose_schedule(model.config, model.model.layers, [30], SegmentPositions(1, 5), False) == "sequential"
    with torch.no_grad():
        assert choose_schedule(model.config, model.model.layers, [30], SegmentPositions(1, 5), False) == "wavefront"
    model.config.schedule = "wavefront"
    model(ids, labels=ids).loss.backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad is None
    assert model.model.layers[2].mlp.up_proj.weight.grad is not None


def test_layers_are_stacked_only_for_a_wave(noted):
    model = tiny_model()
    model.config.schedule = "wavefront"
    cache = model(random_ids(1, 17)).past_key_values
    stacked = noted(wavefront, "stack_of")
    model(random_ids(1, 1), past_key_values=cache)
    assert not stacked
    model(random_ids(1, 10), past_key_values=cache)
    assert [call.arguments for call in stacked] == [(model.model.layers,)]


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


@pytest.mark.usefixtures("group_of_one")
def test_sharded_models_train_sequentially():
    """FSDP on the root alone adds no hooks to the layers: waves would use weights that FSDP has replaced."""
    ids, losses = random_ids(1, 30), {}
    for schedule in ("sequential", "auto", "wavefront"):
        model = tiny_model(torch.float32, schedule=schedule)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        if schedule == "wavefront":
            with pytest.raises(ValueError, match="FSDP.*schedule='sequential'"):
                model(ids, labels=ids)
            continue
        losses[schedule] = sgd_losses(model, ids)
    assert losses["auto"] == losses["sequential"] and losses["auto"][2] < losses["auto"][0]


@torch.no_grad()
def test_concurrent_first_waves_share_one_stack(monkeypatch):
    """Several threads run a new model at once: one of them makes the stack, and all get the same logits.

    The test slows down reads of the list of layers, which holds the stack, so that the threads overlap there.
    """
    described = stacking._describe

    def slow_described(module):
        if isinstance(module, nn.ModuleList):
            for _ in module.__dict__.items():  # fails if another thread adds an attribute
                time.sleep(0.005)
        return described(module)

    monkeypatch.setattr(stacking, "_describe", slow_described)
    model, ids = tiny_model(schedule="wavefront"), random_ids(1, 30)
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


@pytest.fixture
def joined(monkeypatch, noted):
    """Weights with one input side by side, as on CUDA; the numbers of those that were joined, and the axes."""
    monkeypatch.setattr(stacked_parameters, "JOINING_DEVICES", ("cpu",))
    calls = [noted(module, "side_by_side") for module in (products, stacked_products)]

    def taken():
        found = [one for each in calls for one in each if one.result is not None]
        joined = [(len(one.arguments[0]), one.options["dim"]) for one in found]
        for each in calls:
            each.clear()
        return {(number, dim) for number, dim in joined if number > 1}

    return taken


FIELDS = [{}, {"attention_bias": True, "mlp_bias": True, "family": "qwen3"}, {"memory_source": "layer_input"}]


@pytest.mark.parametrize("fields", FIELDS, ids=["plain", "biases and norms", "layer_input"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_of_one_input_are_one_product(dtype, fields, joined):
    model, other = (tiny_model(dtype, schedule=schedule, **fields) for schedule in ("wavefront", "sequential"))
    ids = random_ids(2, 33)
    limit = 1e-9 if dtype == torch.float64 else 0.05
    with torch.no_grad():
        found, expected = model(ids, use_cache=False).logits, other(ids, use_cache=False).logits
    assert (found - expected).norm() <= limit * expected.norm()
    assert joined() >= {(3, 1), (2, 1)}
    assert_same_gradients(gradients(model.train(), ids), gradients(other.train(), ids), 10 * limit)
    assert bool(joined()) == (dtype == torch.bfloat16)  # gradients in float64 are autograd's own
    query, key = (model.model.layers[1].self_attn.get_submodule(name).weight for name in ("q_proj", "k_proj"))
    assert key.data_ptr() == query.data_ptr() + query.numel() * query.element_size()
    assert key.untyped_storage().nbytes() == key.numel() * key.element_size()


def test_joined_weights_that_are_partly_frozen(joined):
    found, ids = [], random_ids(1, 33)
    for schedule in ("wavefront", "sequential"):
        model = tiny_model(torch.float32, schedule=schedule).train()
        trained = {n: one for n, one in model.named_parameters() if "q_proj" not in n and "up_proj" not in n}
        model.requires_grad_(False)
        for parameter in trained.values():
            parameter.requires_grad_(True)
        model(ids, labels=ids).loss.backward()
        found.append({name: parameter.grad for name, parameter in trained.items()})
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("in_order", [True, False])
def test_weights_in_the_order_of_a_flat_storage_are_joined_in_place(in_order, joined):
    """ZeRO's flat buffers hold a layer's weights one after the other."""
    model, ids = tiny_model(), random_ids(1, 30)
    expected = gradients(model, ids)
    parameters = list(model.model.layers.parameters())
    by_layer = [list(layer.parameters()) for layer in model.model.layers]
    ordered = [weight for weights in by_layer for weight in (weights if in_order else reversed(weights))]
    place_in(torch.empty(sum(map(torch.Tensor.numel, parameters)), dtype=torch.float64), ordered)
    pointers = [weight.data_ptr() for weight in parameters]
    model.config.schedule = "wavefront"
    assert_same_gradients(gradients(model, ids), expected, 1e-10)
    assert [weight.data_ptr() for weight in parameters] == pointers
    joined()
    with torch.no_grad():
        model(ids, use_cache=False)
    assert bool(joined()) == in_order
