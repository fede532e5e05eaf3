"""Progress bars: one line that moves in a terminal, and a line now and then in a log file."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from tqdm import tqdm

SECONDS_PER_LINE = 30.0  # off a terminal


class ProgressBar(tqdm):
    """A bar of tqdm. Off a terminal it writes its first and last line, and others at most every 30 seconds.

    A bar that disappears at its end (`leave=False`) then writes nothing in its first 30 seconds.
    """

    def __init__(self, *arguments: Any, **options: Any):
        self._is_logged, self._next_line = not sys.stderr.isatty(), time.monotonic()
        if self._is_logged:
            delay = 0.0 if options.get("leave", True) else SECONDS_PER_LINE
            self._next_line += delay
            options |= {"file": _Lines(sys.stderr), "delay": delay, "dynamic_ncols": False}
            options |= {"mininterval": SECONDS_PER_LINE, "maxinterval": SECONDS_PER_LINE}
        else:
            options = {"dynamic_ncols": True} | options
        super().__init__(*arguments, **options)

    def refresh(self, *arguments: Any, **options: Any) -> Any:
        """Shows the bar now. tqdm also calls this for every change of the text beside the bar."""
        if self._is_logged:
            if time.monotonic() < self._next_line:
                return None
            self._next_line = time.monotonic() + SECONDS_PER_LINE
        return super().refresh(*arguments, **options)


class _Lines:
    """Writes each state of a bar on its own line, instead of over the state before."""

    def __init__(self, file: Any):
        self.file, self.encoding = file, getattr(file, "encoding", None)

    def write(self, text: str) -> None:
        if line := text.replace("\x1b[A", "").strip():  # "up", of a bar below others
            self.file.write(line + "\n")

    def flush(self) -> None:
        self.file.flush()


class Terminated(SystemExit):
    """Ends this process as SIGTERM asks, after the blocks that it leaves have ended."""


@contextmanager
def stoppable(kept: Callable[[], str]) -> Iterator[None]:
    """Says at Ctrl-C and SIGTERM what is kept, and that the same command goes on from there.

    SIGTERM then ends the process as Ctrl-C does, so other processes that it has started end too.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated(128 + number)

    in_charge = threading.current_thread() is threading.main_thread()
    takes_over = in_charge and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if takes_over:
        signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except (KeyboardInterrupt, Terminated):
        print(f"\nstopped: {kept()}; the same command goes on from there", file=sys.stderr, flush=True)
        raise
    finally:
        if takes_over:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
