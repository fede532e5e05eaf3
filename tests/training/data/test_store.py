"""Documents are prepared once, also after an interruption, and are the same for all ranks."""

import contextlib
import io
import json
import os
import signal
import time
from functools import partial

import datasets
import numpy as np
import pytest

from condense.training.data import preparation
from condense.training.data.preparation import prepare
from condense.training.data.store import Need, Store, folder_of
from condense.training.data.text import text_encoder
from condense.training.recipe import Source, TextData
from condense.training.small_llama import word_tokenizer

from ..ranks import FORKS
from .stopping import stopped_before_part

WORDS = [f"w{n}" for n in range(50)]
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
    return prepare(folder, data, data.sources, partial(text_encoder, tokenizer, min_tokens), need, False, num_workers)


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
    folders = [
        folder_of(data, data.sources, tokenizer, min_tokens=2),
        folder_of(data, data.sources, other, min_tokens=2),
    ]
    folders.append(folder_of(data, data.sources, tokenizer, min_tokens=3))
    path.write_text(path.read_text() + "\n" + json.dumps({"text": "w1 w2"}))
    folders.append(folder_of(data, data.sources, tokenizer, min_tokens=2))
    assert len(set(folders)) == 4
    tokenizer(["w1", "w1 w2"], padding=True, truncation=True, max_length=5)  # which the tokenizer remembers
    assert folder_of(data, data.sources, tokenizer, min_tokens=2) == folders[-1]


def test_a_stream_goes_on_where_its_preparation_was_stopped(documents, monkeypatch):
    """Parts are bounded by what is read, too; and a stop between two of them loses none and repeats none."""
    path, _ = documents
    lines = [line for line in path.read_text().splitlines() if line != '{"text": ']
    path.write_text("\n".join(lines))  # datasets takes no broken lines
    load = datasets.load_dataset
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_, **__: load("json", data_files=str(path), split="train", streaming=True)
    )
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
    write, written = preparation._write_part, []

    def slowly(path, kept, notes):
        write(path, kept, notes)
        written.append(path.name)
        time.sleep(seconds)

    preparation.PART_TOKENS, preparation._write_part = 500, slowly
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
    assert json.loads((store.folder / "summary.json").read_text()) == json.loads(
        (whole.folder / "summary.json").read_text()
    )


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
