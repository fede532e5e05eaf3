"""Divides one measurement among several processes, each with its own GPU.

The processes claim items from one counter and send their records to the first process, which writes them. They talk
through the key-value store that torch's launchers set up. So records do not depend on the number of processes, and
only the first one needs the output folder.
"""

import hashlib
import json
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cache
from itertools import count
from signal import Signals
from typing import Any

import torch
from torch.distributed import PrefixStore
from torch.distributed.rendezvous import rendezvous

from condense.training.subprocesses import child_environment, end_with_parents, run_all_to_end
from condense.utils.progress import Terminated

WITHOUT_LIMIT = timedelta(days=365)
INTERVAL_S = 0.1
LAUNCHED = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # set by a launcher besides WORLD_SIZE

_measurements = count()  # in this process: each has its own keys in the launcher's store


class Ranks:
    """The processes of a measurement, seen from process number `rank` of `size`."""

    def __init__(self, store: Any, rank: int, size: int):
        self.store, self.rank, self.size = store, rank, size

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def publish(self, settings: dict[str, Any], pending: Sequence[int]) -> None:
        """Accepts the measurement as the first process, and publishes the numbers of the items to measure."""
        self.store.set("accepted", json.dumps({"settings": _digest(settings), "pending": list(pending)}))

    def await_acceptance(self) -> dict[str, Any]:
        """Waits for what the first process publishes, and returns it; exits if the first process has ended."""
        try:
            return json.loads(self.store.get("accepted"))
        except RuntimeError:  # the first process has printed the reason
            sys.exit(1)

    def pending(self, settings: dict[str, Any]) -> list[int]:
        """Returns the items to measure. Raises `ValueError` if models or data differ from the first process's."""
        accepted = self.await_acceptance()
        if accepted["settings"] != _digest(settings):
            raise ValueError(
                f"process {self.rank} on {socket.gethostname()} has other models or data than the first process: give "
                "all machines the same files and packages."
            )
        return accepted["pending"]

    def claims(self, pending: Sequence[int]) -> Iterator[int]:
        """Yields the items that this process measures, always the next unclaimed one."""
        while (claimed := self.store.add("claimed", 1)) <= len(pending):
            yield pending[claimed - 1]

    def leave(self) -> None:
        """Tells the first process that this one has finished."""
        self.store.add("left", 1)

    def wait_for_others(self) -> None:
        """Waits until all others have left: the store ends with this process."""
        while self.store.add("left", 0) < self.size - 1:
            time.sleep(INTERVAL_S)

    def send(self, record: str) -> None:
        """Sends a record to the first process."""
        self.store.queue_push("records", record)

    def received(self, number: int) -> Iterator[str]:
        """Yields the records of all processes as they arrive. Can run in a thread: it opens its own connection."""
        connection = self.store.clone()
        for _ in range(number):
            yield connection.queue_pop("records").decode()


def _digest(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def started_ranks() -> int:
    """Returns the number of processes that a launcher has started, including this one."""
    return int(os.environ.get("WORLD_SIZE", 1))


def join() -> Ranks | None:
    """Joins the processes that a launcher has started, and selects this process's GPU; None for a single process."""
    if started_ranks() == 1:
        return None
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, size = _rendezvous()
    return Ranks(PrefixStore(f"measurement {next(_measurements)}", store), rank, size)


@cache
def _rendezvous() -> tuple[Any, int, int]:
    """Returns the store for all measurements of this process, its number, and the number of processes."""
    return next(iter(rendezvous("env://", timeout=WITHOUT_LIMIT)))


def check_alone(name: str) -> None:
    """Raises `ValueError` if a launcher has started several processes of a command that runs in one."""
    if started_ranks() > 1:
        raise ValueError(
            f"condense {name} runs in one process: start it without the launcher, which has started {started_ranks()}."
        )


def check_ranks(ranks: int, device_map: str | None) -> None:
    """Raises `ValueError` for processes without a GPU of their own, or inside another launcher's processes."""
    if started_ranks() > 1 and ranks > 1:
        raise ValueError(f"a launcher has started {started_ranks()} processes: leave --ranks {ranks} out.")
    total = max(ranks, started_ranks())
    if device_map is not None and total > 1:
        raise ValueError(f"--device-map {device_map} divides a model over all GPUs: it needs one process, not {total}.")
    if started_ranks() > 1 and (absent := [name for name in LAUNCHED if name not in os.environ]):
        raise ValueError(
            f"WORLD_SIZE={started_ranks()} and {', '.join(absent)} not set: start the processes with torchrun or the "
            "deepspeed launcher, or a single one with --ranks."
        )
    num_gpus, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", 0))
    if num_gpus and started_ranks() > 1 and local >= num_gpus:
        raise ValueError(f"LOCAL_RANK={local}: this machine has {num_gpus} GPUs: start at most that many on it.")
    if num_gpus and ranks > num_gpus:
        raise ValueError(f"--ranks {ranks}: this machine has {num_gpus} GPUs, and each process needs one of its own.")


def call_on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> None:
    """Calls a function of a module in `ranks` processes on this machine, which end with this one.

    Exits with the code of the first process that fails, after the others have ended.
    """
    environment = child_environment() | {"MASTER_ADDR": "localhost", "WORLD_SIZE": str(ranks)}
    environment["MASTER_PORT"] = str(_free_port())
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the store ends with the first process
    if not torch.cuda.is_available():
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    numbers: list[dict[str, str]] = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    for others in numbers[1:]:
        others["TQDM_DISABLE"] = "1"  # the first process has the progress bars
    work = pickle.dumps((sys.argv, function, arguments))
    command = [sys.executable, "-m", __name__]
    exit_code = run_all_to_end([(command, environment | number) for number in numbers], work)
    if exit_code < 0:
        raise ChildProcessError(
            f"one of {ranks} processes was ended by {Signals(-exit_code).name} (SIGKILL is often lack of memory): "
            "start the command again, with fewer --ranks. It resumes."
        )
    if exit_code:
        sys.exit(exit_code)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def main() -> None:
    """Runs one of the processes of `call_on_ranks`."""
    from transformers.utils import logging

    end_with_parents()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    sys.argv, function, arguments = pickle.load(sys.stdin.buffer)
    exit_code = 0
    try:
        function(*arguments)
    except (ValueError, OSError) as error:
        print(f"condense: {error}", file=sys.stderr)
        exit_code = 1
    except KeyboardInterrupt:
        exit_code = 130
    except Terminated as stopped:
        exit_code = int(stopped.code or 1)
    if exit_code:
        sys.stderr.flush()
        os._exit(exit_code)  # a thread may still wait for records, and Python would abort at its exit


if __name__ == "__main__":
    main()
