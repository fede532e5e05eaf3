"""Worker processes prepare what one process prepares, to the byte, whatever happens to them."""

import json
import shutil
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from condense.training.data import preparation
from condense.training.data.chunks import Reading
from condense.training.data.preparation import prepare
from condense.training.data.shards import open_shards
from condense.training.data.store import Need, Store
from condense.training.data.workers import Needed, Workers
from condense.training.recipe import Source, TextData

from .encoders import WORDS, die, encoder, fail, failing_first, wait_for
from .hub import stream_files
from .stopping import stopped_before_part

pytestmark = pytest.mark.process

ALL = Need(lambda lengths: lengths, 10**9)


@pytest.fixture(scope="module")
def texts():
    """The texts of 400 documents."""
    generator = np.random.default_rng(0)
    return [" ".join(generator.choice(WORDS, generator.integers(1, 40))) for _ in range(400)]


@pytest.fixture
def data(tmp_path, texts, monkeypatch):
    """Two sources: three files of lines and two of rows, with bad documents; and 20 files of one document."""
    monkeypatch.setattr(preparation, "PART_TOKENS", 1_500)
    lines = [json.dumps({"text": text}) for text in texts]
    lines[10], lines[120] = '{"text": ', '{"texts": "w1"}'
    for n in range(3):
        (tmp_path / f"{n}.jsonl").write_text("\n".join(lines[100 * n : 100 * n + 70 + 30 * (n > 0)]))
    for n in range(3, 5):
        rows = texts[40 * n + 180 : 40 * n + 220]
        pa.parquet.write_table(pa.table({"text": rows}), tmp_path / f"{n}.parquet", row_group_size=15)
    (tmp_path / "books").mkdir()
    for n, text in enumerate(texts[380:]):
        (tmp_path / "books" / f"{n:02d}.txt").write_text(text)
    files = [f"{tmp_path}/[0-2].jsonl", f"{tmp_path}/[34].parquet", f"{tmp_path}/books/*.txt"]
    return TextData(
        task="text",
        sources=[Source(files=name) for name in files],
        prepared=tmp_path / "prepared",
        bad_documents="skip",
    )


def prepared(data, folder, num_workers, need=ALL, **options):
    folder.mkdir(exist_ok=True)
    return prepare(folder, data, data.sources, partial(encoder, **options), need, num_workers)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


@pytest.mark.parametrize("num_workers", [1, 3])
def test_the_same_to_the_byte(data, tmp_path, num_workers):
    alone = prepared(data, tmp_path / "alone", 0)
    prepared(data, tmp_path / "workers", num_workers)
    expected = files(alone.folder)
    assert files(tmp_path / "workers") == expected and len([name for name in expected if "part" in name]) > 3
    counts = json.loads(expected["summary.json"])
    assert (counts["read"], counts["broken JSON"], counts["missing field"]) == (270 + 80 + 20, 1, 1)
    assert set(alone.sources) == {0, 1, 2}


def test_the_shards_of_a_hub_data_set(data, tmp_path, monkeypatch):
    stream_files(monkeypatch, "parquet", tmp_path / "*.parquet")
    data = data.model_copy(update={"sources": [Source(hub="owner/name")]})
    prepared(data, tmp_path / "alone", 0)
    prepared(data, tmp_path / "workers", 2)
    assert files(tmp_path / "workers") == files(tmp_path / "alone")


def test_less_than_all_is_a_prefix_and_more_goes_on(data, tmp_path):
    few = Need(np.ones_like, 100)
    store = prepared(data, tmp_path / "workers", 2, need=few)
    assert 100 <= len(store) < 200 and files(store.folder) == files(prepared(data, tmp_path / "few", 0, few).folder)
    prepared(data, tmp_path / "workers", 2)
    prepared(data, tmp_path / "few", 0)
    assert files(tmp_path / "workers") == files(tmp_path / "few")


