"""A state in a file continues as the cache that it was written from, and only for the model that read the text."""

import copy
import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from condense import CondenseForCausalLM, CondenseModel, FoldedCache
from condense.state.state_file import TIMELINE
from tests.labs.depth.model.models import depth_model, random_control

from ...refusals import assert_refused
from ..models import padded_batch, random_durations, random_ids, tiny_config, tiny_model
from ..test_device_map import dispatched, folder  # noqa: F401  a fixture
from .test_cache_refusals import Interrupted, interrupt

pytestmark = pytest.mark.usefixtures("no_grad")


def read(model, ids, **options):
    """A cache that has read a text in two calls."""
    cache, half = FoldedCache(model.config), ids.shape[1] // 2
    for columns in (slice(half), slice(half, None)) if half else (slice(None),):
        parts = {name: value[:, columns] for name, value in options.items()}
        model(ids[:, columns], cache=cache, **parts)
    return cache


def saved(cache, model, path):
    cache.save(path, model)
    return FoldedCache.load(path, model)


def assert_continues_alike(model, cache, loaded, num_rows, **options):
    """Through several segment borders, bit for bit; `cache` itself is not changed by it."""
    cache = copy.deepcopy(cache)
    for number, count in enumerate((1, 1, 3, 12)):
        ids = random_ids(num_rows, count, seed=50 + number)
        found, expected = (model(ids, cache=one, **options).logits for one in (loaded, cache))
        assert torch.equal(found, expected)
    assert loaded.get_seq_length() == cache.get_seq_length() and loaded.num_bytes == cache.num_bytes
    assert vars(loaded.positions) == vars(cache.positions)


MODELS = {
    "output": tiny_model,
    "input": lambda: tiny_model(memory_source="layer_input"),
    "shares": lambda: tiny_model(memory_share=[1.0, 0.0, 0.3]),
    "qwen3": lambda: tiny_model(family="qwen3"),
    "float32": lambda: tiny_model(torch.float32),
    "bfloat16": lambda: tiny_model(torch.bfloat16),
    "static": lambda: tiny_model(attn_implementation="sdpa"),
    "no head": lambda: CondenseModel(tiny_config()).double().eval(),
}


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 13])
@pytest.mark.parametrize("kind", MODELS)
def test_a_loaded_state_continues_as_the_cache_itself(kind, num_tokens, tmp_path):
    model = MODELS[kind]()
    if kind == "static":
        model.fixed_decoding = True
    cache = read(model, random_ids(2, num_tokens))
    loaded = saved(cache, model, tmp_path / "state")
    if kind == "no head":
        assert torch.equal(loaded.layers[-1].keys, cache.layers[-1].keys)
    else:
        assert_continues_alike(model, cache, loaded, 2)


@pytest.mark.parametrize("num_tokens", [3, 5, 17])
def test_a_text_in_two_sessions_is_the_text(num_tokens, tmp_path):
    model, ids = tiny_model(), random_ids(1, 30)
    whole = model(ids, use_cache=False).logits
    loaded = saved(read(model, ids[:, :num_tokens]), model, tmp_path / "state")
    torch.testing.assert_close(
        model(ids[:, num_tokens:], cache=loaded).logits, whole[:, num_tokens:], atol=1e-9, rtol=0
    )
    again = FoldedCache.load(tmp_path / "state", model)
    written = model.generate(ids[:, :num_tokens], max_new_tokens=13, do_sample=False)
    continued = model.generate(written[:, : num_tokens + 1], cache=again, max_new_tokens=12, do_sample=False)
    assert torch.equal(continued, written)


@pytest.mark.parametrize("sink", [None, 1])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_and_durations(side, sink, tmp_path):
    model = tiny_model(sink_token_id=sink)
    _, ids, mask = padded_batch([3, 13, 7], side)
    cache = read(model, ids, attention_mask=mask, durations=random_durations(3, 13))
    loaded = saved(cache, model, tmp_path / "state")
    assert all(torch.equal(getattr(loaded.timeline, name), getattr(cache.timeline, name)) for name in TIMELINE)
    assert_continues_alike(model, cache, loaded, 3)


