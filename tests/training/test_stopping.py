"""A signal ends a run with a checkpoint, and the same command continues it: in one process, on two ranks, for real."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

import condense.cli.main
from condense import CondenseForCausalLM
from condense.training import train
from condense.training.checkpoints.complete import checkpoints, newest_checkpoint
from condense.training.launch import _free_port
from condense.training.recipe import load_recipe
from condense.training.stopping import StopOnSignal, Stopped

from .ranks import run_ranks
from .runs import ROOT, expected, folded_recipe, log_lines, logged, train_with
from .test_subprocesses import wait_for

pytestmark = pytest.mark.process

LONG = ["stages=[{total_length: 200, steps: 60}]", "log_every=1"]  # for signals from outside
ON_CPU = ["deepspeed=zero2_cpu"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    fields = {"optimizer": {"learning_rate": 1e-3, "final_learning_rate": 1e-4, "warmup_steps": 2}, "log_every": 2}
    fields |= {"attention": "eager", "checkpoints": {"every": 4, "keep": 3}}
    folder, stages = tmp_path_factory.mktemp("recipe"), [(120, 3), (200, 5)]
    return folded_recipe(folder, *stages, global_batch=4, micro_batch=2, **fields)


class SignalInStep:
    """Makes this process send itself a signal in the first micro-batch of a training step, once."""

    def __init__(self, step: int, micro_batches: int, number=signal.SIGUSR1):
        self.at, self.number, self.calls = (step - 1) * micro_batches, number, 0
        self.forward = CondenseForCausalLM.forward

    def __get__(self, model, owner=None):
        def forward(*args, **kwargs):
            if model.training:
                if self.calls == self.at:
                    os.kill(os.getpid(), self.number)
                self.calls += 1
            return self.forward(model, *args, **kwargs)

        return forward


def assert_losses(output: Path, losses: list[float], stopped_after: int) -> None:
    """Lines every 2 steps, and one where the run was stopped; each has the mean since the one before it."""
    steps = sorted({2, 4, 6, 8, stopped_after})
    lines = log_lines(output)
    assert [line["step"] for line in lines] == steps
    means = [sum(losses[a:b]) / (b - a) for a, b in zip([0, *steps], steps, strict=False)]
    assert [line["loss"] for line in lines] == pytest.approx(means, abs=1e-4)


def test_a_signal_stops_after_the_current_step_and_the_run_continues(recipe, tmp_path, monkeypatch):
    """One process: the checkpoint is complete, and losses are those of a run that was never stopped."""
    monkeypatch.setattr(CondenseForCausalLM, "forward", SignalInStep(3, micro_batches=2))
    loaded = load_recipe(recipe, [f"output={tmp_path}"])
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(Stopped, match="SIGUSR1 has stopped the run after step 3 of 8; the same command resumes it"):
        train.train(loaded, stop_on=[signal.SIGUSR1])
    assert signal.getsignal(signal.SIGUSR1) == before
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-3"]
    assert not (tmp_path / "model.safetensors").exists()
    train.train(loaded, stop_on=[signal.SIGUSR1])
    assert_losses(tmp_path, expected(recipe, ranks=1)[0], stopped_after=3)


def test_where_a_run_may_stop():
    """With a curriculum at a logged line; in its last step it ends by itself."""
    stop = StopOnSignal([], every=5)
    stop.received = signal.SIGUSR1
    steps = []
    for step in range(1, 11):
        control = TrainerControl()
        stop.on_step_end(TrainingArguments(use_cpu=True), TrainerState(global_step=step, max_steps=10), control)
        steps += [step] if control.should_training_stop else []
    assert steps == [5]


def test_a_process_alone_does_not_ask_its_device():
    """torch's meta device holds no numbers; on a GPU, the host would wait for the step's last kernel."""
    stop, arguments, control = StopOnSignal([]), TrainingArguments(use_cpu=True), TrainerControl()
    arguments._setup_devices = torch.device("meta")
    stop.received = signal.SIGUSR1
    stop.on_step_end(arguments, TrainerState(global_step=1, max_steps=2), control)
    assert arguments.device.type == "meta" and control.should_training_stop


def test_a_signal_that_arrives_while_ranks_agree_stops_after_the_next_step(monkeypatch):
    sent = []

    def all_reduce(received, op):
        if not sent:
            sent.append(os.kill(os.getpid(), signal.SIGUSR1))

    monkeypatch.setattr("condense.training.stopping.dist.is_initialized", lambda: True)
    monkeypatch.setattr("condense.training.stopping.dist.all_reduce", all_reduce)
    arguments, stop, steps = TrainingArguments(use_cpu=True), StopOnSignal([signal.SIGUSR1]), []
    try:
        for step in range(1, 4):
            state, control = TrainerState(global_step=step, max_steps=9), TrainerControl()
            stop.on_step_begin(arguments, state, control)
            stop.on_step_end(arguments, state, control)
            steps += [step] if control.should_training_stop and control.should_save else []
            if steps:
                break
    finally:
        stop.on_train_end(arguments, state, control)
    assert steps == [2] and stop.stopped and stop.name == "SIGUSR1"


@pytest.mark.parametrize(("asked", "came"), [("SIGUSR1", "SIGUSR1"), ("SIGUSR2", "SIGTERM"), ("SIGTERM", "SIGTERM")])
def test_the_signal_that_came_is_named(asked, came):
    """`condense train` passes SIGTERM on as SIGUSR2, since the launcher sends SIGTERM for reasons of its own."""
    stop = StopOnSignal([])
    stop.received = int(signal.Signals[asked])
    assert stop.name == came


def test_an_interrupted_run_says_how_it_resumes(recipe, tmp_path, monkeypatch):
    """Ctrl-C: at once, without a checkpoint of its own."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test in the background ignores it
    try:
        for step, said in ((3, "there is no checkpoint yet, so"), (6, f"resumes it from {tmp_path / 'checkpoint-4'}")):
            monkeypatch.setattr(CondenseForCausalLM, "forward", SignalInStep(step, 2, signal.SIGINT))
            with pytest.raises(KeyboardInterrupt, match=f"interrupted: .*{said}"):
                train.train(load_recipe(recipe, [f"output={tmp_path}"]))
            monkeypatch.undo()
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupted_launch_says_how_it_resumes(recipe, tmp_path, monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("condense.training.launch.launch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        condense.cli.main.train(str(recipe), [f"output={tmp_path}"])
    assert "\ninterrupted: there is no checkpoint yet, so the same command begins the run" in capsys.readouterr().out


def test_a_run_resumes_from_a_moved_model_with_another_log(recipe, tmp_path, monkeypatch):
    output = f"output={tmp_path / 'out'}"
    monkeypatch.setattr(CondenseForCausalLM, "forward", SignalInStep(4, micro_batches=2))
    with pytest.raises(Stopped):
        train.train(load_recipe(recipe, [output]), stop_on=[signal.SIGUSR1])
    shutil.copytree(recipe.parent / "start", tmp_path / "moved")
    train.train(load_recipe(recipe, [output, f"model={tmp_path / 'moved'}", "log_every=1"]))
    lines, losses = log_lines(tmp_path / "out"), expected(recipe, ranks=1)[0]
    assert [line["step"] for line in lines] == [2, 4, 5, 6, 7, 8]
    assert [line["loss"] for line in lines[2:]] == pytest.approx(losses[4:], abs=1e-4)


def train_with_a_signal(arguments: list[str], step: int) -> None:
    """To rank 1 alone."""
    if os.environ["RANK"] == "1":
        CondenseForCausalLM.forward = SignalInStep(step, micro_batches=1, number=signal.SIGTERM)
    train_with(arguments)


def test_a_signal_to_one_rank_stops_all(recipe, tmp_path):
    arguments = ["--recipe", str(recipe), f"output={tmp_path}", *ON_CPU]
    succeeded, printed = run_ranks(train_with_a_signal, arguments, 6)
    assert not succeeded
    assert printed.count("SIGTERM has stopped the run after step 6 of 8") == 1, printed[-3000:]
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-6"]
    assert [line["step"] for line in log_lines(tmp_path)] == [2, 4, 6]


def start(command: list[str], **options) -> subprocess.Popen:
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipe, **options)


def has_begun(output: Path) -> bool:
    return (output / "log.jsonl").exists() and len(log_lines(output)) > 1


def ends_stopped(process: subprocess.Popen, output: Path, exit_code: int, number: signal.Signals) -> None:
    """The run has a checkpoint of the step that it printed, and no step after it was lost."""
    printed, _ = process.communicate(timeout=120)
    assert f"{number.name} has stopped the run" in printed, printed[-3000:]
    assert process.returncode == exit_code and "ERROR" not in printed, printed[-3000:]
    kept = newest_checkpoint(output)
    assert kept is not None and printed.count(f"resumes it from {kept}") == 1, printed[-3000:]
    assert f"checkpoint-{log_lines(output)[-1]['step']}" == kept.name


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=["SIGTERM", "SIGUSR1"])
def test_condense_train_passes_signals_on(recipe, tmp_path, number):
    """To its whole process group, as job managers send them; then the same command finishes the run."""
    command = [sys.executable, "-m", "condense", "train", str(recipe), f"output={tmp_path}", *LONG]
    process = start(command)
    assert wait_for(lambda: has_begun(tmp_path), 240)
    os.killpg(process.pid, number)
    ends_stopped(process, tmp_path, 75, number)
    finished = start(command)
    assert "resuming from" in finished.communicate(timeout=240)[0] and finished.returncode == 0
    assert logged(tmp_path) == pytest.approx(expected(recipe, *LONG)[0], abs=1e-4)