def test_stopped_preparations_lose_no_chunk(data, tmp_path):
    """Stopped after two parts, with half a chunk at the end of a file: no whole chunk is tokenised again."""
    (tmp_path / "calls").mkdir()
    folder = tmp_path / "workers"
    with stopped_before_part(2):
        prepared(data, folder, 2, calls=tmp_path / "calls")
    assert len(Store(folder).parts) == 2
    chunk_files = list((folder / "unmerged").iterdir())
    assert chunk_files
    with chunk_files[0].open("ab") as file:
        file.write(b"\x10\0\0\0\0\0\0\0half")
    shutil.copytree(folder, tmp_path / "copy")
    for path in (tmp_path / "calls").iterdir():
        path.unlink()
    prepared(data, folder, 3, calls=tmp_path / "calls")
    expected = files(prepared(data, tmp_path / "alone", 0).folder)
    assert files(folder) == expected
    again = [where for path in (tmp_path / "calls").iterdir() for where in path.read_text().splitlines()]
    assert len(again) == len(set(again)) < 330  # of 370
    prepared(data, tmp_path / "copy", 0)  # a run alone resumes, and no file of the workers remains
    assert files(tmp_path / "copy") == expected


def test_a_shard_resumes_in_its_middle(data, tmp_path, texts):
    """Its file holds chunks that are merged already."""
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = data.model_copy(update={"sources": [Source(files=str(tmp_path / "lines.jsonl"))]})
    with stopped_before_part(2):
        prepared(data, tmp_path / "workers", 1)
    assert Store(tmp_path / "workers").notes["positions"][0][1] > 0  # the number of the chunk
    prepared(data, tmp_path / "workers", 1)
    assert files(tmp_path / "workers") == files(prepared(data, tmp_path / "alone", 0).folder)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_document_that_can_not_be_tokenised_is_named(data, tmp_path, num_workers):
    with pytest.raises(RuntimeError, match=r"1.jsonl:41: RuntimeError: too deep"):
        prepared(data, tmp_path / "workers", num_workers, at="1.jsonl:41", action=fail)


def test_a_worker_that_dies_ends_the_preparation_and_names_its_documents(data, tmp_path):
    with pytest.raises(ChildProcessError, match=r"1.jsonl:1 to .*1.jsonl:64: .*exit code -9.*fewer --workers"):
        prepared(data, tmp_path / "workers", 2, at="1.jsonl:41", action=die)
    prepared(data, tmp_path / "workers", 2)
    assert files(tmp_path / "workers") == files(prepared(data, tmp_path / "alone", 0).folder)


def test_the_first_bad_document_in_order_is_refused(data, tmp_path):
    refusing = data.model_copy(update={"bad_documents": "refuse"})
    with pytest.raises(ValueError, match=r"0.jsonl:11: broken JSON.*data.bad_documents=skip"):
        prepared(refusing, tmp_path / "workers", 3)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_a_source_drops_is_counted_and_never_tokenised(tmp_path, num_workers):
    """Nothing of the first chunk is kept."""
    (tmp_path / "calls").mkdir()
    (tmp_path / "x.jsonl").write_text("".join(f'{{"text": "w1 w2 w3", "n": {n}}}\n' for n in range(100)))
    source = Source(files=str(tmp_path / "x.jsonl"), at_least={"n": 90})
    data = TextData(task="text", sources=[source], prepared=tmp_path, bad_documents="skip")
    store = prepared(data, tmp_path / "folder", num_workers, calls=tmp_path / "calls")
    (calls,) = (tmp_path / "calls").iterdir()
    assert len(store) == len(calls.read_text().splitlines()) == 10
    counts = json.loads((store.folder / "summary.json").read_text())
    assert (counts["read"], counts["n under 90"]) == (100, 90)
    wrong = data.model_copy(update={"sources": [Source(files=str(tmp_path / "x.jsonl"), at_least={"tokens": 90})]})
    with pytest.raises(ValueError, match=r"x.jsonl:1: at_least names 'tokens'"):
        prepared(wrong, tmp_path / "wrong", 0)


