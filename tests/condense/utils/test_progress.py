"""Progress bars in a log file and in a terminal; and that all bars of the package are of this kind."""

import ast
import contextlib
import os
import pty
import sys
import termios

import pytest

from condense.utils import progress
from condense.utils.progress import ProgressBar

from ...test_architecture import SOURCES

pytestmark = pytest.mark.process


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves by hand, for tqdm's bars too."""

    class Clock:
        now = 1_000.0

        def read(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock.read)
    monkeypatch.setattr("tqdm.std.time", clock.read)
    monkeypatch.setattr(ProgressBar, "monitor_interval", 0)
    return clock


def lines(capsys):
    text = capsys.readouterr().err
    assert "\r" not in text and "\x1b" not in text and "\n\n" not in text
    return text.splitlines()


@pytest.mark.parametrize("by", [1, 7])
def test_a_log_file_has_few_lines(clock, capsys, by):
    """10,000 steps in 1,000 seconds, with a text that changes at each of them."""
    with ProgressBar(total=10_000, desc="training", unit="step") as bar:
        for _ in range(0, 10_000, by):
            clock.now += 0.1 * by
            bar.set_postfix(loss=1.5)
            bar.update(min(by, 10_000 - bar.n))
    found = lines(capsys)
    assert 25 <= len(found) <= 1 + 1_000 / 30 + 1
    assert found[0].startswith("training:   0%|") and found[-1].startswith("training: 100%|")
    assert "10000/10000" in found[-1] and all("loss=1.5" in line for line in found[1:])


def test_a_short_bar_that_disappears_writes_nothing(clock, capsys):
    for _ in range(100):  # a validation every few steps
        for _ in ProgressBar(range(20), desc="validation", leave=False):
            clock.now += 0.1
    assert lines(capsys) == []
    for _ in ProgressBar(range(1_000), desc="validation", leave=False):
        clock.now += 0.1
    assert 2 <= len(lines(capsys)) <= 3


def test_bars_below_others_and_messages_between(clock, capsys):
    with ProgressBar(range(3), desc="outer") as outer:
        for _ in outer:
            for _ in ProgressBar(range(2), desc="inner"):
                clock.now += 40
            ProgressBar.write("a message", file=sys.stderr)
    found = lines(capsys)
    assert found.count("a message") == 3 and all(line.startswith(("outer", "inner", "a message")) for line in found)


def test_a_terminal_shows_one_line_that_moves(new_process):
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    code = (
        "import os, sys; os.dup2(os.open(sys.argv[1], os.O_RDWR), 2); os.environ['TERM'] = 'xterm'\n"
        "from condense.utils.progress import ProgressBar\nfor _ in ProgressBar(range(3), mininterval=0): pass"
    )
    assert new_process(code, os.ttyname(theirs)).returncode == 0
    os.close(theirs)
    shown = ""
    with contextlib.suppress(OSError):  # the end
        while data := os.read(ours, 2**16):
            shown += data.decode()
    os.close(ours)
    assert shown.count("\r") >= 4 and "3/3" in shown


def test_all_bars_are_made_here():
    makers = []
    for name, path in SOURCES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            makers += [name for module in modules if module.split(".")[0] == "tqdm"]
    assert makers == ["condense.utils.progress"]
