"""Documents of every format, and broken ones, by file and line."""

import json
import pickle
import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from packaging.requirements import Requirement

from condense.training.data import shards
from condense.training.data.documents import Document, good_documents, make_document, read_documents, used_fields
from condense.training.data.shards import Problem, open_shards
from condense.training.recipe import Source
from condense.utils.files import read_text

from .hub import stream_files

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]


def read(*sources, summaries=False):
    return list(read_documents(sources, summaries))


def write_json_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_formats(tmp_path):
    (tmp_path / "b.txt").write_text("second\nfile")
    (tmp_path / "a.txt").write_text("first file")
    assert read(Source(files=str(tmp_path / "*.txt"))) == [
        Document(str(tmp_path / "a.txt"), "first file"),
        Document(str(tmp_path / "b.txt"), "second\nfile"),
    ]
    lines = write_json_lines(tmp_path / "c.jsonl", [{"text": "x"}, {"text": ["y", "z"]}])
    assert read(Source(files=str(lines))) == [Document(f"{lines}:1", "x"), Document(f"{lines}:2", "y z")]
    rows = tmp_path / "d.parquet"
    pa.parquet.write_table(pa.table({"article": ["n1", "n2"], "highlights": ["h1", "h2"]}), rows)
    cnn = Source(files=str(rows), text="article", summary="highlights")
    assert read(cnn, summaries=True) == [Document(f"{rows}:row 0", "n1", "h1"), Document(f"{rows}:row 1", "n2", "h2")]
    chapters = tmp_path / "e.parquet"
    pa.parquet.write_table(pa.table({"chapter": ["c"], "summary_text": ["s"]}), chapters)
    assert read(Source(files=str(chapters), text="chapter", summary="summary_text"), summaries=True) == [
        Document(f"{chapters}:row 0", "c", "s")
    ]
    titles = write_json_lines(tmp_path / "f.jsonl", [{"source": ["One.", "Two."], "target": ["short", "other"]}])
    assert read(Source(files=str(titles), text="source", summary="target"), summaries=True) == [
        Document(f"{titles}:1", "One. Two.", "short")
    ]


def test_text_files_of_other_systems(tmp_path):
    """A byte order mark is not text, lines end with a line feed, and JSON strings are unchanged."""
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert read(Source(files=str(tmp_path / "a.txt"))) == [Document(str(tmp_path / "a.txt"), "one\ntwo\nthree\n")]
    assert read_text(tmp_path / "a.txt") == "one\ntwo\nthree\n"
    lines = tmp_path / "b.jsonl"
    lines.write_bytes(b'\xef\xbb\xbf{"text": "one\\r\\n\xef\xbb\xbftwo"}\r\n{"text": "three"}\r\n')
    assert read(Source(files=str(lines))) == [
        Document(f"{lines}:1", "one\r\n\ufefftwo"),
        Document(f"{lines}:2", "three"),
    ]


def test_nested_fields(tmp_path):
    records = [
        {"content": {"text": "one", "title": "t"}, "messages": [{"text": "two"}], "meta": {"score": 0.7}},
        {"content.text": "its own name", "content": {"text": "nested"}, "meta": {"score": 0.1}},
        {"content": {"title": "t"}, "meta": {"score": None}},
    ]
    path = write_json_lines(tmp_path / "a.jsonl", records)
    one, own, problem = read(Source(files=str(path), text="content.text"))
    assert (one.text, own.text) == ("one", "its own name")
    assert problem.kind == "missing field" and "there are 'content.title', 'meta.score'" in problem.detail
    first, *_ = read(Source(files=str(path), text="messages.0.text", summary="content.title"), summaries=True)
    assert (first.text, first.summary) == ("two", "t")
    one, problem = read(Source(files=str(path), text="content.text", at_least={"meta.score": 0.5}))
    assert one.text == "one" and problem.kind == "wrong type" and "NoneType" in problem.detail
    with pytest.raises(ValueError, match=r"at_least names 'meta.none', and there are 'content.text'"):
        read(Source(files=str(path), text="content.text", at_least={"meta.none": 0.5}))
    rows = tmp_path / "b.parquet"
    pa.parquet.write_table(pa.table({"content": [{"text": "row"}]}), rows)
    assert read(Source(files=str(rows), text="content.text")) == [Document(f"{rows}:row 0", "row")]


