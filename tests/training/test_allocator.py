"""Memory in the log, and the snapshot of a GPU whose memory is full, in a real run of one process."""

import os
from pathlib import Path
from statistics import median

import pytest
import torch

from condense import CondenseForCausalLM
from condense.training import allocator, train, trainer
from condense.training.planning.operations import count_operations
from condense.training.planning.speed import parse_rate
from condense.training.planning.utilization import seconds_at_peak
from condense.training.recipe import load_recipe
from condense.training.trainer import peak_memory

from .ranks import run_ranks
from .runs import folded_recipe, log_lines, train_with

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    fields = {"attention": "eager", "dtype": "bfloat16", "checkpoints": {"every": 3}}
    return folded_recipe(folder, (120, 3), global_batch=4, micro_batch=2, **fields)


@pytest.fixture
def gpu_calls(monkeypatch):
    """What is asked of the CUDA allocator, which a machine without GPUs lacks; the trainer itself stays on the CPU."""
    calls = []

    def dump(name):
        calls.append("dump")
        Path(name).touch()

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **given: calls.append(("record", given)))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    return calls


def run_main(monkeypatch, *arguments) -> str:
    """The message that the command line ends with."""
    monkeypatch.setattr("sys.argv", ["train.py", "--recipe", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        train.main()
    assert isinstance(ended.value.code, str)  # which Python prints, and exits with 1
    return ended.value.code


def fill_the_memory(monkeypatch, at_step=2):
    forward, calls = CondenseForCausalLM.forward, []

    def full(self, *args, **kwargs):
        calls.append(None)
        if len(calls) == 2 * at_step:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 80 GiB. Of these 79"
            )
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(CondenseForCausalLM, "forward", full)


def test_a_run_without_memory_ends_with_a_snapshot_and_a_remedy(path, tmp_path, monkeypatch, gpu_calls):
    fill_the_memory(monkeypatch)
    monkeypatch.setattr(train, "record_history", lambda: gpu_calls.append("record"))
    said = run_main(monkeypatch, path, f"output={tmp_path}", "record_memory_history=true")
    snapshot = tmp_path / "oom-rank-0.pickle"
    assert said == (
        "train: the GPU's memory is full (CUDA out of memory): set micro_batch below 2 or gradient_checkpointing=true "
        f"(condense train RECIPE --dry-run --gpu-memory GIB says what fits); a snapshot is in {snapshot}; open it at "
        "https://pytorch.org/memory_viz."
    )
    assert snapshot.exists() and gpu_calls == ["record", "dump"]
    assert [line["step"] for line in log_lines(tmp_path)] == [1]  # what was done is kept


def test_a_snapshot_that_can_not_be_written_is_said(path, tmp_path, monkeypatch, gpu_calls):
    fill_the_memory(monkeypatch, at_step=1)

    def no_space(name):
        raise OSError(28, "No space left on device", name)

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", no_space)
    said = run_main(monkeypatch, path, f"output={tmp_path}", "micro_batch=1", "gradient_checkpointing=true")
    assert "record" not in gpu_calls
    assert "set deepspeed=zero3" in said and "could not be written to" in said and "No space left" in said


def test_a_history_is_recorded_where_it_is_asked_for(monkeypatch, gpu_calls, capsys):
    allocator.record_history()
    assert gpu_calls == [] and "no GPU: no history" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    allocator.record_history()
    assert gpu_calls == [("record", {"max_entries": allocator.MAX_EVENTS, "stacks": "python"})]


def test_the_log_has_the_allocators_figures(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 7)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_alloc_retries": 3})
    assert peak_memory() == {"peak_cuda_bytes": 5, "reserved_cuda_bytes": 7, "cuda_allocation_retries": 3}


def test_the_share_of_the_peak_is_that_of_the_plans_operations(path, tmp_path, monkeypatch):
    """A run whose device is said to do as many operations a second as it needs: each line's share is near that."""
    trained = load_recipe(path, [f"output={tmp_path}", "data.shortest=1"])
    config = trained.model.load_config()
    operations = count_operations(config, trained, 1)["flops"] / trained.steps
    with monkeypatch.context() as on_gpu:
        on_gpu.setattr(torch.cuda, "is_available", lambda: True)
        on_gpu.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
        at_peak = seconds_at_peak(trained, config)
        assert seconds_at_peak(trained.model_copy(update={"dtype": "float32"}), config) is None
        on_gpu.setattr(torch.cuda, "get_device_name", lambda: "an unknown GPU")
        assert seconds_at_peak(trained, config) is None
    assert seconds_at_peak(trained, config) is None  # on a CPU
    assert 4 * at_peak(120) == pytest.approx(operations / 989e12)

    monkeypatch.setattr(trainer, "seconds_at_peak", lambda recipe, config: at_peak)
    train.train(trained)
    for line in log_lines(tmp_path):
        assert line["ranks"] == 1
        seconds = 4 * 120 / line["tokens_per_second"]  # passkey texts of the full length are rarely shorter
        assert line["mfu"] == pytest.approx(operations / 989e12 / seconds, rel=0.02)


def test_a_plan_takes_the_rate_of_a_runs_log(path, tmp_path, monkeypatch):
    train.train(load_recipe(path, [f"output={tmp_path}"]))
    rates = [line["tokens_per_second"] for line in log_lines(tmp_path)]
    assert parse_rate(str(tmp_path / "log.jsonl"), 8).tokens_per_second == pytest.approx(8 * median(rates[1:]))


def train_with_full_memory(arguments: list[str]) -> None:
    """The memory of rank 1 is full in its third pass."""

    forward, calls = CondenseForCausalLM.forward, []

    def full(self, *args, **kwargs):
        calls.append(None)
        if os.environ["RANK"] == "1" and len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(self, *args, **kwargs)

    CondenseForCausalLM.forward = full
    torch.cuda.memory._dump_snapshot = lambda name: Path(name).touch()
    train_with(arguments)


@pytest.mark.slow
def test_one_rank_of_two_without_memory_ends_the_run(path, tmp_path):
    arguments = ["--recipe", str(path), f"output={tmp_path}", "deepspeed=zero2_cpu", "micro_batch=1"]
    succeeded, printed = run_ranks(train_with_full_memory, arguments)
    assert not succeeded and "OutOfMemoryError" not in printed  # rank 0 may report that rank 1 has left
    assert "train, rank 1: the GPU's memory is full (CUDA out of memory): set gradient_checkpointing=true" in printed
    assert [file.name for file in tmp_path.glob("oom-*")] == ["oom-rank-1.pickle"]
