"""Documents are prepared once, also after an interruption, and are the same for all ranks."""

import contextlib
import io
import json
import os
import resource
import signal
import time
from functools import partial

import numpy as np
import pytest
from transformers import ByT5Tokenizer

from condense.training.data import preparation
from condense.training.data.preparation import prepare
from condense.training.data.store import Need, Store, folder_of
from condense.training.data.text import text_encoder
from condense.training.recipe import Source, TextData
from condense.training.small_llama import word_tokenizer

from ..ranks import FORKS
from .encoders import WORDS
from .hub import stream_files
from .stopping import stopped_before_part

pytestmark = pytest.mark.process

ALL = Need(lambda lengths: lengths, 10**9)


@pytest.fixture
def documents(tmp_path):
    generator = np.random.default_rng(0)
    texts = [" ".join(generator.choice(WORDS, generator.integers(1, 40))) for _ in range(1_000)]
    path = tmp_path / "documents.jsonl"
    lines = [json.dumps({"text": text}) for text in texts]
    lines[500] = '{"text": '
    path.write_text("\n".join(lines))
    return path, [text for n, text in enumerate(texts) if n != 500]


def data_of(path, **fields):
    return TextData(
        task="text",
        sources=[Source(files=str(path))],
        prepared=path.parent / "prepared",
        bad_documents="skip",
        **fields,
    )


def prepared(data, need=ALL, min_tokens=2, num_workers=0):
    tokenizer = word_tokenizer(WORDS)
    folder = folder_of(data, data.sources, tokenizer, min_tokens=min_tokens)
    return prepare(folder, data, data.sources, partial(text_encoder, tokenizer, min_tokens), need, num_workers)


def contents(store):
    return [store[n].input_ids.tolist() for n in range(len(store))]


def test_what_is_kept_is_the_documents(documents, capsys):
    path, texts = documents
    tokenizer = word_tokenizer(WORDS)
    expected = [tokenizer(text)["input_ids"] for text in texts]
    expected = [[1, *ids, 2] for ids in expected if len(ids) >= 10]
    store = prepared(data_of(path), min_tokens=10)
    assert contents(store) == expected and store.lengths.tolist() == [len(ids) for ids in expected]
    counts = json.loads((store.folder / "summary.json").read_text())
    assert counts["read"] == 1_000 and counts["kept"] == len(expected)
    assert counts["under 10 tokens"] == 999 - len(expected) and counts["broken JSON"] == 1
    assert counts["tokens kept"] == sum(map(len, expected))
    (problem,) = map(json.loads, (store.folder / "problems.jsonl").read_text().splitlines())
    assert problem["where"] == f"{path}:501"
    assert f"{len(expected):,} kept" in capsys.readouterr().out
    assert contents(prepared(data_of(path), min_tokens=10)) == expected  # from disk
    assert capsys.readouterr().out == ""


def test_refusing_names_file_line_and_remedy(documents):
    path, _ = documents
    data = data_of(path).model_copy(update={"bad_documents": "refuse"})
    with pytest.raises(ValueError, match=r"documents.jsonl:501: broken JSON.*bad_documents=skip"):
        prepared(data)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b'{"text": "w1', "broken JSON"),
        (b'{"text": "w1 \xe9"}', "wrong encoding"),
        (b'"w1"', "no JSON object"),
        (b'{"texts": "w1"}', "missing field"),
        (b'{"text": null}', "missing field"),
        (b'{"text": 7}', "wrong type"),
        (b'{"text": [7]}', "wrong type"),
        (b'{"text": ""}', "empty document"),
    ],
)
def test_every_kind_of_problem_refused_and_skipped(tmp_path, line, kind):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "w1 w2"}\n' + line + b'\n{"text": "w3 w4"}\n')
    skipping = data_of(path)
    with pytest.raises(ValueError, match=rf"x.jsonl:2: {kind} .*data.bad_documents=skip"):
        prepared(skipping.model_copy(update={"bad_documents": "refuse"}))
    store = prepared(skipping)
    tokenizer = word_tokenizer(WORDS)
    assert contents(store) == [[1, *tokenizer(text)["input_ids"], 2] for text in ("w1 w2", "w3 w4")]
    (problem,) = map(json.loads, (store.folder / "problems.jsonl").read_text().splitlines())
    assert (problem["where"], problem["kind"]) == (f"{path}:2", kind)
    assert json.loads((store.folder / "summary.json").read_text())[kind] == 1


