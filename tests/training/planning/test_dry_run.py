"""The table of a dry run."""

import json

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from condense import CondenseConfig
from condense.cli.main import app
from condense.training.data.tasks import make_examples
from condense.training.launch import CPU_CONFIG, CPU_RANKS
from condense.training.planning.dry_run import dry_run, memory_by_ranks, table, waves_in_words
from condense.training.planning.fit import GIB
from condense.training.planning.memory import estimate
from condense.training.prepare import prepare
from condense.training.recipe import load_recipe

from ..recipes import write_recipe
from .shapes import PLAIN, SMALL, recipe


def test_the_table_says_where_a_batch_does_not_divide():
    config = CondenseConfig(**SMALL, segment_length=32)
    rows = memory_by_ranks(config, recipe(128, 2, segment_length=32, global_batch=8), PLAIN, [1, 2, 3, 4])
    assert [row["ranks"] for row in rows] == [1, 2, 3, 4] and "total" in rows[3]
    assert "global_batch=8" in rows[2]["error"]
    text = table(json.loads(json.dumps(rows))).splitlines()
    assert len(text) == 5 and "does not divide" in text[3] and "host" not in text[0]
    assert f"{rows[0]['total'] / GIB:.2f}" in text[1]


def test_a_row_says_what_a_run_without_graphs_needs():
    config, trained = CondenseConfig(**SMALL, segment_length=32), recipe(256, 2, segment_length=32)
    (row,) = memory_by_ranks(config, trained, PLAIN, [1])
    least = estimate(config, trained, PLAIN, 1, captures=False)
    assert row["graphs"] > 0 == least.graphs and row["without_graphs"] == least.total < row["total"]
    assert "without graphs" in table([row])
    (on_cpu,) = memory_by_ranks(config, trained, PLAIN, [1], "cpu")
    assert on_cpu["graphs"] == 0 and "without_graphs" not in on_cpu


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
    options = ["gradient_checkpointing=true", "model.checkpoint_segments=auto", "model.segment_length=8"]
    options += ["stages.0.total_length=512"]
    printed, figures = plan(*options)
    groups = figures["plan"]["checkpoint_segments"]
    assert groups > 1 and f"gradient checkpointing by groups of {groups} segments" in printed
    assert "checkpoint_segments" not in plan()[1]["plan"]


def test_ranks_of_a_plan_divide_the_batch(plan):
    """The quickstart's batch does not hold a text on each of 8 ranks."""
    printed, figures = plan("model.segment_length=64", "--gpu-memory", "80", recipe="passkey_quickstart")
    assert figures["plan"]["ranks"] == 5 and "error" not in figures["memory"][-1]
    assert "planned for 5 GPUs, the most up to 8 that the batch divides by; this machine has none" in printed
    assert plan("global_batch=24", "micro_batch=8", "--gpu-memory", "80")[1]["plan"]["ranks"] == 3


def test_without_a_gpu_the_plan_is_for_the_cpu(plan):
    """For the ranks, the DeepSpeed configuration and the schedule that `condense train` has here, and no hours."""
    printed, figures = plan()
    assert (figures["plan"]["device"], figures["plan"]["ranks"], figures["recipe"]["deepspeed"]) == (
        "cpu", CPU_RANKS, CPU_CONFIG
    )  # fmt: skip
    assert [row["ranks"] for row in figures["memory"]] == [1, 2]
    assert f"planned for {CPU_RANKS} ranks on this machine's CPU" in printed and "hours on a CPU are not" in printed
    assert "hours" not in str(figures["plan"]) and "minutes" not in printed
    assert plan("--ranks", "1")[1]["plan"]["ranks"] == 1
    printed, figures = plan("--tokens-per-second", "1e3")
    assert figures["plan"]["hours"] == pytest.approx(figures["plan"]["tokens"] / 3.6e6)
    with pytest.raises(ValueError, match="global_batch=9 does not divide"):  # nor would the run
        plan("global_batch=9", "micro_batch=1")


def test_a_plan_on_a_machine_with_gpus(tmp_path):
    LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    planned = load_recipe("passkey_pretrain_1b", [f"model={tmp_path}", "global_batch=24", "micro_batch=1"])
    for gpus, ranks, words in (
        (4, None, "for the 4 GPUs of this"),
        (5, None, "8 GPUs, the most"),
        (4, 2, "as --ranks"),
    ):
        figures, printed = dry_run(planned, ranks, gpus)
        assert words in printed and "an assumption: --tokens-per-second" in printed
        assert (figures["plan"]["device"], figures["plan"]["ranks"]) == ("cuda", ranks or (4 if gpus == 4 else 8))


def test_a_plan_of_less_than_a_minute(plan):
    printed, _ = plan("steps=101", "stages.0.total_length=64", "--gpu-memory", "80")
    assert "less than a minute if each rank" in printed and "0 minutes" not in printed


@pytest.fixture
def documents(llama, tmp_path):
    """A recipe on two sources of two and one files of equal sizes."""
    for name in ("one", "two", "three"):
        (tmp_path / f"{name}.txt").write_text("the sea " * 2_500)
    sources = [{"files": f"{tmp_path}/t*.txt"}, {"files": f"{tmp_path}/one.txt"}]
    data = {"task": "text", "sources": sources, "prepared": str(tmp_path / "prepared")}
    return write_recipe(tmp_path, {"source": str(llama), "segment_length": 16}, [(64, 10)], global_batch=4, data=data)


def test_a_plan_says_how_much_of_each_source_the_run_reads(documents, tmp_path):
    """By the files' sizes, or exactly after they have been prepared; it prepares nothing."""
    recipe = load_recipe(documents)
    figures, printed = dry_run(recipe)
    assert f"{tmp_path}/t*.txt: about 66.7% of the run, from 2 files with 0.0 MB, about 10,000 tokens if" in printed
    assert [row["assumed_tokens"] for row in figures["plan"]["sources"]] == [10_000, 5_000]
    assert not (tmp_path / "prepared").exists()
    prepare(recipe, 0)
    training, _ = make_examples(recipe, recipe.model.load_tokenizer(recipe.model.load_config()))
    tokens = [0, 0]
    for number in range(40):
        for row in training.sequence(number, 64):
            tokens[training.source(number, 64)] += len(row.input_ids)
    figures, printed = dry_run(recipe)
    assert [row["tokens_read"] for row in figures["plan"]["sources"]] == tokens and min(tokens) > 0
    assert f"one.txt: {tokens[1]:,} tokens, {tokens[1] / sum(tokens):.1%} of the run, from 1 of 1 documents" in printed


def test_a_plan_of_documents_that_can_not_be_counted(documents):
    for override, words in (
        ("data.sources=[{hub: a/b, split: c}]", "a/b:c: the first documents, as many as the steps need"),
        ("data.sources=[{files: none.txt}]", "files='none.txt' names no file."),
        ("data.max_documents=7", "from the first 7 documents of 2 files"),
    ):
        assert words in dry_run(load_recipe(documents, [override]))[1]
    assert dry_run(load_recipe(documents, ["data={task: passkey}"]))[0]["plan"]["sources"] == []


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