def test_a_run_that_prepares_says_for_how_long(data, tmp_path, monkeypatch, capsys):
    """By a clock of one second a chunk: 64 documents read, of 640 needed."""
    (tmp_path / "lines.jsonl").write_text('{"text": "w1 w2 w3"}\n' * 1_000)
    data = data.model_copy(update={"sources": [Source(files=str(tmp_path / "lines.jsonl"))]})
    seconds = iter(range(10**6))
    monkeypatch.setattr(preparation.time, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(preparation, "ESTIMATE_AFTER_S", 1)
    need = Need(np.ones_like, 640, "documents")
    prepared(data, tmp_path / "alone", 0, need)
    printed = capsys.readouterr().out
    assert "at 64 documents/s this process needs about 00:09 more" in printed and "condense prepare" in printed
    prepared(data, tmp_path / "alone", 0, need)
    assert capsys.readouterr().out == ""
    prepared(data, tmp_path / "workers", 1, need)
    assert "this process needs" not in capsys.readouterr().out


def test_more_workers_than_shards_is_said(data, tmp_path, capsys):
    one = data.model_copy(update={"sources": data.sources[1:2]})
    prepared(one, tmp_path / "workers", 5)
    assert "2 of 5 workers start" in capsys.readouterr().out


@pytest.fixture
def lines(tmp_path):
    """A source of three files of 640 documents of 5 tokens each."""
    for n in range(3):
        (tmp_path / f"{n}.jsonl").write_text('{"text": "w1 w2 w3"}\n' * 640)
    return Source(files=str(tmp_path / "[0-2].jsonl"))


def test_an_error_in_a_shard_that_is_not_needed_ends_nothing(lines, tmp_path, capsys):
    """Its worker fails before any other chunk is there."""
    data = TextData(task="text", sources=[lines], prepared=tmp_path)
    need, make_encode = Need(np.ones_like, 600), partial(failing_first, tmp_path / "failed")
    (tmp_path / "workers").mkdir()
    store = prepare(tmp_path / "workers", data, data.sources, make_encode, need, 2)
    assert "1.jsonl:1: RuntimeError: too deep" in capsys.readouterr().out
    assert files(store.folder) == files(prepared(data, tmp_path / "alone", 0, need).folder)
    with pytest.raises(RuntimeError, match=r"1.jsonl:1: RuntimeError: too deep"):
        prepare(tmp_path / "workers", data, data.sources, make_encode, ALL, 2)
    assert len(Store(tmp_path / "workers")) == 640


def test_workers_read_no_further_than_is_needed(lines, tmp_path):
    """Nothing is merged. 100 documents are in two chunks; a third one follows, and the worker waits in the fourth."""
    readings = [
        Reading(lines, 0, shard, number, with_summaries=False)
        for number, shard in enumerate(open_shards(lines, ["text"]))
    ]
    make_encode = partial(encoder, at="0.jsonl:200", action=partial(wait_for, tmp_path / "go"))
    needed = Needed(Need(np.ones_like, 100), None, 64, [3])
    with Workers(tmp_path, readings, make_encode, 1, needed, lambda *_: None) as workers:
        while workers.written[0, 0] < 3:
            workers._receive()
        (tmp_path / "go").touch()
        while workers.reads:
            workers._receive()
    assert workers.written[0, 0] in (3, 4)  # of 10; the message may come before the fourth chunk
    assert workers.written[0, 1] == workers.written[0, 2] == 0


@pytest.mark.parametrize(("amount", "max_documents"), [(100, None), (10**9, 20)])
def test_a_shard_is_needed_until_those_up_to_it_hold_enough(amount, max_documents):
    needed = Needed(Need(lambda lengths: lengths, amount), max_documents, 64, [3, 1])
    needed.add(0, 1, 64, [5] * 10)
    needed.add(0, 2, 64, [5] * 10)  # 20 documents and 100 tokens: enough up to shard 2
    needed.add(0, 2, 63, [5])
    assert (0, 2) in needed
    needed.add(0, 2, 1, [])
    assert (0, 2) not in needed and (0, 1) in needed and (1, 0) in needed
    needed.add(0, 0, 64, [5] * 10)  # enough up to shard 1, which has not been read after it
    assert (0, 1) in needed
    needed.add(0, 1, 64, [])
    assert (0, 1) not in needed and (0, 0) in needed
