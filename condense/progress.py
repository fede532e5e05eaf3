"""Progress bars: one line that moves in a terminal, and a line now and then in a log file."""

import sys
import time
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
