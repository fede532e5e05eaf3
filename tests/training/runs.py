"""Runs of a recipe on several ranks, and the same training written out plainly."""

import functools
import json
import os
import runpy
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, get_wsd_schedule

from condense import CondenseForCausalLM
from condense.training import train
from condense.training.data.batches import StageBatches
from condense.training.data.curriculum import CurriculumBatches, CurriculumState
from condense.training.data.passkey import PasskeyTask
from condense.training.data.tasks import make_examples
from condense.training.launch import launch, load_local_recipe, local_overrides
from condense.training.output_lock import was_finished
from condense.training.recipe import Recipe, load_recipe
from condense.training.small_llama import save_small_llama

from .ranks import run_ranks
from .recipes import write_recipe

ROOT = Path(__file__).resolve().parents[2]
CODE = (
    "import sys; from condense.training.launch import launch, load_local_recipe; "
    "launch(load_local_recipe(sys.argv[1], sys.argv[3:]), int(sys.argv[2]))"
)


def launch_command(recipe, *overrides, ranks=2) -> list[str]:
    return [sys.executable, "-c", CODE, str(recipe), str(ranks), *overrides]


def folded_recipe(folder: Path, *stages: tuple[int, int], **fields) -> Path:
    """A recipe that starts from a small folded model, which is saved beside it; see `write_recipe`."""
    save_small_llama(folder / "start")
    CondenseForCausalLM.from_pretrained(folder / "start", segment_length=40).save_pretrained(folder / "start")
    return write_recipe(folder, str(folder / "start"), stages, **fields)


def copy_checkpoint(finished: Path, output: Path, step: int) -> None:
    """An output as that of a finished run was when it had written the checkpoint of a step."""
    shutil.copytree(finished / f"checkpoint-{step}", output / f"checkpoint-{step}")
    lines = (finished / "log.jsonl").read_text().splitlines(keepends=True)
    (output / "log.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= step))


def tie(folder: Path) -> set[str]:
    """Ties the head of a folder's folded model to its embedding; returns the names of the weights that it then has."""
    model = CondenseForCausalLM.from_pretrained(folder)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(folder)
    names = set(load_file(folder / "model.safetensors"))
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    return names


def log_lines(output: Path, name="loss") -> list[dict]:
    return [line for line in map(json.loads, (output / "log.jsonl").read_text().splitlines()) if name in line]


def logged(output: Path, name="loss") -> list[float]:
    return [line[name] for line in log_lines(output, name)]


def run(recipe, output, *overrides, ranks=2, launcher=False) -> tuple[list[float], str]:
    """The logged losses, and what was printed."""
    succeeded, printed = _start(recipe, output, overrides, ranks, launcher)
    assert succeeded and was_finished(output), printed[-6000:]
    return logged(output), printed


def fails(recipe, output, *overrides, ranks=2, launcher=False) -> str:
    """The output of a run that fails."""
    succeeded, printed = _start(recipe, output, overrides, ranks, launcher)
    assert not succeeded
    return printed


def _start(recipe, output, overrides, ranks: int, launcher: bool) -> tuple[bool, str]:
    if launcher:
        return run_ranks(launch_from_a_shell, recipe, [f"output={output}", *overrides], ranks, ranks=1)
    return run_ranks(train_with, rank_arguments(recipe, output, *overrides), ranks=ranks)


def rank_arguments(recipe, output, *overrides) -> list[str]:
    return ["--recipe", str(recipe), *local_overrides([f"output={output}", *overrides])]


def launch_from_a_shell(recipe, overrides: list[str], ranks: int) -> None:
    """In a process that is no rank: the launcher starts them."""
    _be_no_rank()
    launch(load_local_recipe(recipe, overrides), ranks)


def train_alone(arguments: list[str]) -> None:
    """The file training/train.py, as a shell runs it without the launcher."""
    _be_no_rank()
    sys.argv[1:] = arguments
    runpy.run_path("training/train.py", run_name="__main__")


def _be_no_rank() -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]


def train_with(arguments: list[str]) -> None:
    """The command line of training/train.py."""
    sys.argv[1:] = arguments
    train.main()


def plain_training(
    recipe: Recipe, ranks=2, rates: list[float] | None = None
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and weights of one process without Trainer and DeepSpeed: a step's rows are one sum.

    `rates` are the learning rates of the steps; None: the schedule of the recipe.
    """
    torch.manual_seed(recipe.seed)
    model = CondenseForCausalLM.from_pretrained(recipe.model.source)
    model = recipe.objective.prepare_model(model, recipe).train()
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.source)
    curriculum = None
    if recipe.curriculum:
        curriculum = CurriculumState(recipe.curriculum)
        segment_length = recipe.model.tokens_per_segment(model.config)
        batches = CurriculumBatches(recipe, curriculum, PasskeyTask(tokenizer), segment_length, ranks)
    else:
        batches = StageBatches(recipe, make_examples(recipe, tokenizer)[0], ranks)
    settings = recipe.optimizer
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=settings.learning_rate, betas=(settings.beta1, settings.beta2), eps=settings.eps
    )
    schedule = get_wsd_schedule(
        optimizer,
        settings.warmup_steps,
        recipe.decay_steps,
        num_training_steps=recipe.steps,
        min_lr_ratio=settings.final_learning_rate / settings.learning_rate,
    )
    per_step = recipe.accumulation(ranks) * ranks
    losses, norms = [], []
    for step in range(recipe.steps):
        parts = [dict(batches[step * per_step + part]) for part in range(per_step)]
        targets = sum(int(recipe.objective.num_targets(part)) for part in parts)
        for part in parts:
            del part["name"]
        loss = sum(model(**part, num_items_in_batch=targets).loss for part in parts)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)))
        for group in optimizer.param_groups if rates else ():
            group["lr"] = rates[step]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if curriculum is not None:
            curriculum.observe(step + 1, loss.item(), 1)
    return losses, norms, model.state_dict()


def kill_tree(process: subprocess.Popen) -> None:
    """SIGKILL, to a process and all that it has started, at once."""
    root = psutil.Process(process.pid)
    processes = [root, *root.children(recursive=True)]
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
    psutil.wait_procs(processes[1:], timeout=20)


@functools.cache
def expected(recipe, *overrides, ranks=2):
    return plain_training(load_recipe(recipe, ["output=o", *overrides]), ranks)


def assert_same_training(recipe, output, *overrides, tolerance=1e-4):
    """Float32: losses, gradient norms (before clipping) and weights."""
    losses, norms, weights = expected(recipe, *overrides)
    lines = log_lines(output)
    assert [line["loss"] for line in lines] == pytest.approx(losses, abs=1e-4)
    assert [line["grad_norm"] for line in lines] == pytest.approx(norms, rel=1e-3)
    trained = CondenseForCausalLM.from_pretrained(output)
    for name, tensor in trained.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], atol=tolerance, rtol=1e-3)


def same_weights(one: Path, other: Path, file="model.safetensors") -> bool:
    first, second = (load_file(folder / file) for folder in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
