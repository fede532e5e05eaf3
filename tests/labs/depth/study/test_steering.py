"""The experiments on steering and on effort: figures worked by hand, solvers alone and in a batch, the small runs."""

import json
from itertools import chain, product
from math import log

import pandas as pd
import pytest
import torch

from condense.eval.runner import run
from condense.labs.depth.model.block import NotFiniteError
from condense.labs.depth.study import effort, evaluations, probe, steered, steering, steering_measures
from condense.labs.depth.study.experiments import EXPERIMENTS, find_experiment
from condense.labs.depth.study.models import SMALL, block_of, build
from condense.labs.depth.study.options import DepthOptions
from condense.labs.depth.study.readings import accurate


def test_figures_of_a_group():
    """One prompt and two pairs: the first is steered, the second always positive."""
    probabilities = {-1.0: [(0.1, 0.3), (0.4, 0.1)], 0.0: [(0.2, 0.2), (0.3, 0.1)], 1.0: [(0.3, 0.1), (0.4, 0.1)]}
    log_UPN2 = torch.tensor([[pairs] for pairs in probabilities.values()]).log()
    found = steering_measures.figures(log_UPN2, list(probabilities))
    assert found["accuracy"] == 0.75
    assert found["asked"] == pytest.approx((0.3 + 0.4 + 0.3 + 0.1) / 4)
    assert found["shift"] == pytest.approx((2 * log(3) + 0) / 2, rel=1e-5)
    assert found["share"] == pytest.approx([(0.25 + 0.8) / 2, (0.5 + 0.75) / 2, (0.75 + 0.8) / 2])


def test_disturbances():
    """Two dimensions, a word of each cell: the first control moves both dimensions, the second none."""
    signs = list(product((1.0, -1.0), repeat=2))
    log_SPW = torch.zeros(4, 1, 4)
    for number, (first, _) in enumerate(signs):
        log_SPW[number, 0] = torch.tensor([first * a + first * b / 2 for a, b in signs])
    found = steering_measures.disturbances(log_SPW, signs, signs)
    assert found["effects"][0] == pytest.approx([4.0, 2.0], rel=1e-5)
    assert found["effects"][1] == pytest.approx([0.0, 0.0], abs=1e-6)
    assert found["accuracy"] == [[1, 1, 1, 1], [1, 0, 0, 1]]


@pytest.fixture(scope="module")
def lively():
    """Makes a hybrid whose flow moves far, so tokens differ in their steps."""
    model = build("hybrid", SMALL, seed=0).eval().requires_grad_(False)
    block = block_of(model)
    block.alpha.fill_(1.0)
    for name in ("up_proj", "control_proj", "down_proj"):
        getattr(block.field, name).weight.mul_(4)
    return model


@pytest.mark.parametrize(("solver", "tolerance"), [("dopri5", 1e-4), ("adaptive_heun", 1e-2)])
def test_steps_by_token_ignore_the_neighbours(lively, solver, tolerance):
    counted = evaluations.Evaluations(lively, solver)
    starts = evaluations.states_before(lively, [(1, 2, 3), (400, 5), (6, 7, 8, 9)])
    starts[1] = starts[1] * 100  # the same error is relatively smaller
    alone = [counted.by_token(start, 1.0, tolerance) for start in starts]
    assert counted.by_token(torch.cat(starts), 1.0, tolerance) == [*chain(*alone)]
    assert len({*chain(*alone)}) > 1
    found = evaluations.neighbours(counted, starts, tolerance)
    assert found["by_token_changed"] == 0 and found["prompts"] == 9
    assert found["common_changed"] == sum(
        counted.common(start, u, tolerance) != counted.common(torch.cat(starts), u, tolerance)
        for start in starts
        for u in (-1.0, 0.0, 1.0)
    )
    assert found["common_changed"] > 0
    loose, tight = (counted.common(starts[0], 1.0, each) for each in (tolerance, tolerance / 10))
    assert tight > loose
    steps = evaluations.num_steps_of("common", solver, loose)
    assert steps == int(steps) > 1


def test_a_flow_that_is_not_finite_is_no_matter_of_tolerances(lively):
    counted = evaluations.Evaluations(lively, "dopri5")
    (start,) = evaluations.states_before(lively, [(1, 2, 3)])
    with torch.no_grad():
        counted.block.field.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(NotFiniteError, match="values that are not finite"):
        counted.by_token(start, 1.0, 1e-4)


@pytest.mark.parametrize(("solver", "tolerance"), [("dopri5", 1e-6), ("adaptive_heun", 1e-4)])
def test_steps_mean_the_same_in_both_libraries(lively, solver, tolerance):
    """One token is the same problem with common steps and by token; what a library evaluates for a step may differ."""
    counted = evaluations.Evaluations(lively, solver)
    (start,) = evaluations.states_before(lively, [(1,)])
    common = evaluations.num_steps_of("common", solver, counted.common(start, 1.0, tolerance))
    by_token = evaluations.num_steps_of("mean", solver, counted.by_token(start, 1.0, tolerance)[0])
    assert common == int(common) and by_token == int(by_token)
    assert by_token > 5 and common == pytest.approx(by_token, rel=0.2)


