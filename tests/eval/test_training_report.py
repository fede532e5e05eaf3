"""The training page: validation, segments, speed and memory, as pictures and beside them as CSV and JSON."""

import csv
import json
from contextlib import contextmanager

import pytest

from condense.eval import results, training_report
from condense.eval.report import write_report

CPU = [
    {"step": 0, "eval_loss": 3.0, "eval_loss_segment_1": 3.1, "eval_loss_books": 2.9, "eval_passkey_accuracy": 0.25},
    {"step": 5, "loss": 2.5, "grad_norm": float("inf"), "learning_rate": 1e-3, "loss_segment_1": 2.6,
     "loss_segment_2": 2.4, "tokens_per_second": 100.0, "ranks": 2, "peak_resident_bytes": 2**29},
    {"step": 10, "loss": 2.0, "grad_norm": 1.0, "learning_rate": 5e-4, "loss_segment_1": 2.2, "loss_segment_2": 1.8,
     "tokens_per_second": 300.0, "ranks": 2, "peak_resident_bytes": 2**30},
    {"step": 10, "eval_loss": 1.5, "eval_loss_segment_1": 1.6, "eval_loss_books": 1.4, "eval_passkey_accuracy": 0.75},
    {"step": 10, "train_runtime": 3.0},
]  # fmt: skip
GPU = [
    {"step": 1, "loss": 2.0, "learning_rate": 1e-3, "tokens_per_second": 900.0, "peak_cuda_bytes": 3 * 2**30,
     "reserved_cuda_bytes": 4 * 2**30},
]  # fmt: skip


def write_log(folder, lines):
    folder.mkdir(parents=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def drawn(monkeypatch):
    """Returns what the pictures show: by the title of the axes, the curves by their labels."""
    found = {}

    @contextmanager
    def picture(path, **options):
        with results.picture(path, **options) as axes:
            yield axes
            for one in getattr(axes, "flat", axes):
                found[one.get_title()] = {line.get_label(): line.get_xydata().tolist() for line in one.get_lines()}

    monkeypatch.setattr(training_report, "picture", picture)
    return found


def test_everything_that_was_logged_is_drawn(tmp_path, drawn):
    write_log(tmp_path / "cpu", CPU)
    write_log(tmp_path / "gpu", GPU)
    page = write_report(tmp_path).read_text()
    assert page.count("data:image/png;base64,") == 4
    assert drawn["training loss"] == {"cpu": [[5, 2.5], [10, 2.0]], "gpu": [[1, 2.0]]}
    assert drawn["validation loss"] == {"cpu": [[0, 3.0], [10, 1.5]], "cpu: books": [[0, 2.9], [10, 1.4]]}
    assert drawn["right answers in validation"] == {"cpu": [[0, 0.25], [10, 0.75]]}
    assert drawn["cpu: training loss by segment"] == {
        "segment 1": [[5, 2.6], [10, 2.2]], "segment 2": [[5, 2.4], [10, 1.8]],
    }  # fmt: skip
    assert drawn["cpu: validation loss by segment"] == {"segment 1": [[0, 3.1], [10, 1.6]]}
    assert drawn["tokens per second, over all ranks"] == {"cpu": [[5, 100], [10, 300]], "gpu": [[1, 900]]}
    assert drawn["memory of the first rank, the most so far [GiB]"] == {
        "cpu: resident memory of the process (CPU)": [[5, 0.5], [10, 1]],
        "gpu: GPU memory in tensors": [[1, 3]],
        "gpu: GPU memory held by the allocator": [[1, 4]],
    }
    for cell in ("200", "1.00 GiB, resident memory of the process (CPU)", "3.00 GiB, GPU memory in tensors"):
        assert f"<td>{cell}" in page, cell


def test_learning_rates_and_lengths_have_axes_of_their_own(tmp_path, drawn):
    growing = [
        {"step": step, "loss": 2.0, "learning_rate": 1e-4, "segments": segments} for step, segments in ((1, 2), (9, 4))
    ]
    write_log(tmp_path / "gpu", GPU)
    write_log(tmp_path / "grown", growing)
    write_report(tmp_path)
    assert list(drawn["training loss"]) == ["gpu", "grown"] and drawn["learning rate"] == {"gpu": [[1, 1e-3]]}
    assert drawn["length of the text [segments]"] == {"grown": [[1, 2], [9, 4]]}


def test_the_same_numbers_are_beside_the_page(tmp_path):
    write_log(tmp_path / "cpu", CPU)
    write_report(tmp_path)
    lines = json.loads((tmp_path / "training.json").read_text())["lines"]
    assert [line["step"] for line in lines] == [0, 5, 10, 10]
    for line, logged in zip(lines, CPU, strict=False):
        assert line == {"run": "cpu", **logged, **({"grad_norm": None} if logged["step"] == 5 else {})}
    with (tmp_path / "training.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["eval_loss"] for row in rows] == ["3.0", "", "", "1.5"]
    assert [row["peak_resident_bytes"] for row in rows] == ["", str(2**29), str(2**30), ""]


def test_the_report_of_a_single_run_has_its_name(tmp_path, drawn):
    write_log(tmp_path / "mine", GPU)
    assert '<td class="words">mine' in write_report(tmp_path / "mine").read_text()
    assert list(drawn["training loss"]) == ["mine"] and "validation loss" not in drawn
