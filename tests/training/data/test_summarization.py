"""Summaries after their documents: the labels, and documents that do not fit."""

import json

import pyarrow as pa
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from condense.training.data.answers import AnswerExamples
from condense.training.data.documents import Document
from condense.training.data.summarization import prompt_frame, prompt_ids, summary_encoder
from condense.training.data.tasks import make_examples
from condense.training.recipe import load_recipe
from condense.training.small_llama import word_tokenizer
from tests.conftest import SHARED

from ..recipes import write_recipe
from .test_text import Documents

pytestmark = pytest.mark.unit

SUMMARY_WORDS = "Summarize this text Summary : - a b c d e f"


def test_summaries_by_hand():
    tokenizer = word_tokenizer([SUMMARY_WORDS])
    encode = summary_encoder(tokenizer, 18, "drop")
    documents = [Document("1", "a b c", "d"), Document("2", "a " * 30, "d"), Document("3", "a", "d " * 30)]
    short, long, impossible = encode(documents)
    tokens = tokenizer.convert_ids_to_tokens(short.input_ids)
    assert " ".join(tokens) == "<s> Summarize this text : a b c - - - - Summary : d </s>"
    assert short.num_given == 14
    assert long == "over 18 tokens" and impossible == "summary too long for 18 tokens"
    _, cut, _ = summary_encoder(tokenizer, 18, "cut")(documents)
    assert tokenizer.convert_ids_to_tokens(cut.input_ids)[5:11] == ["a"] * 5 + ["-"] and len(cut.input_ids) == 18
    before, after = prompt_frame(tokenizer)
    assert short.input_ids[:14].tolist() == [*before, *tokenizer("a b c")["input_ids"], *after]
    assert short.input_ids[:14].tolist() == prompt_ids(tokenizer, "a b c")
    assert (short.remark, cut.remark) == ("", "cut to 18 tokens")


def test_only_the_summary_is_asked_for():
    examples = AnswerExamples(Documents([6, 30, 8], given=4), 0, 3, seed=None)
    assert examples.num_sequences(10) == 2 and examples.left_out(10) == "1 longer documents left out"
    assert examples.left_out(30) == ""
    (example,) = examples.sequence(1, 10)
    assert example.input_ids[0] == 200 and example.labels.tolist() == [-100] * 4 + [204, 205, 206, 207]
    with pytest.raises(ValueError, match="total_length=5"):
        examples.sequence(0, 5)


def examples_of(folder, tokenizer, shorter=100, longest=400, steps=2, too_long="drop", **fields):
    data = {"task": "summarization", "sources": [fields], "too_long": too_long, "bad_documents": "skip"}
    data |= {"prepared": str(folder / "prepared")}
    path = write_recipe(folder, "m", [(shorter, 2), (longest, steps)], global_batch=2, data=data)
    return make_examples(load_recipe(path), tokenizer)[0]


def summary_of(folder):
    (path,) = folder.glob("prepared/*/summary.json")
    return json.loads(path.read_text())


def halves(tokenizer, example):
    """The prompt and what is asked for, as text."""
    asked = example.labels != -100
    first = int(asked.argmax())
    assert asked[first:].all() and (example.labels[first:] == example.input_ids[first:]).all()
    return tokenizer.decode(example.input_ids[:first]), tokenizer.decode(example.input_ids[first:])


@pytest.mark.parametrize(("text", "summary"), [("article", "highlights"), ("chapter", "summary_text")])
def test_parquet_as_cnn_dailymail_and_booksum_have_it(tmp_path, text, summary):
    columns = {text: [f"a {'b ' * n}" for n in range(6)], summary: ["c", "d", None, "e", "", "f"], "id": list(range(6))}
    pa.parquet.write_table(pa.table(columns), tmp_path / "x.parquet")
    tokenizer = word_tokenizer([SUMMARY_WORDS])
    examples = examples_of(tmp_path, tokenizer, files=str(tmp_path / "x.parquet"), text=text, summary=summary)
    pairs = {halves(tokenizer, examples.sequence(n, 100)[0]) for n in range(examples.num_sequences(100))}
    frame = "<s> Summarize this text : {} - - - - Summary :"
    assert pairs == {(frame.format(" ".join("a" + "b" * n)), f"{summary} </s>") for n, summary in
                     ((0, "c"), (1, "d"), (3, "e"), (5, "f"))}  # fmt: skip
    counts = summary_of(tmp_path)
    assert counts["kept"] == 4 and counts["missing field"] == 1 and counts["empty document"] == 1


def test_cut_and_dropped_documents_are_counted(tmp_path):
    path = tmp_path / "x.jsonl"
    records = [("a", "d"), ("a " * 200, "d"), ("a " * 150, "d"), ("a", "d " * 200)]
    path.write_text("".join(json.dumps({"text": text, "summary": summary}) + "\n" for text, summary in records))
    fields = {"files": str(path), "text": "text", "summary": "summary", "longest": 120}
    tokenizer = word_tokenizer([SUMMARY_WORDS])
    for name in ("drop", "cut"):
        (tmp_path / name).mkdir()
    examples_of(tmp_path / "drop", tokenizer, **fields)
    counts = summary_of(tmp_path / "drop")
    assert counts == {
        "read": 4, "kept": 1, "tokens kept": 14, "over 120 tokens": 2, "summary too long for 120 tokens": 1,
    }  # fmt: skip
    examples = examples_of(tmp_path / "cut", tokenizer, too_long="cut", shorter=120, **fields)
    counts = summary_of(tmp_path / "cut")
    assert counts == {
        "read": 4, "kept": 3, "tokens kept": 254, "cut to 120 tokens": 2, "summary too long for 120 tokens": 1,
    }  # fmt: skip
    assert sorted(len(examples.sequence(n, 120)[0].input_ids) for n in range(3)) == [14, 120, 120]


def test_every_summary_of_scitldr(tmp_path, stories):
    """A real tokenizer, and lists of sentences: what stands in the file stands in the examples."""
    path = SHARED / "data" / "scitldr" / "dev.jsonl"
    if not path.exists():
        pytest.skip("needs ../shared/data/scitldr beside the checkout")
    lines = path.read_text(encoding="utf-8").splitlines()[:40]
    (tmp_path / "x.jsonl").write_text("\n".join(lines), encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(stories)
    fields = {"files": str(tmp_path / "x.jsonl"), "text": "source", "summary": "target"}
    fields |= {"shorter": 1_000, "longest": 2_000, "steps": 20}
    examples = examples_of(tmp_path, tokenizer, **fields)
    assert examples.num_sequences(2_000) == 40
    records = [(" ".join(record["source"]), record["target"][0]) for record in map(json.loads, lines)]
    expected = {(tuple(prompt_ids(tokenizer, text)), summary.strip()) for text, summary in records}
    found = set()
    for n in range(40):
        (example,) = examples.sequence(n, 2_000)
        first = int((example.labels != -100).argmax())
        assert (example.labels[first:] == example.input_ids[first:]).all() and example.input_ids[-1] == 2
        summary = tokenizer.decode(example.input_ids[first:-1]).strip()
        found.add((tuple(example.input_ids[:first].tolist()), summary))
    assert found == expected
    # A tokenizer that puts a space before each text it is given puts it before each part of the prompt.
    prompt = tokenizer.decode(prompt_ids(tokenizer, "The cat sat."), skip_special_tokens=True)
    parts = [line.strip() for line in prompt.splitlines()]
    assert parts == "Summarize this text:\nThe cat sat.\n----\nSummary:\n".splitlines()
