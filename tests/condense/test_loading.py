"""What `from_pretrained` itself refuses; for the commands see tests/test_damaged_models.py."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from condense import CondenseConfig, CondenseForCausalLM, to_llama
from condense.loading import check_source, load_config, load_model, load_tokenizer

from .models import tiny_model

NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def folder(tmp_path):
    to_llama(tiny_model(torch.float32)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change(folder, change_weights=None, **fields):
    if change_weights:
        tensors = load_file(folder / "model.safetensors")
        change_weights(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("loader", [CondenseForCausalLM, AutoModelForCausalLM], ids=["class", "auto class"])
def test_random_weights_do_not_take_the_place_of_missing_ones(loader, folder):
    if loader is AutoModelForCausalLM:
        CondenseForCausalLM.from_pretrained(folder).save_pretrained(folder)
    loader.from_pretrained(folder)
    change(folder, lambda tensors: tensors.pop(NORM))
    with pytest.raises(ValueError, match=f"lacks {NORM}"):
        loader.from_pretrained(folder)
    with pytest.raises(ValueError, match=f"lacks {NORM}"):
        loader.from_pretrained(pretrained_model_name_or_path=folder)
    _, report = loader.from_pretrained(folder, output_loading_info=True)  # whoever asks for the report judges it
    assert report["missing_keys"] == {NORM}


def test_no_report_contradicts_the_error(folder, caplog):
    """transformers would say that the weights were initialised; its other messages remain."""
    change(folder, lambda tensors: tensors.pop(NORM))
    caplog.set_level("WARNING", logger="transformers")
    with pytest.raises(ValueError, match=NORM):
        CondenseForCausalLM.from_pretrained(folder)
    assert "initialized" not in caplog.text
    LlamaForCausalLM.from_pretrained(folder)
    assert "initialized" in caplog.text


def test_unexpected_weights(folder):
    change(folder, lambda tensors: tensors.update({"score.weight": torch.ones(2)}))
    with pytest.raises(ValueError, match="holds score.weight, which the model of its config.json does not have"):
        CondenseForCausalLM.from_pretrained(folder)


def test_buffers_of_old_checkpoints_are_not_unexpected(folder):
    old = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(4) for n in range(3)}
    expected = CondenseForCausalLM.from_pretrained(folder).state_dict()
    change(folder, lambda tensors: tensors.update(old))
    loaded = CondenseForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_other_shapes(folder):
    change(folder, intermediate_size=32)
    with pytest.raises(ValueError, match=r"down_proj.weight \[24, 40\] where the model has \[24, 32\]"):
        CondenseForCausalLM.from_pretrained(folder)
    CondenseForCausalLM.from_pretrained(folder, ignore_mismatched_sizes=True)  # asked for


def test_a_tied_head_is_not_missing(tmp_path):
    model = tiny_model(torch.float32, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = CondenseForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    change(tmp_path, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"lacks lm_head.weight"):
        CondenseForCausalLM.from_pretrained(tmp_path)


def test_a_head_of_its_own_in_spite_of_the_config_survives(folder):
    """transformers keeps it and does not tie; a stock Llama made of the model must not tie it either."""
    change(folder, tie_word_embeddings=True)
    stock, model = LlamaForCausalLM.from_pretrained(folder), CondenseForCausalLM.from_pretrained(folder)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    ids = torch.arange(2, 7)[None]
    expected = stock(ids).logits
    torch.testing.assert_close(model(ids).logits, expected)
    torch.testing.assert_close(to_llama(model)(ids).logits, expected)


@pytest.mark.parametrize("text", [None, "{}"], ids=["no file", "braces"])
def test_a_folder_without_a_config_is_no_default_llama(text, folder):
    """It was one of 7 B parameters."""
    (folder / "config.json").unlink() if text is None else (folder / "config.json").write_text(text)
    for load in (CondenseConfig.from_pretrained, CondenseForCausalLM.from_pretrained):
        with pytest.raises((ValueError, OSError), match=r"config.json"):
            load(folder)


def test_names_of_functions_that_do_not_exist():
    with pytest.raises(ValueError, match="hidden_act='sigmoyd' is not known: choose one of .*silu"):
        CondenseConfig(hidden_act="sigmoyd")
    with pytest.raises(ValueError, match="rope_type='spiral' is not known: choose one of default, .*llama3"):
        CondenseConfig(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4})


def test_weights_are_checked_without_being_read(folder):
    """As `condense train` does before it starts ranks."""
    model = load_model(LlamaForCausalLM, folder, device_map="meta")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    change(folder, lambda tensors: tensors.pop(NORM))
    with pytest.raises(ValueError, match=NORM):
        load_model(LlamaForCausalLM, folder, device_map="meta")


def test_a_hub_that_has_the_model_in_its_cache(folder, tmp_path, monkeypatch):
    """A cached model loads without asking anybody."""
    snapshot = tmp_path / "cache" / "models--owner--name" / "snapshots" / ("0" * 40)
    shutil.copytree(folder, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("condense.loading.HfApi", lambda: pytest.fail("asked the hub"))
    check_source("owner/name")


def test_a_hub_that_cannot_be_asked(monkeypatch, tmp_path):
    class Hub:
        def model_info(self, source, timeout):
            raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("condense.loading.HfApi", Hub)
    with pytest.raises(ValueError, match="no folder 'owner/name', and the hub can't be reached .*no route to host"):
        check_source("owner/name")


@pytest.mark.parametrize("name", ["pytorch_model.bin.index.json", "model.safetensors.index.json"])
def test_an_index_that_is_not_used(name, folder):
    """As downloads of one format and earlier saves in shards leave them."""
    expected = load_file(folder / "model.safetensors")
    (folder / name).write_text('{"weight_map": {"a": "absent-00001-of-00002"}}')
    loaded = load_model(LlamaForCausalLM, folder).state_dict()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_shards(folder):
    model, folder = LlamaForCausalLM.from_pretrained(folder), folder.parent / "shards"
    model.save_pretrained(folder, max_shard_size="10KB")
    assert len(list(folder.glob("*.safetensors"))) > 2 and not (folder / "model.safetensors").exists()
    load_model(LlamaForCausalLM, folder)
    sorted(folder.glob("*.safetensors"))[1].unlink()
    with pytest.raises(ValueError, match=r"lacks model-00002-of-.*, which model.safetensors.index.json names"):
        load_model(LlamaForCausalLM, folder)
    load_config(CondenseConfig, folder)  # which needs no weights
    for wrong in ('{"weight_map": {"a": 1}}', '{"weight_map": {"a": ["x"]}}', "{}"):
        (folder / "model.safetensors.index.json").write_text(wrong)
        with pytest.raises(ValueError, match="has no weight_map of file names"):
            load_model(LlamaForCausalLM, folder)


@pytest.mark.parametrize("what", ["model", "tokenizer"])
def test_code_of_a_model_is_not_run(what, folder, stories, tmp_path, monkeypatch):
    """Not even where the user would say yes: nobody is asked."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for path in stories.glob("tokenizer*"):
        shutil.copy(path, folder)
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\nclass C: pass\n")
    if what == "model":
        change(folder, model_type="evil", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"})
        with pytest.raises(ValueError, match="can't be loaded"):
            load_model(AutoModelForCausalLM, folder)
        with pytest.raises(ValueError, match="can't be loaded"):
            load_config(AutoConfig, folder)
    else:
        path = folder / "tokenizer_config.json"
        fields = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.C", "evil.C"]}}
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
        with pytest.raises(ValueError, match="can't be loaded"):
            load_tokenizer(folder, CondenseConfig(vocab_size=512))
    assert not (tmp_path / "ran").exists()


def test_asking_for_no_report(folder):
    assert isinstance(CondenseForCausalLM.from_pretrained(folder, output_loading_info=False), CondenseForCausalLM)


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_a_full_memory_is_no_damage(error, folder, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "__init__", lambda *_: (_ for _ in ()).throw(error("full")))
    with pytest.raises(error, match="full"):
        load_model(LlamaForCausalLM, folder)
