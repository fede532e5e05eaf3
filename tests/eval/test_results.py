"""The files of a measurement: what a spreadsheet reads, and what is written where."""

import csv
import os
import re
import resource
from contextlib import contextmanager

import numpy as np
import pytest
from PIL import Image

from condense.eval.results import DPI, picture, set_log_scale, write_csv, write_results
from condense.eval.results_store import open_results_store
from condense.eval.tasks.answers import Answers
from condense.utils.files import atomic_file

FORMULAS = ('=HYPERLINK("http://x")', "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "\n=1")


def test_names_are_not_formulas_and_numbers_stay_numbers(tmp_path):
    records = [{"model": text, "loss": -1.5, "steps": -3, "gain": "-2.5e-1", "=field": None} for text in FORMULAS]
    write_csv(tmp_path / "a.csv", [*records, {"model": "a=b", "loss": 0.5}])
    with (tmp_path / "a.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["model", "loss", "steps", "gain", "'=field"]
    assert rows[:-1] == [[f"'{text}", "-1.5", "-3", "-2.5e-1", ""] for text in FORMULAS]
    assert rows[-1] == ["a=b", "0.5", "", "", ""]


def draw(path, *_):
    with picture(path):
        pass


@pytest.mark.parametrize("linked", ["passkey.json", "passkey.csv", "passkey.png", "passkey.svg"])
def test_results_are_not_written_through_links(tmp_path, linked):
    other = tmp_path / "other"
    other.write_text("kept")
    (tmp_path / linked).symlink_to(other)
    write = write_results if linked.endswith(("json", "csv")) else draw
    with pytest.raises(ValueError, match=f"{linked} is a link"):
        write(tmp_path / "passkey", {"kind": "passkey"}, [{"model": "a"}])
    store = open_results_store(tmp_path / "passkey.records.jsonl", {})
    with pytest.raises(ValueError, match=f"{linked} is a link"), store:
        pass  # refused before anything is measured
    assert other.read_text() == "kept"


def test_records_are_not_written_through_links(tmp_path):
    other = tmp_path / "other"
    other.write_text("")
    path = tmp_path / "passkey.records.jsonl"
    path.symlink_to(other)
    with pytest.raises(ValueError, match="is a link"), open_results_store(path, {}):
        pass
    assert other.read_text() == ""


@contextmanager
def files_of_at_most(num_bytes):
    """A write beyond them fails as one to a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(
    ("write", "names"),
    [
        (lambda path, size: write_results(path, {"kind": "a" * size}, []), ["a.json"]),
        (lambda path, size: write_csv(path.with_suffix(".csv"), [{"name": "a" * size}]), ["a.csv"]),
        (lambda path, size: draw(path) if size > 100 else (path.with_suffix(".png").write_text("{}")), ["a.png"]),
    ],
)
def test_a_full_disk_is_said_and_leaves_the_former_file(write, names, tmp_path):
    write(tmp_path / "a", 10)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert list(before) == names
    said = f"{tmp_path / names[0]} can't be written: File too large. Make room, and start the same command again."
    with files_of_at_most(1000), pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        write(tmp_path / "a", 2000)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_records_on_a_full_disk_go_on(tmp_path):
    """A record that was cut off is measured again; those before it are kept."""
    path, settings = tmp_path / "a.records.jsonl", {"model": "m"}
    with open_results_store(path, settings) as store:
        store.get({"a": 1}, lambda: {"value": "one"})
        with files_of_at_most(path.stat().st_size + 20), pytest.raises(ValueError, match=r"a\.records\.jsonl can't be"):
            store.get({"a": 2}, lambda: {"value": "two"})
    with open_results_store(path, settings) as store:
        assert {"a": 1} in store and store.get({"a": 2}, lambda: {"value": "again"}) == {"value": "again"}
    with files_of_at_most(20), pytest.raises(ValueError, match=r"a\.records\.jsonl can't be written"):
        open_results_store(path, settings).__enter__()
    assert len(path.read_text().splitlines()) == 3


def test_an_output_that_is_no_file_is_written_itself(tmp_path):
    """Such as /dev/stdout, or a pipe; a link leads to the file that is replaced."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with atomic_file(pipe) as file:
        file.write_text("all of it")
    assert os.read(reader, 100) == b"all of it"
    os.close(reader)
    link.symlink_to(tmp_path / "target")
    with atomic_file(link) as file:
        file.write_text("target")
    assert link.is_symlink() and (tmp_path / "target").read_text() == "target"


def test_logarithmic_axes_have_plain_numbers(tmp_path):
    with picture(tmp_path / "curve") as axes:
        axes.plot([1, 2, 3], [20, 3_000, 4_000_000])
        set_log_scale(axes, "y")
        axes.figure.canvas.draw()
        labels = [label.get_text() for label in axes.get_yticklabels()]
    assert "100,000" in labels and not any("10^" in label or "e" in label for label in labels)


def test_a_palette_looks_like_all_colors(tmp_path, monkeypatch):
    """The reference is the figure as matplotlib saves it."""
    reference = tmp_path / "reference.png"
    with picture(tmp_path / "plot") as panel:
        panel.imshow(np.arange(400).reshape(20, 20))
        for number in range(8):
            panel.plot([0, 19], [number, number + 5], f"C{number}")
        panel.figure.get_layout_engine().execute(panel.figure)
        panel.figure.savefig(reference, dpi=DPI)
    saved = Image.open(tmp_path / "plot.png")
    assert saved.mode == "P" and (tmp_path / "plot.png").stat().st_size < reference.stat().st_size
    found, expected = (np.asarray(image.convert("RGB"), float) for image in (saved, Image.open(reference)))
    assert found.shape == expected.shape and np.abs(found - expected).mean() < 2


def test_long_names_stay_within_a_picture(tmp_path):
    """Titles leave neither the figure nor their columns, and a legend not the figure; short ones keep their size."""
    name = "Llama-3.2-1B-Instruct, folded with segments of 512 tokens and trained on passkeys"
    with picture(tmp_path / "grid", columns=2, figsize=(5, 2)) as panels:
        for panel, title in zip(panels, (name, "short"), strict=True):
            panel.set_title(title, fontsize=10)
            panel.figure.colorbar(panel.imshow(np.eye(2), label=name), ax=panel)
        for label in (name[:45], name[-45:]):
            panel.plot([0, 1], [0, 1], label=label)
        legend = panel.figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    long, short = (panel.title.get_window_extent() for panel in panels)
    assert 0 <= long.x0 < long.x1 <= short.x0 and panel.title.get_fontsize() == 10
    found = legend.get_window_extent()
    assert 0 <= found.x0 < found.x1 <= legend.figure.bbox.width


def test_a_picture_has_room_for_the_names_at_its_bars(tmp_path, recwarn):
    share = {"accuracy": 0.5, "low": 0.2, "high": 0.8, "total": 9}
    cells = [{"model": "short", **share}, {"model": "long " * 20, **share}]
    Answers.draw({"cells": cells}, tmp_path / "answers")
    assert not [str(one.message) for one in recwarn if "constrained_layout" in str(one.message)]
