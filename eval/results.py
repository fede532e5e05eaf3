"""The files of a measurement: JSON, CSV and pictures, and the metadata of the run that wrote them.

NAME.json holds everything. NAME.csv holds the records, one per line, for spreadsheets. NAME.png and NAME.svg hold the
picture. The terminal and the report show the same tables. No file is written through a link.
"""

import csv
import io
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from textwrap import wrap
from typing import Any

from condense.utils.files import atomic_file, check_not_linked

from . import table_layout

PACKAGES = ("torch", "transformers", "deepspeed", "accelerate", "rouge-score", "sentencex", "lm-eval")
DPI = 150  # in pictures
COLORS = 256  # in a PNG
MAKE_ROOM = "Make room, and start the same command again."
MIN_FONT_SIZE = 4.0  # of a long title, in points
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # spreadsheets read a cell that begins with one of these as a formula


@dataclass(frozen=True)
class Table:
    """A table whose column names include the units, and whose cells are formatted for display."""

    title: str
    columns: list[str]
    rows: list[list[Any]]

    def __str__(self) -> str:
        return self.within(None)

    def within(self, width: int | None) -> str:
        """Returns the table as text, in lines of at most `width` characters if it can."""
        title = [self.title] if width is None else wrap(self.title, width)
        return "\n".join([*title, *table_layout.lines(self.columns, self.cells, width)])

    @property
    def cells(self) -> list[list[str]]:
        return [list(map(str, row)) for row in self.rows]

    @property
    def text_columns(self) -> list[bool]:
        """Returns for each column whether it holds words, which stand at the left."""
        return [table_layout.is_text([row[number] for row in self.cells]) for number in range(len(self.columns))]


def some_table(title: str, columns: list[str], rows: list[list[Any]]) -> list[Table]:
    """Returns the table in a list, or nothing if it has no rows."""
    return [Table(title, columns, rows)] if rows else []


