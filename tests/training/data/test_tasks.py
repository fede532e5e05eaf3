"""A recipe's documents: how many are read, and which are held out."""

import json
from collections import Counter

import pytest

from condense.training.data import document_task
from condense.training.data.tasks import make_examples
from condense.training.recipe import load_recipe
from condense.training.small_llama import word_tokenizer

from ..recipes import text_data, write_recipe, write_texts
from .conftest import WORDS
from .hub import stream_files

pytestmark = pytest.mark.unit


def documents_of(examples, total_length=8):
    count = examples.num_sequences(total_length)
    sequences = (examples.sequence(n, total_length)[0].input_ids for n in range(count))
    return {tuple(ids[1:3]) for ids in sequences if ids[0] == 1}  # those that begin a document


def test_held_out_documents_are_never_trained_on(recipe):
    tokenizer = word_tokenizer([WORDS])
    training, held_out = make_examples(load_recipe(recipe, ["evaluation.sequences=6"]), tokenizer)
    assert held_out.num_sequences(8) == 6 and len(documents_of(held_out)) == 3
    assert len(documents_of(training)) == 57 and not documents_of(training) & documents_of(held_out)
    assert [held_out.sequence(n, 8)[0].input_ids[1] for n in (0, 6)] == [tokenizer.convert_tokens_to_ids("zero")] * 2
    nothing, none = make_examples(load_recipe(recipe), tokenizer)
    assert none is None and len(documents_of(nothing)) == 60


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


def drawn(examples, count, total_length=8):
    """Tokens by the number of the document that they come from, which has 1,000 tokens, one sequence after another."""
    found = Counter()
    for number in range(count):
        for row in examples.sequence(number, total_length):
            found[row.place // 1_000] += len(row.input_ids)
    return found


@pytest.fixture
def books(tmp_path):
    """A recipe on five files of a long document each: its steps need less than the first one has."""
    for number in range(5):
        (tmp_path / f"book-{number}.txt").write_text(" ".join(WORDS.split()[number : number + 2] * 499))
    data = text_data(tmp_path, "pack", "book-*.txt")
    return write_recipe(tmp_path, "m", [(8, 20)], global_batch=4, data=data)


def test_a_run_draws_from_all_books(books, tmp_path, capsys):
    """And says so; the figures are those of the sequences that it takes, one by one."""
    tokenizer = word_tokenizer([WORDS])
    training, _ = make_examples(load_recipe(books), tokenizer)
    found = drawn(training, 80)
    assert set(found) == set(range(5)) and sum(found.values()) == 640 and max(found.values()) < 200
    line = f"{tmp_path}/book-*.txt: 640 tokens, 100.0% of the run, from 5 of 5 documents with 5,000 tokens"
    assert line in capsys.readouterr().out
    again, _ = make_examples(load_recipe(books), tokenizer)
    assert all(again.sequence(n, 8)[0].place == training.sequence(n, 8)[0].place for n in range(80))
    other, _ = make_examples(load_recipe(books, ["seed=1"]), tokenizer)
    assert drawn(other, 80) != found


def test_how_much_of_each_source_a_run_reads(books, tmp_path, capsys):
    """Of two sources, over an epoch and a half, with documents held out."""
    sources = ", ".join(f"{{files: '{tmp_path}/{name}'}}" for name in ("book-[0-3].txt", "book-4.txt"))
    loaded = load_recipe(books, [f"data.sources=[{sources}]", "steps=140", "evaluation.sequences=3"])
    training, _ = make_examples(loaded, word_tokenizer([WORDS]))
    found = drawn(training, 140 * 4)  # of the documents 0, 4, 1, 2, 3, whose first one is held out
    assert 0 not in found and set(found) == {1, 2, 3, 4}
    first, second = found[2] + found[3] + found[4], found[1]
    printed = capsys.readouterr().out
    assert f"book-[0-3].txt: {first:,} tokens, {first / (first + second):.1%} of the run, from 3 of 3" in printed
    assert f"book-4.txt: {second:,} tokens, {second / (first + second):.1%} of the run, from 1 of 1" in printed
    assert "held out for validation: the first documents, 1\n" in printed


@pytest.mark.parametrize(("least", "expected"), [(0, {0}), (3, {0, 1, 2}), (64, set(range(5)))])
def test_of_the_hub_a_run_draws_from_some_books_at_least(books, tmp_path, monkeypatch, least, expected):
    lines = [{"text": (tmp_path / f"book-{number}.txt").read_text()} for number in range(5)]
    (tmp_path / "books.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    stream_files(monkeypatch, "json", tmp_path / "books.jsonl")
    monkeypatch.setattr(document_task, "LEAST_DOCUMENTS", least)
    training, _ = make_examples(load_recipe(books, ["data.sources=[{hub: a/b}]"]), word_tokenizer([WORDS]))
    assert set(drawn(training, 80)) == expected


def test_validation_draws_from_several_books_of_its_own(books, tmp_path):
    sources = f"evaluation.sources=[{{files: {tmp_path}/book-*.txt}}]"
    _, held_out = make_examples(load_recipe(books, ["evaluation.sequences=40", sources]), word_tokenizer([WORDS]))
    assert set(drawn(held_out, 40)) == set(range(5))


def test_a_run_draws_from_all_files_of_many_documents(tmp_path):
    """Of 100 documents each; the steps need 20 documents."""
    for name in ("a", "b"):
        write_texts(tmp_path / f"{name}.jsonl", ["one two three four five six " * 3] * 100)
    path = write_recipe(tmp_path, "m", [(8, 10)], global_batch=4, data=text_data(tmp_path, files="[ab].jsonl"))
    training, _ = make_examples(load_recipe(path), word_tokenizer([WORDS]))
    documents = [training.sequence(n, 8)[0].place // 20 for n in range(40)]
    assert training.num_sequences(8) == 400 and 10 < sum(document >= 100 for document in documents) < 30
    limited, _ = make_examples(load_recipe(path, ["data.max_documents=7"]), word_tokenizer([WORDS]))
    assert {limited.sequence(n, 8)[0].place // 20 for n in range(40)} == set(range(7))
