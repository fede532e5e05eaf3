"""The studies of docs/results that compute: what they count of the present code equals the stored files."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from condense.training.data.passkey import Passkeys
from scripts.benchmarks import (
    costs,
    gpu_launches,
    gpu_memory,
    heal_frontier,
    passkey_tokens,
    schedule_drift,
    schedule_rule,
)

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"


@pytest.mark.parametrize(
    ("study", "stored"),
    [(schedule_rule, "schedules/rule.txt"), (gpu_memory, "gpu/memory.txt"), (gpu_launches, "gpu/launches.txt")],
    ids=["rule of auto", "estimates beside a GPU", "launches on a GPU"],
)
def test_what_is_computed_is_what_is_stored(study, stored, capsys):
    study.main()
    printed = capsys.readouterr().out
    assert printed == (RESULTS / stored).read_text()
    lines = printed.splitlines()
    stock = [line for line in lines if "stock sdpa" in line]
    assert len(stock) == (22 if study is gpu_memory else 0)
    assert all(0.99 < float(line.split()[-1]) < 1.003 for line in stock)
    assert study is not gpu_launches or len(lines) == 2 + 8  # both orders at four lengths


def test_the_stored_drift_is_that_of_the_docs():
    """docs/speed.md: equal losses, and norms at most 2e-7 of their size apart."""
    logs = json.loads((RESULTS / "gpu" / "h100" / "zero2.json").read_text())
    losses, norms = schedule_drift.table(logs).rows
    assert losses[1:3] == ["20", "20"] and float(norms[-1]) < 2e-7


def test_counted_costs_are_the_stored_ones(capsys):
    stored = (RESULTS / "costs" / "costs.txt").read_text()
    costs.print_texts()
    costs.print_borders()
    printed = capsys.readouterr().out
    assert stored.startswith(printed)
    assert len(printed.splitlines()) > 20
    model = costs.meta_model()
    counts = [costs.count_launches(model, 2048, schedule) for schedule in ("sequential", "wavefront")]
    assert f"  2,048 tokens: sequential {counts[0]:,}, wavefront {counts[1]:,};" in stored


def test_the_cost_of_folding_against_trained_tokens(tmp_path, capsys):
    """Checkpoints stand in order of their steps, beside the window of the same text and the first run, text by text."""

    def cost(model: str, way: str, mean: float) -> dict:
        between = {"cost": mean, "low": mean - 0.02, "high": mean + 0.02}
        above = {name: value - 0.05 for name, value in between.items()}
        by_text = [mean - 0.5, mean + 0.5]
        return {
            "model": model,
            "way": way,
            "source": "data/emma.txt",
            **between,
            "by_text": by_text,
            "above_window": above,
        }

    costs = [
        cost("stock", "own", 0.0), cost("stock", "window", 0.05), cost("untrained", "own", 0.1),
        cost("all@128", "own", 0.06), cost("all@16", "own", 0.08), cost("adapters@16", "own", 0.09),
    ]  # fmt: skip
    (tmp_path / "loss.json").write_text(json.dumps({"costs": costs}))
    heal_frontier.main([str(tmp_path / "loss.json"), "--tokens-per-step", "4096"])
    lines = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines() if line.startswith("emma.txt")]
    runs = [("adapters", "0"), ("adapters", "65,536"), ("all", "0"), ("all", "65,536"), ("all", "524,288")]
    assert [tuple(line[1:3]) for line in lines[:-1]] == runs
    assert lines[-1][1] == "window"
    assert lines[4][3].split("  ")[0] == "+0.0600 [+0.0400, +0.0800]"
    assert lines[4][3].split("  ")[-1] == "+0.0100 [-0.0100, +0.0300]"
    assert lines[3][3].split("  ")[-1] == "-0.0100 [-0.0100, -0.0100]", "both texts are as much below adapters"
    assert (tmp_path / "frontier.png").stat().st_size > 1_000
    (tmp_path / "loss.json").write_text(json.dumps({"costs": costs[2:]}))
    with pytest.raises(ValueError, match="or no window: give all to condense eval loss"):
        heal_frontier.main([str(tmp_path / "loss.json"), "--tokens-per-step", "4096"])


def test_which_tokens_of_an_answer_are_right():
    """A model that says each token after itself: an answer of two equal tokens is half right."""

    class Repeats(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, input_ids, logits_to_keep):
            logits = torch.nn.functional.one_hot(input_ids[:, -logits_to_keep:], 9).double()
            return SimpleNamespace(logits=logits)

    prompts, answers = torch.tensor([[4, 1], [2, 3]]), torch.tensor([[1, 1], [5, 5]])
    right = passkey_tokens.right_tokens(Repeats(), Passkeys(prompts, answers, ["1", "5"], [0, 0]))
    assert right.tolist() == [[True, True], [False, True]]


def test_passkeys_before_the_question_are_read_by_any_model(stories, capsys):
    passkey_tokens.main([f"stories={stories}", "--lengths", "300", "--prompts", "2"])
    name, length, first, others = capsys.readouterr().out.splitlines()[-1].split()
    assert (name, length) == ("stories", "300") and float(first) >= 0 and float(others) >= 0
