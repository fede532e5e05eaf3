"""The real launcher, ZeRO-2, two ranks on a CPU."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, get_wsd_schedule

from condense import CondenseForCausalLM
from training.checkpoints import MARKER, checkpoints, newest_checkpoint
from training.curriculum import CurriculumBatches, LengthSchedule
from training.data.passkey import PasskeyTask
from training.recipe import load_recipe
from training.small_llama import save_small_llama

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "training" / "recipes" / "passkey_quickstart.yaml"
SHORT = ["steps=12", "tokens_per_step=320", "curriculum.last_segments=3", "save_every=4", "log_every=1"]
SHORT += ["optimizer.warmup_steps=2", "optimizer.decay_steps=4"]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    save_small_llama(folder)
    CondenseForCausalLM.from_pretrained(folder, segment_length=40).save_pretrained(folder)
    return folder


def launch_command(start, output, *overrides):
    code = "import sys; from training.launch import launch; launch(sys.argv[1], sys.argv[2:])"
    return [sys.executable, "-c", code, str(RECIPE), f"model={start}", f"output={output}", *SHORT, *overrides]


def run(start, output, *overrides):
    done = subprocess.run(launch_command(start, output, *overrides), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line], done.stdout


def plain_training(start, overrides):
    """The same run in one process: no Trainer, no DeepSpeed, the batches of both ranks as one."""
    recipe = load_recipe(RECIPE, [f"model={start}", "output=o", *SHORT, *overrides])
    torch.manual_seed(0)
    model = CondenseForCausalLM.from_pretrained(start).train()
    task = PasskeyTask(AutoTokenizer.from_pretrained(start))
    schedule = LengthSchedule(recipe.curriculum)
    batches = CurriculumBatches(recipe, schedule, task, 40, world_size=2)
    settings = recipe.optimizer
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, settings.beta2), eps=1e-8)
    rates = get_wsd_schedule(
        optimizer, settings.warmup_steps, settings.decay_steps, num_training_steps=recipe.steps, min_lr_ratio=0.02
    )
    losses = []
    for step in range(recipe.steps):
        parts = [batches[2 * step + rank] for rank in range(2)]
        targets = sum(int((part["labels"] != -100).sum()) for part in parts)
        loss = sum(model(**part, num_items_in_batch=targets).loss for part in parts)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        schedule.observe(step + 1, loss.item(), 1)
    return losses, model.state_dict()


@pytest.mark.parametrize("checkpointing", ["false", "true"])
def test_two_ranks_of_zero_2_train_as_one_plain_process(start, tmp_path, checkpointing):
    """Float32; losses and weights within 1e-4 after 12 steps of AdamW with clipping and a schedule."""
    overrides = ["dtype=float32", "attention_dropout=0", f"gradient_checkpointing={checkpointing}"]
    losses, _ = run(start, tmp_path / "out", *overrides)
    expected, weights = plain_training(start, overrides)
    assert losses == pytest.approx(expected, abs=1e-4)
    trained = CondenseForCausalLM.from_pretrained(tmp_path / "out")
    for name, tensor in trained.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], atol=1e-4, rtol=1e-3)


def test_a_killed_run_goes_on_from_its_last_complete_checkpoint(start, tmp_path):
    """In bfloat16: the same losses, bit for bit, as a run that was never stopped, and the same weights."""
    losses, _ = run(start, tmp_path / "whole")

    broken = tmp_path / "broken"
    process = subprocess.Popen(
        launch_command(start, broken),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while newest_checkpoint(broken) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kept = newest_checkpoint(broken)
    assert kept is not None and not (broken / "model.safetensors").exists()
    (broken / "checkpoint-best").mkdir()  # somebody else's
    # A checkpoint that was being written when the run died has files and no marker.
    (broken / "checkpoint-11").mkdir()
    (broken / "checkpoint-11" / "trainer_state.json").write_text("{}")

    all_losses, output = run(start, broken)
    assert f"going on from {kept}" in output
    assert all_losses == losses
    config = CondenseForCausalLM.from_pretrained(broken).config
    assert config.use_cache and config.attention_dropout == 0  # neither is left as the run had it
    whole, resumed = (CondenseForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "broken"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert [path.name for path in checkpoints(broken)] == ["checkpoint-8", "checkpoint-12"]  # older ones are pruned
    assert (kept.parent / "checkpoint-12" / MARKER).exists() and not (broken / "checkpoint-11").exists()
