"""Flows and networks that are not flows under solvers, against closed forms, the models themselves and torchdiffeq."""

import csv
import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from scipy.integrate import solve_ivp
from transformers import GPT2LMHeadModel
from typer.testing import CliRunner

from condense.cli import main as cli
from condense.eval.report import write_report
from condense.eval.runner import run
from condense.labs.depth.study import convergence, solvers
from condense.labs.depth.study.convergence import ORDERS, converge, linear_problem, order
from condense.labs.depth.study.divergence import distances, diverge, logits_difference
from condense.labs.depth.study.models import SMALL, TWINS, block_of, build
from condense.labs.depth.study.options import DepthOptions
from condense.labs.depth.study.readings import (
    Reading,
    accurate,
    held_out_texts,
    input_of,
    output_of,
    read_flow,
    read_layers,
    read_steps,
)
from condense.labs.depth.study.solvers import CRITERIA, SUBJECTS, Solvers, criteria
from tests.pictures import is_drawn

TINY = replace(SMALL, steps=2)


def test_distances_of_vectors():
    end, exact, start = torch.tensor([[3.0, 4.5]]), torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 0.0]])
    wanted = {"to_state": 0.1, "to_displacement": 0.125, "displacement": 0.8}
    assert distances(end, exact, start) == pytest.approx(wanted)


def test_a_field_that_jumps():
    """dh/dtau = 2 a h in the first half of the depth and 2 b h in the second: exp(a + b), which no step may miss."""
    a, b = 0.5, -0.8
    reading = Reading((lambda tau, h: a * h, lambda tau, h: b * h), steps=2, sample_dims=1)
    start = torch.ones(1, 1, 1, dtype=torch.float64)
    assert reading.exact(start).item() == pytest.approx(math.exp(a + b), rel=1e-8)
    network = (1 + a) * (1 + b)
    assert reading.fixed(start, "euler", 2).item() == pytest.approx(network)
    assert reading.fixed(start, "euler", 1).item() == pytest.approx(1 + 2 * a)
    assert reading.fixed(start, "euler", 3).item() == pytest.approx((1 + 2 * a / 3) ** 2 * (1 + 2 * b / 3))


@pytest.fixture(scope="module")
def texts(setup):
    return held_out_texts(setup, 3)


@pytest.mark.parametrize("arm", ["hybrid", "twin", "wide_twin", "baseline"])
def test_own_steps_are_the_model(arm, texts):
    """The reading of a model computes the model's output with the model's own Euler steps."""
    model = accurate(build(arm, SMALL, seed=1))
    first, end = SMALL.replaced
    if arm == "baseline":
        layers = model.transformer.h[first:end]
        module, last, reading = layers[0], layers[-1], read_layers(layers, SMALL.width)
        assert reading.steps == end - first
    else:
        module = last = block_of(model)
        torch.nn.init.normal_(last.alpha, std=3)
        reading = read_steps(last) if arm in TWINS else read_flow(last)
        assert reading.steps == 4
    with torch.no_grad():
        start_BTD = input_of(model, module, texts)
        own_BTD = reading.fixed(start_BTD, "euler", reading.steps)
        wanted_BTV = model(texts).logits
        with output_of(last, own_BTD):
            torch.testing.assert_close(model(texts).logits, wanted_BTV, rtol=1e-9, atol=1e-11)
        with output_of(last, start_BTD):
            assert not torch.allclose(model(texts).logits, wanted_BTV, rtol=1e-3)


