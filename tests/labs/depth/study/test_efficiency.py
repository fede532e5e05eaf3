"""Counts of operations against torch's own, memory of a hand-worked graph, the adjoint's gradient as steps increase."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from condense.cli import main as cli
from condense.labs.depth.model import set_solver
from condense.labs.depth.study.efficiency import STEPS, TRAINED, head_operations, in_turn, operations, saved_bytes
from condense.labs.depth.study.models import SMALL, build


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("depth")
    arguments = ["study", "depth", "efficiency", "--small", "--seeds", "1", "--output", str(folder)]
    shown = CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
    assert shown.exit_code == 0 and "519.83" in shown.output
    assert (folder / "depth_efficiency.png").exists() and (folder / "depth_efficiency.csv").exists()
    found = json.loads((folder / "depth_efficiency.json").read_text())
    return {record["part"]: record["measured"] for record in found["records"]}


@pytest.mark.parametrize("arm", TRAINED)
def test_operations_are_those_that_torch_counts(arm):
    model = build(arm, SMALL, 0)
    model.set_attn_implementation("eager")
    evaluations = {"hybrid": 8, "twin": 4, "wide_twin": 4}.get(arm, 0)
    if arm == "hybrid":
        set_solver(model, "midpoint")
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, SMALL.positions, dtype=torch.long))
    counted = counter.get_total_flops() / 2 / (2 * SMALL.positions)
    assert operations(arm, SMALL, evaluations) + head_operations(SMALL) == pytest.approx(counted, rel=0.01)


def test_saved_bytes_count_each_tensor_once():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8, 8))

        def forward(self, given):  # keeps `given` for the product, and the sine's argument for both of its uses
            product = given @ self.weight
            return product.sin() + product.cos()

    module = Twice()
    assert saved_bytes(module, lambda: module(torch.ones(16, 8, requires_grad=True))) == 2 * 16 * 8 * 4


def test_calls_take_turns():
    said = []
    calls = {
        name: (lambda name=name: said.append(f"prepare {name}"), lambda name=name: said.append(name)) for name in "ab"
    }
    seconds = in_turn(calls, 2)
    assert said == ["prepare a", "a", "prepare b", "b"] * 3  # the first round is not counted
    assert [len(times) for times in seconds.values()] == [2, 2]


def test_evaluations_of_the_solvers(results):
    found = {name: figures["most_evaluations"] for name, figures in results["inference"].items()}
    assert found["baseline"] == found["shorter"] == 0 and found["twin"] == found["wide_twin"] == 4
    predicted = {name: figures["body_predicted"] for name, figures in results["inference"].items()}
    assert predicted["wide_twin"] == predicted["hybrid, euler 4"] > predicted["twin"]
    assert results["training"]["wide_twin"]["predicted"] == results["training"]["hybrid"]["predicted"]
    fixed = {"euler 1": 1, "euler 2": 2, "euler 4": 4, "euler 8": 8, "midpoint 4": 8, "rk4 4": 16}
    assert {name: found[f"hybrid, {name}"] for name in fixed} == fixed
    for solver in ("dopri5", "adaptive_heun"):
        assert found[f"hybrid, {solver} 1e-05"] >= found[f"hybrid, {solver} 0.01"] > 0
    assert all(len(figures["seconds"]) == 2 for part in ("inference", "training") for figures in results[part].values())


def test_the_adjoint(results):
    """Its memory is constant, and its gradient belongs to the continuous problem: more steps make it exact."""
    found = [results["adjoint"][str(steps)] for steps in STEPS]
    assert len({figures["adjoint_bytes"] for figures in found}) == 1
    assert found[-1]["direct_bytes"] > 30 * found[0]["direct_bytes"]
    for name in ("adjoint_to_direct", "adjoint_to_reference", "direct_to_reference"):
        errors = [figures[name] for figures in found]
        assert errors[0] > 3 * errors[1] > 9 * errors[2] > 27 * errors[3] > 0  # of first order in the step
