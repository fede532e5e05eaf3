"""Processes that end, on any signal, when the process that started them ends.

`condense train` starts DeepSpeed's runner, which starts its launcher, which starts the ranks. Neither runner nor
launcher forwards every signal, and SIGKILL can't be forwarded. So the parent ends its children, and each rank watches
its parents. A launcher sends SIGTERM to all ranks when one of them fails, so the parent asks for a checkpoint with
different signals.
"""

import os
import signal
import site
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path

import psutil

import condense

PARENT = "CONDENSE_PARENT"  # a process started by `run_to_end` ends with this one
STOPPED = os.EX_TEMPFAIL  # exit code (75) of a run stopped by a signal; the same command resumes it
# A signal to this process: the one that then asks a rank to write a checkpoint and end, and that tells it which came.
PLEASE_SAVE = {signal.SIGUSR1: signal.SIGUSR1, signal.SIGTERM: signal.SIGUSR2}
SAVING_S = 600  # for the ranks to do so
GRACE_S = 30  # between SIGTERM and SIGKILL
INTERVAL_S = 0.25
RANK_OPTION = "--local_rank="  # given to each rank by DeepSpeed's launcher only
LAUNCHERS = ("deepspeed", "torchrun", "torch.distributed.run")
POLL_S = 0.1


def child_environment() -> dict[str, str]:
    """Returns the environment of child processes in Python: they can import this package even if it isn't installed."""
    root = str(Path(condense.__file__).parents[1])
    if root in site.getsitepackages():
        return dict(os.environ)
    given = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{given}" if given else root}


def run_to_end(command: Sequence[str], environment: Mapping[str, str], **options) -> int:
    """Runs a command in its own session and returns its exit code; signals act as in `run_all_to_end`.

    `timeout` and job managers signal this process's whole group, which would end DeepSpeed's runner.
    """
    return run_all_to_end([(command, environment)], given=None, start_new_session=True, **options)


def run_all_to_end(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], given: bytes | None = b"", **options
) -> int:
    """Runs commands at once, each in its environment and with `given` as input (None: this process's input).

    Returns the first nonzero exit code; a process that fails ends the others. SIGHUP and exceptions here end all of
    them and their children. The first SIGTERM or SIGUSR1 asks the ranks among the children for a checkpoint, after
    which they end by themselves. Without ranks, or on a second signal, all end at once.
    """
    processes = list[subprocess.Popen]()
    stdin = None if given is None else subprocess.PIPE
    with _signals_as_exit() as asked:
        try:
            for command, environment in commands:
                environment = {**environment, PARENT: str(os.getpid())}
                processes.append(subprocess.Popen(command, env=environment, stdin=stdin, **options))
                _write(processes[-1], given)
            # Once ranks were asked for checkpoints, the first that has saved doesn't end the others.
            while None in (exit_codes := [process.poll() for process in processes]) and (asked or not any(exit_codes)):
                time.sleep(POLL_S)
            exit_code = next(filter(None, exit_codes), 0)
        finally:
            for process in processes:
                if process.poll() is None:
                    _end_tree(psutil.Process(process.pid))
    if asked and exit_code not in (0, STOPPED):  # nothing to save
        sys.exit(128 + asked[0])
    return exit_code


def _write(process: subprocess.Popen, given: bytes | None) -> None:
    if given is not None and process.stdin is not None:
        with suppress(BrokenPipeError), process.stdin:  # its exit code says that it has ended
            process.stdin.write(given)


def end_with_parents() -> None:
    """Ends this process and its children within seconds after any of its watched parents ends.

    It watches the process that called `run_to_end` and all processes in between, or else the launcher: DeepSpeed's with
    its runner, or torchrun.
    """
    parents = _parents()
    if not parents:
        return

    def watch() -> None:
        while all(map(_is_alive, parents)):
            time.sleep(INTERVAL_S)
        gone = next(parent.pid for parent in parents if not _is_alive(parent))
        with suppress(OSError):  # the terminal may be closed as well
            print(f"process {os.getpid()} ends: its parent, process {gone}, has gone", file=sys.stderr, flush=True)
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end_with_parents").start()


def _parents() -> list[psutil.Process]:
    chain, started_by = psutil.Process().parents(), os.environ.get(PARENT)
    if started_by is not None:
        numbers = [parent.pid for parent in chain]
        if int(started_by) not in numbers:
            sys.exit(f"process {os.getpid()} ends: its parent, process {started_by}, has gone")
        return chain[: numbers.index(int(started_by)) + 1]
    return list(takewhile(_is_launcher, chain))


def _is_launcher(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any(name in part for part in process.cmdline()[:3] for name in LAUNCHERS)
    return False


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _end_tree(root: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        processes = [root, *root.children(recursive=True)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        for process in psutil.wait_procs(processes, timeout=GRACE_S)[1]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _ask_for_checkpoint(number: int) -> bool:
    """Returns whether there is a rank to ask."""
    ranks = [child for child in psutil.Process().children(recursive=True) if _is_rank(child)]
    if ranks:
        name = signal.Signals(number).name
        print(f"{name}: once training, the ranks write a checkpoint and end; a second signal ends them at once")
        sys.stdout.flush()
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(PLEASE_SAVE[signal.Signals(number)])
    return bool(ranks)


def _is_rank(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any(part.startswith(RANK_OPTION) for part in process.cmdline())
    return False


@contextmanager
def _signals_as_exit() -> Iterator[list[int]]:
    """Makes signals unwind the stack, as Ctrl-C does; one that asks ranks for a checkpoint goes into the list instead.

    Only the main thread receives signals.
    """
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + (asked[0] if asked else number))

    def ask_or_leave(number: int, frame: object) -> None:
        if asked:
            leave(number, frame)
        asked.append(number)
        if not _ask_for_checkpoint(number):
            leave(number, frame)
        signal.alarm(SAVING_S)

    handlers = {
        signal.SIGTERM: ask_or_leave, signal.SIGUSR1: ask_or_leave, signal.SIGHUP: leave, signal.SIGALRM: leave,
    }  # fmt: skip
    # Ignored signals stay ignored, such as SIGHUP under nohup.
    numbers = [number for number in handlers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handlers[number]) for number in numbers}
    try:
        yield asked
    finally:
        signal.alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)