def groups_of(records: Iterable[dict[str, Any]], *names: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Groups records by the values of these fields."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(tuple(record[name] for name in names), []).append(record)
    return groups


def run_metadata() -> dict[str, Any]:
    """Returns the command, hardware, versions and date of a run."""
    program = Path(sys.argv[0])
    is_front_door = program.name == "condense" or program.parts[-2:] == ("condense", "__main__.py")
    shown = "condense" if is_front_door else f"python {program.name}"
    return {
        "command": f"{shown} {shlex.join(sys.argv[1:])}".strip(),
        "hardware": hardware(),
        "versions": versions() | commit(),
        "date": date.today().isoformat(),
    }


def hardware() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    return f"{model}, {os.cpu_count()} cores"


@cache  # for the code that this process has imported
def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> dict[str, str]:
    """Returns the commit of the checkout that the package runs from; nothing if it is installed."""
    checkout = Path(__file__).resolve().parents[1]
    if _git(checkout, "rev-parse", "--show-toplevel") != str(checkout):
        return {}
    found = _git(checkout, "describe", "--always", "--dirty", "--exclude=*")
    return {} if found is None else {"commit": found}


@cache
def _git(folder: Path, *arguments: str) -> str | None:
    """Returns the output of git; None if it fails or is missing."""
    try:
        found = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return None if found.returncode else found.stdout.strip()


def write_results(path: Path, results: dict[str, Any], records: Sequence[dict[str, Any]]) -> None:
    """Writes `path`.json, one field per line, and `path`.csv, without dictionary values.

    Without records, `path`.csv is not written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    table = path.with_suffix(".csv")
    check_not_linked(path.with_suffix(".json"), table)
    fields = ",\n".join(f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in results.items())
    with atomic_file(path.with_suffix(".json"), MAKE_ROOM) as file:
        file.write_text(f"{{\n{fields}\n}}\n", encoding="utf-8")
    flat = [{name: value for name, value in record.items() if not isinstance(value, dict)} for record in records]
    if flat:
        write_csv(table, flat)
    else:
        table.unlink(missing_ok=True)


def write_csv(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Writes a header of all fields and a line per record; a quote is put before text that would be a formula."""
    names = list(dict.fromkeys(name for record in records for name in record))
    with atomic_file(path, MAKE_ROOM) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(map(_cell, names))
        writer.writerows([_cell(record.get(name, "")) for name in names] for record in records)


def _cell(value: Any) -> Any:
    """Returns a cell's value, with a quote before text that a spreadsheet would compute, unless it is a number."""
    if not isinstance(value, str) or not value.startswith(FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


@contextmanager
def picture(path: Path, rows: int = 1, columns: int = 1, **options: Any) -> Iterator[Any]:
    """Yields a figure's axes and saves `path`.png and `path`.svg. Dollars in names do not start formulas."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(rows, columns, layout="constrained", dpi=DPI, **options)
    try:
        yield axes
        for text in _texts(figure):
            text.set_parse_math(False)
        figure.get_layout_engine().execute(figure)  # once for both files
        figure.set_layout_engine("none")  # not the one from the user's settings
        _fit_width(figure)
        _save(figure, path)
    finally:
        plt.close(figure)


def _fit_width(figure: Any) -> None:
    """Makes titles and legends smaller that would leave the figure or meet the next title, because of long names."""
    width, titled = figure.bbox.width, [axes for axes in figure.axes if axes.get_title()]
    parts = [([text], text, width) for text in (figure._suptitle, figure._supxlabel) if text is not None]
    parts += [(legend.get_texts(), legend, width) for legend in figure.legends]
    for axes in titled:
        (left, _), (right, top) = axes.bbox.get_points()
        row = [other.bbox for other in titled if other is not axes and abs(other.bbox.y1 - top) < 1]
        to_others = [abs(left + right - other.x0 - other.x1) / 2 for other in row]
        parts.append(([axes.title], axes.title, min(left + right, 2 * width - left - right, *to_others)))
    for texts, whole, room in parts:
        while whole.get_window_extent().width > room and texts[0].get_fontsize() > MIN_FONT_SIZE:
            for text in texts:
                text.set_fontsize(0.95 * text.get_fontsize())


def remove_picture(path: Path) -> None:
    """Removes `path`.png and `path`.svg, which an earlier start may have drawn."""
    for suffix in (".png", ".svg"):
        path.with_suffix(suffix).unlink(missing_ok=True)


def _save(figure: Any, path: Path) -> None:
    """Saves `path`.png, with a palette: it looks the same in a third of the bytes; and `path`.svg."""
    import matplotlib
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    check_not_linked(path.with_suffix(".png"), path.with_suffix(".svg"))
    with io.BytesIO() as buffer, atomic_file(path.with_suffix(".png"), MAKE_ROOM) as file:
        figure.savefig(buffer, format="png", dpi=DPI)
        colors = Image.open(buffer).convert("RGB")
        colors.convert("P", palette=Image.Palette.ADAPTIVE, colors=COLORS, dither=Image.Dither.NONE).save(
            file, format="PNG", optimize=True
        )
    hash_salt = matplotlib.rc_context({"svg.hashsalt": "condense"})
    with hash_salt, atomic_file(path.with_suffix(".svg"), MAKE_ROOM) as file:
        figure.savefig(file, format="svg", metadata={"Date": None})


def set_log_scale(axes: Any, name: str) -> None:
    """Makes axis "x" or "y" logarithmic, with plain numbers at its ticks instead of powers of ten."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        def __call__(self, x, pos=None):
            return f"{x:,.10g}" if super().__call__(x, pos) else ""

    getattr(axes, f"set_{name}scale")("log")
    axis = getattr(axes, f"{name}axis")
    axis.set_major_formatter(Plain())
    axis.set_minor_formatter(Plain(minor_thresholds=(2, 0.4)))


def _texts(artist: Any) -> Iterator[Any]:
    """Yields a figure's texts except at its axes, because matplotlib writes powers at the ticks as formulas."""
    from matplotlib.axis import Axis
    from matplotlib.text import Text

    for child in artist.get_children():
        if isinstance(child, Text):
            yield child
        if not isinstance(child, Axis):
            yield from _texts(child)
