"""A model whose layers a device map puts elsewhere computes what the model in one place computes."""

import pytest
import torch
from accelerate import dispatch_model
from accelerate.utils import send_to_device
from transformers import AutoModelForCausalLM

import condense  # noqa: F401  registers folded models with the Auto classes
from condense import CondenseForCausalLM
from condense.eval.models import load_evaluated
from condense.eval.tasks import evaluate
from condense.training.small_llama import passkey_tokenizer, small_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path, tokenizer = tmp_path_factory.mktemp("model"), passkey_tokenizer()
    small_llama(tokenizer, seed=0).save_pretrained(path / "llama")
    CondenseForCausalLM.from_pretrained(path / "llama", segment_length=40).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def dispatched(folder, offload, **options):
    """Layer 1, the norm and the head are on the disk, and in memory only while they run."""
    model = CondenseForCausalLM.from_pretrained(folder, **options).eval()
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.rotary_emb": "cpu"}
    places |= {"model.layers.1": "disk", "model.norm": "disk", "lm_head": "disk"}
    return dispatch_model(model, places, main_device="cpu", offload_dir=offload)


def test_layers_on_the_disk(folder, tmp_path):
    whole, parts = CondenseForCausalLM.from_pretrained(folder).eval(), dispatched(folder, tmp_path)
    assert parts.model.norm.weight.is_meta and parts.model.layers[1].mlp.up_proj.weight.is_meta
    ids = torch.randint(3, whole.config.vocab_size, (2, 230), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(parts(ids).logits, whole(ids).logits)  # a wave if "auto" chooses it
        mask = torch.ones_like(ids)
        mask[0, :17] = 0
        durations = torch.rand(ids.shape) + 0.5
        for options in ({"attention_mask": mask}, {"durations": durations}, {"labels": ids}):
            found, expected = parts(ids, **options), whole(ids, **options)
            torch.testing.assert_close(found[0], expected[0])
    generate = {"max_new_tokens": 50, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(parts.generate(ids[:, :70], **generate), whole.generate(ids[:, :70], **generate))


EMBEDDING_ELSEWHERE = {"model.embed_tokens": "disk", "model.layers": "cpu", "model.norm": "disk"}
MAPS = {
    "the head apart": {"model": "cpu", "lm_head": "disk"},
    "only the head in memory": {"model": "disk", "lm_head": "cpu"},
    "all on the disk": {"": "disk"},
    "in parts": EMBEDDING_ELSEWHERE | {"model.rotary_emb": "cpu", "lm_head": "cpu"},
}


@pytest.mark.parametrize(("name", "tied"), [*((name, False) for name in MAPS), ("all on the disk", True)])
@torch.no_grad()
def test_whatever_the_map_says(folder, tmp_path, name, tied):
    """accelerate moves what it finds in the arguments of the modules that the map names. Parts of a tied weight must be
    in one place, in a stock model too."""
    whole = CondenseForCausalLM.from_pretrained(folder).eval()
    whole.config.tie_word_embeddings = tied
    whole.tie_weights()
    assert (whole.lm_head.weight is whole.model.embed_tokens.weight) == tied
    whole.save_pretrained(tmp_path / "model")
    options = {"device_map": (places := MAPS[name]), "offload_folder": tmp_path / "offload"}
    parts = CondenseForCausalLM.from_pretrained(tmp_path / "model", **options)
    assert parts.hf_device_map == places and any(parameter.is_meta for parameter in parts.parameters())
    ids = torch.randint(3, whole.config.vocab_size, (2, 90), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :17] = 0
    for options in ({}, {"attention_mask": mask}, {"labels": ids}, {"output_hidden_states": True}):
        found, expected = parts(ids, **options), whole(ids, **options)
        torch.testing.assert_close(found[0], expected[0])
        torch.testing.assert_close(found.hidden_states, expected.hidden_states)
    generate = {"max_new_tokens": 50, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(parts.generate(ids[:, :70], **generate), whole.generate(ids[:, :70], **generate))


def test_a_call_moves_to_its_model_and_the_model_stays(folder, monkeypatch):
    """What accelerate does with the arguments of a module on another GPU; "meta" stands for it."""
    model, moved = CondenseForCausalLM.from_pretrained(folder), []

    def run(self, prepared):
        moved.append(send_to_device({"_prepared": prepared}, "meta")["_prepared"])
        return original(self, prepared)

    original = type(model.model).run
    monkeypatch.setattr(type(model.model), "run", run)
    ids = torch.ones(1, 90, dtype=torch.long)
    model(ids)
    (prepared,) = moved
    assert prepared.call.inputs.is_meta and prepared.call.like_hidden(model.model.norm.weight).device.type == "cpu"
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_a_wave_is_refused(folder, tmp_path):
    parts = dispatched(folder, tmp_path, schedule="wavefront")
    with pytest.raises(ValueError, match="forward of its own"):
        parts(torch.ones(1, 200, dtype=torch.long))


def test_metadata_follows_a_layer_to_its_device(folder):
    """accelerate moves the arguments of a layer by their `to`: no second device is here, so "meta" stands for it."""
    model, seen = CondenseForCausalLM.from_pretrained(folder, schedule="sequential"), []
    hook = model.model.layers[1].register_forward_pre_hook(lambda _, given: seen.append(given[2]))
    model(torch.ones(1, 90, dtype=torch.long), durations=torch.full((1, 90), 0.5))
    hook.remove()
    moved = seen[1].to("meta", non_blocking=True)
    tensors = [*moved.rotary, *moved.memory_rotary, moved.mask.log_duration_RK]
    assert [tensor.device.type for tensor in tensors] == ["meta"] * 5
    assert moved.chunk == seen[1].chunk and seen[1].rotary[0].device.type == "cpu"


def test_evaluation_with_a_device_map(folder, tmp_path, noted):
    options = {"models": [str(folder)], "lengths": [80], "num_prompts": 2}
    alone = evaluate("passkey", tmp_path / "alone", **options)
    asked = noted(AutoModelForCausalLM, "from_pretrained")
    mapped = evaluate("passkey", tmp_path / "mapped", device_map="auto", **options)
    assert asked[0].options["device_map"] == "auto" and mapped["cells"] == alone["cells"]
    with pytest.raises(ValueError, match="pass --curves folded"):
        evaluate("perplexity", tmp_path, models=[str(folder)], device_map="auto", data=[__file__])


def test_the_fingerprint_does_not_depend_on_the_place(folder, tmp_path, monkeypatch):
    evaluated = load_evaluated(str(folder))
    monkeypatch.setattr("condense.eval.models.load_model", lambda *_, **__: dispatched(folder, tmp_path))
    assert load_evaluated(str(folder), device_map="auto").describe() == evaluated.describe()
