"""The card of a saved model: what it says, how the model is loaded from it, and whose card it leaves as it is."""

import json
import re
import shutil
from importlib.metadata import version

import pytest
import torch
from huggingface_hub import ModelCard
from packaging.version import Version
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.integrations.peft import MIN_PEFT_VERSION

from condense import CondenseForCausalLM, CondenseModel
from condense.hub.card import CARD
from condense.version import __version__

from ...commands import printed
from ..models import random_ids, tiny_config, tiny_model

pytestmark = pytest.mark.unit

HUB_ID = "meta-llama/Llama-3.2-1B"


def saved(model, folder, **options):
    model.save_pretrained(folder, **options)
    return ModelCard((folder / CARD).read_text())


def python_of(card, folder):
    """The names that the card's lines of Python define, with the folder in its place."""
    (code,) = re.findall(r"```python\n(.*?)```", card.text, flags=re.DOTALL)
    assert "import condense" in code and "condense-llama. It is not on PyPI" in card.text
    assert f"pip install condense_llama-{__version__}-py3-none-any.whl" in card.text
    names = {}
    exec(code.replace("THIS_FOLDER", str(folder)), names)
    return names


@torch.no_grad()
def test_a_saved_model_says_what_it_is_and_how_to_load_it(llama, tmp_path):
    model = CondenseForCausalLM.from_pretrained(llama, segment_length=24, memory_source="layer_input")
    card = saved(model, tmp_path / "saved")
    AutoTokenizer.from_pretrained(llama).save_pretrained(tmp_path / "saved")
    assert card.data.library_name == "condense-llama" and card.data.base_model is None
    assert "condense" in card.data.tags and card.data.pipeline_tag == "text-generation"
    assert "24 tokens" in card.text and "as in Transformer-XL" in card.text and "# A folded Llama" in card.text
    loaded, ids = python_of(card, tmp_path / "saved"), random_ids(1, 30) % 50
    assert torch.equal(loaded["model"](ids).logits, model.eval()(ids).logits)
    assert loaded["tokenizer"]("The sky").input_ids


def test_a_card_names_share_and_sink(tmp_path):
    text = saved(tiny_model(sink_token_id=7, memory_share=0.2), tmp_path).text
    assert "in the segment before, a = 0.2; a sink, token 7 alone, in place of its first row |" in text


def test_a_model_without_a_head(tmp_path):
    card = saved(CondenseModel(tiny_config()), tmp_path)
    assert "AutoModel.from_pretrained" in card.text and card.data.pipeline_tag is None


@pytest.mark.parametrize("name", [HUB_ID, f"{HUB_ID} (folded in memory: save it)"])
def test_the_base_model_is_passed_on(name, tmp_path):
    """From a hub id, and from the card of the folder that a model was loaded from."""
    model = tiny_model()
    model.config.name_or_path = name
    assert saved(model, tmp_path / "first").data.base_model == HUB_ID
    again = CondenseForCausalLM.from_pretrained(tmp_path / "first")
    assert saved(again, tmp_path / "second").data.base_model == HUB_ID


def base_row(card):
    return re.search(r"\| base model \| (.*) \|", card.text)[1]


def test_a_local_base_model_has_its_name_and_no_path(llama, tmp_path, monkeypatch):
    """Its folder's, also after the model was saved twice; a hub id that a former transformers stored is better."""
    shutil.copytree(llama, source := tmp_path / "My Llama (new)")
    first = saved(CondenseForCausalLM.from_pretrained(source), tmp_path / "first")
    again = saved(CondenseForCausalLM.from_pretrained(tmp_path / "first"), tmp_path / "second")
    monkeypatch.chdir(source)
    here = saved(CondenseForCausalLM.from_pretrained("."), tmp_path / "third")
    for card in (first, again, here):
        assert base_row(card) == "My Llama (new)" and card.data.base_model is None
        assert str(tmp_path) not in card.text
    shutil.rmtree(tmp_path / "first")  # a model in memory
    again = saved(CondenseForCausalLM.from_pretrained(tmp_path / "second"), tmp_path / "fourth")
    assert base_row(again) == "My Llama (new)"
    config = json.loads((source / "config.json").read_text())
    for stored, named in ((HUB_ID, HUB_ID), ("../runs/llama", None), (7, None)):
        (source / "config.json").write_text(json.dumps(config | {"_name_or_path": stored}))
        assert saved(CondenseForCausalLM.from_pretrained(source), tmp_path / "stored").data.base_model == named


