"""Training on two ranks of a CPU, through the launcher and without it, against training written out plainly."""

import atexit
import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoTokenizer

from condense import CondenseForCausalLM
from condense.execution import cuda_graph, selection
from condense.training.checkpoints.complete import MARKER, checkpoints, newest_checkpoint
from condense.training.checkpoints.resume import find_checkpoint
from condense.training.data.batches import ValidationBatches
from condense.training.data.tasks import make_examples
from condense.training.deepspeed_file import GATHER
from condense.training.recipe import load_recipe
from condense.training.small_llama import save_small_llama

from ..condense.execution.recording import recordings
from .ranks import run_ranks, started_ranks
from .recipes import text_data, write_recipe, write_texts
from .runs import (
    ROOT,
    assert_same_training,
    copy_checkpoint,
    expected,
    fails,
    log_lines,
    logged,
    rank_arguments,
    run,
    same_weights,
    tie,
    train_alone,
    train_with,
)

pytestmark = pytest.mark.process

SHARED_MEMORY = Path("/dev/shm")
QUICKSTART = ROOT / "training" / "recipes" / "passkey_quickstart.yaml"
CURRICULUM = ["curriculum.steps=12", "curriculum.tokens_per_step=320", "curriculum.last_segments=3", "log_every=1"]
CURRICULUM += ["checkpoints.every=4", "optimizer.warmup_steps=2", "optimizer.decay_steps=4"]
SHORT = ["stages=[{total_length: 120, steps: 1}, {total_length: 160, steps: 2}]", "optimizer.warmup_steps=1"]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    save_small_llama(folder)
    CondenseForCausalLM.from_pretrained(folder, segment_length=40).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def stages(start):
    fields = {"optimizer": {"learning_rate": 1e-3, "final_learning_rate": 1e-4, "warmup_steps": 2}}
    fields |= {"attention": "eager", "checkpoints": {"every": 4, "keep": 3}}
    return write_recipe(start, str(start), [(120, 3), (200, 5)], global_batch=8, micro_batch=2, **fields)


@pytest.fixture(scope="module")
def finished(stages, tmp_path_factory):
    """The output of a run of two ranks of ZeRO-2."""
    output = tmp_path_factory.mktemp("finished")
    before = set(SHARED_MEMORY.iterdir())
    run(stages, output, launcher=True)
    left = {path for path in set(SHARED_MEMORY.iterdir()) - before if path.name.startswith("deepspeed_")}
    assert not left, "DeepSpeed's buffers are still there"
    return output


def test_two_ranks_of_zero_2_train_as_one_plain_process_on_a_curriculum(start, tmp_path):
    overrides = [f"model={start}", *CURRICULUM, "dtype=float32", "attention_dropout=0"]
    run(QUICKSTART, tmp_path, *overrides)
    assert_same_training(QUICKSTART, tmp_path, *overrides)


def test_two_ranks_of_zero_2_train_as_one_plain_process_in_stages(stages, finished):
    """With accumulation, and rows of unequal lengths."""
    assert_same_training(stages, finished)
    lines = log_lines(finished)
    assert all(line["loss_segment_1"] > 0 and line["loss_segment_2"] > 0 for line in lines)
    assert all(line["tokens_per_second"] > 0 and line["peak_resident_bytes"] > 2**20 for line in lines)
    assert {line["skipped_steps"] for line in lines} == {0}


def test_the_same_with_checkpointing_and_validation(stages, tmp_path):
    """The logged validation loss is the mean over all targets of the sequences, taken by the trained model."""
    run(stages, tmp_path, "gradient_checkpointing=true", "evaluation.sequences=3")
    assert_same_training(stages, tmp_path)
    lines = log_lines(tmp_path, "eval_loss")
    assert [line["step"] for line in lines] == [0, 3, 8]
    recipe = load_recipe(stages, ["evaluation.sequences=3"])
    batches = ValidationBatches(recipe, make_examples(recipe, AutoTokenizer.from_pretrained(recipe.model.source))[1])
    model = CondenseForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        losses = [model(**batches[n], num_items_in_batch=1).loss.item() for n in range(len(batches))]
    targets = [int((batches[n]["labels"] != -100).sum()) for n in range(len(batches))]
    assert lines[-1]["eval_loss"] == pytest.approx(sum(losses) / sum(targets), abs=1e-4)


