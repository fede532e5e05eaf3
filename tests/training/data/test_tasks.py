"""A recipe's documents: how many are read, and which are held out."""

import pytest

from condense.training.data.tasks import make_examples
from condense.training.recipe import load_recipe
from condense.training.small_llama import word_tokenizer

from .conftest import WORDS

pytestmark = pytest.mark.unit


def documents_of(examples, total_length=8):
    count = examples.num_sequences(total_length)
    sequences = (examples.sequence(n, total_length)[0].input_ids for n in range(count))
    return {tuple(ids[1:3]) for ids in sequences if ids[0] == 1}  # those that begin a document


def test_held_out_documents_are_never_trained_on(recipe):
    tokenizer = word_tokenizer([WORDS])
    training, held_out = make_examples(load_recipe(recipe, ["evaluation.sequences=6"]), tokenizer)
    assert held_out.num_sequences(8) == 6 and len(documents_of(held_out)) == 3
    # 20 steps of 4 sequences need 40 documents of two sequences each.
    assert len(documents_of(training)) == 40 and not documents_of(training) & documents_of(held_out)
    assert [held_out.sequence(n, 8)[0].input_ids[1] for n in (0, 6)] == [tokenizer.convert_tokens_to_ids("zero")] * 2
    nothing, none = make_examples(load_recipe(recipe), tokenizer)
    assert none is None and len(documents_of(nothing)) == 40


def test_documents_for_the_evaluation(recipe, tmp_path):
    tokenizer = word_tokenizer([WORDS])
    sources = f"evaluation.sources=[{{files: {tmp_path}/other.jsonl}}]"
    _, held_out = make_examples(load_recipe(recipe, ["evaluation.sequences=24", sources]), tokenizer)
    assert held_out.num_sequences(8) == 24
    with pytest.raises(ValueError, match="evaluation.sequences=25, and its documents make only 24"):
        make_examples(load_recipe(recipe, ["evaluation.sequences=25", sources]), tokenizer)
    with pytest.raises(ValueError, match="take all 60 documents.*evaluation.sources"):
        make_examples(load_recipe(recipe, ["evaluation.sequences=200"]), tokenizer)


def test_epochs_are_said(recipe, capsys):
    make_examples(load_recipe(recipe, ["stages.0.steps=60"]), word_tokenizer([WORDS]))
    assert "sequences of 8 tokens: 240 to train on, 120 available: 2.00 epochs" in capsys.readouterr().out
