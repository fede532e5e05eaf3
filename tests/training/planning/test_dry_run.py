"""The table of a dry run."""

import json

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from condense import CondenseConfig
from condense.cli import app
from condense.training.planning.dry_run import memory_by_ranks, table, waves_in_words
from condense.training.planning.fit import GIB, wave_bytes
from condense.training.planning.memory import estimate

from .shapes import PLAIN, SMALL, recipe


def test_the_table_says_where_a_batch_does_not_divide():
    config = CondenseConfig(**SMALL, segment_length=32)
    rows = memory_by_ranks(config, recipe(128, 2, segment_length=32, global_batch=8), PLAIN, [1, 2, 3, 4])
    assert [row["ranks"] for row in rows] == [1, 2, 3, 4] and "total" in rows[3]
    assert "global_batch=8" in rows[2]["error"]
    text = table(json.loads(json.dumps(rows))).splitlines()
    assert len(text) == 5 and "does not divide" in text[3] and "host" not in text[0]
    assert f"{rows[0]['total'] / GIB:.2f}" in text[1]


def test_a_row_counts_what_waves_need():
    config = CondenseConfig(**SMALL, segment_length=32)
    trained = recipe(512, 2, segment_length=32, schedule="wavefront")
    (row,) = memory_by_ranks(config, trained, PLAIN, [1])
    parts = estimate(config, trained, PLAIN, 1)
    assert row["waves"] == wave_bytes(config, trained, parts) > 0 and row["total"] == parts.total + row["waves"]
    assert "waves" in table([row])


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """The command's output and report, for the shape of the quickstart's recipe."""
    folder = tmp_path_factory.mktemp("plan")
    LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"]).save_pretrained(folder)

    def run(*options, recipe="passkey_pretrain_1b"):
        arguments = ["train", recipe, f"model={folder}", "--dry-run", "--report", str(folder / "plan.json"), *options]
        done = CliRunner().invoke(app, arguments)
        if done.exception:
            raise done.exception
        return done.output, json.loads((folder / "plan.json").read_text())

    return run


def test_the_command_proposes_overrides(plan):
    printed, figures = plan("--gpu-memory", "80")
    assert figures["plan"]["ranks"] == 8 and "in 80 GiB on 8 ranks" in printed
    assert [row["micro_batch"] for row in figures["proposals"]] == [8, 8]
    assert "without gradient checkpointing: gradient_checkpointing=false micro_batch=8" in printed
    assert "in waves" in printed and "no waves: gradient checkpointing computes each segment again alone" in printed
    assert "assumption" in printed and figures["plan"]["assumed_hours"] > 0
    printed, figures = plan("--gpu-memory", "5", "--ranks", "2", "--tokens-per-second", "1e6")
    assert "none. the smallest needs" in printed and "error" in figures["proposals"][0]
    assert "assum" not in printed and figures["plan"]["hours"] == pytest.approx(figures["plan"]["tokens"] / 3.6e9)


def test_a_plan_says_which_groups_are_checkpointed(plan):
    options = "gradient_checkpointing=true", "model.checkpoint_segments=auto", "model.segment_length=8"
    printed, figures = plan(*options)
    groups = figures["plan"]["checkpoint_segments"]
    assert groups > 1 and f"gradient checkpointing by groups of {groups} segments" in printed
    assert "checkpoint_segments" not in plan()[1]["plan"]


def test_ranks_of_a_plan_divide_the_batch(plan):
    """The quickstart's batch does not hold a text on each of 8 ranks."""
    _, figures = plan("model.segment_length=64", recipe="passkey_quickstart")
    assert figures["plan"]["ranks"] == 5 and "error" not in figures["memory"][-1]
    assert plan("global_batch=24", "micro_batch=8")[1]["plan"]["ranks"] == 3


def test_a_plan_says_that_it_does_not_count_another_objective(plan):
    printed, figures = plan("objective={kind: free_running, steps: 4}")
    assert "objective.kind='free_running'" in figures["plan"]["uncounted"] in printed
    assert all(
        "the memory of objective.kind='free_running' is not estimated" in row["error"] for row in figures["memory"]
    )
    printed, figures = plan("objective={kind: next_token}")
    assert "uncounted" not in figures["plan"] and "is counted for" not in printed


@pytest.mark.parametrize("memory", ["0", "-1", "nan", "inf"])
def test_a_memory_that_is_none(plan, memory):
    with pytest.raises(ValueError, match="--gpu-memory .*a finite number above 0"):
        plan("--gpu-memory", memory)


@pytest.mark.parametrize("option", [("--gpu-memory", "80"), ("--tokens-per-second", "5")])
def test_options_of_a_plan_need_a_plan(option):
    error = CliRunner().invoke(app, ["train", "passkey_quickstart", *option]).exception
    assert isinstance(error, ValueError) and f"{option[0]} {float(option[1]):g}"[:16] in str(error)
    assert "needs --dry-run" in str(error)


def test_waves_by_length():
    assert waves_in_words({512: "too few", 4096: None}) == "512 tokens: too few; 4,096 tokens: in waves"


def test_a_plan_refuses_adapters_of_maps_that_the_model_does_not_have(plan):
    with pytest.raises(ValueError, match="did you mean 'q_proj'"):
        plan("lora.targets=[q_prj]")