def train_by_recorded_graphs(arguments: list[str]) -> None:
    counts = Counter()
    cuda_graph.GRAPHS["cpu"], selection.CAPTURING_DEVICES = recordings(counts), ("cpu",)
    atexit.register(lambda: print(f"{counts['capture']} captures, {counts['replay']} replays", flush=True))
    train_with(arguments)


@pytest.mark.parametrize(
    "overrides", [["data.shortest=1"], ["gradient_checkpointing=true", "model.checkpoint_segments=2"]], ids=str
)
def test_two_ranks_of_zero_2_by_graphs(overrides, stages, tmp_path):
    """A recording stands for a CUDA graph: ZeRO-2 flattens, reduces and changes the weights that it reads."""
    arguments = rank_arguments(stages, tmp_path, *overrides)
    succeeded, printed = run_ranks(train_by_recorded_graphs, arguments)
    assert succeeded, printed[-3000:]
    replays = re.findall(r"captures, (\d+) replays", printed)
    assert len(replays) == 2 and min(map(int, replays)) > 8
    assert_same_training(stages, tmp_path, *overrides)


@pytest.fixture(scope="module")
def two_sources(start, tmp_path_factory):
    """A recipe whose validation documents come from two sources; odd digits and even ones."""
    names = {"train": 40, "news": 2, "books": 3}
    for number, (name, count) in enumerate(names.items()):
        digits = ["0123456789", "13579", "2468"][number]
        texts = [" ".join(Random(n).choices(digits, k=40 + 10 * n)) for n in range(count)]
        write_texts(start / f"{name}.jsonl", texts)
    folder, held_out = (
        tmp_path_factory.mktemp("sources"),
        [{"files": f"{start}/{name}.jsonl"} for name in ("news", "books")],
    )
    fields = {"data": text_data(start, files="train.jsonl"), "evaluation": {"sequences": 5, "sources": held_out}}
    return write_recipe(folder, str(start), [(20, 2)], global_batch=4, checkpoints={"every": 1}, **fields)


def test_validation_losses_by_source(two_sources, tmp_path):
    """On two ranks, whose micro-batches have two sequences or one: the same as one process's means by source."""
    run(two_sources, tmp_path, "micro_batch=2")
    recipe = load_recipe(two_sources)
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.source)
    batches = ValidationBatches(recipe, make_examples(recipe, tokenizer)[1])
    assert batches.source_names == ["news", "books"]
    model = CondenseForCausalLM.from_pretrained(tmp_path)
    sums, targets = {"news": 0.0, "books": 0.0}, {"news": 0, "books": 0}
    ids = {
        name: set(tokenizer(words, add_special_tokens=False)["input_ids"])
        for name, words in (("news", "1 3 5 7 9"), ("books", "2 4 6 8"))
    }
    with torch.no_grad():
        for n in range(5):
            found = set(batches[n]["input_ids"].flatten().tolist()) - set(tokenizer.all_special_ids)
            name = "news" if found <= ids["news"] else "books"
            assert found <= ids[name]
            sums[name] += model(**batches[n], num_items_in_batch=1).loss.item()
            targets[name] += int((batches[n]["labels"] != -100).sum())
    line = log_lines(tmp_path, "eval_loss")[-1]
    assert all(targets.values()) and targets["news"] != targets["books"]
    for name in sums:
        assert line[f"eval_loss_{name}"] == pytest.approx(sums[name] / targets[name], abs=1e-4)
    assert line["eval_loss"] == pytest.approx(sum(sums.values()) / sum(targets.values()), abs=1e-4)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["model.schedule=wavefront"], marks=pytest.mark.slow),
        [
            "model.schedule=wavefront",
            "gradient_checkpointing=true",
            "model.checkpoint_segments=auto",
            "model.offload_memories=true",
        ],
    ],
    ids=["waves", "checkpointed waves"],
)
def test_waves_train_as_one_plain_process(stages, tmp_path, overrides):
    run(stages, tmp_path, *SHORT, *overrides)
    assert_same_training(stages, tmp_path, *SHORT)
    assert CondenseForCausalLM.from_pretrained(tmp_path).config.schedule == "auto"  # as the model had it


