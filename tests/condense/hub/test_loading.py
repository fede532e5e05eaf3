"""Checkpoints that `from_pretrained` refuses; tests/test_damaged_models.py tests the commands."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from condense import CondenseConfig, CondenseForCausalLM, to_stock
from condense.hub.loading import check_source, load_config, load_model, load_tokenizer

from ...refusals import assert_refused
from ..models import tiny_model

pytestmark = pytest.mark.unit

NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def folder(tmp_path):
    to_stock(tiny_model(torch.float32)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("loader", [CondenseForCausalLM, AutoModelForCausalLM], ids=["class", "auto class"])
def test_missing_weights_are_refused(loader, folder):
    if loader is AutoModelForCausalLM:
        CondenseForCausalLM.from_pretrained(folder).save_pretrained(folder)
    loader.from_pretrained(folder)
    change_weights(folder, lambda tensors: tensors.pop(NORM))
    assert_refused(f"lacks {NORM}", loader.from_pretrained, folder)
    assert_refused(f"lacks {NORM}", loader.from_pretrained, pretrained_model_name_or_path=folder)
    _, report = loader.from_pretrained(folder, output_loading_info=True)  # a caller that requests the report checks it
    assert report["missing_keys"] == {NORM}


def test_transformers_report_is_not_printed_with_the_error(folder, caplog):
    """The report would say that the weights were initialised; other messages of transformers remain."""
    change_weights(folder, lambda tensors: tensors.pop(NORM))
    caplog.set_level("WARNING", logger="transformers")
    assert_refused(NORM, CondenseForCausalLM.from_pretrained, folder)
    assert "initialized" not in caplog.text
    LlamaForCausalLM.from_pretrained(folder)
    assert "initialized" in caplog.text


def test_unexpected_weights_are_refused(folder):
    change_weights(folder, lambda tensors: tensors.update({"score.weight": torch.ones(2)}))
    with pytest.raises(ValueError, match="holds score.weight, which the model of its config.json does not have"):
        CondenseForCausalLM.from_pretrained(folder)


def test_buffers_of_old_checkpoints_are_ignored(folder):
    old = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(4) for n in range(3)}
    expected = CondenseForCausalLM.from_pretrained(folder).state_dict()
    change_weights(folder, lambda tensors: tensors.update(old))
    torch.testing.assert_close(CondenseForCausalLM.from_pretrained(folder).state_dict(), expected, atol=0, rtol=0)


def test_other_shapes_are_refused(folder):
    change(folder / "config.json", intermediate_size=32)
    with pytest.raises(ValueError, match=r"down_proj.weight \[24, 40\], but the model has \[24, 32\]"):
        CondenseForCausalLM.from_pretrained(folder)
    CondenseForCausalLM.from_pretrained(folder, ignore_mismatched_sizes=True)  # on request


def test_a_tied_head_is_not_missing(tmp_path):
    tiny_model(torch.float32, tie_word_embeddings=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = CondenseForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    change(tmp_path / "config.json", tie_word_embeddings=False)
    assert_refused(r"lacks lm_head.weight", CondenseForCausalLM.from_pretrained, tmp_path)


def test_an_untied_head_is_kept_although_the_config_ties_it(folder):
    """transformers keeps such a head untied; the conversion to a stock Llama must do the same."""
    change(folder / "config.json", tie_word_embeddings=True)
    stock, model = LlamaForCausalLM.from_pretrained(folder), CondenseForCausalLM.from_pretrained(folder)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    ids = torch.arange(2, 7)[None]
    expected = stock(ids).logits
    torch.testing.assert_close(model(ids).logits, expected)
    torch.testing.assert_close(to_stock(model)(ids).logits, expected)


@pytest.mark.parametrize("text", [None, "{}"], ids=["no file", "braces"])
def test_a_folder_without_a_config_is_refused(text, folder):
    """transformers would load it as a default Llama of 7 B parameters."""
    (folder / "config.json").unlink() if text is None else (folder / "config.json").write_text(text)
    for load in (CondenseConfig.from_pretrained, CondenseForCausalLM.from_pretrained):
        with pytest.raises((ValueError, OSError), match=r"config.json"):
            load(folder)


def test_weights_are_checked_on_the_meta_device(folder):
    """`condense train` makes this check before it starts ranks."""
    model = load_model(LlamaForCausalLM, folder, device_map="meta")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    change_weights(folder, lambda tensors: tensors.pop(NORM))
    assert_refused(NORM, load_model, LlamaForCausalLM, folder, device_map="meta")


def test_a_model_in_the_hubs_cache_needs_no_request(folder, tmp_path, monkeypatch):
    snapshot = tmp_path / "cache" / "models--owner--name" / "snapshots" / ("0" * 40)
    shutil.copytree(folder, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("condense.hub.loading.HfApi", lambda: pytest.fail("sent a request to the hub"))
    check_source("owner/name")


def test_a_hub_that_cannot_be_reached_is_named(monkeypatch, tmp_path):
    class Hub:
        def model_info(self, source, timeout):
            raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("condense.hub.loading.HfApi", Hub)
    with pytest.raises(ValueError, match="no folder 'owner/name', and the hub can't be reached .*no route to host"):
        check_source("owner/name")


@pytest.mark.parametrize("name", ["pytorch_model.bin.index.json", "model.safetensors.index.json"])
def test_an_unused_index_is_ignored(name, folder):
    """Downloads of one format and earlier saves in shards leave such files."""
    expected = load_file(folder / "model.safetensors")
    (folder / name).write_text('{"weight_map": {"a": "absent-00001-of-00002"}}')
    loaded = load_model(LlamaForCausalLM, folder).state_dict()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_missing_shards_and_damaged_indices_are_refused(folder):
    model, folder = LlamaForCausalLM.from_pretrained(folder), folder.parent / "shards"
    model.save_pretrained(folder, max_shard_size="10KB")
    assert len(list(folder.glob("*.safetensors"))) > 2 and not (folder / "model.safetensors").exists()
    load_model(LlamaForCausalLM, folder)
    sorted(folder.glob("*.safetensors"))[1].unlink()
    with pytest.raises(ValueError, match=r"lacks model-00002-of-"):
        load_model(LlamaForCausalLM, folder)
    load_config(CondenseConfig, folder)  # a config needs no weights
    for wrong in ('{"weight_map": {"a": 1}}', '{"weight_map": {"a": ["x"]}}', "{}"):
        (folder / "model.safetensors.index.json").write_text(wrong)
        assert_refused("shards lacks|shards' can't be loaded", load_model, LlamaForCausalLM, folder)


@pytest.mark.parametrize("source", ["model", "tokenizer"])
def test_code_of_a_model_is_not_run(source, folder, stories, tmp_path, monkeypatch):
    """The user is not asked for permission either."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for path in stories.glob("tokenizer*"):
        shutil.copy(path, folder)
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\nclass C: pass\n")
    if source == "model":
        fields = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"}
        change(folder / "config.json", auto_map=fields)
        assert type(load_model(AutoModelForCausalLM, folder)) is LlamaForCausalLM
        change(folder / "config.json", model_type="evil")
        for load, kind in ((load_model, AutoModelForCausalLM), (load_config, AutoConfig)):
            assert_refused("names the model_type 'evil', which neither condense nor", load, kind, folder)
    else:
        fields = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.C", "evil.C"]}}
        change(folder / "tokenizer_config.json", **fields)
        assert_refused("contains custom code", load_tokenizer, folder, CondenseConfig(vocab_size=512))
    assert not (tmp_path / "ran").exists()


def test_output_loading_info_false_returns_the_model_alone(folder):
    assert isinstance(CondenseForCausalLM.from_pretrained(folder, output_loading_info=False), CondenseForCausalLM)


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_a_full_memory_is_not_reported_as_damage(error, folder, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "__init__", lambda *_: (_ for _ in ()).throw(error("full")))
    with pytest.raises(error, match="full"):
        load_model(LlamaForCausalLM, folder)
