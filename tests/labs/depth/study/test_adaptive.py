"""Evaluations by token: each token's own, the losses of the models themselves, and the verdict on made-up figures."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from condense.eval.runner import run
from condense.labs.depth.model import set_solver
from condense.labs.depth.study import adaptive
from condense.labs.depth.study.adaptive import MODELS, WORTH, Adaptive, verdicts
from condense.labs.depth.study.models import SMALL, block_of
from condense.labs.depth.study.options import DepthOptions
from condense.labs.depth.study.readings import Reading, held_out_texts
from condense.labs.depth.study.tokens import equal_steps, rank_correlation, shuffled_middle

TEXTS = 3


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adaptive")
    experiment = Adaptive(DepthOptions(small=True, seeds=1), folder)
    experiment.size = replace(SMALL, steps=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adaptive, "NUM_TEXTS", TEXTS)
        patch.setattr(adaptive, "TOLERANCES", {"dopri5": (1e-2,), "adaptive_heun": (1e-2, 1e-5)})
        patch.setattr(Adaptive, "draw", lambda *given: None)
        results = run(experiment, folder)
        text = "\n".join(map(str, Adaptive.tables(json.loads(json.dumps(results)))))
    return folder, json.loads((folder / "depth_adaptive.json").read_text()), experiment, text


def test_points_are_those_of_the_model(measured):
    folder, results, experiment, _ = measured
    ids_BT = held_out_texts(experiment.setup, TEXTS)
    for record in results["records"]:
        model = adaptive.pretrain(record["model"], 0, experiment.setup, folder)
        for point in (record["fixed"][3], record["adaptive"][0], record["adaptive"][2]):
            steps = (
                {"steps": point["steps"]} if "steps" in point else dict.fromkeys(("rtol", "atol"), point["tolerance"])
            )
            set_solver(model, point["solver"], **steps)
            losses, taken = [], []
            with torch.no_grad():
                for ids_1T in ids_BT.split(1):  # a token's evaluations do not depend on its neighbours
                    losses.append(model(ids_1T, labels=ids_1T).loss.item())
                    evaluations = torch.as_tensor(block_of(model).function_evaluations).expand(ids_1T.shape)
                    taken += evaluations[0, :-1].tolist()
            assert point["loss"] == pytest.approx(np.mean(losses), rel=1e-6)
            assert point["nfe"] == pytest.approx(np.mean(taken))
            if "counts" in point:
                assert point["counts"] == {str(nfe): taken.count(nfe) for nfe in sorted(set(taken))}


def test_comparisons_are_at_equal_evaluations(measured):
    _, results, _, text = measured
    for record in results["records"]:
        fixed = {(point["solver"], point["steps"]): point for point in record["fixed"]}
        (dopri5, *_) = record["adaptive"]
        assert dopri5["nfe"] == 14 and dopri5["correlation"] is None
        for solver, steps in (("rk4", 3), ("midpoint", None), ("euler", None)):
            against = dopri5["minus_fixed"][solver]
            assert against["nfe"] == (12 if solver == "rk4" else 14)
            if steps:
                assert against["loss"] == dopri5["loss"] - fixed[solver, steps]["loss"]
                assert against["error"] == dopri5["error"] / fixed[solver, steps]["error"]
        assert dopri5["minus_trained"] == dopri5["loss"] - fixed["euler", 4]["loss"]
        heun = record["adaptive"][2]
        assert len(heun["counts"]) > 1 and -1 < heun["correlation"]["correlation"] < 1
        errors = [point["error"] for point in record["fixed"] if point["solver"] == "euler"]
        assert errors == sorted(errors, reverse=True)
    assert "14: 100.0%" in text and "needs 2 seeds" in text


def test_the_csv(measured):
    folder, results, _, _ = measured
    lines = list(csv.DictReader((folder / "depth_adaptive.csv").open()))
    points = [point for record in results["records"] for point in (*record["fixed"], *record["adaptive"])]
    assert [float(line["loss"]) for line in lines] == [point["loss"] for point in points]


@pytest.mark.parametrize(("change", "wanted"), [(-2 * WORTH, True), (-WORTH / 2, False), (2 * WORTH, False)])
def test_when_it_is_worth_it(change, wanted):
    """Against the best fixed solver, by an interval over seeds."""

    def point(tolerance, noise):
        by_solver = {"euler": change - 1 + noise, "midpoint": change + noise, "rk4": change - 0.5 + noise}
        return {
            "solver": "dopri5",
            "tolerance": tolerance,
            "minus_fixed": {solver: {"loss": loss} for solver, loss in by_solver.items()},
        }

    records = [
        {"model": model, "seed": seed, "fixed": [], "adaptive": [point(1e-3, noise), point(1e-4, noise)]}
        for model in MODELS
        for seed, noise in enumerate((-1e-5, 0.0, 1e-5))
    ]
    for verdict in verdicts(records):
        assert verdict["best_fixed"] == "midpoint" and verdict["worth_it"] is wanted
        assert verdict["loss_difference"] == pytest.approx(change)
    assert all(verdict["worth_it"] is None for verdict in verdicts(records[::3]))


def test_steps_that_evaluations_pay_for():
    assert [equal_steps(solver, 14.9) for solver in ("euler", "midpoint", "rk4")] == [14, 7, 3]
    assert equal_steps("rk4", 2) == 1


def test_rank_correlation():
    from scipy.stats import spearmanr

    generator = np.random.default_rng(0)
    taken = generator.integers(2, 5, (40, 50))
    losses = taken + generator.normal(size=(40, 50))
    found = rank_correlation(taken, losses)
    assert found["correlation"] == pytest.approx(spearmanr(taken.flatten(), losses.flatten()).statistic)
    low, high = shuffled_middle([found["shuffled"]])
    assert low < 0 < high < 0.15 < found["correlation"]
    assert rank_correlation(np.full((8, 50), 14), losses) is None


def test_what_the_position_explains_stays_when_shuffled():
    """Both follow the position and nothing else: the correlation lies within the shuffled ones."""
    generator = np.random.default_rng(0)
    taken, losses = (np.arange(50) + 10 * generator.normal(size=(8, 50)) for _ in range(2))
    found = rank_correlation(taken, losses)
    low, high = shuffled_middle([found["shuffled"]])
    assert 0.5 < low < found["correlation"] < high


def test_the_middle_of_shuffled_means():
    """The mean over seeds spreads less than a seed's correlation, by the root of their number."""
    one, *others = np.random.default_rng(0).normal(scale=0.1, size=(4, 5000)).tolist()
    assert shuffled_middle([one]) == pytest.approx((-0.196, 0.196), abs=0.01)
    assert shuffled_middle([one, *others]) == pytest.approx((-0.098, 0.098), abs=0.005)