@pytest.mark.slow
def test_waves_in_bfloat16(stages, tmp_path):
    """The first losses are those of the sequential order; later ones drift apart by rounding."""
    losses = [
        run(stages, tmp_path / name, "dtype=bfloat16", f"model.schedule={name}")[0]
        for name in ("sequential", "wavefront")
    ]
    assert losses[1] == pytest.approx(losses[0], abs=2e-2)
    assert losses[1][0] == pytest.approx(losses[0][0], abs=2e-3)


@pytest.mark.slow
def test_zero_3_refuses_waves(stages, tmp_path):
    overrides = ["model.schedule=wavefront", "deepspeed=deepspeed_configs/zero3.json"]
    assert "schedule='sequential' (or 'auto')" in fails(stages, tmp_path, *overrides)


@pytest.mark.parametrize(
    "config",
    ["zero3", pytest.param("zero1", marks=pytest.mark.slow), pytest.param("zero2_offload", marks=pytest.mark.slow)],
)
def test_the_other_configurations_train_as_one_plain_process(stages, tmp_path, config):
    """As files of a user that say nothing of batches, clipping, precision and, under ZeRO-3, of gathering weights."""
    zero = json.loads(Path(f"deepspeed_configs/{config}.json").read_text())["zero_optimization"]
    zero.pop(GATHER, None)
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": zero}))
    overrides = [*SHORT, "optimizer.max_grad_norm=0.1"]
    run(stages, tmp_path / "out", *overrides, f"deepspeed={tmp_path / 'zero.json'}", "gradient_checkpointing=true")
    assert_same_training(stages, tmp_path / "out", *overrides)
    assert max(logged(tmp_path / "out", "grad_norm")) > 0.1  # so clipping has changed the weights


@pytest.mark.parametrize("config", ["zero2", pytest.param("zero3", marks=pytest.mark.slow)])
def test_a_tied_head_is_written_once(start, stages, tmp_path, config):
    """As save_pretrained writes it, in the output and in each checkpoint; adapters come without it."""
    shutil.copytree(start, tmp_path / "start")
    names = tie(tmp_path / "start")
    overrides = [f"model={tmp_path / 'start'}", *SHORT, "checkpoints.every=2", "gradient_checkpointing=true"]
    run(stages, tmp_path / "out", *overrides, f"deepspeed=deepspeed_configs/{config}.json")
    for folder in (tmp_path / "out", tmp_path / "out" / "checkpoint-2"):
        assert set(load_file(folder / "model.safetensors")) == names
    if config == "zero2":
        run(stages, tmp_path / "adapters", *overrides, "lora={rank: 2}")
        assert all("lora_" in name for name in load_file(tmp_path / "adapters" / "adapter_model.safetensors"))


def test_one_process_without_the_launcher(stages, tmp_path):
    succeeded, printed = run_ranks(train_alone, ["--recipe", str(stages), f"output={tmp_path}", *SHORT], ranks=1)
    assert succeeded, printed[-3000:]
    assert "is not used" in printed
    assert logged(tmp_path) == pytest.approx(expected(stages, *SHORT)[0], abs=1e-4)


def test_a_killed_run_goes_on_from_its_last_complete_checkpoint(start, tmp_path):
    """In bfloat16: the same losses, bit for bit, as a run that was never stopped, and the same weights."""
    overrides = [f"model={start}", *CURRICULUM, "dtype=bfloat16"]
    losses, _ = run(QUICKSTART, tmp_path / "whole", *overrides)

    broken = tmp_path / "broken"
    files = [tmp_path / f"rank{rank}.txt" for rank in range(2)]
    with started_ranks(train_with, rank_arguments(QUICKSTART, broken, *overrides), files=files):
        deadline = time.monotonic() + 120
        while newest_checkpoint(broken) is None and time.monotonic() < deadline:
            time.sleep(0.05)
    kept = newest_checkpoint(broken)
    assert kept is not None and not (broken / "model.safetensors").exists()
    (broken / "checkpoint-best").mkdir()  # somebody else's
    # A checkpoint that was being written when the run died has files and no marker.
    (broken / "checkpoint-11").mkdir()
    (broken / "checkpoint-11" / "trainer_state.json").write_text("{}")

    all_losses, output = run(QUICKSTART, broken, *overrides)
    assert f"resuming from {kept}" in output
    assert all_losses == losses
    config = CondenseForCausalLM.from_pretrained(broken).config
    assert config.use_cache and config.attention_dropout == 0  # neither is left as the run had it
    assert same_weights(tmp_path / "whole", broken)
    assert [path.name for path in checkpoints(broken)] == ["checkpoint-8", "checkpoint-12"]  # older ones are pruned
    assert (kept.parent / "checkpoint-12" / MARKER).exists() and not (broken / "checkpoint-11").exists()


