"""Conversion of Llama checkpoints to folded models, through the Auto classes, and back."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import condense
from condense import CondenseForCausalLM, to_stock

from ..models import random_ids, tiny_model

pytestmark = pytest.mark.process

LLAMA_3_2 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
LLAMA_3_2 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS = {
    "llama 2": {},
    "llama 3": {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "llama 3.2": {"num_key_value_heads": 2, "rope_parameters": LLAMA_3_2, "tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 16, "num_key_value_heads": 1},
}


def stock_llama(**fields):
    torch.manual_seed(0)
    shape = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3}
    return LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, initializer_range=0.3, **fields)).eval()


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_a_round_trip_keeps_the_logits(variant, tmp_path):
    stock, ids = stock_llama(**VARIANTS[variant]), random_ids(2, 21)
    expected = stock(ids).logits
    stock.save_pretrained(tmp_path / "llama", max_shard_size="10KB")
    assert len(list((tmp_path / "llama").glob("*.safetensors"))) > 1  # sharded

    folded = CondenseForCausalLM.from_pretrained(tmp_path / "llama", segment_length=21)
    assert set(folded.state_dict()) == set(stock.state_dict())
    torch.testing.assert_close(folded(ids).logits, expected, atol=1e-4, rtol=1e-4)

    short = CondenseForCausalLM.from_pretrained(tmp_path / "llama", segment_length=6)
    short.save_pretrained(tmp_path / "folded")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "folded")
    assert type(again) is CondenseForCausalLM and again.config.segment_length == 6
    torch.testing.assert_close(again.state_dict(), short.state_dict(), atol=0, rtol=0)
    # The sink is a single row, whose products are rounded as the alignment of the weights has it.
    torch.testing.assert_close(again(ids).logits, short(ids).logits, atol=1e-4, rtol=1e-4)

    to_stock(again).save_pretrained(tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "llama"
    torch.testing.assert_close(LlamaForCausalLM.from_pretrained(tmp_path / "back")(ids).logits, expected)


@torch.no_grad()
def test_rope_scaling_reaches_the_memory():
    """Memory keys are rotated by Llama-3.2's frequencies, not by the default ones."""
    scaled = tiny_model(rope_parameters=LLAMA_3_2)
    plain = tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    plain.load_state_dict(scaled.state_dict())
    ids = random_ids(1, 13)
    assert not torch.allclose(scaled(ids).logits, plain(ids).logits, atol=1e-3)
    torch.testing.assert_close(scaled.model.rotary_emb.inv_freq.float(), to_stock(scaled).model.rotary_emb.inv_freq)


def test_a_new_process_loads_a_saved_model(new_process, tmp_path):
    model, ids = tiny_model(torch.float32), random_ids(1, 13)
    model.save_pretrained(tmp_path)
    code = (
        "import sys, torch, transformers\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        f"print(type(model).__name__, model(torch.tensor({ids.tolist()})).logits.double().sum().item())"
    )
    done = new_process(code, tmp_path)
    assert done.returncode == 0, done.stderr
    name, total = done.stdout.split()
    assert name == "CondenseForCausalLM"
    assert float(total) == pytest.approx(model(ids).logits.double().sum().item(), abs=1e-3)


@torch.no_grad()
def test_conversion_keeps_bfloat16(tmp_path):
    stock_llama().to(torch.bfloat16).save_pretrained(tmp_path)
    model = CondenseForCausalLM.from_pretrained(tmp_path, segment_length=5, attn_implementation="sdpa")
    assert model.dtype == torch.bfloat16 and to_stock(model).dtype == torch.bfloat16
    assert model(random_ids(2, 13)).logits.isfinite().all()
    assert to_stock(model).model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(to_stock(model)(random_ids(2, 5)).logits, model(random_ids(2, 5)).logits)
    assert model(random_ids(2, 13), labels=random_ids(2, 13)).loss.dtype == torch.float32


def test_public_names():
    assert set(condense.__all__) >= {"CondenseConfig", "CondenseForCausalLM", "FoldedCache"}