def test_no_document_left(documents):
    with pytest.raises(ValueError, match="no document is left"):
        prepared(data_of(documents[0]), min_tokens=1_000)


def test_needing_more_goes_on_and_needing_less_is_a_prefix(documents, monkeypatch):
    path, _ = documents
    monkeypatch.setattr(preparation, "PART_TOKENS", 3_000)
    need = Need(np.ones_like, 100)
    some = prepared(data_of(path), need)
    first = contents(some)
    assert 100 <= len(first) < 200 and need.prefix(some.lengths) == 100
    everything = contents(prepared(data_of(path)))
    assert everything[: len(first)] == first and len(everything) > 900
    again = prepared(data_of(path), need)
    assert contents(again) == everything and need.prefix(again.lengths) == 100
    assert len(list(again.folder.glob("part-*.arrow"))) > 4
    limited = prepared(data_of(path, max_documents=70).model_copy(update={"prepared": path.parent / "other"}))
    assert contents(limited) == everything[: len(limited)] and 70 <= len(limited) < 200


def test_the_folder_depends_on_what_decides_the_content(documents):
    path, _ = documents
    tokenizer, other = word_tokenizer(WORDS), word_tokenizer(WORDS[:-1])
    data = data_of(path)
    given = ((tokenizer, 2), (other, 2), (tokenizer, 3))
    folders = [folder_of(data, data.sources, used, min_tokens=least) for used, least in given]
    path.write_text(path.read_text() + "\n" + json.dumps({"text": "w1 w2"}))
    folders.append(folder_of(data, data.sources, tokenizer, min_tokens=2))
    assert len(set(folders)) == 4
    tokenizer(["w1", "w1 w2"], padding=True, truncation=True, max_length=5)  # which the tokenizer remembers
    assert folder_of(data, data.sources, tokenizer, min_tokens=2) == folders[-1]


def test_a_tokenizer_that_is_not_fast(documents):
    path, _ = documents
    data, tokenizer = data_of(path), ByT5Tokenizer()
    folder = folder_of(data, data.sources, tokenizer)
    store = prepare(folder, data, data.sources, partial(text_encoder, tokenizer, 2), Need(lambda lengths: lengths, 1))
    first = json.loads(path.read_text().splitlines()[0])["text"]
    assert tokenizer.decode(store[0].input_ids, skip_special_tokens=True) == first
    assert folder != folder_of(data, data.sources, ByT5Tokenizer(extra_ids=5))


def test_a_stream_goes_on_where_its_preparation_was_stopped(documents, monkeypatch):
    """Parts are bounded by what is read, too; and a stop between two of them loses none and repeats none."""
    path, _ = documents
    lines = [line for line in path.read_text().splitlines() if line != '{"text": ']
    path.write_text("\n".join(lines))  # datasets takes no broken lines
    stream_files(monkeypatch, "json", path)
    monkeypatch.setattr(preparation, "PART_DOCUMENTS", 128)
    data = data_of(path).model_copy(update={"sources": [Source(hub="owner/name")]})
    with stopped_before_part(3):
        prepared(data)
    store = prepared(data)
    assert contents(store) == contents(prepared(data_of(path)))
    assert len(store.parts) == 8 and json.loads((store.folder / "summary.json").read_text())["read"] == 999