def test_a_gguf_file_is_a_base_model_by_its_name(tmp_path):
    pytest.importorskip("gguf")
    from ...gguf_files import byte_level_tokenizer, stock_model, tokenizer_fields, write_gguf

    write_gguf(tmp_path / "tiny.Q8_0.gguf", stock_model(LlamaForCausalLM), tokenizer_fields(byte_level_tokenizer()))
    model = CondenseForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.Q8_0.gguf")
    assert base_row(saved(model, tmp_path / "saved")) == "tiny.Q8_0.gguf"


def test_a_base_model_that_is_not_known(tmp_path):
    card = saved(tiny_model(), tmp_path / "first")
    again = saved(CondenseForCausalLM.from_pretrained(tmp_path / "first"), tmp_path / "second")
    assert base_row(card) == base_row(again) == "not known"


@pytest.mark.parametrize("text", ["", f"---\nbase_model: {HUB_ID}\n---\n# A Llama\n", "---\n: :\n", "\0"])
def test_a_card_of_somebody_else_is_left_as_it_is_and_not_believed(text, tmp_path):
    (tmp_path / CARD).write_text(text)
    tiny_model().save_pretrained(tmp_path)
    assert (tmp_path / CARD).read_text() == text
    assert saved(CondenseForCausalLM.from_pretrained(tmp_path), tmp_path / "again").data.base_model is None


def test_our_own_card_is_renewed_until_it_is_changed(tmp_path):
    assert "5 tokens" in saved(tiny_model(), tmp_path).text
    assert "7 tokens" in saved(tiny_model(segment_length=7), tmp_path).text
    kept = "".join(line for line in (tmp_path / CARD).read_text().splitlines(True) if not line.startswith("<!--"))
    (tmp_path / CARD).write_text(kept)
    tiny_model(segment_length=9).save_pretrained(tmp_path)
    assert (tmp_path / CARD).read_text() == kept


def test_the_other_processes_of_a_run_write_no_card(tmp_path):
    tiny_model().save_pretrained(tmp_path, False)
    tiny_model().save_pretrained(tmp_path, is_main_process=False)
    assert not (tmp_path / CARD).exists()


def test_a_model_without_a_name_does_not_read_the_card_of_the_working_folder(tmp_path, monkeypatch):
    model = tiny_model()
    model.config.name_or_path = HUB_ID
    model.save_pretrained(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert saved(tiny_model(), tmp_path / "other").data.base_model is None


def test_convert_writes_a_card_of_folded_models_only(llama, tmp_path):
    printed("convert", llama, tmp_path / "folded")
    printed("convert", tmp_path / "folded", tmp_path / "stock", "--to", "stock")
    assert "512 tokens" in (tmp_path / "folded" / CARD).read_text() and not (tmp_path / "stock" / CARD).exists()


def test_adapters_have_the_card_of_peft(tmp_path):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(task_type="CAUSAL_LM")
    peft.get_peft_model(tiny_model(), settings).save_pretrained(tmp_path / "peft")
    assert ModelCard((tmp_path / "peft" / CARD).read_text()).data.library_name == "peft"
    model = tiny_model()
    if Version(version("peft")) < Version(MIN_PEFT_VERSION):
        pytest.skip(f"this transformers adds adapters with PEFT {MIN_PEFT_VERSION} or newer")
    model.add_adapter(settings)  # transformers' own
    model.save_pretrained(tmp_path / "transformers")
    assert not {CARD, "condense_remote.py", "config.json"} & {
        path.name for path in (tmp_path / "transformers").iterdir()
    }
