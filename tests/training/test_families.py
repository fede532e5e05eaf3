"""Folded and stock models of other families under `condense train`: ZeRO-2 against one plain process."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from condense import CondenseForCausalLM
from condense.families import FAMILIES

from .runs import assert_same_training, expected, folded_recipe, run

SHAPE = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 12, "initializer_range": 0.1, "tie_word_embeddings": True}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3"])
def test_a_family_trains_folded_and_stock(name, tmp_path):
    family, stock = FAMILIES[name], tmp_path / "stock"
    rates = {"learning_rate": 2e-2, "final_learning_rate": 1e-3, "warmup_steps": 2}
    fields = {"optimizer": rates, "gradient_checkpointing": True}
    recipe = folded_recipe(tmp_path, (120, 6), global_batch=8, micro_batch=2, **fields)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "start")
    torch.manual_seed(0)
    family.model_class(family.config_class(**SHAPE, vocab_size=len(tokenizer), pad_token_id=0)).save_pretrained(stock)
    tokenizer.save_pretrained(stock)
    CondenseForCausalLM.from_pretrained(stock, segment_length=40).save_pretrained(tmp_path / "start")

    output = tmp_path / "folded"
    run(recipe, output, launcher=True)
    assert_same_training(recipe, output, tolerance=2e-4)
    losses = expected(recipe)[0]
    assert losses[-1] < losses[0] - 0.3
    trained = AutoModelForCausalLM.from_pretrained(output)
    assert type(trained) is CondenseForCausalLM and trained.config.family == name

    # Texts of one segment: the folded model and the stock one train alike.
    whole, _ = run(recipe, tmp_path / "whole", f"model={{source: {stock}, segment_length: 120}}")
    plain, _ = run(recipe, tmp_path / "plain", f"model={{kind: stock, source: {stock}}}")
    assert plain == pytest.approx(whole, abs=1e-4)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "plain")) is family.model_class
