"""The sample data: the same for a seed, of the sizes promised, and true to itself."""

import json
import re
from collections import defaultdict
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from condense.training.data.passkey import PasskeyTask
from condense.training.data.tasks import make_examples
from condense.training.facts_data import write_facts_llama
from condense.training.recipe import load_recipe
from condense.training.sample_data import ATTRIBUTES, make_documents, write_sample_data

from ..commands import printed

FILES = [f"{kind}/{split}" for kind in ("text", "summaries") for split in ("train", "validation")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    write_sample_data(folder)
    return folder


def read(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def facts(text):
    """The text's facts about each name, trade, thing and colour, by naive patterns."""
    said = defaultdict(set)
    trade = "|".join(ATTRIBUTES["trade"])
    for pattern in (
        r"(?P<a>\b[A-Z]\w+) (?:comes )?from (?P<b>[A-Z]\w+)",
        rf"(?P<a>\b[A-Z]\w+) (?:is a|was a|the) (?P<b>{trade})\b",
        rf"the (?P<b>{trade}) from \w+, who is (?P<a>\w+)",
        rf"the (?P<a>{trade}) from (?P<b>\w+)",
        r"(?P<a>\b[A-Z]\w+) held the (?P<b>\w+ \w+)",
        r"(?P<a>\b[A-Z]\w+) was a \w+ and had a (?P<b>\w+ \w+)",
        r"from \w+ (?:lost|found|sold|hid|broke|repaired) (?P<a>the) (?P<b>\w+ \w+)",
        r"It is the (?P<a>\w+) of (?P<b>\w+)",
    ):
        for match in re.finditer(pattern, text):
            said[pattern, match["a"]].add(match["b"])
    return said


def test_stories_never_contradict_themselves(folder):
    for name in FILES[:2]:
        for document in read(folder, name):
            text = document["text"]
            assert 100 <= len(text.split()) <= 3_000
            said = facts(text)
            assert all(len(values) == 1 for values in said.values()), said
            for pair in ("from (?P<b>[A-Z]", "had a (?P<b>", "is a|was a"):  # nobody shares what is his own
                values = [value for (pattern, _), values in said.items() if pair in pattern for value in values]
                assert len(set(values)) == len(values) >= 3


def test_stories_come_back_to_early_facts_late(folder):
    later = 0
    for document in read(folder, "text/train"):
        text = document["text"]
        beginning = text[: text.rindex("Once upon a time") + 120]
        rest = text[len(beginning) :]
        known, restated = facts(beginning), facts(rest[len(rest) // 2 :])
        later += sum(values <= known[key] for key, values in restated.items() if "from (?P<b>[A-Z]" in key[0])
    assert later > 400


def test_summaries_restate_the_marked_news(folder):
    for name in FILES[2:]:
        for document in read(folder, name):
            news = re.findall(r"Here is the news: ([^.]+\.)", document["article"])
            assert len(news) == 2 and document["highlights"] == " ".join(news)


def test_files_and_their_counts(folder, tmp_path, capsys):
    import pyarrow.parquet

    write_sample_data(tmp_path)
    printed = capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(folder / "llama")
    for name in FILES:
        documents = read(folder, name)
        tokens = tokenizer([" ".join(document.values()) for document in documents])["input_ids"]
        assert not any(tokenizer.unk_token_id in ids for ids in tokens)
        assert len(documents) == (400 if "train" in name else 40)
        assert f"{name}.jsonl: {len(documents)} documents, {sum(map(len, tokens)):,} tokens\n" in printed
    table = pyarrow.parquet.read_table(folder / "summaries" / "train.parquet")
    assert table.to_pylist() == read(folder, "summaries/train")
    for path in folder.rglob("*.*"):
        assert path.read_bytes() == (tmp_path / path.relative_to(folder)).read_bytes(), path


def test_the_llama_knows_the_passkeys(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "llama")
    assert AutoModelForCausalLM.from_pretrained(folder / "llama").num_parameters() < 1_000_000
    PasskeyTask(tokenizer, num_keys=24)


def test_other_content_is_kept(folder, tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "train.jsonl").write_text("mine")
    with pytest.raises(ValueError, match="train.jsonl exists with different content"):
        write_sample_data(tmp_path)
    assert [path.name for path in tmp_path.rglob("*.*")] == ["train.jsonl"]


@pytest.mark.parametrize("task", [("llama",), ("questions", "--questions", 5)])
def test_commands_keep_a_model_that_is_there(task, tmp_path):
    """Its folder may be that of a trained one."""
    sample = ("sample", task[0], tmp_path, *task[1:], "--width", 8)
    printed(*sample)
    written = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    printed(*sample)
    with pytest.raises(ValueError, match="exists with different content: pass another folder, or delete it"):
        printed(*sample, "--seed", 1)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == written
    with pytest.raises(ValueError, match="config.json can.t be written: Not a directory"):
        printed("sample", task[0], next(tmp_path.rglob("config.json")))


def test_others_can_read_what_was_written(tmp_path):
    tmp_path.chmod(0o775)
    (tmp_path / "new").touch()
    write_facts_llama(tmp_path, width=8)
    assert tmp_path.stat().st_mode & 0o777 == 0o775
    modes = {path.stat().st_mode for path in (tmp_path / "llama").iterdir()}
    assert modes == {(tmp_path / "new").stat().st_mode}


def test_seeds_and_splits_differ():
    first, other = make_documents(0), make_documents(1)
    stories = [document["text"] for made in (first, other) for name in FILES[:2] for document in made[name]]
    assert len(set(stories)) == len(stories)


RECIPES = sorted((Path(__file__).resolve().parents[2] / "training" / "recipes").glob("*_tiny.yaml"))
TINY = [path for path in RECIPES if load_recipe(path).data.task != "questions"]  # which have data of their own


@pytest.mark.parametrize("path", TINY, ids=lambda path: path.name)
def test_the_tiny_recipes_find_their_examples(folder, tmp_path, monkeypatch, path):
    """As they stand, on what `condense sample data runs/sample` makes."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "sample").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(path)
    tokenizer = AutoTokenizer.from_pretrained(folder / "llama")
    training, held_out = make_examples(recipe, tokenizer)
    for stage in recipe.stages:
        assert all(len(training.sequence(number, stage.total_length)) == 1 for number in range(recipe.global_batch))
    assert held_out is not None