def test_what_is_broken_is_named_by_file_and_line(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(
        b'{"text": "good"}\n'
        b'{"text": "cut\n'
        b'{"text": "\xff bad"}\n'
        b"[1]\n"
        b"\n"
        b'{"texts": "other"}\n'
        b'{"text": null}\n'
        b'{"text": 7}\n'
        b'{"text": "  "}\n'
        b'{"text": "half a pair: \\ud800"}\n'
        b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
        b'{"text": "last"}'
    )
    records = read(Source(files=str(path)))
    assert [record for record in records if isinstance(record, Document)] == [
        Document(f"{path}:1", "good"),
        Document(f"{path}:12", "last"),
    ]
    (null,) = [record for record in records if record[0] == f"{path}:7"]
    assert null.detail == "'text' is null"
    assert [(record.where, record.kind) for record in records if isinstance(record, Problem)] == [
        (f"{path}:2", "broken JSON"),
        (f"{path}:3", "wrong encoding"),
        (f"{path}:4", "no JSON object"),
        (f"{path}:6", "missing field"),
        (f"{path}:7", "missing field"),
        (f"{path}:8", "wrong type"),
        (f"{path}:9", "empty document"),
        (f"{path}:10", "wrong encoding"),
        (f"{path}:11", "broken JSON"),
    ]
    text = tmp_path / "y.txt"
    text.write_bytes(b"fine\nfine\nnot \xe9 fine\n")
    (problem,) = read(Source(files=str(text)))
    assert (problem.where, problem.kind) == (f"{text}:3", "wrong encoding")


def test_a_truncated_parquet_file(tmp_path):
    whole, broken = tmp_path / "a.parquet", tmp_path / "b.parquet"
    table = pa.table({"text": [f"document {n} " + "x" * 200 for n in range(2_000)]})
    pa.parquet.write_table(table, whole, row_group_size=500, compression=None)
    data = bytearray(whole.read_bytes())
    broken.write_bytes(data[: len(data) // 2])
    records = read(Source(files=str(tmp_path / "*.parquet")))
    assert len(records) == 2_001 and isinstance(records[-1], Problem)
    assert (records[-1].where, records[-1].kind) == (f"{broken}:row 0", "unreadable Parquet")
    # Damage in the middle: rows before it are kept, and the row is named.
    damaged = bytearray(data)
    start = len(data) // 2
    damaged[start - 60_000 : start + 60_000] = bytes(120_000)
    broken.write_bytes(damaged)
    records = read(Source(files=str(broken)))
    problems = [record for record in records if isinstance(record, Problem)]
    assert problems and all(str(broken) in problem.where for problem in problems)


def test_a_parquet_file_with_two_columns_of_one_name(tmp_path):
    path = tmp_path / "x.parquet"
    pa.parquet.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), path)
    (problem,) = read(Source(files=str(path)))
    assert problem == (str(path), "unreadable Parquet", "two columns are named 'text'")


def test_a_badly_encoded_row_of_parquet_costs_only_itself(tmp_path):
    path = tmp_path / "x.parquet"
    offsets = pa.py_buffer(np.array([0, 4, 8, 12], dtype=np.int32).tobytes())
    texts = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"goodb\xffadlast")])
    pa.parquet.write_table(pa.table({"text": texts}), path)
    first, problem, last = read(Source(files=str(path)))
    assert (first, last) == (Document(f"{path}:row 0", "good"), Document(f"{path}:row 2", "last"))
    assert (problem.where, problem.kind) == (f"{path}:row 1", "wrong encoding")


def test_memory_holds_a_few_chunks_of_long_documents(tmp_path, monkeypatch):
    """Shards of text files, and chunks of any files, end early if their texts are long."""
    monkeypatch.setattr(shards, "TEXT_BYTES", 100)
    monkeypatch.setattr(shards, "CHUNK_CHARACTERS", 100)
    sizes = [30] * 4 + [250, 10, 60, 40] + [1] * 20
    for number, size in enumerate(sizes):
        (tmp_path / f"{number:02d}.txt").write_text("x" * size)
    write_json_lines(tmp_path / "lines.jsonl", [{"text": "x" * size, "n": 1} for size in sizes])
    opened = open_shards(Source(files=str(tmp_path / "*.txt")), ["text"])
    assert [len(shard.paths) for shard in opened] == [4, 1, 3, 16, 4]
    (lines,) = open_shards(Source(files=str(tmp_path / "lines.jsonl")), ["text"])
    assert [(len(chunk), position) for chunk, position in lines.chunks()] == [(4, 4), (1, 5), (3, 8), (20, 28)]
    texts = [fields["text"] for _, fields in [*rest(lines, 4)]]
    assert list(map(len, texts)) == sizes[4:]