def test_a_control_steers_what_is_read():
    block = block_of(accurate(build("hybrid", SMALL, seed=1)))
    start_BTD = torch.randn(2, 3, SMALL.width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.nn.init.normal_(block.field.control_proj.weight, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ends = [read_flow(block, control).fixed(start_BTD, "euler", 4) for control in (-1.0, 1.0)]
        torch.testing.assert_close(ends[0], block(start_BTD, control=torch.tensor([[-1.0], [-1.0]])))
        assert not torch.allclose(ends[0], ends[1])


def test_difference_of_logits():
    own, exact = torch.randn(2, 2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = logits_difference(own + 5, exact)
    log_probabilities = own.log_softmax(-1), exact.log_softmax(-1)
    kl = F.kl_div(*log_probabilities, reduction="sum", log_target=True)
    assert found["kl"] == pytest.approx(kl.item())
    centred = [x - x.mean(-1, keepdim=True) for x in (own, exact)]
    assert found["difference"] == pytest.approx(((centred[0] - centred[1]) ** 2).sum().item())
    assert found["size"] == pytest.approx((centred[1] ** 2).sum().item())


def test_orders_on_a_linear_field(monkeypatch):
    monkeypatch.setattr(convergence, "TOLERANCES", {"dopri5": [1e-2, 1e-5, 1e-8], "adaptive_heun": [1e-1, 1e-3, 1e-5]})
    reading, start_1nD, exact_1nD = linear_problem(seed=0)
    (field,) = reading.pieces
    sample = solve_ivp(
        lambda tau, h: field(tau, torch.tensor(h)).numpy(), (0, 1), start_1nD[0, 0], rtol=1e-11, atol=1e-13
    )
    torch.testing.assert_close(exact_1nD[0, 0], torch.tensor(sample.y[:, -1]), rtol=1e-8, atol=1e-9)
    found = converge(reading, start_1nD, exact_1nD)
    assert {solver: found[solver]["order"] for solver in ORDERS} == pytest.approx(ORDERS, abs=0.1)
    for solver, tolerances in convergence.TOLERANCES.items():
        errors = found[solver]["errors"]
        assert len(errors) == len(tolerances) and errors[-1] < 30 * tolerances[-1] and errors[-1] < errors[0] / 100
        assert found[solver]["evaluations"] == sorted(found[solver]["evaluations"])


def test_a_slope():
    steps = (1, 2, 4, 8, 16, 32)
    assert order(steps, [7 * n**-3 for n in steps]) == pytest.approx(3)
    assert order(steps, [1, 1, *(n**-2 for n in steps[2:])]) == pytest.approx(2)  # the first ones are not fitted
    assert order(steps, [1, 1, 1, 1e-13, 1e-13, 1e-13]) is None  # rounding


def flows_and_others(values):
    return [
        {"name": name, "seed": seed} | dict.fromkeys(CRITERIA, value) for name, value in values for seed in range(2)
    ]


def test_when_a_criterion_separates():
    flows, others = ([name for name, (_, is_flow) in SUBJECTS.items() if is_flow is wanted] for wanted in (True, False))
    records = flows_and_others([*((name, 0.1) for name in flows), *((name, 0.2) for name in others)])
    assert all(found["separates"] and all(found["pair_separates"].values()) for found in criteria(records))
    for record in records:
        if record["name"] == "twin":
            record["to_state"] = 0.05 + 0.15 * record["seed"]
    paper, displacement, _ = criteria(records)
    assert not paper["separates"] and paper["pair_separates"] == {"twin": False, "wide_twin": True}
    assert paper["highest_flow"] == 0.1 and paper["lowest_other"] == 0.05
    assert displacement["separates"]
    alone = criteria([record for record in records if not record["seed"]])
    assert alone[1]["separates"] and set(alone[1]["pair_separates"].values()) == {None}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("solvers")
    experiment = Solvers(DepthOptions(small=True, seeds=1), folder)
    experiment.size = TINY
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solvers, "NUM_TEXTS", 3)
        patch.setattr(solvers, "SMALL_REFERENCE_STEPS", 64)
        patch.setattr(convergence, "TOLERANCES", {"dopri5": [1e-2, 1e-6], "adaptive_heun": [1e-2, 1e-3]})
        patch.setattr(Solvers, "draw", lambda *given: None)
        run(experiment, folder)
    return folder, json.loads((folder / "depth_solvers.json").read_text()), experiment


def test_the_small_experiment(measured):
    folder, results, _ = measured
    found = {record["name"]: record for record in results["divergence"]}
    assert found.keys() == SUBJECTS.keys()
    for name, (_, is_flow) in SUBJECTS.items():
        record = found[name]
        assert (record["one_more_step"] < 1) is is_flow, name
        assert record["to_displacement"] == pytest.approx(record["to_state"] / record["displacement"])
    assert len({record["to_state"] for record in found.values()}) == len(SUBJECTS)  # no two are the same by mistake
    assert found["hybrid_at_one"]["displacement"] > 2 * found["hybrid"]["displacement"]
    trained = next(record for record in results["order"] if record["name"] == "hybrid")
    assert {solver: trained[solver]["order"] for solver in ("euler", "midpoint")} == pytest.approx(
        {"euler": 1, "midpoint": 2}, abs=0.1
    )
    lines = list(csv.DictReader((folder / "depth_solvers.csv").open()))
    assert [float(line["to_state"]) for line in lines if line["part"] == "divergence"] == [
        record["to_state"] for record in results["divergence"]
    ]
    assert {line["solver"] for line in lines if line["part"] == "order"} == {*ORDERS, "dopri5", "adaptive_heun"}
    text = "\n".join(map(str, Solvers.tables(results)))
    assert "0.068%" in text and "passes, and is no flow" in text and f"{64:,} steps of rk4" in text


def loss_of(model, ids_BT):
    """Computes the loss in float64, unlike the model."""
    return F.cross_entropy(model(ids_BT).logits[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten()).item()


def test_against_torchdiffeq(measured):
    """The divergence and the loss of the trained flow, computed anew from its weights."""
    from torchdiffeq import odeint

    folder, results, experiment = measured
    record = next(record for record in results["divergence"] if record["name"] == "hybrid")
    model: GPT2LMHeadModel = accurate(solvers.pretrain("hybrid", 0, experiment.setup, folder))
    block = block_of(model)
    ids_BT = held_out_texts(experiment.setup, 3)
    with torch.no_grad():
        start = model(ids_BT, output_hidden_states=True).hidden_states[SMALL.replaced[0]]
        control = torch.zeros(1, 1, dtype=torch.float64)
        exact = odeint(
            lambda tau, h: block.alpha * block.field(tau, h, control), start, torch.tensor([0.0, 1.0]).double(),
            method="dopri5", rtol=1e-9, atol=1e-10,
        )[-1]  # fmt: skip
        end = block(start)
        loss = loss_of(model, ids_BT)
        with output_of(block, exact):
            exact_loss = loss_of(model, ids_BT)
    assert record["to_state"] == pytest.approx(((end - exact).norm() / exact.norm()).item(), rel=1e-4)
    assert record["to_displacement"] == pytest.approx(((end - exact).norm() / (exact - start).norm()).item(), rel=1e-4)
    assert record["loss"] == pytest.approx(loss, rel=1e-9)
    assert record["loss_change"] == pytest.approx(exact_loss - loss, rel=1e-3)


def test_a_block_that_does_not_curve_does_not_diverge(texts):
    """If the field does not depend on the state, Euler is exact."""
    model = accurate(build("hybrid", SMALL, seed=0))
    block = block_of(model)
    torch.nn.init.zeros_(block.field.up_proj.weight)
    torch.nn.init.normal_(block.field.down_proj.bias, generator=torch.Generator().manual_seed(0))
    found = diverge(model, block, block, read_flow(block), texts)
    assert found["to_displacement"] < 1e-12 and found["kl"] < 1e-12 and found["displacement"] > 0.01


@pytest.mark.slow
def test_the_command_writes_pictures(tmp_path):
    """Runs both experiments as a user does."""
    for name, pictures in (("solvers", ["solvers-divergence", "solvers-order"]), ("adaptive", ["adaptive"])):
        arguments = ["study", "depth", name, "--small", "--seeds", "2", "--output", str(tmp_path)]
        shown = CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
        assert shown.exit_code == 0 and f"depth_{name}.json" in shown.output
        for picture in pictures:
            assert all((tmp_path / f"depth_{picture}.{suffix}").stat().st_size > 10_000 for suffix in ("png", "svg"))
            assert is_drawn(tmp_path / f"depth_{picture}.png")
    assert write_report(tmp_path).read_text().count("data:image/png;base64,") == 3
