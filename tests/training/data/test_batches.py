"""Micro-batches by number: the same on any number of ranks, and no sequence twice."""

import numpy as np
import pytest

from condense.training.data.batches import StageBatches, ValidationBatches, evaluated_sources, source_names
from condense.training.data.examples import Example
from condense.training.recipe import Source, load_recipe

from ..recipes import write_recipe

pytestmark = pytest.mark.unit


class Numbered:
    """Sequence n of length N is n, n, ... and is asked for here as (n, N)."""

    def __init__(self):
        self.asked = []

    def sequence(self, number, total_length):
        self.asked.append((number, total_length))
        return [Example(np.full(total_length, number), np.full(total_length, -100))]


@pytest.mark.parametrize("ranks", [1, 2])
def test_sequences_are_numbered_within_their_length(tmp_path, ranks):
    path = write_recipe(tmp_path, "m", [(4, 1), (6, 2), (4, 2)], global_batch=4, micro_batch=2)
    examples = Numbered()
    batches = StageBatches(load_recipe(path), examples, ranks)
    names = [batches[index]["name"] for index in range(len(batches))]
    stages = [[(n, 4) for n in range(4)], [(n, 6) for n in range(8)], [(n, 4) for n in range(4, 12)]]
    assert examples.asked == [item for stage in stages for item in stage]
    assert names[2] == "sequences 0 to 1 of length 6" and names[6] == "sequences 4 to 5 of length 4"


class Sources:
    """Sequence n is n, n and comes from source n % 2."""

    def sequence(self, number, total_length):
        return [Example(np.array([number, number]), np.array([-100, number]))]

    def source(self, number, total_length):
        return number % 2


def test_validation_has_micro_batches_of_one_source_each():
    two = "data={task: text, fit: cut, sources: [{files: a.txt}, {files: b.txt}]}"
    fields = ["evaluation.sequences=5", "micro_batch=2", two]
    batches = ValidationBatches(load_recipe("passkey_pretrain_1b", fields), Sources())
    rows = [batches[index]["input_ids"][:, 0].tolist() for index in range(len(batches))]
    assert rows == [[0, 2], [4], [1, 3]] and [batches.source(index) for index in range(3)] == [0, 0, 1]


@pytest.mark.parametrize(("recipe", "rows"), [("passkey_finetune_1b", 1), ("passkey_pretrain_1b", 2)])
def test_passkeys_are_validated_one_by_one(recipe, rows):
    fields = ["micro_batch=2", "evaluation.sequences=4"]
    batches = ValidationBatches(load_recipe(recipe, fields), Sources())
    assert [len(batches[index]["input_ids"]) for index in range(len(batches))] == [rows] * (4 // rows)


def test_names_of_sources():
    sources = [
        Source(hub="kmfoda/booksum"),
        Source(hub="abisee/cnn_dailymail", name="3.0.0"),
        Source(files="data/novels/*.txt"),
        Source(files="one/train.jsonl"),
        Source(files="other/train.parquet"),
        Source(files="*.txt"),
    ]
    assert source_names(sources) == ["booksum", "cnn_dailymail", "novels", "train_1", "train_2", "files"]


def test_names_of_sources_are_unique_and_not_empty():
    sources = [Source(files=name) for name in ("x/a.jsonl", "y/a.jsonl", "z/a_1.jsonl", "/*.jsonl")]
    assert source_names(sources) == ["a_2", "a_3", "a_1", "files"]


def test_the_sources_of_the_second_finetuning_have_losses_of_their_own():
    assert evaluated_sources(load_recipe("summarize_finetune_b")) == ["booksum", "cnn_dailymail"]
    assert evaluated_sources(load_recipe("summarize_finetune_a")) == []
    two = "evaluation={sources: [{files: a.txt}, {files: b.txt}]}"
    assert evaluated_sources(load_recipe("passkey_pretrain_1b", [two])) == ["a", "b"]
    assert evaluated_sources(load_recipe("passkey_pretrain_1b", [two, "data.fit=pack", "micro_batch=1"])) == []


def test_zero_3_validates_sequences_one_by_one():
    """The last micro-batch would be smaller than the others, and its rank would gather the head less often."""
    fields = ["micro_batch=2", "evaluation.sequences=3"]
    batches = ValidationBatches(load_recipe("passkey_pretrain_1b", fields), Sources(), equal_lengths=True)
    assert [len(batches[index]["input_ids"]) for index in range(len(batches))] == [1, 1, 1]