def test_a_correlation_says_of_how_many_seeds(measured):
    _, results, _, text = measured
    records = [record | {"seed": seed} for record in results["records"] for seed in (0, 1)]
    changed = [json.loads(json.dumps(record)) for record in records]
    for record in changed:
        for point in record["adaptive"]:
            if record["seed"]:
                point["correlation"] = None
    effort = Adaptive.tables(results | {"records": changed, "verdicts": verdicts(changed)})[1]
    heun = [row for row in effort.rows if row[1] == "adaptive_heun" and row[2] == "1e-05"]
    assert [row[-1] for row in heun] == ["1 of 2"] * len(MODELS) and all(row[4] != "-" for row in heun)
    dopri5 = effort.rows[0]
    assert dopri5[4:] == ["-", "-", "0 of 2"] and "0 of 1" in text


def test_errors_are_in_float64(measured):
    """Below what float32 rounds to, as torchdiffeq finds them."""
    from torchdiffeq import odeint

    folder, results, experiment, _ = measured
    model = adaptive.pretrain("hybrid", 0, experiment.setup, folder)
    block, ids_BT = block_of(model), held_out_texts(experiment.setup, TEXTS)
    with torch.no_grad():
        start = model(ids_BT, output_hidden_states=True).hidden_states[SMALL.replaced[0]].double()
        block = block.double()
        control = torch.zeros(1, 1, dtype=torch.float64)

        def end(steps):
            taus, field = torch.linspace(0, 1, steps + 1).double(), block.field
            return odeint(lambda tau, h: block.alpha * field(tau, h, control), start, taus, method="rk4")[-1]

        exact, own = end(128), end(4)
    (point,) = (at for at in results["records"][0]["fixed"] if (at["solver"], at["steps"]) == ("rk4", 4))
    assert results["records"][0]["model"] == "hybrid" and point["error"] < 2e-8
    assert point["error"] == pytest.approx(((own - exact).norm() / (exact - start).norm()).item(), rel=0.02)


def test_a_constant_field_takes_14():
    """Two evaluations to choose the first step, which is too short for the whole depth, and two steps of six."""
    reading = Reading((lambda tau, state_nD: torch.full_like(state_nD, 0.01),), steps=4, sample_dims=1)
    start_BTD = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0))
    for tolerance in (1e-1, 1e-3, 1e-5):
        end_BTD, evaluations_n = reading.adaptive(start_BTD, "dopri5", tolerance)
        assert evaluations_n.tolist() == [14] * 5
        torch.testing.assert_close(end_BTD, start_BTD + 0.01)