@pytest.mark.parametrize("field", ["mlp", "layer"])
def test_a_depth_block(field, tmp_path):
    """The field `layer` has keys of its own for each of its evaluations, and an MLP none."""
    model = depth_model(field, depth={"solver": "midpoint", "steps": 2})
    control = random_control(2, 2)
    cache = FoldedCache(model.config)
    model(random_ids(2, 13), control=control, cache=cache)
    loaded = saved(cache, model, tmp_path / "state")
    assert [len(layer.buffers) for layer in loaded.layers] == [4, 4 if field == "layer" else 0, 4]
    assert_continues_alike(model, cache, loaded, 2, control=control)


def test_a_state_of_autocast_continues_under_autocast(tmp_path):
    model = tiny_model(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        cache = read(model, random_ids(2, 13))
        loaded = saved(cache, model, tmp_path / "state")
        assert_continues_alike(model, cache, loaded, 2)
    assert_refused(
        "written in torch.bfloat16", model, random_ids(2, 1), cache=FoldedCache.load(tmp_path / "state", model)
    )


def test_a_state_read_with_gradients_is_saved_without(tmp_path):
    model = tiny_model()
    with torch.enable_grad():
        cache = read(model, random_ids(1, 8))
    loaded = saved(cache, model, tmp_path / "state")
    cache.detach()
    assert_continues_alike(model, cache, loaded, 1)


def test_layers_on_the_disk_continue_the_state_of_a_model_in_memory(folder, tmp_path):  # noqa: F811
    whole, parts = CondenseForCausalLM.from_pretrained(folder).eval(), dispatched(folder, tmp_path)
    ids = torch.randint(3, whole.config.vocab_size, (2, 95), generator=torch.Generator().manual_seed(0))
    cache = FoldedCache(whole.config)
    whole(ids[:, :90], cache=cache)
    cache.save(tmp_path / "state", whole)
    found = parts(ids[:, 90:], cache=FoldedCache.load(tmp_path / "state", parts)).logits
    torch.testing.assert_close(found, whole(ids[:, 90:], cache=cache).logits)


@pytest.mark.gpu
def test_a_state_of_the_cpu_continues_on_a_gpu(tmp_path):
    model, ids = tiny_model(), random_ids(2, 25)
    expected = model(ids, use_cache=False).logits[:, 13:]
    read(model, ids[:, :13]).save(tmp_path / "state", model)
    model = model.cuda()
    logits = model(ids[:, 13:].cuda(), cache=FoldedCache.load(tmp_path / "state", model)).logits
    torch.testing.assert_close(logits.cpu(), expected, atol=1e-9, rtol=0)


def test_adapters_are_weights(tmp_path):
    peft = pytest.importorskip("peft")
    model = tiny_model()
    plain = read(model, random_ids(1, 8))
    plain.save(tmp_path / "plain", model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)).eval()
    cache = read(adapted, random_ids(1, 8))
    assert_continues_alike(adapted, cache, saved(cache, adapted, tmp_path / "state"), 1)
    assert_refused("with weights=", FoldedCache.load, tmp_path / "plain", adapted)
    assert_refused("with weights=", FoldedCache.load, tmp_path / "state", adapted.unload())


def changed(model):
    model.model.layers[2].mlp.up_proj.weight[3, 4] += 1e-6
    return model


OTHERS = {
    "with weights='.*', and this one has .*: load it with the model that read the text": lambda: changed(tiny_model()),
    "with segment_length=5, and this one has 7": lambda: tiny_model(segment_length=7),
    r"with memory_shares=\[1.0, 1.0, 1.0\], and this one has \[0.5, 0.5, 0.5\]": lambda: tiny_model(memory_share=0.5),
    "with sink_token_id=None, and this one has 7: load it with the model": lambda: tiny_model(sink_token_id=7),
    "with rms_norm_eps=1e-06, and this one has 0.001": lambda: tiny_model(rms_norm_eps=1e-3),
    "with hidden_act='silu', and this one has 'gelu'": lambda: tiny_model(hidden_act="gelu"),
    "with family='llama', and this one has 'qwen3'": lambda: tiny_model(family="qwen3"),
    "rope_parameters=.*'rope_theta': 10000.0.*'rope_theta': 500": lambda: tiny_model(
        rope_parameters={"rope_type": "default", "rope_theta": 500}
    ),
    "with num_hidden_layers=3, and this one has 2": lambda: tiny_model(num_hidden_layers=2),
    "with dtype='float64', and this one has 'float32'": lambda: tiny_model().float(),
}