def test_killed_before_the_summary_is_written(documents, monkeypatch, capsys):
    path, _ = documents
    whole = prepared(data_of(path))
    summary, problems = (whole.folder / name for name in ("summary.json", "problems.jsonl"))
    expected = summary.read_text(), problems.read_text()
    problems.unlink()
    summary.write_text(expected[0][:20])
    prepared(data_of(path))
    assert (summary.read_text(), problems.read_text()) == expected
    capsys.readouterr()
    prepared(data_of(path))
    assert capsys.readouterr().out == ""


def prepare_slowly(path, seconds, together, results):
    """In a process of its own: sends the parts it has written, what it has printed, and the number of documents."""
    write, written = preparation.write_part_file, []

    def slowly(path, kept, notes):
        write(path, kept, notes)
        written.append(path.name)
        time.sleep(seconds)

    preparation.PART_TOKENS, preparation.write_part_file = 500, slowly
    together.wait()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        count = len(prepared(data_of(path)))
    results.put((written, printed.getvalue(), count))


def start(path, seconds, together):
    """Processes that prepare the documents, from the same moment on, and what each of them sends."""
    results = [FORKS.SimpleQueue() for _ in range(together.parties)]
    processes = [FORKS.Process(target=prepare_slowly, args=(path, seconds, together, queue)) for queue in results]
    for process in processes:
        process.start()
    return processes, results


def test_a_killed_preparation_goes_on_with_the_same_documents(documents):
    path, _ = documents
    alone = FORKS.Barrier(1)
    (process,), _ = start(path, 0.1, alone)
    prepared_folder = path.parent / "prepared"
    deadline = time.monotonic() + 60
    while len(list(prepared_folder.glob("*/part-*.arrow"))) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    (folder,) = prepared_folder.iterdir()
    (folder / "part-00099.partial").write_text("half a part")  # of the moment it was killed
    done = len(Store(folder))
    assert 0 < done < 900
    store = prepared(data_of(path))
    whole = prepared(data_of(path).model_copy(update={"prepared": path.parent / "whole"}))
    assert contents(store) == contents(whole)
    assert (store.folder / "problems.jsonl").read_text() == (whole.folder / "problems.jsonl").read_text()
    first, second = (json.loads((each.folder / "summary.json").read_text()) for each in (store, whole))
    assert first == second


def test_two_processes_prepare_once(documents):
    path, _ = documents
    together = FORKS.Barrier(2)
    processes, results = start(path, 0.02, together)
    for process in processes:
        process.join()
    assert all(process.exitcode == 0 for process in processes)
    (first, second), printed, counts = zip(*(queue.get() for queue in results), strict=True)
    assert sum("documents read" in text for text in printed) == 1
    assert len([*first, *second]) == len({*first, *second}) > 10
    (folder,) = (path.parent / "prepared").iterdir()
    assert len(Store(folder)) == counts[0] == counts[1]


def several(tmp_path, files, **fields):
    """Returns data of several sources, given by the lines of their files."""
    sources = []
    for name, lines in files.items():
        (tmp_path / name).write_text("\n".join(lines))
        sources.append(Source(files=str(tmp_path / name)))
    return TextData(task="text", sources=sources, prepared=tmp_path / "prepared", bad_documents="skip", **fields)


GOOD, BAD = json.dumps({"text": "w1 w2 w3"}), json.dumps({"txt": "w1 w2 w3"})


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("lines", "need", "words"),
    [
        ([BAD] * 5, ALL, "of 5 read none is kept .5 missing field.*problems.jsonl"),
        ([], ALL, "it is empty"),
        ([json.dumps({"text": "w1"})] * 3, ALL, "3 under 2 tokens"),
        ([BAD] * 900, Need(lambda lengths: lengths, 100), "missing field"),  # the others would be enough
    ],
)
def test_a_source_that_yields_nothing_is_refused(tmp_path, lines, need, words, num_workers):
    data = several(tmp_path, {"good.jsonl": [GOOD] * 900, "other.jsonl": lines})
    for _ in range(2):  # and when it is started again
        with pytest.raises(ValueError, match=f"source .*other.jsonl gives no document.*{words}"):
            prepared(data, need, num_workers=num_workers)


