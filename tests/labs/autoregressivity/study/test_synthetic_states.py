"""The experiment on synthetic states, from end to end."""

import json

import pytest

from condense.eval.report import write_report
from condense.labs.autoregressivity.study.experiments import ablate
from condense.labs.autoregressivity.study.options import AblationOptions
from condense.labs.autoregressivity.study.synthetic_states import HIDDEN_SIZES, SyntheticStates


def test_changes_by_hand(tmp_path):
    """A model with twice the operations is read at half of its steps for the comparison at equal operations."""
    task = SyntheticStates(AblationOptions(small=True, seeds=2), tmp_path)
    losses = {(16, 0, "line"): 4.0, (16, 1, "line"): 3.0, (16, 1, "repeat"): 2.0, (8, 0, "line"): 5.0,
              (8, 1, "line"): 4.4}  # fmt: skip
    operations = {(16, 0): 100.0, (16, 1): 200.0, (8, 0): 40.0, (8, 1): 80.0}
    measured = []
    for item in task.items():
        loss = losses[item[1:4]] * (1 + item.seed)
        curve = [{"step": step, "loss": loss + 2 - step / 3} for step in (0, 3, 6)]
        record = {"loss": loss, "curve": curve, "operations_per_step": operations[item[1:3]], "parameters": 1000}
        measured.append((item, record))
    results = task.results({"hidden_sizes": {"0": 16, "1": 8}}, measured)
    values = {v["model"][0] + f" {v['hidden_size']} {v['states']} {v['path']}": v for v in results["values"]}
    line, smaller, bare = values["f 16 1 line"], values["s 8 1 line"], values["f 8 0 line"]
    assert line["change_by_states"] == pytest.approx([-0.25, -0.25])
    assert line["change_by_line"] == pytest.approx([0.5, 0.5])
    assert line["change_at_equal_operations"] == pytest.approx([0.0, 7 / 8 - 1])  # at step 3 its loss is 1 higher
    assert smaller["change_by_states"] == pytest.approx([4.4 / 5 - 1] * 2) and smaller["change_by_line"] is None
    assert smaller["change_at_equal_operations"] == pytest.approx([0.1, 0.1]) and smaller["operations"] == [0.8, 0.8]
    assert bare["change_by_states"] is None and bare["change_at_equal_operations"] is None
    (table,) = task.tables(results)
    by_states, at_equal_operations, by_line = table.rows[1][5:8]
    assert len(table.rows) == 10 and (by_states, by_line) == ("-25.0 [-25.0, -25.0]", "50.0 [50.0, 50.0]")
    assert at_equal_operations.endswith(" [-85.7, 73.2]")  # the mean is -6.25, at the border of rounding


@pytest.mark.slow
def test_the_experiment_from_end_to_end(tmp_path, monkeypatch):
    options = AblationOptions(small=True, seeds=1)
    results = ablate("synthetic_states", tmp_path, options)
    values = {(v["model"], v["hidden_size"], v["states"], v["path"]): v for v in results["values"]}
    cells = {(c["model"], c["hidden_size"], c["states"], c["path"]): c for c in results["cells"]}
    assert len(values) == len(cells) == 2 * 5
    for model in ("folded", "stock"):
        none, line, repeat = (cells[model, 16, *shape] for shape in ((0, "line"), (1, "line"), (1, "repeat")))
        smaller, bare = cells[model, 8, 1, "line"], cells[model, 8, 0, "line"]
        assert none["parameters"] == line["parameters"] == repeat["parameters"] > smaller["parameters"]
        assert smaller["parameters"] == bare["parameters"] and len({c["loss"] for c in cells.values()}) == 10
        assert line["operations_per_step"] == repeat["operations_per_step"]
        assert 2 <= line["operations_per_step"] / none["operations_per_step"] < 2.6
        assert values[model, 16, 1, "line"]["change_by_states"] == [pytest.approx(line["loss"] / none["loss"] - 1)]
        assert values[model, 16, 1, "line"]["change_by_line"] == [pytest.approx(line["loss"] / repeat["loss"] - 1)]
        assert values[model, 8, 1, "line"]["change_by_states"] == [pytest.approx(smaller["loss"] / bare["loss"] - 1)]
        assert line["curve"][0]["step"] == none["curve"][0]["step"] and line["loss"] < line["curve"][0]["loss"]
    (table,) = SyntheticStates.tables(json.loads((tmp_path / "ablation_synthetic_states.json").read_text()))
    assert len(table.rows) == 10
    assert all((tmp_path / f"ablation_synthetic_states.{kind}").exists() for kind in ("csv", "png", "svg"))
    assert not list((tmp_path / "synthetic_states/runs").iterdir())
    assert not (tmp_path / "synthetic_states/inputs/reference").exists()  # not needed here
    assert "states between tokens" in write_report(tmp_path).read_text()
    monkeypatch.setattr("condense.labs.autoregressivity.study.setup.train_alone", pytest.fail)
    assert ablate("synthetic_states", tmp_path, options)["cells"] == results["cells"]  # nothing is trained again


def test_every_smaller_model_has_heads_of_an_even_size(tmp_path):
    task = SyntheticStates(AblationOptions(seeds=2), tmp_path)
    items = task.items()
    assert len(items) == len(set(items)) == 2 * 2 * 9
    assert all(size % (2 * task.setup.size.heads) == 0 for size in HIDDEN_SIZES.values())