@pytest.mark.parametrize("after", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_going_on_at_another_number_of_ranks(stages, finished, tmp_path, after):
    """Float32: the same batches, so the same losses as on the first number of ranks, within 1e-4."""
    shutil.copytree(finished / "checkpoint-4", tmp_path / "checkpoint-4")
    shutil.copy(finished / "log.jsonl", tmp_path)
    losses, printed = run(stages, tmp_path, ranks=after)
    assert f"written by 2 ranks: rewriting it for {after}" in printed
    assert losses == pytest.approx(expected(stages)[0], abs=1e-4)


def test_zero_0_goes_on_at_another_number_of_ranks(stages, tmp_path):
    """It divides nothing among ranks, so its checkpoints have no universal form and need none."""
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 0}}')
    overrides = [*SHORT, f"deepspeed={tmp_path / 'zero.json'}", "checkpoints.every=2"]
    run(stages, tmp_path / "two", *overrides)
    copy_checkpoint(tmp_path / "two", tmp_path / "one", 2)
    losses, _, weights = expected(stages, *SHORT)
    assert run(stages, tmp_path / "one", *overrides, ranks=1)[0] == pytest.approx(losses, abs=1e-4)
    for name, tensor in CondenseForCausalLM.from_pretrained(tmp_path / "one").state_dict().items():
        torch.testing.assert_close(tensor, weights[name], atol=1e-4, rtol=1e-3)


def test_a_loss_that_is_not_finite_stops_the_run(stages, tmp_path):
    """A learning rate that destroys the model in its first step: the loss of the second one is not a number."""
    rates = ["optimizer.learning_rate=1e18", "optimizer.final_learning_rate=1e18", "checkpoints.every=1"]
    printed = fails(stages, tmp_path, *rates)
    assert "train: step 2, rank 0: the loss of sequences 8 to 9 of length 120 is nan" in printed
    assert "The optimizer has not moved" in printed
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-1"]
    assert [line["step"] for line in log_lines(tmp_path)] == [1]


