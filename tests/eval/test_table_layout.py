"""Tables as text: words at the left, numbers at the right, and nothing beyond the width of a terminal."""

import re
import sys
from types import SimpleNamespace

import pytest

from condense.eval.command import show
from condense.eval.results import Table

pytestmark = pytest.mark.unit

COLUMNS = ["tokens", "model", "training step [ms]", "lowest to highest [ms]", "peak above model [MiB]", "why"]
ROWS = [
    ["1,024", "folded, segment 256", "39,428.3", "32,799.4 to 46,057.1", "1,055", ""],
    ["16,384*", "stock", "OOM", "", "", "the machine has 12 of the 40 GiB that it would need for all of its scores"],
]
TABLE = Table("training step, batch 1, attention auto (peak resident memory of the process)", COLUMNS, ROWS)


def test_words_stand_at_the_left_and_numbers_at_the_right():
    assert str(TABLE).splitlines()[1:] == [
        " tokens  model                training step [ms]  lowest to highest [ms]  peak above model [MiB]  why",
        "  1,024  folded, segment 256            39,428.3    32,799.4 to 46,057.1                   1,055",
        "16,384*  stock                               OOM                                                  "
        f"{ROWS[1][-1]}",
    ]
    assert TABLE.text_columns == [False, True, False, False, False, True]


@pytest.mark.parametrize(
    ("cells", "text"),
    [
        (["75.0 (60.0 to 80.0), in a chat", "-"], False),
        (["4.47x", "OOM"], False),
        (["< 1.0", ">= 4"], True),
        (["< 1.0", "> 8.0 (7.1 to 9.5)"], False),
        (["-0.0030", "+1.2e-05 [1e-05, 2e-05]"], False),
        (["0-512", "1024+", "overall"], False),
        (["[0.1, 0.2]", "1,024*"], False),
        (["", "-"], False),
        (["135M-folded", "1B"], True),
        (["folded", "stock"], True),
        (["12 of 40 texts have other lengths", "no text has this length"], True),
    ],
)
def test_columns_of_words(cells, text):
    assert Table("", ["head"], [[cell] for cell in cells]).text_columns == [text]


@pytest.mark.parametrize("width", [200, 130, 100, 80, 60, 40])
def test_nothing_stands_beyond_the_width(width):
    lines = TABLE.within(width).splitlines()
    assert max(map(len, lines)) <= width
    shown = re.sub(r"\s+", "", "".join(lines))
    words = [word for row in [COLUMNS, *ROWS] for cell in row for word in cell.split()]
    assert all(word in shown for word in words)


def test_parts_repeat_what_names_a_row():
    parts = TABLE.within(60).split("\n\n")
    assert len(parts) > 2 and all("folded, segment 256" in part and "16,384*" in part for part in parts)


def test_a_wrapped_head_stands_above_its_numbers():
    table = Table("t", ["model", "the same after the first call [MiB]"], [["a", "7"], ["b", "205"]])
    assert table.within(28) == (
        "t\n"
        "       the same after\n"
        "       the first call\n"
        "model           [MiB]\n"
        "a                   7\n"
        "b                 205"
    )


@pytest.mark.parametrize("is_terminal", [True, False])
def test_only_a_terminal_has_a_width(is_terminal, tmp_path, monkeypatch, capsys):
    """A file and a pipe have one line for each row, as programs read them."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    show({"kind": "profile"}, SimpleNamespace(tables=lambda results: [TABLE]), tmp_path)
    shown, _, _ = capsys.readouterr().out.rpartition("\n\n")
    assert shown == (TABLE.within(60) if is_terminal else str(TABLE))
