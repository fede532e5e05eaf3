"""Block diffusion as the objective of a recipe, in the real trainer."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from condense.labs.autoregressivity.model import BlockDiffusionForCausalLM, likelihood_bound
from condense.training.recipe import load_recipe
from condense.training.small_llama import word_tokenizer
from condense.training.train import train
from tests.condense.models import tiny_model
from tests.training.recipes import text_data, write_recipe, write_texts
from tests.training.runs import log_lines, logged


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blocks")
    words = [f"word{n}" for n in range(40)]
    tokenizer = word_tokenizer(words)
    generator = torch.Generator().manual_seed(0)
    texts = [" ".join(words[n] for n in torch.randint(40, (60,), generator=generator)) for _ in range(12)]
    write_texts(folder / "texts.jsonl", texts)
    fields = {"vocab_size": len(tokenizer), "bos_token_id": tokenizer.bos_token_id, "initializer_range": 0.02}
    tiny_model(torch.float32, segment_length=8, **fields).save_pretrained(folder / "start")
    tokenizer.save_pretrained(folder / "start")
    fields = {"objective": {"kind": "block_diffusion", "block_length": 4}, "data": text_data(folder)}
    fields |= {"optimizer": {"learning_rate": 0.01, "warmup_steps": 1}, "checkpoints": {"every": 2, "keep": 1}}
    fields |= {"evaluation": {"sequences": 3, "every": 2}}
    return write_recipe(folder, str(folder / "start"), [(20, 4)], global_batch=4, micro_batch=2, **fields)


def trained(path, name, *overrides):
    recipe = load_recipe(path, [f"output={path.parent / name}", *overrides])
    train(recipe)
    return recipe


def test_blocks_of_one_train_as_next_token_prediction(path):
    ordinary = trained(path, "ordinary", "objective={kind: next_token}")
    blocks = trained(path, "ones", "objective.block_length=1")
    for name in ("loss", "grad_norm", "eval_loss"):
        found, expected = ([line[name] for line in log_lines(recipe.output, name)] for recipe in (blocks, ordinary))
        assert found == pytest.approx(expected, rel=1e-4) and len(found) >= 3


def test_a_run_saves_a_model_that_writes_blocks(path):
    recipe = trained(path, "fours")
    whole = trained(path, "whole", "micro_batch=4")  # other draws in training, but not in validation
    model = AutoModelForCausalLM.from_pretrained(recipe.output)
    assert isinstance(model, BlockDiffusionForCausalLM) and model.config.block_length == 4
    assert model.config.use_cache and model.config.attention_dropout == 0
    lines = logged(recipe.output, "eval_loss")
    assert len(lines) == 3 and lines[-1] < lines[0]
    assert log_lines(whole.output, "eval_loss")[0]["eval_loss"] == pytest.approx(lines[0], rel=1e-5)
    prompt = AutoTokenizer.from_pretrained(recipe.output)("word1 word2 word3", return_tensors="pt").input_ids
    assert model.generate(prompt, max_new_tokens=9, eos_token_id=None).shape[1] == prompt.shape[1] + 9
    ids = torch.randint(1, 40, (2, 20))
    assert likelihood_bound(model, ids, ids).sum() > 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.kind=stock"], "needs a folded model, not model.kind='stock'"),
        (["model.segment_length=6"], "block_length=4 does not divide model.segment_length=6: choose a divisor"),
        (["gradient_checkpointing=true"], "has no gradient checkpointing: set it to false"),
        (["attention=flex_attention"], "has no attention=flex_attention: choose one of auto, eager, sdpa"),
        (["objective.block_length=0"], "greater than or equal to 1"),
        (["data.fit=pack", "micro_batch=1"], "takes texts of one length: set data.fit=cut"),
        (["data={task: passkey, background: 0}"], "those of data.task=passkey differ: set micro_batch=1"),
        (["data={task: passkey}", "micro_batch=1"], "data.background=2 labels single tokens: set it to 0"),
    ],
)
def test_refusals(path, overrides, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(path, overrides)


def test_what_does_not_fit_the_model_is_refused_before_documents_are_read(path):
    recipe = load_recipe(path, ["objective.block_length=3", f"data.prepared={path.parent}/unread"])
    with pytest.raises(ValueError, match="block_length=3 does not divide segment_length=8: choose a divisor"):
        train(recipe)
    assert not (path.parent / "unread").exists()