@pytest.mark.parametrize("message", OTHERS)
def test_a_state_of_another_model_is_refused(message, tmp_path):
    model = tiny_model()
    read(model, random_ids(1, 8)).save(tmp_path / "state", model)
    assert_refused(message, FoldedCache.load, tmp_path / "state", OTHERS[message]())


def rewritten(path, change):
    """The file with its tensors and its description changed in place."""
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    described = json.loads(metadata["state"])
    change(tensors, described, metadata)
    if metadata.get("state") not in ("{", "[" * 100_000, "7", None):
        metadata["state"] = json.dumps(described)
    save_file(tensors, path, metadata)


def put(name, value):
    return lambda tensors, described, metadata: tensors.update({name: value})


def describe(**fields):
    return lambda tensors, described, metadata: described.update(fields)


def at(name, value):
    def change(tensors, described, metadata):
        tensors[name].view(-1)[0] = value

    return change


DAMAGES = [
    (lambda t, d, m: t.pop("layers.1.values"), r"layers.1.values has shape None instead of \(2, 2, 10, 8\)"),
    (lambda t, d, m: t.pop("segments"), "segments has shape None"),
    (lambda t, d, m: t.pop("offsets"), "has shape"),
    (lambda t, d, m: t.pop("last_hidden_BD"), "last_hidden_BD has shape None"),
    (lambda t, d, m: t.pop("memory_BL"), "memory_BL has shape None"),
    (put("layers.3.keys", torch.zeros(2, 2, 10, 8)), r"layers.3.keys has shape \(2, 2, 10, 8\) instead of None"),
    (put("more", torch.zeros(1)), r"more has shape \(1,\) instead of None"),
    (put("layers.0.keys", torch.zeros(2, 2, 10, 6)), r"\(2, 2, 10, 6\) instead of \(2, 2, 10, 8\)"),
    (put("layers.0.keys", torch.zeros(2, 4, 10, 8)), r"\(2, 4, 10, 8\) instead of \(2, 2, 10, 8\)"),
    (put("offsets", torch.zeros(3, dtype=torch.long)), r"shape \(2, .* instead of \(3"),
    (put("offsets", torch.tensor(0)), "has shape"),
    (put("offsets", torch.zeros(2)), "offsets has another dtype or other values than in a state"),
    (
        put("last_hidden_BD", torch.zeros(2, 24, dtype=torch.long)),
        "last_hidden_BD has another dtype or other values than in a state",
    ),
    (put("layers.0.keys", torch.zeros(2, 2, 10, 8)), "has another dtype or other values than in a state"),
    (put("elapsed_B", torch.zeros(2)), "elapsed_B has another dtype or other values than in a state"),
    (at("layers.2.next_keys", torch.nan), "layers.2.next_keys has another dtype or other values than in a state"),
    (at("durations_BL", torch.inf), "durations_BL has another dtype or other values than in a state"),
    (at("durations_BL", -1), "durations_BL has another dtype or other values than in a state"),
    (at("segments", -1), "segments has another dtype or other values than in a state"),
    (at("offsets", 5), "offsets has another dtype or other values than in a state"),
    (describe(num_columns=-1), "its description is not that of a state"),
    (describe(num_columns=True), "its description is not that of a state"),
    (describe(computed_in="int8"), "its description is not that of a state"),
    (describe(computed_in=["float64"]), "its description is not that of a state"),
    (describe(fields=None), "its description is not that of a state"),
    (lambda t, d, m: m.update(state="{"), "its description is not that of a state"),
    (lambda t, d, m: m.update(state="[" * 100_000), "its description is not that of a state"),
    (lambda t, d, m: m.update(state="7"), "its description is not that of a state"),
    (lambda t, d, m: m.pop("state"), "its description is not that of a state"),
]