def test_documents_are_counted_by_source(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(preparation, "PART_DOCUMENTS", 64)
    files = {"a.jsonl": [GOOD] * 100 + [BAD] * 3, "b.jsonl": [BAD] * 20 + [GOOD] * 60 + [json.dumps({"text": "w1"})]}
    data = several(tmp_path, files)
    with stopped_before_part(2):
        prepared(data)
    store = prepared(data)
    a, b = json.loads((store.folder / "summary.json").read_text())["sources"].values()
    assert a == {"kept": 100, "missing field": 3} and b == {"kept": 60, "missing field": 20, "under 2 tokens": 1}
    assert np.bincount(store.sources).tolist() == [100, 60]
    assert "b.jsonl: 20 missing field, 60 kept, 1 under 2 tokens" in capsys.readouterr().out


def test_a_deleted_part_is_refused_or_prepared_again(documents, monkeypatch):
    path, _ = documents
    monkeypatch.setattr(preparation, "PART_TOKENS", 3_000)
    store = prepared(data_of(path))
    expected, parts = contents(store), sorted(store.folder.glob("part-*.arrow"))
    del store
    assert len(parts) > 4
    parts[-1].unlink()
    assert contents(prepared(data_of(path))) == expected
    for number in (0, 2):
        saved = parts[number].read_bytes()
        parts[number].unlink()
        with pytest.raises(ValueError, match=f"{parts[number]} is missing.*delete the folder"):
            prepared(data_of(path))
        parts[number].write_bytes(saved)
    assert contents(prepared(data_of(path))) == expected


@pytest.mark.parametrize("length", [0, 5, 1_000, -1])
def test_a_truncated_part_is_refused_by_name(documents, monkeypatch, length):
    path, _ = documents
    monkeypatch.setattr(preparation, "PART_TOKENS", 3_000)
    store = prepared(data_of(path))
    expected, parts = contents(store), sorted(store.folder.glob("part-*.arrow"))
    del store
    parts[2].write_bytes(parts[2].read_bytes()[:length])
    with pytest.raises(ValueError, match=f"{parts[2]} is damaged.*delete it and the parts after it"):
        prepared(data_of(path))
    for part in parts[2:]:  # the remedy
        part.unlink()
    assert contents(prepared(data_of(path))) == expected


def check_full(documents, refused):
    """Checks the error of a preparation on a full disk, and that it goes on when there is room again."""
    path, _ = documents
    (folder,) = (path.parent / "prepared").iterdir()
    assert f"{folder} can't be written: File too large. Make room" in refused and "data.prepared" in refused
    assert not list(folder.glob("*.partial"))
    other = data_of(path).model_copy(update={"prepared": path.parent / "other"})
    assert contents(prepared(data_of(path))) == contents(prepared(other))


def test_a_full_disk(documents, monkeypatch):
    """Files may have 8,000 bytes: a write beyond them fails as one to a full disk does."""
    monkeypatch.setattr(preparation, "PART_TOKENS", 3_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, limits[1]))
    try:
        with pytest.raises(ValueError, match="can't be written") as refused:
            prepared(data_of(documents[0]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    check_full(documents, str(refused.value))


@pytest.mark.slow
def test_a_full_disk_of_workers(documents, new_process):
    code = """
import resource, sys
from pathlib import Path
from tests.training.data.test_store import data_of, prepared
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000,) * 2)
try:
    prepared(data_of(Path(sys.argv[1])), num_workers=2)
except ValueError as error:
    print("REFUSED", error)
"""
    run = new_process(code, documents[0])
    assert run.returncode == 0, run.stderr
    check_full(documents, *[line for line in run.stdout.splitlines() if line.startswith("REFUSED")])