def test_a_file_whose_name_looks_like_a_pattern(tmp_path):
    (tmp_path / "part[1].txt").write_text("text")
    assert [document.text for document in read(Source(files=str(tmp_path / "part[1].txt")))] == ["text"]


def test_a_pattern_that_finds_a_file_several_times(tmp_path):
    for name in ("", "a", "a/b"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "text.txt").write_text(name or "top")
    assert [document.text for document in read(Source(files=f"{tmp_path}/**/**/*.txt"))] == ["a/b", "a", "top"]


@pytest.mark.parametrize(
    ("files", "words"), [("nothing/*.txt", "names no file"), ("{}/a.pdf", r"a.pdf.*read from .txt, .jsonl, .parquet")]
)
def test_files_that_are_none(tmp_path, files, words):
    (tmp_path / "a.pdf").write_text("")
    with pytest.raises(ValueError, match=words):
        read(Source(files=files.format(tmp_path)))


def test_sources_take_turns(tmp_path):
    long = Source(files=str(write_json_lines(tmp_path / "a.jsonl", [{"text": f"a{n}"} for n in range(5)])))
    (tmp_path / "b.txt").write_text("b")
    short = Source(files=str(tmp_path / "b.txt"))
    assert [document.text for document in read(long, short)] == ["a0", "b", "a1", "a2", "a3", "a4"]


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_a_stream_of_the_hub(tmp_path, monkeypatch, kind):
    """The hub's own streaming, on local files; going back to a position by the stream's state."""
    for shard in range(2):
        records = [{"body": f"{shard}-{n}"} for n in range(20)]
        write_json_lines(tmp_path / f"{shard}.json", records)
        pa.parquet.write_table(pa.Table.from_pylist(records), tmp_path / f"{shard}.parquet", row_group_size=7)
    asked = stream_files(monkeypatch, kind, tmp_path / f"*.{kind}")
    source = Source(hub="owner/name", name="small", revision="v1", text="body")
    everything = read(source)
    assert asked == [(("owner/name", "small"), {"split": "train", "revision": "v1", "streaming": True})]
    assert [document.text for document in everything] == [f"{shard}-{n}" for shard in range(2) for n in range(20)]
    assert everything[25].where == "owner/name:shard 1 of 2:row 5"
    records = [record for shard in open_shards(source, ["body"]) for record in rest(shard)]
    assert [fields["body"] for _, fields in records] == [document.text for document in everything]


def rest(shard, position=None):
    return [record for records, _ in shard.chunks(position) for record in records]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hub"])
def test_a_shard_is_read_on_from_each_of_its_positions(tmp_path, monkeypatch, kind):
    """Positions go through JSON, as in a part's notes, and hub shards through a pickle, as to a worker."""
    monkeypatch.setattr(shards, "CHUNK", 7)
    for shard in range(3):
        pa.parquet.write_table(pa.table({"text": [f"{shard}-{n}" for n in range(20)]}), tmp_path / f"{shard}.parquet")
        write_json_lines(tmp_path / f"{shard}.jsonl", [{"text": f"{shard}-{n}"} for n in range(20)])
    source = Source(files=str(tmp_path / f"*.{kind}"))
    if kind == "hub":
        stream_files(monkeypatch, "parquet", tmp_path / "*.parquet")
        source = Source(hub="owner/name")
    opened = open_shards(source, ["text"])
    assert len(opened) == 3
    for number, shard in enumerate(opened):
        everything = rest(pickle.loads(pickle.dumps(shard)))
        assert [fields["text"] for _, fields in everything] == [f"{number}-{n}" for n in range(20)]
        for index, (_, position) in enumerate(shard.chunks()):
            assert (
                rest(open_shards(source, ["text"])[number], json.loads(json.dumps(position)))
                == everything[7 * index + 7 :]
            )


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_a_stream_that_resumes_many_times_delivers_each_row_once(tmp_path, monkeypatch, kind):
    """Each time from a position that a resumed stream has written; `datasets` 5.0.0 begins again at the second."""
    monkeypatch.setattr(shards, "CHUNK", 7)
    rows = [{"text": f"t{n}"} for n in range(40)]
    write_json_lines(tmp_path / "0.json", rows)
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "0.parquet", row_group_size=9)
    stream_files(monkeypatch, kind, tmp_path / f"0.{kind}")
    position, found = None, []
    for _ in range(6):
        (shard,) = open_shards(Source(hub="owner/name"), ["text"])
        chunk, position = next(shard.chunks(position and json.loads(json.dumps(position))))
        found += chunk
    assert [(where, fields["text"]) for where, fields in found] == [(f"owner/name:row {n}", f"t{n}") for n in range(40)]


