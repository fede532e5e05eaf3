"""The real launcher, on two ranks of a CPU, against training written out plainly."""

import os
import signal
import subprocess
import time

import pytest
import torch

from condense import CondenseForCausalLM
from training.checkpoints import MARKER, checkpoints, newest_checkpoint
from training.small_llama import save_small_llama

from .runs import ROOT, expected, fails, launch_command, log_lines, run, same_weights

QUICKSTART = ROOT / "training" / "recipes" / "passkey_quickstart.yaml"
CURRICULUM = ["curriculum.steps=12", "curriculum.tokens_per_step=320", "curriculum.last_segments=3", "log_every=1"]
CURRICULUM += ["checkpoints.every=4", "optimizer.warmup_steps=2", "optimizer.decay_steps=4"]
STAGES = """
data: {task: passkey, shortest: 0.4}
stages: [{total_length: 120, steps: 3}, {total_length: 200, steps: 5}]
global_batch: 8
micro_batch: 2
optimizer: {learning_rate: 1.0e-3, final_learning_rate: 1.0e-4, warmup_steps: 2}
attention: eager
dtype: float32
checkpoints: {every: 4, keep: 3}
log_every: 1
report_to: none
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    save_small_llama(folder)
    CondenseForCausalLM.from_pretrained(folder, segment_length=40).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def stages(start):
    path = start / "stages.yaml"
    path.write_text(f"model: {start}\noutput: unused\n{STAGES}")
    return path


def assert_same_training(recipe, output, *overrides, ranks=2):
    """Float32: losses, gradient norms (before clipping) and weights within 1e-4."""
    losses, _ = run(recipe, output, *overrides, ranks=ranks)
    expected_losses, expected_norms, weights = expected(recipe, *overrides)
    assert losses == pytest.approx(expected_losses, abs=1e-4)
    assert [line["grad_norm"] for line in log_lines(output)] == pytest.approx(expected_norms, rel=1e-3)
    trained = CondenseForCausalLM.from_pretrained(output)
    for name, tensor in trained.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], atol=1e-4, rtol=1e-3)


def test_two_ranks_of_zero_2_train_as_one_plain_process_on_a_curriculum(start, tmp_path):
    overrides = [f"model={start}", *CURRICULUM, "dtype=float32", "attention_dropout=0"]
    assert_same_training(QUICKSTART, tmp_path / "out", *overrides)


@pytest.mark.parametrize("checkpointing", ["false", "true"])
def test_two_ranks_of_zero_2_train_as_one_plain_process_in_stages(stages, tmp_path, checkpointing):
    """With accumulation, and rows of unequal lengths."""
    assert_same_training(stages, tmp_path / "out", f"gradient_checkpointing={checkpointing}")
    lines = log_lines(tmp_path / "out")
    assert all(line["loss_segment_1"] > 0 and line["loss_segment_2"] > 0 for line in lines)
    assert all(line["tokens_per_second"] > 0 and line["peak_resident_bytes"] > 2**20 for line in lines)
    assert {line["skipped_steps"] for line in lines} == {0}


@pytest.mark.parametrize("config", ["zero1", "zero2_offload", "zero3"])
def test_the_other_configurations_train_as_one_plain_process(stages, tmp_path, config):
    assert_same_training(stages, tmp_path / "out", f"deepspeed=deepspeed_configs/{config}.json")


def test_one_process_without_the_launcher(stages, tmp_path):
    import sys

    command = [sys.executable, "training/train.py", "--recipe", str(stages), f"output={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "is not used" in done.stdout
    assert [line["loss"] for line in log_lines(tmp_path)] == pytest.approx(expected(stages)[0], abs=1e-4)


def test_a_killed_run_goes_on_from_its_last_complete_checkpoint(start, tmp_path):
    """In bfloat16: the same losses, bit for bit, as a run that was never stopped, and the same weights."""
    overrides = [f"model={start}", *CURRICULUM]
    losses, _ = run(QUICKSTART, tmp_path / "whole", *overrides)

    broken = tmp_path / "broken"
    process = subprocess.Popen(
        launch_command(QUICKSTART, f"output={broken}", *overrides),
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

    all_losses, output = run(QUICKSTART, broken, *overrides)
    assert f"going on from {kept}" in output
    assert all_losses == losses
    config = CondenseForCausalLM.from_pretrained(broken).config
    assert config.use_cache and config.attention_dropout == 0  # neither is left as the run had it
    assert same_weights(tmp_path / "whole", broken)
    assert [path.name for path in checkpoints(broken)] == ["checkpoint-8", "checkpoint-12"]  # older ones are pruned
    assert (kept.parent / "checkpoint-12" / MARKER).exists() and not (broken / "checkpoint-11").exists()


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_going_on_at_another_number_of_ranks(stages, tmp_path, before, after):
    """Float32: the same batches, so the same losses as on the first number of ranks, within 1e-4."""
    run(stages, tmp_path, ranks=before)
    losses, printed = run(stages, tmp_path, f"resume={tmp_path / 'checkpoint-4'}", ranks=after)
    assert f"written by {before} ranks: rewriting it for {after}" in printed
    assert losses == pytest.approx(expected(stages)[0], abs=1e-4)


def test_a_loss_that_is_not_finite_stops_the_run(stages, tmp_path):
    """A learning rate that destroys the model in its first step: the loss of the second one is not a number."""
    rates = ["optimizer.learning_rate=1e18", "optimizer.final_learning_rate=1e18", "checkpoints.every=1"]
    printed = fails(stages, tmp_path, *rates)
    assert "FloatingPointError: step 2, rank 0: the loss of sequences 8 to 9 is nan" in printed
    assert "The optimizer has not moved" in printed
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-1"]
    assert [line["step"] for line in log_lines(tmp_path)] == [1]


GRADIENT = """
import runpy, sys, torch
sys.path.insert(0, {root!r})
from condense import CondenseForCausalLM
forward, calls = CondenseForCausalLM.forward, [0]
def poisoned(self, *args, **kwargs):
    output = forward(self, *args, **kwargs)
    if self.training:
        calls[0] += 1
        if calls[0] == 9 and {rank} == int(__import__("os").environ.get("RANK", 0)):  # step 5 of 2 micro-batches each
            output.loss.register_hook(lambda gradient: gradient * float("inf"))
    return output
