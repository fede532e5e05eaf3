"""The driver resumes where it was stopped, measures nothing twice, and writes the same files in the end."""

import json
import os
import signal
import subprocess
from typing import ClassVar, NamedTuple

import pytest

from condense.eval import results
from condense.eval.results import Table
from condense.eval.runner import Task, measure, run

pytestmark = pytest.mark.process


class Stopped(Exception):
    pass


class Rows(Task):
    """A task whose results are the records of its items."""

    columns: ClassVar[list[str]]

    def summarise(self, measured):
        return {self.kind: [{**self.key(item), **record} for item, record in measured]}

    def rows(self, results):
        return results[self.kind]

    @classmethod
    def tables(cls, results):
        return [Table(cls.kind, cls.columns, [list(row.values()) for row in results[cls.kind]])]

    @classmethod
    def draw(cls, results, path):
        pass


class Squares(Rows):
    """Squares of numbers; stops before the measurement `stop`."""

    kind, columns = "squares", ["number", "square"]

    def __init__(self, numbers, exponent=2, stop=None):
        self.numbers, self.exponent, self.stop, self.calls = numbers, exponent, stop, []

    def settings(self):
        return {"exponent": self.exponent}

    def items(self):
        return self.numbers

    def key(self, item):
        return {"number": item}

    def measure(self, item):
        if len(self.calls) == self.stop:
            raise Stopped
        self.calls.append(item)
        return {"square": item**self.exponent}

    @classmethod
    def draw(cls, results, path):
        path.with_suffix(".png").write_text(str(len(results["squares"])))


@pytest.mark.parametrize("stop", [0, 1, 3])
def test_a_stopped_measurement_resumes(tmp_path, stop):
    first = Squares([3, 1, 2, 5], stop=stop)
    with pytest.raises(Stopped):
        run(first, tmp_path)
    assert not (tmp_path / "squares.json").exists() and len(first.calls) == stop
    second = Squares([3, 1, 2, 5])
    results = run(second, tmp_path)
    assert first.calls + second.calls == [3, 1, 2, 5]  # each of them once
    assert results["squares"] == [{"number": n, "square": n * n} for n in (3, 1, 2, 5)]
    third = Squares([2, 7])  # items are no part of the settings: a grid may grow
    assert [row["square"] for row in run(third, tmp_path)["squares"]] == [4, 49] and third.calls == [7]


@pytest.fixture
def default_interrupt():
    """A shell lets its background processes ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("stop", "error"),
    [
        (lambda: signal.raise_signal(signal.SIGINT), KeyboardInterrupt),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), SystemExit),
    ],
)
def test_a_signal_says_how_to_resume(stop, error, tmp_path, capsys, default_interrupt):
    """Ctrl-C and SIGTERM; after the measurement SIGTERM has its default action again."""

    class Interrupted(Squares):
        def measure(self, item):
            if len(self.calls) == 2:
                stop()
            return super().measure(item)

    with pytest.raises(error) as left:
        run(Interrupted([3, 1, 2, 5]), tmp_path)
    said = f"stopped: {tmp_path}/squares.records.jsonl keeps 2 records; the same command goes on from there"
    assert capsys.readouterr().err.splitlines()[-1] == said
    assert error is KeyboardInterrupt or left.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert [row["square"] for row in run(Squares([3, 1, 2, 5]), tmp_path)["squares"]] == [9, 1, 4, 25]


def test_a_resumed_bar_begins_with_what_is_done(tmp_path, capsys):
    """So its rate and its remaining time are those of what is measured now."""
    with pytest.raises(Stopped):
        run(Squares([3, 1, 2, 5], stop=3), tmp_path)
    capsys.readouterr()
    run(Squares([5, 3, 1, 2]), tmp_path)
    first, *_, last = capsys.readouterr().err.splitlines()
    assert "| 3/4 [" in first and "| 4/4 [" in last and last.endswith("number 5]")


def test_items_in_words():
    """Names of fields stand beside numbers; what is off or left out is not said."""

    class Keyed(Squares):
        def key(self, item):
            return item

    key = {"model": "llama", "length": 1024, "depth": 0.5, "segment_length": None, "fixed": True, "optimizer": False}
    assert Keyed([]).in_words(key) == "llama, length 1,024, depth 0.5, fixed"


def test_what_is_written(tmp_path):
    results = run(Squares([1, 2]), tmp_path / "new")
    assert {path.name for path in (tmp_path / "new").iterdir() if not path.name.startswith(".")} == {
        "squares.json", "squares.csv", "squares.png", "squares.records.jsonl",
    }  # fmt: skip
    assert json.loads((tmp_path / "new" / "squares.json").read_text()) == results
    assert list(results) == ["kind", "command", "hardware", "versions", "date", "exponent", "squares"]
    assert (tmp_path / "new" / "squares.csv").read_text().split() == ["number,square", "1,1", "2,4"]
    lines = [json.loads(line) for line in (tmp_path / "new" / "squares.records.jsonl").read_text().splitlines()]
    assert lines == [
        {"settings": {"exponent": 2}},
        {"key": {"number": 1}, "record": {"square": 1}},
        {"key": {"number": 2}, "record": {"square": 4}},
    ]


def test_other_settings_are_refused(tmp_path):
    run(Squares([1]), tmp_path)
    other = Squares([1], exponent=3)
    with pytest.raises(ValueError, match="comes from another measurement: exponent was 2 and is 3"):
        run(other, tmp_path)
    assert other.calls == []


def test_without_files():
    assert measure(Squares([4])) == [(4, {"square": 16})]


class Point(NamedTuple):
    length: int
    kind: str


def test_items_may_be_tuples_with_the_fields_as_keys(tmp_path):
    """A grid of points, as of a benchmark, whose points are measured in processes of their own."""

    class Grid(Squares):
        def key(self, item):
            return item._asdict()

        def measure(self, item):
            self.calls.append(item)
            return {"seconds": item.length / 2}

    points = [Point(length, kind) for length in (2, 4) for kind in ("folded", "stock")]
    run(Grid(points), tmp_path)
    again = Grid(points)
    assert [row["seconds"] for row in run(again, tmp_path)["squares"]] == [1, 1, 2, 2] and again.calls == []


def test_the_commit_is_that_of_our_own_checkout_alone(tmp_path, monkeypatch):
    """Somebody else's project, in whose folder the package is installed, has a commit of its own."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-C", str(tmp_path)]
    installed = tmp_path / "site-packages" / "condense" / "eval" / "results.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "theirs"], check=True)
    checkout = tmp_path / "eval" / "results.py"
    monkeypatch.setattr(results, "__file__", str(installed))
    assert results.commit() == {}
    monkeypatch.setattr(results, "__file__", str(checkout))  # the control: at the place of a checkout
    assert set(results.commit()) == {"commit"}
