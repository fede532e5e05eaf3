"""Schedules and attentions are timed in turn, and the choices that "auto" is said to make are those that run."""

import csv
import json
from dataclasses import replace
from itertools import groupby

import pytest
import torch

from condense.attention import IMPLEMENTATIONS, dispatch
from condense.eval.benchmark import grid
from condense.eval.benchmark import schedules as module
from condense.eval.benchmark.cases import BenchmarkCase
from condense.eval.benchmark.options import ProfileOptions
from condense.eval.benchmark.process import ProcessKilledError
from condense.eval.benchmark.schedule_tables import tables
from condense.eval.benchmark.sources import build, read_models
from condense.eval.benchmark.workloads import WHOLE_TEXT_WORKLOADS, random_ids
from condense.eval.report import write_report
from condense.execution import EXECUTORS

from ...pictures import is_drawn
from ..measuring import command, stop_within

# Of two layers a wavefront saves one launch for each segment after the first: 5 segments are too few for it, 20 enough.
ARGUMENTS = ["--modes", "training", "--lengths", "100,400", "--segment-length", 20, "--repeats", 3]

pytestmark = [pytest.mark.usefixtures("forked_cases"), pytest.mark.process]


@pytest.fixture(scope="module")
def measured(llama, forked_cases, tmp_path_factory):
    output = tmp_path_factory.mktemp("schedules")
    shown = command("profile", "--schedules", "--config", llama, *ARGUMENTS, "--output", output)
    return json.loads((output / "schedules.json").read_text()), shown, output


def spied(monkeypatch, functions) -> list[str]:
    """Returns the names of the functions that are called, as they are called."""
    seen: list[str] = []
    for name, run in dict(functions).items():
        monkeypatch.setitem(functions, name, lambda *args, name=name, run=run: seen.append(name) or run(*args))
    return seen


@pytest.fixture
def ran(monkeypatch):
    return spied(monkeypatch, EXECUTORS)


@pytest.fixture
def attended(monkeypatch):
    return spied(monkeypatch, IMPLEMENTATIONS)


def case_of(mode, length, batch=1, attention="auto"):
    return BenchmarkCase(kind="folded", mode=mode, length=length, batch=batch, segment_length=20, attention=attention)


def model_of(llama, case):
    torch.manual_seed(0)
    (profiled,) = read_models(ProfileOptions(configs=[str(llama)]))
    return build(profiled, case, "float32")


class NoMemory:
    """Measures no memory: `ResidentMemory` would limit the memory of the tests' process."""

    description = "none"
    now = restart = peak = lambda self: 0


def test_points(measured):
    results, _, output = measured
    points = results["points"]
    assert [(point["mode"], point["length"]) for point in points] == [("training", 100), ("training", 400)]
    for point in points:
        assert point["parameters"] == 102_208 and point["dtype"] == "float32" and not point["out_of_memory"]
        for schedule, seconds in point["times"].items():
            low, middle, high = sorted(seconds)
            assert 0 < low == point[f"{schedule}_seconds_low"] and point[f"{schedule}_seconds_high"] == high
            assert point[f"{schedule}_seconds"] == middle
    assert [point["auto"] for point in points] == ["sequential", "wavefront"]
    with (output / "schedules.csv").open() as file:
        seconds = [float(line["wavefront_seconds"]) for line in csv.DictReader(file)]
    assert seconds == [point["wavefront_seconds"] for point in points]