def poison_micro_batch(number: int, change: Callable[[Any], None]) -> list[int]:
    """Lets `change` alter the model's output in a micro-batch of training; returns a list with the count so far."""
    forward, calls = CondenseForCausalLM.forward, [0]

    def poisoned(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        calls[0] += self.training
        if self.training and calls[0] == number:
            change(output)
        return output

    CondenseForCausalLM.forward = poisoned
    return calls


def train_with_an_infinite_loss(arguments: list[str]) -> None:
    """In step 3, of 2 micro-batches, the loss of the first is infinite and its gradient finite."""
    moves = []

    def add_infinity(output):
        output.loss = output.loss + float("inf")

    calls = poison_micro_batch(5, add_infinity)
    register_optimizer_step_post_hook(lambda *_: moves.append(1))
    try:
        train_with(arguments)
    finally:
        print(f"{calls[0]} micro-batches, {len(moves)} moves")


def test_an_infinite_loss_with_a_finite_gradient_moves_no_weight(stages, tmp_path):
    """DeepSpeed sees nothing wrong: the optimizer itself asks for the losses. It moves its two groups one by one."""
    overrides = [f"output={tmp_path}", "deepspeed=deepspeed_configs/zero2_cpu.json"]
    succeeded, printed = run_ranks(train_with_an_infinite_loss, ["--recipe", str(stages), *overrides])
    assert not succeeded
    assert "step 3, rank 0: the loss of sequences" in printed and "is inf" in printed
    assert "6 micro-batches, 4 moves" in printed


def train_with_a_poisoned_gradient(arguments: list[str]) -> None:
    """In step 5, of 2 micro-batches a step, rank 1 has a gradient that is not finite."""
    if os.environ["RANK"] == "1":
        poison_micro_batch(9, lambda output: output.loss.register_hook(lambda gradient: gradient * float("inf")))
    train_with(arguments)


@pytest.mark.parametrize("allowed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_gradient_that_is_not_finite(stages, tmp_path, allowed):
    """It comes from one rank of two; DeepSpeed leaves the step out, and the run ends where none is allowed."""
    output = tmp_path / "out"
    overrides = [f"output={output}", "deepspeed=deepspeed_configs/zero2_cpu.json", f"max_skipped_steps={allowed}"]
    succeeded, printed = run_ranks(train_with_a_poisoned_gradient, ["--recipe", str(stages), *overrides])
    if allowed:
        assert succeeded, printed[-3000:]
        assert "WARNING: step 5, rank 0: the gradient" in printed
        assert [line["skipped_steps"] for line in log_lines(output)] == [0, 0, 0, 0, 1, 1, 1, 1]
        weights = CondenseForCausalLM.from_pretrained(output).state_dict()
        assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    else:
        assert not succeeded
        assert "train, rank 1: step 5, rank 1: the gradient, summed over all ranks, is not finite" in printed
        part = "this rank's part came from sequences 10 to 11 of length 200, sequences 14 to 15 of length 200"
        assert part in printed
        assert [path.name for path in checkpoints(output)] == ["checkpoint-4"]


def test_a_run_goes_on_under_its_own_recipe(stages, finished):
    changes = ["optimizer.beta2=0.9", "stages.0.total_length=130"]
    kept = [
        "micro_batch=1",
        "evaluation.sequences=3",
        "checkpoints.keep=5",
        "attention=sdpa",
        "deepspeed=deepspeed_configs/zero1.json",
    ]
    assert find_checkpoint(load_recipe(stages, [f"output={finished}", *kept])) == finished / "checkpoint-8"
    with pytest.raises(ValueError, match="optimizer.beta2 was 0.95 and is 0.9") as error:
        find_checkpoint(load_recipe(stages, [f"output={finished}", *kept, *changes]))
    for words in ("stages was [", "model=", "checkpoint-8 output=FOLDER"):
        assert words in str(error.value)
    assert "attention" not in str(error.value)
    with pytest.raises(ValueError, match="seed was 0 and is 1"):
        find_checkpoint(load_recipe(stages, ["output=new", f"resume={finished / 'checkpoint-4'}", "seed=1"]))


def test_going_on_from_another_output(stages, finished, tmp_path):
    """Where the output has a checkpoint of its own, that is newer: the same command can be started again."""
    resume = f"resume={finished / 'checkpoint-4'}"
    shutil.copy(finished / "recipe.json", tmp_path)
    (tmp_path / "checkpoint-8").mkdir()  # a killed run was writing it
    (tmp_path / "checkpoint-8" / "trainer_state.json").write_text("{")
    run(stages, tmp_path, resume)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-8"]
    assert logged(tmp_path) == logged(finished)[4:]
    assert same_weights(tmp_path, finished)
    recipe = load_recipe(stages, [f"output={tmp_path}", resume])
    assert find_checkpoint(recipe) == tmp_path / "checkpoint-8"


def test_damaged_and_missing_checkpoints_are_refused_by_name(stages, finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    recipe = load_recipe(stages, [f"output={tmp_path}"])
    assert find_checkpoint(recipe) == tmp_path / "checkpoint-8"
    weights = tmp_path / "checkpoint-8" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ValueError, match="checkpoint-8 is damaged: model.safetensors has"):
        find_checkpoint(recipe)
    weights.unlink()
    with pytest.raises(ValueError, match="checkpoint-8 is damaged: model.safetensors is missing.*Delete the folder"):
        find_checkpoint(recipe)
    assert "checkpoint-8 is damaged: model.safetensors is missing" in fails(stages, tmp_path)
    for text in ("{", None):
        marker = tmp_path / "checkpoint-4" / MARKER
        marker.unlink() if text is None else marker.write_text(text)
        with pytest.raises(ValueError, match="checkpoint-4 was never completed, or its complete.json is damaged"):
            find_checkpoint(load_recipe(stages, ["output=new", f"resume={marker.parent}"]))
    with pytest.raises(ValueError, match="there is no checkpoint nowhere"):
        find_checkpoint(load_recipe(stages, ["resume=nowhere"]))
