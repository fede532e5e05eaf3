"""Ranks of a run without the launcher: forked from a process that has imported what every rank imports.

A run through the launcher starts five processes, one after another, each of which imports torch. The tests of the
launcher itself, and one run of each kind, still use it.
"""

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from condense.training.data.workers import PRELOAD
from condense.training.launch import _free_port

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 3  # for the messages of other ranks, after one has failed
FORKS = multiprocessing.get_context("forkserver")
PRELOAD.insert(0, f"{__package__}.preloaded")  # of the one server of this process
FORKS.set_forkserver_preload(PRELOAD)


def run_ranks(function: Callable, *arguments, ranks: int = 2) -> tuple[bool, str]:
    """Calls a function as every rank of a run: whether all of them ended well, and all that was printed."""
    with TemporaryDirectory() as folder:
        files = [Path(folder) / f"rank{rank}.txt" for rank in range(ranks)]
        with started_ranks(function, *arguments, files=files) as processes:
            while any(process.is_alive() for process in processes):
                time.sleep(0.05)
                if any(process.exitcode for process in processes):
                    _wait(processes, GRACE_S)
                    break
        return not any(process.exitcode for process in processes), "".join(file.read_text() for file in files)


@contextmanager
def started_ranks(function: Callable, *arguments, files: Sequence[Path]) -> Iterator[list]:
    """The processes of a run, each of which prints into its file. Leaving the context kills those that still run."""
    port, ranks = _free_port(), len(files)
    processes = [
        FORKS.Process(target=_be_rank, args=(rank, ranks, port, file, function, arguments))
        for rank, file in enumerate(files)
    ]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _wait(processes: list, seconds: float) -> None:
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))


def _be_rank(rank: int, ranks: int, port: int, file: Path, function: Callable, arguments: tuple) -> None:
    os.chdir(ROOT)
    torch.set_num_threads(1)  # of several, those that wait take the cores of other tests
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja lies there
    output = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    try:
        function(*arguments)
        code = 0
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
