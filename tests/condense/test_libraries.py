"""PEFT and TRL train a folded Llama as they train a stock one: to the same losses on texts within a segment."""

from contextlib import nullcontext

import pytest
import torch
from transformers import AutoTokenizer

from condense import CondenseConfig, CondenseForCausalLM
from condense.labs.depth.model.llama import DepthLlamaConfig
from tests.condense.models import both, random_adapters

pytestmark = pytest.mark.process

SENTENCE = "The sky is blue. The sun is yellow. Here we go. There and back again. "
TEXTS = [SENTENCE * count for count in (1, 2, 1, 3, 1, 1, 2, 1)]  # 17 to 51 tokens and an end


@pytest.mark.parametrize("options", [{}, {"packing": True, "packing_strategy": "bfd"}], ids=["padded", "packed"])
def test_trl_fine_tunes_as_on_a_stock_llama(options, llama, tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    found = []
    for model in both(llama):
        torch.manual_seed(0)
        config = trl.SFTConfig(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=4, max_length=64, learning_rate=1e-3,
            logging_steps=1, report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, **options,
        )  # fmt: skip
        trainer = trl.SFTTrainer(
            model, args=config, train_dataset=datasets.Dataset.from_dict({"text": TEXTS}),
            processing_class=AutoTokenizer.from_pretrained(llama),
        )  # fmt: skip
        trainer.train()
        found.append([(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "loss" in line])
    stock, folded = map(torch.tensor, found)
    assert len(stock) == 3 and stock[2, 0] < stock[0, 0] - 0.3
    torch.testing.assert_close(folded, stock, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("config_class", [CondenseConfig, DepthLlamaConfig])
def test_peft_has_the_defaults_of_a_llama_for_a_folded_one(config_class):
    constants = vars(pytest.importorskip("peft.utils.constants")).values()
    tables = [table for table in constants if isinstance(table, dict) and "llama" in table]
    config_class().to_dict()
    assert len(tables) > 20 and all(table[config_class.model_type] == table["llama"] for table in tables)


@pytest.mark.parametrize("method", ["Lora", "AdaLora", "IA3", "LoHa", "LNTuning", "Vera"])
def test_peft_adapts_the_same_modules_as_of_a_llama(method, llama):
    peft, found = pytest.importorskip("peft"), []
    options = {"total_step": 10} if method == "AdaLora" else {}
    for model in both(llama):
        adapted = peft.get_peft_model(model, getattr(peft, f"{method}Config")(task_type="CAUSAL_LM", **options))
        found.append({name: one.shape for name, one in adapted.named_parameters() if one.requires_grad})
    assert found[0] == found[1] and len(found[1]) > 1


def test_peft_may_be_imported_after_the_model_was_made(new_process):
    """And who does not use it does not import it."""
    pytest.importorskip("peft")
    fields = "hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=9"
    code = f"""
import sys, condense
model = condense.CondenseForCausalLM(condense.CondenseConfig({fields}))
assert model.config.to_dict() and "peft" not in sys.modules
import peft
peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM"))
"""
    done = new_process(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("length", [12, 100])
def test_activated_lora_is_refused(length, llama):
    """PEFT says how many tokens from the end the adapters begin, which no layer of a folded model can count."""
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[7])
    ids = torch.randint(8, 50, (1, length))
    ids[0, 5] = 7
    for model, refused in zip(both(llama), (False, True), strict=True):
        adapted = peft.get_peft_model(model, settings).eval()
        with pytest.raises(ValueError, match="activated LoRA counts") if refused else nullcontext():
            adapted(input_ids=ids)
        adapted.unload()(ids)


def test_peft_adapts_as_on_a_stock_llama(llama):
    """Losses, and gradients of the adapters; then a text of several segments, and the adapters merged."""
    peft = pytest.importorskip("peft")
    ids = torch.randint(5, 50, (2, 60))
    results = []
    for model in both(llama):
        torch.manual_seed(1)
        settings = peft.LoraConfig(target_modules=["q_proj", "k_proj", "up_proj"], r=4, init_lora_weights="gaussian")
        adapted = random_adapters(peft.get_peft_model(model, settings))
        loss = adapted(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        loss.backward()
        gradients = [parameter.grad for name, parameter in adapted.named_parameters() if "lora" in name]
        results.append((loss.detach(), gradients))
    (stock_loss, stock_gradients), (loss, gradients) = results
    torch.testing.assert_close(loss, stock_loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients, stock_gradients, atol=1e-4, rtol=1e-3)
    assert len(gradients) == 2 * 3 * 2 and all(gradient.abs().max() > 0 for gradient in gradients)

    long = torch.randint(5, 50, (1, 300))
    with torch.no_grad():
        before = adapted.double().eval()(long).logits
        merged = adapted.merge_and_unload()
        torch.testing.assert_close(merged(long).logits, before, atol=1e-8, rtol=1e-8)
        tokens = merged.generate(long, max_new_tokens=3, do_sample=False)
    assert type(merged) is CondenseForCausalLM and tokens.shape == (1, 303)
