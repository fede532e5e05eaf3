"""Several processes that share a measurement write the files of one process, whatever each of them measures."""

import json
import os
import signal
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Event

import pytest
import torch
from torch.distributed import TCPStore

from condense import CondenseForCausalLM
from condense.eval.models import load_models
from condense.eval.ranks import Ranks, call_on_ranks, check_alone, check_ranks, join
from condense.eval.runner import measure_share, run
from condense.eval.tasks import evaluate
from condense.training.small_llama import passkey_tokenizer, small_llama

from ..refusals import assert_refused
from .test_runner import Squares, Stopped

pytestmark = pytest.mark.process

PASSKEY = {"lengths": (80, 120), "num_prompts": 3}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("models"), passkey_tokenizer()
    for seed in (0, 1):
        small_llama(tokenizer, seed=seed).save_pretrained(folder / "llama")
        model = CondenseForCausalLM.from_pretrained(folder / "llama", segment_length=40)
        model.save_pretrained(folder / f"model-{seed}")
        tokenizer.save_pretrained(folder / f"model-{seed}")
    return [f"{folder}/model-{seed}" for seed in (0, 1)]


@pytest.fixture(scope="module")
def alone(models, tmp_path_factory):
    """Returns the folder that one process writes."""
    folder = tmp_path_factory.mktemp("alone")
    evaluate("passkey", folder, models=models, **PASSKEY)
    return folder


def same_files(folder, alone, kind="passkey"):
    for name in (f"{kind}.records.jsonl", f"{kind}.csv"):
        assert (folder / name).read_bytes() == (alone / name).read_bytes()
    found, expected = (json.loads((path / f"{kind}.json").read_text()) for path in (folder, alone))
    assert {**found, "command": 0} == {**expected, "command": 0}


def shared(folder, tasks):
    """Runs tasks as the processes of one measurement, in threads; returns the first one's results."""
    server = new_server()
    with ThreadPoolExecutor() as pool:
        for rank, task in enumerate(tasks[1:], 1):
            pool.submit(share, task, Ranks(server.clone(), rank, len(tasks)))
        return run(tasks[0], folder, Ranks(server.clone(), 0, len(tasks)))


def share(task, ranks):
    measure_share(task, ranks, ranks.pending(task.settings()))


def new_server():
    return TCPStore("localhost", 0, None, True, timedelta(minutes=1), wait_for_workers=False)


@pytest.mark.parametrize("already", [0, 2])
def test_items_are_divided_and_written_as_by_one_process(tmp_path, already):
    numbers = [3, 1, 2, 5, 9, 4, 7]
    run(Squares(numbers), tmp_path / "alone")
    if already:  # a stopped measurement of one process resumes on several
        with pytest.raises(Stopped):
            run(Squares(numbers, stop=already), tmp_path / "shared")
    tasks = [Squares(numbers) for _ in range(3)]
    results = shared(tmp_path / "shared", tasks)
    assert [row["square"] for row in results["squares"]] == [number**2 for number in numbers]
    assert sorted(number for task in tasks for number in task.calls) == sorted(numbers[already:])  # each of them once
    same_files(tmp_path / "shared", tmp_path / "alone", "squares")


def test_records_are_there_when_the_first_process_fails(tmp_path):
    started, records = Event(), tmp_path / "squares.records.jsonl"

    class First(Squares):
        def measure(self, item):
            started.set()
            while len(records.read_text().splitlines()) < 4:  # the settings and the records of the other process
                time.sleep(0.01)
            raise Stopped

    class Other(Squares):
        def measure(self, item):
            assert started.wait(60)
            return super().measure(item)

    with pytest.raises(Stopped):
        shared(tmp_path, [First([3, 1, 2, 5]), Other([3, 1, 2, 5])])
    again = Squares([3, 1, 2, 5])
    run(again, tmp_path)
    assert len(again.calls) == 1
    run(Squares([3, 1, 2, 5]), tmp_path / "alone")
    same_files(tmp_path, tmp_path / "alone", "squares")


def test_a_record_that_cannot_be_written_ends_the_measurement(tmp_path, monkeypatch):
    def full(self, line):
        raise OSError("no space left")

    monkeypatch.setattr("condense.eval.results_store.ResultsStore.add", full)
    with pytest.raises(OSError, match="no space left"):
        shared(tmp_path, [Squares([3, 1])])