@pytest.mark.parametrize(("change", "message"), DAMAGES, ids=range(len(DAMAGES)))
def test_a_damaged_state_is_refused(change, message, tmp_path):
    model = tiny_model()
    path = tmp_path / "state"
    read(model, random_ids(2, 13), durations=random_durations(2, 13)).save(path, model)
    rewritten(path, change)
    assert_refused(rf"state is damaged \(.*{message}.*\): read the text again", FoldedCache.load, path, model)


def test_other_files_are_refused_and_not_replaced(tmp_path):
    model = tiny_model()
    cache = read(model, random_ids(1, 8))
    model.save_pretrained(tmp_path)
    (tmp_path / "notes").write_text("notes")
    cache.save(tmp_path / "state", model)
    data = (tmp_path / "state").read_bytes()
    (tmp_path / "torn").write_bytes(data[: len(data) // 2])
    for name in ("model.safetensors", "notes", "torn"):
        before = (tmp_path / name).read_bytes()
        assert_refused("is not a state of a folded|can't be read as a state", FoldedCache.load, tmp_path / name, model)
        assert_refused("exists and is not a state: pass another path", cache.save, tmp_path / name, model)
        assert (tmp_path / name).read_bytes() == before
    assert_refused("can't be read as a state .*nowhere", FoldedCache.load, tmp_path / "nowhere", model)
    assert_refused("is a folder", cache.save, tmp_path, model)
    assert_refused("there is no folder", cache.save, tmp_path / "nowhere" / "state", model)


def test_what_has_no_state_to_save_is_refused(tmp_path, monkeypatch):
    model, path = tiny_model(schedule="sequential"), tmp_path / "state"
    assert_refused("the cache has read no token", FoldedCache(model.config).save, path, model)
    cache = read(model, random_ids(1, 8))
    assert_refused("the cache was made for segment_length=5", cache.save, path, tiny_model(segment_length=7))
    with monkeypatch.context() as patch:
        interrupt(patch, model, 3)
        with pytest.raises(Interrupted):
            model(random_ids(1, 30), cache=cache)
    assert_refused("interrupted", cache.save, path, model)

    assert list(tmp_path.iterdir()) == []


class Block(nn.Module):
    """A block of the caller's: two layers, of which only the first has a memory."""

    def __init__(self, layer, mlp):
        super().__init__()
        self.layer, self.mlp = layer, mlp

    def forward(self, input_RTD, key_values, metadata):
        output_RTD, memory = self.layer(input_RTD, key_values, metadata)
        return output_RTD + self.mlp(output_RTD), memory


def test_a_block_of_the_callers_says_what_it_keeps(tmp_path):
    model = tiny_model()
    model.model.replace_layers(1, 3, block := Block(model.model.layers[1], model.model.layers[2].mlp))
    cache = read(model, random_ids(1, 8))
    assert_refused(
        r"layers.1.keys has shape \(1, 2, 10, 8\).*attention_evaluations", cache.save, tmp_path / "state", model
    )
    block.attention_evaluations = 1
    assert_continues_alike(model, cache, saved(cache, model, tmp_path / "state"), 1)


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    model, path = tiny_model(), tmp_path / "state"
    cache = read(model, random_ids(1, 8))
    cache.save(path, model)
    before, write = path.read_bytes(), Path.write_bytes

    def fails(self, data):
        write(self, data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fails)
    model(random_ids(1, 4), cache=cache)
    assert_refused("state can't be written: No space left on device. Make room", cache.save, path, model)
    assert path.read_bytes() == before and [one.name for one in tmp_path.iterdir()] == ["state"]
    monkeypatch.undo()
    cache.save(path, model)
    assert path.read_bytes() != before


def test_the_file_has_the_mode_of_new_files(tmp_path):
    model = tiny_model()
    read(model, random_ids(1, 8)).save(tmp_path / "state", model)
    (tmp_path / "new").touch()
    assert (tmp_path / "state").stat().st_mode == (tmp_path / "new").stat().st_mode