CondenseForCausalLM.forward = poisoned
sys.argv[0] = {root!r} + "/training/train.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("allowed", [0, 1])
def test_a_gradient_that_is_not_finite(stages, tmp_path, allowed):
    """It comes from one rank of two; DeepSpeed leaves the step out, and the run ends where none is allowed."""
    script = tmp_path / "poisoned.py"
    script.write_text(GRADIENT.format(root=str(ROOT), rank=1))
    output = tmp_path / "out"
    command = ["deepspeed", "--num_accelerators", "2", "--master_port", "29611", str(script), "--recipe", str(stages)]
    command += [f"output={output}", "deepspeed=deepspeed_configs/zero2_cpu.json", f"max_skipped_steps={allowed}"]
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    printed = done.stdout + done.stderr
    if allowed:
        assert done.returncode == 0, printed[-3000:]
        assert "WARNING: step 5, rank 0: the gradient" in printed
        assert [line["skipped_steps"] for line in log_lines(output)] == [0, 0, 0, 0, 1, 1, 1, 1]
        weights = CondenseForCausalLM.from_pretrained(output).state_dict()
        assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    else:
        assert done.returncode != 0
        assert "FloatingPointError: step 5, rank 1: the gradient, summed over all ranks, is not finite" in printed
        assert "this rank's part came from sequences 34 to 35, sequences 38 to 39" in printed
        assert [path.name for path in checkpoints(output)] == ["checkpoint-4"]


def test_damaged_and_missing_checkpoints_are_refused_by_name(stages, tmp_path):
    run(stages, tmp_path)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-8"]
    weights = tmp_path / "checkpoint-8" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert "checkpoint-8 is damaged: model.safetensors has" in fails(stages, tmp_path)
    weights.unlink()
    assert "checkpoint-8 is damaged: model.safetensors is missing" in fails(stages, tmp_path)
    assert "there is no checkpoint nowhere" in fails(stages, tmp_path, "resume=nowhere")


def test_a_batch_that_does_not_divide_is_refused(stages, tmp_path):
    assert "global_batch=6 does not divide into micro_batch=2 x 2 ranks" in fails(stages, tmp_path, "global_batch=6")