def test_the_first_process_waits_for_one_that_is_late(tmp_path):
    """The store ends with the first process, also where nothing is left to measure."""
    run(Squares([3, 1]), tmp_path)
    arrived = Event()

    class Late(Squares):
        def settings(self):
            time.sleep(0.3)
            arrived.set()
            return super().settings()

    server = new_server()
    with ThreadPoolExecutor() as pool:
        pool.submit(share, Late([3, 1]), Ranks(server.clone(), 1, 2))
        run(Squares([3, 1]), tmp_path, Ranks(server.clone(), 0, 2))
        assert arrived.is_set()


def test_each_measurement_of_a_process_has_keys_of_its_own(monkeypatch):
    server = new_server()
    monkeypatch.setattr("condense.eval.ranks._rendezvous", lambda: (server, 0, 2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    first, second = join(), join()
    first.publish({}, [4])
    assert list(first.claims([4])) == [4]
    second.publish({}, [5])
    assert second.pending({}) == [5] and list(second.claims([5])) == [5]


def test_processes_with_other_data_are_refused():
    server = new_server()
    Ranks(server, 0, 2).publish({"exponent": 2}, [0, 1])
    assert Ranks(server, 1, 2).pending({"exponent": 2}) == [0, 1]
    assert_refused("process 1 on .* has other models or data", Ranks(server, 1, 2).pending, {"exponent": 3})


@pytest.mark.usefixtures("collected_by_hand")  # else the cycle would be freed sooner or later
def test_one_model_at_a_time_is_in_memory(models):
    first, second = load_models(models)
    seen = weakref.ref(first.model)
    assert first.model is seen()  # not loaded again
    assert second.model is not None and seen() is None
    seen = weakref.ref(second.model)
    second.model.cycle = [second.model]  # such as the hooks of a device map make
    assert first.model is not None and seen() is None
    assert first.describe()["weights"] != second.describe()["weights"]
    assert torch.equal(first.model.lm_head.weight, CondenseForCausalLM.from_pretrained(models[0]).lm_head.weight)


def test_mistakes_are_named(monkeypatch):
    check_ranks(2, None)
    assert_refused("--device-map auto .* needs one process, not 2", check_ranks, 2, "auto")
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        assert_refused("WORLD_SIZE=2 and RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set", check_ranks, 1, None)
        for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            patch.setenv(name, "1")
        check_ranks(1, None)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        assert_refused("LOCAL_RANK=1: this machine has 1 GPUs", check_ranks, 1, None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert_refused("--ranks 2: this machine has 1 GPUs", check_ranks, 2, None)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert_refused("a launcher has started 4 processes: leave --ranks 2 out", check_ranks, 2, None)
    assert_refused("condense profile runs in one process", check_alone, "profile")


def test_two_processes_of_one_machine(models, alone, tmp_path):
    results = evaluate("passkey", tmp_path, models=models, ranks=2, **PASSKEY)
    assert results["cells"] == json.loads((alone / "passkey.json").read_text())["cells"]
    same_files(tmp_path, alone)


COMMAND = ["eval", "passkey", "--lengths", "80,120", "--prompts", "3"]


def front_door(launcher, *arguments):
    command = [sys.executable, *launcher, "condense", *COMMAND, *arguments]
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PATH": path}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        ["-m"],
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"],
        ["-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--no_local_rank", "--module"],
    ],
    ids=["ranks", "torchrun", "deepspeed"],
)
def test_launchers(launcher, models, alone, tmp_path):
    own = ["--ranks", "2"] if len(launcher) == 1 else []
    chosen = [part for model in models for part in ("--model", model)]
    done = front_door(launcher, *chosen, *own, "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    same_files(tmp_path, alone)
    assert done.stdout.count("passkey retrieval, all depths together") == 1


def killed():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@pytest.mark.slow
def test_a_killed_process_ends_the_others_and_is_named():
    with pytest.raises(ChildProcessError, match="one of 2 processes was ended by SIGKILL"):
        call_on_ranks(2, killed)


@pytest.mark.slow
def test_a_refusal_is_printed_once(models, alone, tmp_path):
    (tmp_path / "passkey.records.jsonl").write_bytes((alone / "passkey.records.jsonl").read_bytes())
    done = front_door(["-m"], "--model", models[0], "--digits", "5", "--ranks", "2", "--output", str(tmp_path))
    assert done.returncode == 1 and done.stderr.count("comes from another measurement") == 1
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1