def test_ratios_are_those_of_the_raw_times(measured):
    results, printed, output = measured
    table, attentions = tables(results)
    for one, names, auto in (
        (table, ("sequential", "wavefront"), [point["auto"] for point in results["points"]]),
        (attentions, ("sdpa", "blocked"), ["sdpa", "sdpa"]),
    ):
        right = 0
        for row, point, chosen in zip(one.rows, results["points"], auto, strict=True):
            times = {name: sorted(point["times"][name])[1] for name in names}
            first, second = times.values()
            taken = times[chosen] / min(first, second)
            assert row[:4] == [str(point["length"]), 20, 1, point["mode"]]
            assert row[6:] == [f"{first / second:.2f}", chosen, f"{taken:.2f}"]
            assert row[5].startswith(f"{1000 * second:,.1f} (")
            right += taken <= 1.05
        assert f"within 5% of the best one in {right} of 2 points" in one.title and str(one) in printed
    assert is_drawn(output / "schedules.png") and (output / "schedules.svg").exists()
    page = write_report(output).read_text()
    assert table.title.replace("'", "&#39;") in page and "the rule by which a model chooses" in page


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_stated_choices_of_auto_are_those_that_run(llama, measured, ran, attended, dtype, monkeypatch):
    monkeypatch.setattr(dispatch, "CPU_MULTIPLIES_BFLOAT16", True)
    monkeypatch.setattr(dispatch, "BLOCKED_PRODUCTS", 1)  # the model is tiny
    said = [point["auto"] for point in measured[0]["points"]]
    for mode in WHOLE_TEXT_WORKLOADS:
        for length in (100, 400):
            case = case_of(mode, length)
            model = model_of(llama, case).to(dtype)
            assert model.config.schedule == "auto"
            WHOLE_TEXT_WORKLOADS[mode](model, random_ids(model, 1, length))()
            schedule, taken = module.choices_of_auto(model, case)
            assert ran == [schedule] == [said[length == 400]]
            assert set(attended) == {taken} == {"blocked" if dtype == torch.bfloat16 else "sdpa"}
            ran.clear()
            attended.clear()


def test_all_run_in_turn(llama, ran, attended):
    for mode in WHOLE_TEXT_WORKLOADS:
        case = case_of(mode, 100, batch=2, attention="sdpa")
        compared = module.compare(model_of(llama, case), case, 2, NoMemory())
        # A warm-up and two repeats; then the attentions, under the schedule that auto takes.
        assert ran == ["sequential", "wavefront"] * 3 + ["sequential"] * 6
        assert [name for name, _ in groupby(attended)] == ["sdpa", "blocked"] * 3
        lengths = {name: len(seconds) for name, seconds in compared["times"].items()}
        assert lengths == dict.fromkeys(("sequential", "wavefront", "sdpa", "blocked"), 2)
        ran.clear()
        attended.clear()


def test_blocked_attention_is_left_out_where_a_model_drops_out(llama):
    case = case_of("training", 100)
    model = model_of(llama, case)
    model.config.attention_dropout = 0.1
    compared = module.compare(model, case, 1, NoMemory())
    assert list(compared["times"]) == ["sequential", "wavefront", "sdpa"]


@pytest.mark.usefixtures("without_pictures")
def test_a_stopped_measurement_resumes(llama, measured, noted):
    before, _, output = measured
    stop_within(output / "schedules.records.jsonl", -1, 50)
    called = noted(grid, "call")
    options = ProfileOptions(configs=[str(llama)], modes=["training"], lengths=[100, 400], segments=[20])
    again = module.schedules(output, options)
    assert len(called) == 1
    assert again["points"][:-1] == before["points"][:-1]
    with pytest.raises(ValueError, match="repeats was 3 and is 5"):
        module.schedules(output, replace(options, modes=None, repeats=5))


@pytest.mark.usefixtures("without_pictures")
def test_out_of_memory_is_a_result(llama, tmp_path, monkeypatch):
    def killed(*given):
        raise ProcessKilledError

    monkeypatch.setattr(grid, "call", killed)
    options = ProfileOptions(configs=[str(llama)], lengths=[100], segments=[20], batches=[1, 2])
    (table,) = tables(module.schedules(tmp_path, options))
    assert [row[4] for row in table.rows] == ["OOM"] * 4 and "in 0 of 0 points" in table.title


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kinds", "folded"], "--schedules compares a folded model with itself: leave out --kinds"),
        (["--checkpointing", "on", "--snapshots"], "leave out --checkpointing, --snapshots"),
        (["--modes", "prefill,decoding"], r"modes=\['decoding'\]: .* choose from training, prefill"),
        (["--segment-length", "0"], "'0' is not a positive whole number"),
    ],
)
def test_mistakes_are_named(llama, tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        command("profile", "--schedules", "--config", llama, "--output", tmp_path, *options)
    assert not list(tmp_path.iterdir())
