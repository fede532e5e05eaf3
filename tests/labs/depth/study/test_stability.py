"""`condense study depth`: the command, its files, figures of a log worked by hand."""

import csv
import json
import math
from statistics import fmean

import pytest
from typer.testing import CliRunner

from condense.cli import main as cli
from condense.eval.intervals import FISHER, LOG, LOGIT, format_seeds, interval
from condense.eval.report import write_report
from condense.labs.depth.study import stability
from condense.labs.depth.study.experiments import EXPERIMENTS, depth, find_experiment
from condense.labs.depth.study.models import ARMS, SMALL
from condense.labs.depth.study.options import DepthOptions


def condense(*arguments):
    return CliRunner().invoke(cli.app, [str(word) for word in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("depth")
    shown = condense("study", "depth", "stability", "--small", "--seeds", 2, "--output", folder)
    assert shown.exit_code == 0
    return folder, json.loads((folder / "depth_stability.json").read_text()), shown.output


def test_every_model_is_measured(measured):
    folder, results, shown = measured
    assert {(record["arm"], record["seed"]) for record in results["records"]} == {
        (arm, seed) for arm in ARMS for seed in (0, 1)
    }
    for record in results["records"]:
        assert record["loss"] == pytest.approx(fmean(record["log"]["loss"]))  # fewer than 50 steps
        assert record["log"]["loss"][-1] < record["log"]["loss"][0] - 0.8
        assert record["vanishing_steps"] == record["exploding_steps"] == record["not_finite_steps"] == 0
    lines = list(csv.DictReader((folder / "depth_stability.csv").open()))
    assert [float(line["held_out_loss"]) for line in lines] == [r["held_out_loss"] for r in results["records"]]
    assert all((folder / f"depth_stability.{kind}").exists() for kind in ("png", "svg"))
    assert "6.471" in shown and "paired by seed" in shown
    assert f"loss, last {SMALL.steps} steps" in shown and "last 50 steps" not in shown
    arms = [record["arm"] for record in results["records"]][: len(ARMS)]
    assert arms[:5] == ["hybrid", "baseline", "shorter", "twin", "wide_twin"]
    assert "depth_stability" in write_report(folder).read_text()


def test_differences_are_paired(measured):
    _, results, _ = measured
    loss = {(record["arm"], record["seed"]): record["held_out_loss"] for record in results["records"]}
    for twin in ("twin", "wide_twin"):
        found = results["differences"][twin]["held_out_loss"]
        assert found["values"] == [loss["hybrid", seed] - loss[twin, seed] for seed in (0, 1)]
        mean, low, high = interval(found["values"])
        assert found["mean"] == mean and found["low"] == low and found["high"] == high


def test_more_seeds_go_on(measured, monkeypatch):
    folder, results, _ = measured
    monkeypatch.setattr(stability, "pretrain", lambda *given: pytest.fail("was measured"))
    monkeypatch.setattr(stability.Stability, "draw", lambda *given: None)
    again = depth("stability", folder, DepthOptions(small=True, seeds=1))
    assert again["records"] == [record for record in results["records"] if record["seed"] == 0]
    assert again["differences"]["twin"]["loss"]["low"] is None  # one seed has no interval


def test_figures_of_a_log():
    log = {
        "loss": [9.0, *[2.0] * 25, *[4.0] * 25],
        "gradient_norm": [1.0, 1e-7, 200.0, None, *[3.0] * 47],  # two steps vanish, one of them only in the block
        "block_gradient_norm": [0.5, 1e-8, 150.0, None, 1e-9, *[0.5] * 46],
        "alpha": [0.1, *[0.09] * 50, 0.08],
    }
    found = stability.figures(log)
    assert found["loss"] == 3.0
    assert (found["vanishing_steps"], found["exploding_steps"], found["not_finite_steps"]) == (2, 1, 1)
    assert (found["alpha_start"], found["alpha_end"]) == (0.1, 0.08)
    assert found["gradient_norm"] == pytest.approx((1 + 200 + 3 * 47) / 50)


def test_a_run_without_finite_values():
    """A run whose every loss and gradient overflows has a row of dashes, and does not enter the differences."""
    log = {"loss": [None] * 3, "gradient_norm": [None] * 3, "block_gradient_norm": [None] * 3, "alpha": [0.1] * 4}
    broken = stability.figures(log)
    assert broken["loss"] is None and broken["gradient_norm"] is None and broken["not_finite_steps"] == 3
    whole = stability.figures(
        log | {"loss": [2.0] * 3} | dict.fromkeys(("gradient_norm", "block_gradient_norm"), [1.0] * 3)
    )
    common = {"parameters": 9, "block_parameters": 4, "log": log}
    records = [
        {"arm": arm, "seed": seed, "held_out_loss": None if breaks else 3.0, **common, **(broken if breaks else whole)}
        for arm in ARMS
        for seed in (0, 1)
        for breaks in [(arm == "hybrid" and seed == 0) or arm == "twin"]
    ]
    found = stability.differences(records)
    assert found["shorter"]["loss"] == {"values": [None, 0.0], "mean": 0.0, "low": None, "high": None}
    assert found["twin"]["held_out_loss"] == {"values": [None, None], "mean": None, "low": None, "high": None}
    corpus = dict.fromkeys(("text", "held_out", "tokenizer"), "a")
    corpus |= dict.fromkeys(("train_tokens", "held_out_tokens", "tokens_in_use"), 1)
    size = {"steps": 3, "batch": 1, "positions": 1, "vocab_size": 1}
    main, compared = stability.Stability.tables(
        {"corpus": corpus, "size": size, "records": records, "differences": found}
    )
    rows = {row[0]: row for row in main.rows}
    assert rows["twin"][3:7] == ["-"] * 4 and rows["hybrid"][3] == "2.000" and rows["twin"][-1] == 6
    assert ["twin", "-", "-"] in compared.rows


def test_intervals_stay_within_bounds():
    """The scale is the logarithm for ratios, log odds for shares, and Fisher's z for correlations."""
    mean, low, high = interval([1e-4, 1e-3], LOG)
    assert mean == pytest.approx(10**-3.5) and 0 < low < mean < high
    assert [math.log(value) for value in (mean, low, high)] == pytest.approx(interval([math.log(1e-4), math.log(1e-3)]))
    mean, low, high = interval([0.9, 0.99], FISHER)
    z = [math.atanh(0.9), math.atanh(0.99)]
    assert (mean, low, high) == pytest.approx([math.tanh(value) for value in interval(z)]) and -1 < low < high < 1
    mean, low, high = interval([0.9, 0.99], LOGIT)
    odds = [math.log(9), math.log(99)]
    assert [math.log(p / (1 - p)) for p in (mean, low, high)] == pytest.approx(interval(odds)) and 0 < low < high < 1
    assert interval([0.5, 1.0], LOGIT) == (0.75, None, None)
    assert interval([0.0, 2.0], LOG) == (1.0, None, None)  # no logarithm of 0
    assert format_seeds([0.001, 0.002, None], 1, LOG, "%").startswith("0.1% [0.0%, ")


def test_interval():
    """Student's t for two degrees of freedom is 4.3027."""
    mean, low, high = interval([1.0, 2.0, 3.0])
    assert (mean, high - mean, mean - low) == pytest.approx((2.0, 4.3027 / 3**0.5, 4.3027 / 3**0.5), rel=1e-4)


def test_what_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="did you mean 'stability'"):
        find_experiment("stabilty")
    with pytest.raises(ValueError, match="belong together"):
        DepthOptions(text=tmp_path / "a")
    with pytest.raises(ValueError, match="leave out --text"):
        DepthOptions(text=tmp_path / "a", held_out=tmp_path / "b", small=True)
    with pytest.raises(ValueError, match="seeds=0"):
        DepthOptions(seeds=0)
    for name in ("a", "b"):
        (tmp_path / name).write_text("too short")
    short = DepthOptions(text=tmp_path / "a", held_out=tmp_path / "b", tokenizer="text")
    with pytest.raises(ValueError, match="pass more text"):
        depth("stability", tmp_path / "out", short)
    with pytest.raises(ValueError, match="--tokenizer text to work without the hub"):
        depth("stability", tmp_path / "out", DepthOptions())


def test_names_lead_to_experiments():
    assert all(find_experiment(name).kind == f"depth_{name}" for name in EXPERIMENTS)


@pytest.mark.slow
def test_all_experiments_and_their_page(tmp_path):
    shown = condense("study", "depth", "all", "--small", "--seeds", 1, "--output", tmp_path)
    assert shown.exit_code == 0 and "depth_solvers-*.png" in shown.output and "csv, .png" in shown.output
    page = (tmp_path / "report.html").read_text()
    for name in EXPERIMENTS:
        assert f"depth_{name}" in page and list(tmp_path.glob(f"depth_{name}*.svg"))