@pytest.mark.slow
def test_a_second_signal_ends_at_once(recipe, tmp_path):
    process = start([sys.executable, "-m", "condense", "train", str(recipe), f"output={tmp_path}", *LONG])
    assert wait_for(lambda: has_begun(tmp_path), 240)
    os.kill(process.pid, signal.SIGTERM)
    os.kill(process.pid, signal.SIGUSR1)
    process.communicate(timeout=60)
    assert process.returncode in (128 + signal.SIGTERM, 128 + signal.SIGUSR1)  # either may arrive first


def torchrun(recipe, output, *overrides, node: int, port: int) -> subprocess.Popen:
    nodes = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1", "--signals-to-handle=SIGTERM,SIGUSR1"]
    command = [sys.executable, "-m", "torch.distributed.run", *nodes, "--master-addr", "localhost"]
    command += ["--master-port", str(port), "-m", "condense.training.train", "--recipe", str(recipe)]
    return start([*command, f"output={output}", *ON_CPU, *overrides])


@pytest.mark.slow
def test_two_nodes_of_torchrun_train_stop_and_resume(recipe, tmp_path):
    """On one machine; a signal to one node's torchrun stops both with a checkpoint."""
    for signalled in (True, False):
        port = _free_port()
        processes = [torchrun(recipe, tmp_path, *LONG, node=node, port=port) for node in range(2)]
        if signalled:
            assert wait_for(lambda: has_begun(tmp_path), 240)
            os.kill(processes[1].pid, signal.SIGUSR1)
        printed = [process.communicate(timeout=240)[0] for process in processes]
        if signalled:
            assert all(process.returncode == 1 for process in processes)  # torchrun's own
            assert printed[0].count(f"resumes it from {newest_checkpoint(tmp_path)}") == 1, printed[0][-3000:]
        else:
            assert [process.returncode for process in processes] == [0, 0], printed[0][-3000:]
    losses, _, weights = expected(recipe, *LONG)
    assert logged(tmp_path) == pytest.approx(losses, abs=1e-4)
    trained = CondenseForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all((trained[name] - weights[name]).abs().max() < 1e-3 for name in weights)