def test_the_agreement_of_the_solvers_is_one_of_steps():
    """14 and 19 evaluations are 2 and 17 common steps; 14 and 38 are 2 and 18 by token."""
    sweeps = {"dopri5": {"common": [14], "mean": [14]}, "adaptive_heun": {"common": [19], "mean": [38]}}
    records = [
        {"seed": 0, "prompts": prompts, "labels": "own", "what": solver, "sweep": [sweep]}
        for prompts, (solver, sweep) in product(steered.TRAINED_ON, sweeps.items())
    ]
    lines = effort._lines({"controls": [0.0], "tolerances": [1e-3], "records": records})
    found = effort._scaling(pd.DataFrame(lines))
    columns, rows = found.columns, found.rows
    assert [row[:3] for row in rows[2:]] == [
        [name, "0.001", way] for name in ("one prompt", "many prompts") for way in ("common", "by token, mean")
    ]
    assert rows[2][3:] == rows[4][3:] == ["14.0", "19.0", "2.0", "17.0", "8.50"]
    assert rows[3][3:] == rows[5][3:] == ["14.0", "38.0", "2.0", "18.0", "9.00"]
    paper = dict(zip(columns, rows[0], strict=True))
    assert paper["steps: heun / dopri5"] == "0.85 to 1.15" and paper["NFE: adaptive_heun"] == "-"


def test_the_causes_are_those_of_each_solver():
    """Counts that are 20 - 2 u + 3 |u| by dopri5 at the paper's prompt, and other lines elsewhere."""
    controls = [-2.0, -1.0, 0.0, 1.0, 2.0]
    lines = {"dopri5": {"common": (-2, 3), "others": (1, 2)}, "adaptive_heun": {"common": (5, -4), "others": (-6, 7)}}
    records = [
        {"seed": 0, "prompts": prompts, "labels": labels, "what": solver, "prior": 0.6,
         "sweep": [{way: [20 + slope * u + curvature * abs(u) for u in controls]
                    for way, (slope, curvature) in ways.items()}]}
        for (prompts, labels), (solver, ways) in product(effort.BLOCKS, lines.items())
    ]  # fmt: skip
    lines_of_records = effort._lines({"controls": controls, "tolerances": [1e-3], "records": records})
    found = effort._causes(pd.DataFrame(lines_of_records), records)
    assert len(found.rows) == 4 * 2 * 2
    for row in found.rows:
        line = dict(zip(found.columns, row, strict=True))
        way = "common" if line["counted"] == "paper's prompt, common" else "others"
        slope, curvature = lines[line["solver"]][way]
        assert (line["slope"], line["curvature"]) == (f"{slope:.2f}", f"{curvature:.2f}")