@pytest.mark.parametrize("extra", ["train", "eval"])
def test_a_version_of_datasets_that_loses_its_place_is_not_allowed(extra):
    lines = tomllib.loads(read_text(ROOT / "pyproject.toml"))["project"]["optional-dependencies"][extra]
    (allowed,) = [Requirement(line).specifier for line in lines if Requirement(line).name == "datasets"]
    assert [version in allowed for version in ("4.0.0", "4.8.5", "5.0.0", "5.0.1", "5.2.0")] == [
        True, True, False, True, True
    ]  # fmt: skip


FAR, ODD = 10**7, pa.timestamp("us", tz="Mars/Phobos")  # a day after the year 9999, and a zone that is none


def unheld_table():
    """Columns and fields that Python can't hold, beside texts; the second text of `torn` is not UTF-8."""
    days = pa.array([FAR] * 3, pa.date32())
    offsets = pa.py_buffer(np.array([0, 4, 8, 12], dtype=np.int32).tobytes())
    torn = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"goodb\xffadlast")])
    columns = {"text": ["a", "b", "c"], "day": days, "zoned": pa.array([0] * 3, ODD), "torn": torn}
    columns["lasted"] = pa.array([2**62] * 3, pa.duration("s"))
    columns["meta"] = pa.StructArray.from_arrays([pa.array(["x", "y", "z"]), days, torn], ["text", "day", "torn"])
    columns["days"] = pa.array(
        [[{"text": text, "day": FAR}] for text in "uvw"], pa.list_(pa.struct({"text": pa.string(), "day": pa.date32()}))
    )
    return pa.table(columns)


@pytest.mark.parametrize("place", ["files", "hub"])
def test_columns_that_nobody_asked_for_are_not_read(tmp_path, monkeypatch, place):
    path = tmp_path / "a.parquet"
    pa.parquet.write_table(unheld_table(), path)
    stream_files(monkeypatch, "parquet", path)
    named = {place: str(path)}
    assert [one.text for one in read(Source(**named))] == ["a", "b", "c"]
    names = "there are 'text', 'day', 'zoned', 'torn', 'lasted', 'meta', 'days'"
    if place == "files":
        missing, *_ = read(Source(**named, text="body"))
        assert missing.kind == "missing field" and names in missing.detail
        assert [one.text for one in read(Source(**named, text="meta.text"))] == ["x", "y", "z"]
        assert [one.text for one in read(Source(**named, text="days.0.text"))] == ["u", "v", "w"]
        for name in ("torn", "meta.torn"):
            good, bad, last = read(Source(**named, text=name))
            assert (good.text, last.text) == ("good", "last")
            assert (bad.kind, bad.where) == ("wrong encoding", f"{path}:row 1")
        for name in ("day", "zoned", "lasted", "meta.day"):
            assert {(one.kind, "not text" in one.detail) for one in read(Source(**named, text=name))} == {
                ("wrong type", True)
            }
    else:
        with pytest.raises(
            ValueError, match=rf"of 'body' it has no field; {names}: name the right one with text=FIELD"
        ):
            read(Source(**named, text="body"))
        for name in ("meta.text", "torn"):  # the stream ends there, so nothing can be skipped
            with pytest.raises(
                ValueError, match=r"a.parquet: one of the rows 0 to 63 can't be read \(.*Copy the data set"
            ):
                read(Source(**named, text=name))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_documents_below_a_lowest_value_are_dropped(tmp_path, kind):
    records = [{"text": f"t{n}", "token_count": n, "score": 5.0 - n} for n in range(5)]
    path = tmp_path / f"x.{kind}"
    if kind == "jsonl":
        write_json_lines(path, records)
    else:
        pa.parquet.write_table(pa.Table.from_pylist(records), path)
    source = Source(files=str(path), at_least={"token_count": 2, "score": 1.5})
    assert [document.text for document in read(source)] == ["t2", "t3"]
    made = [
        make_document(record, source, False)
        for records, _ in open_shards(source, used_fields(source, False))[0].chunks()
        for record in records
    ]
    assert [made[n] for n in (0, 1, 4)] == ["token_count under 2", "token_count under 2", "score under 1.5"]
    with pytest.raises(
        ValueError, match=r"at_least names 'tokens', and there are 'text', 'token_count', 'score': name"
    ):
        read(Source(files=str(path), at_least={"tokens": 2}))


