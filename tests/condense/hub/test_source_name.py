"""The name of a model that is in no folder: other libraries can't load another model by it."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from condense import CondenseForCausalLM, CondenseModel, to_stock
from condense.labs.depth.model import convert_to_depth
from tests.condense.models import random_adapters, tiny_model

TEXTS = ["The sky is blue.", "Here we go.", "There and back again.", "The sun is yellow."]


def assert_not_loadable(model, change):
    names = {model.config.name_or_path, model.name_or_path, model.base_model.name_or_path}
    assert len(names) == 1
    for load in (AutoConfig.from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(OSError, match=rf"{change} in memory: save_pretrained\(\) it and load that folder"):
            load(*names)


def test_a_model_folded_in_memory_has_a_name_that_cannot_be_loaded(llama):
    assert_not_loadable(CondenseForCausalLM.from_pretrained(llama), "folded")
    assert_not_loadable(CondenseForCausalLM.from_pretrained(llama, output_loading_info=True)[0], "folded")
    assert_not_loadable(CondenseModel.from_pretrained(llama), "folded")


def test_a_model_changed_in_memory_has_a_name_that_cannot_be_loaded(folded):
    assert_not_loadable(CondenseForCausalLM.from_pretrained(folded, segment_length=8), "changed")
    assert_not_loadable(CondenseForCausalLM.from_pretrained(folded, sink_token_id=3), "changed")
    config = AutoConfig.from_pretrained(folded, memory_source="layer_input")
    assert_not_loadable(AutoModelForCausalLM.from_pretrained(folded, config=config), "changed")
    assert_not_loadable(convert_to_depth(CondenseForCausalLM.from_pretrained(folded), 0, 1), "changed")
    assert_not_loadable(to_stock(CondenseForCausalLM.from_pretrained(folded)), "converted")


@pytest.mark.parametrize("options", [{}, {"segment_length": 16, "schedule": "sequential", "bptt_segments": 2}])
def test_a_saved_model_keeps_its_name(options, folded):
    model = AutoModelForCausalLM.from_pretrained(folded, **options)
    assert model.config.name_or_path == model.name_or_path == str(folded)


def test_a_model_without_a_source_has_no_name():
    model = tiny_model()
    model.model.replace_layers(0, 1, model.model.layers[0])
    assert model.name_or_path == model.config.name_or_path == ""


def preferences(trl, model, tokenizer, folder, **options):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"prompt": TEXTS, "chosen": TEXTS[::-1], "rejected": ["no"] * 4})
    arguments = trl.DPOConfig(
        output_dir=str(folder), max_steps=1, per_device_train_batch_size=2, report_to="none", use_cpu=True, bf16=False,
        gradient_checkpointing=False,
    )  # fmt: skip
    return trl.DPOTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer, **options)


def test_the_reference_of_preference_training_is_folded(llama, folded, tmp_path):
    trl = pytest.importorskip("trl")
    tokenizer = AutoTokenizer.from_pretrained(llama)
    in_memory = CondenseForCausalLM.from_pretrained(llama, segment_length=16)
    with pytest.raises(OSError, match="folded in memory: save_pretrained"):
        preferences(trl, in_memory, tokenizer, tmp_path)
    reference = CondenseForCausalLM.from_pretrained(llama, segment_length=16)
    assert preferences(trl, in_memory, tokenizer, tmp_path, ref_model=reference).train().training_loss > 0

    trainer = preferences(trl, CondenseForCausalLM.from_pretrained(folded), tokenizer, tmp_path)
    assert type(trainer.ref_model) is CondenseForCausalLM and trainer.ref_model.config.segment_length == 16
    assert trainer.train().training_loss == pytest.approx(torch.log(torch.tensor(2.0)).item(), rel=1e-4)


@pytest.mark.filterwarnings("ignore")  # PEFT could not compare the vocabulary
def test_adapters_name_the_folded_folder_or_none(llama, folded, tmp_path):
    peft = pytest.importorskip("peft")
    settings = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": "gaussian"}
    ids = torch.arange(5, 55)[None]
    for source, folder in ((folded, tmp_path / "of_folder"), (llama, tmp_path / "of_memory")):
        model = CondenseForCausalLM.from_pretrained(source, segment_length=16)
        adapted = peft.get_peft_model(model, peft.LoraConfig(**settings))
        random_adapters(adapted)
        adapted.save_pretrained(folder)
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "of_folder")
    assert type(loaded.get_base_model()) is CondenseForCausalLM
    with pytest.raises(OSError, match="folded in memory: save_pretrained"):
        peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "of_memory")
    with torch.no_grad():  # the remedy of those who have the adapters
        again = CondenseForCausalLM.from_pretrained(llama, segment_length=16)
        again = peft.PeftModel.from_pretrained(again, tmp_path / "of_memory")
        torch.testing.assert_close(again(ids).logits, adapted.eval()(ids).logits)
        assert not torch.allclose(LlamaForCausalLM.from_pretrained(llama)(ids).logits, again(ids).logits)