def test_states_on_the_way(lively):
    (start,) = evaluations.states_before(lively, [(1, 2, 3)])
    hidden = lively(torch.tensor([[1, 2, 3]]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(start.float(), hidden[2][0])
    block = accurate(block_of(lively))
    states = evaluations.states_at(block, start, 1.0)
    torch.testing.assert_close(states[0], start)
    state = start
    for number in range(1000):  # Heun's rule by hand
        slope = block.alpha * block.field(0.0, state, torch.ones(1, 1).double())
        ahead = block.alpha * block.field(0.0, state + slope / 1000, torch.ones(1, 1).double())
        state = state + (slope + ahead) / 2000
        if number == 499:
            torch.testing.assert_close(states[1], state, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states[3], state, rtol=1e-4, atol=1e-4)


def test_the_ceiling_of_a_frozen_head(lively):
    """If a head knows two directions, the best state is the token's own row, normalised."""
    model = build("baseline", SMALL, seed=0).requires_grad_(False)
    model.lm_head.weight.zero_()
    row = torch.randn(SMALL.width, generator=torch.Generator().manual_seed(0))
    row = row - row.mean()  # what a LayerNorm can give
    model.lm_head.weight[7], model.lm_head.weight[8] = row, -row
    most = row.norm() * SMALL.width**0.5
    expected = most.exp() / (most.exp() + (-most).exp() + SMALL.vocab_size - 2)
    assert steering_measures.ceiling(model, (7,)) == pytest.approx(float(expected), rel=1e-4)
    model.lm_head.weight.mul_(0.1)
    most = most / 10
    expected = most.exp() / (most.exp() + (-most).exp() + SMALL.vocab_size - 2)
    assert steering_measures.ceiling(model, (7, 8)) == pytest.approx(float(expected) ** 2, rel=1e-4)


def test_effort_is_fitted_by_slope_and_curvature():
    controls = [-2.0, -1.0, 0.0, 1.0, 2.0]
    found = evaluations.fit_effort(controls, [20 - 3 * u + 2 * abs(u) for u in controls])
    assert found == pytest.approx((20, -3, 2))
    assert effort._side(controls, [8, 8, 20, 14, 14], below=True) == 12
    assert effort._side(controls, [8, 8, 20, 14, 14], below=False) == 14


def test_the_probe_minimises_its_loss():
    """The loss is convex: its gradient by hand is zero only at the minimum."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(80, 5, generator=generator, dtype=torch.float64)
    labels = (features[:, 0] + 0.5 * torch.randn(80, generator=generator) > 0).double()
    weight, bias = probe.fit_logistic(features, labels)
    excess = 1 / (1 + torch.exp(-(features @ weight + bias))) - labels
    gradient = features.T @ excess / 80 + probe.PENALTY * weight
    torch.testing.assert_close(gradient, torch.zeros(5).double(), rtol=0, atol=1e-5)
    assert abs(excess.mean()) < 1e-5 and weight[0] > 1


def test_the_probe_is_tested_on_other_examples():
    train, labels = torch.tensor([[-1.0, 3.0], [1.0, 3.0], [-2.0, 3.0], [2.0, 3.0]]), torch.tensor([0, 1, 0, 1])
    test = torch.tensor([[-5.0, 3.0], [5.0, 3.0], [7.0, 3.0], [9.0, 3.0]])
    assert probe.probe_accuracy(train, labels, test, torch.tensor([0, 1, 1, 0])) == 0.75


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Runs both experiments on one seed, with fewer steps of steering."""
    folder = tmp_path_factory.mktemp("steering")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steered, "STEPS", 2)
        for module in (steering, effort):
            patch.setattr(module, "FEW_CONTROLS", [-1.0, 0.0, 1.0])
        for name in ("steering", "effort"):
            experiment = find_experiment(name)(DepthOptions(small=True, seeds=1), folder)
            run(experiment, folder)
        yield folder, patch


@pytest.mark.slow
@pytest.mark.parametrize("name", ["steering", "effort"])
def test_small_runs(name, small):
    folder, patch = small
    experiment = find_experiment(name)
    results = json.loads((folder / f"depth_{name}.json").read_text())
    assert name in EXPERIMENTS and results["kind"] == f"depth_{name}" and results["about"]
    for suffix in ("png", "svg", "csv"):
        assert (folder / f"depth_{name}.{suffix}").stat().st_size > 100
    text = "\n".join(map(str, experiment.tables(results)))
    assert "the paper" in text and "nan" not in text

    def measure(self, item):
        raise AssertionError("a second start measures nothing anew")

    patch.setattr(experiment, "measure", measure)
    again = run(experiment(DepthOptions(small=True, seeds=1), folder), folder)
    assert again["records"] == results["records"]


@pytest.mark.slow
def test_small_steering_measures_every_method(small):
    results = json.loads((small[0] / "depth_steering.json").read_text())
    found = {(record["method"], record["prompts"]) for record in results["records"]}
    expected = {*product(steered.METHODS, ("paper", "many")), *product(("flow", "bias", "film"), ["joint"])}
    assert found == expected | {("unfrozen", "paper"), ("everything", "paper")}
    assert (small[0] / "depth_steering-dimensions.svg").exists()


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steered, "STEPS", 2)
        yield folder


def test_one_steered_model(trained_once):
    experiment = steering.Steering(DepthOptions(small=True), trained_once)
    record = experiment.measure(steering.Run(0, "bias", "many"))
    assert record["text_loss"]["0.0"] == pytest.approx(record["text_loss_before"], abs=1e-6)
    assert record["text_loss"]["1.0"] != record["text_loss_before"]
    at_zero = experiment.controls.index(0.0)
    assert [record[word][at_zero] for word in ("good", "bad")] == pytest.approx(record["before"], rel=1e-4)
    for side, word in enumerate(("good", "bad")):
        assert max(record[word]) < record["ceiling"][side] < 1
    assert list(record["groups"]) == list(steering_measures.GROUPS)
    trained, new = (record["groups"][name]["share"][at_zero] for name in ("trained", "both new"))
    assert trained != new


def test_one_model_with_three_controls(trained_once):
    experiment = steering.Steering(DepthOptions(small=True), trained_once)
    record = experiment.measure(steering.Run(0, "flow", "joint"))
    assert len(record["settings"]) == 8
    for values in record["groups"].values():
        assert [len(row) for row in values["accuracy"]] == [8] * 3
        assert [len(row) for row in values["effects"]] == [3] * 3


def test_one_block_s_effort(trained_once):
    experiment = effort.Effort(DepthOptions(small=True), trained_once)
    record = experiment.measure(effort.Run(0, "many", "own", "dopri5"))
    assert all(values["by_token_changed"] == 0 for values in record["neighbours"])
    assert [len(sweep["common"]) for sweep in record["sweep"]] == [len(experiment.controls)] * 2
    assert 0 < record["prior"] < 1
    probes = experiment.measure(effort.Run(0, "many", "own", "probes"))["probes"]
    lines = probes["sign of u, new prompts"]
    assert [line["tau"] for line in lines] == list(evaluations.TAUS)
    assert lines[0]["accuracy"] == 0.5  # at tau = 0 the control has done nothing
    assert probes["sentiment, new prompts"][0]["accuracy"] > 0.9  # it reads the words