def test_a_value_that_is_no_number(tmp_path):
    path = write_json_lines(tmp_path / "x.jsonl", [{"text": "t", "n": None}, {"text": "t", "n": "7"}])
    problems = read(Source(files=str(path), at_least={"n": 2}))
    assert [(problem.where, problem.kind) for problem in problems] == [
        (f"{path}:1", "wrong type"), (f"{path}:2", "wrong type")
    ]  # fmt: skip


@pytest.mark.parametrize(("field", "key"), [("text", "text"), ("summary", "summary")])
def test_a_missing_field_names_its_key_and_option(tmp_path, field, key):
    record = {"text": "t", "summary": "s"} | {"body": "b"}
    del record[field]
    path = write_json_lines(tmp_path / "x.jsonl", [record])
    (problem,) = read(Source(files=str(path)), summaries=True)
    assert f"'{field}'; there are" in problem.detail and f"{key}=FIELD of the source" in problem.detail
    assert f"--{key}-field" in problem.detail


def test_bad_documents_are_skipped_or_refused():
    one, bad, two = Document("a:1", "x"), Problem("a:2", "broken JSON", "line 2"), Document("a:3", "y")
    skipped = []
    assert list(good_documents([one, bad, two], "skip", skipped.append, "")) == [one, two] and skipped == [bad]
    refusing = good_documents([one, bad, two], "refuse", skipped.append, "--bad-documents skip")
    assert next(refusing) == one
    with pytest.raises(
        ValueError, match=r"a:2: broken JSON \(line 2\). Correct it, or leave .* with --bad-documents skip"
    ):
        next(refusing)
    with pytest.raises(ValueError, match=r"\(line 2\). Correct or remove it"):
        list(good_documents([bad], "refuse", skipped.append, ""))
    assert skipped == [bad]


def test_lowest_values_that_are_missing_or_not_a_number():
    """An absent object is a problem of its record, and NaN reaches no lowest value."""
    source = Source(files="a.jsonl", at_least={"meta.score": 3})
    absent = make_document(("a.jsonl:1", {"text": "t", "meta": None}), source, False)
    assert isinstance(absent, Problem) and absent.kind == "wrong type"
    dropped = make_document(("a.jsonl:2", {"text": "t", "meta": {"score": float("nan")}}), source, False)
    assert dropped == "meta.score under 3"


def test_absent_objects_and_values_of_files_are_skipped(tmp_path):
    """Parquet delivers an absent object as null, and a column of floats has NaN in it."""
    nan = float("nan")
    records = [
        {"text": "kept", "meta": {"score": 4.0}},
        {"text": "no object", "meta": None},
        {"text": "no value", "meta": {"score": None}},
        {"text": "not a number", "meta": {"score": nan}},
        {"text": "kept too", "meta": {"score": 3.0}},
    ]
    rows = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.Table.from_pylist(records), rows)
    lines = write_json_lines(tmp_path / "b.jsonl", records)
    for path, absent in ((rows, [f"{rows}:row 1", f"{rows}:row 2"]), (lines, [f"{lines}:2", f"{lines}:3"])):
        skipped = []
        documents = read_documents([Source(files=str(path), at_least={"meta.score": 3})], False)
        assert [one.text for one in good_documents(documents, "skip", skipped.append)] == ["kept", "kept too"]
        assert [(one.where, one.kind) for one in skipped] == [(where, "wrong type") for where in absent]
