"""Tables of a profile's models, against the stock model and against the paper, and curves over length."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from ..paper import RATIOS, Ratio
from ..results import Table, picture, set_log_scale, some_table
from ..tables import select
from .models import TABLE_1_PARAMETERS
from .tables import MODE_NAMES, failure, group_by, label, model_table, token_axis, workload

SHARED = ("mode", "batch", "attention", "checkpointing", "optimizer")  # all points of a table share them
MORE: dict[str, tuple[str, float]] = {  # for points on a GPU: the column, and its unit
    "reserved_bytes": ("reserved [MiB]", 2**-20),
    "allocation_retries": ("retries", 1),
    "mfu": ("MFU [%]", 100),
}
LATER = "later_peak_bytes"  # without the first call's; earlier results lack it
LOG_FROM = 50  # an axis is logarithmic if its panel's highest value is this many times its lowest
Figure = Callable[[dict[str, Any]], float]  # for a point
COLORS = {"folded": "tab:red", "stock": "tab:blue", "sliding_window": "tab:green", "stock_chunked_loss": "tab:cyan"}


def tables(results: dict[str, Any]) -> list[Table]:
    """Returns tables of the models, of each group's points with the stock model's ratios, and of the paper's."""
    made = model_table(results)
    for shared, points in group_by(results["points"], *SHARED):
        state = shared["mode"] != "training"
        columns = ["tokens", "model", f"{MODE_NAMES[shared['mode']]} [ms]", "lowest to highest [ms]"]
        columns += ["peak [MiB]", "peak above model [MiB]", "after the first call [MiB]"]
        more = {name: unit for name, unit in MORE.items() if any(name in point for point in points)}
        columns += [name for name, _ in more.values()] + [f"state [{_state_unit(points)}]"] * state
        stock = next((label(point) for point in points if point["kind"] == "stock"), "stock")
        peak = "later peak" if _peak_of(points) == LATER else "peak"
        columns += [f"{stock}'s {what} / own" for what in ("time", peak, f"{peak} above model")]
        rows = []
        for point in points:
            star = "*" * point.get("past_positions", False)  # past the positions in a stock model's config.json
            row: list[Any] = [f"{point['length']:,}{star}", label(point)]
            if why := failure(point):
                rows.append([*row, why, *[""] * (len(columns) - 3)])
                continue
            row += [f"{1000 * point['seconds']:,.1f}"]
            row += [f"{1000 * point['seconds_low']:,.1f} to {1000 * point['seconds_high']:,.1f}"]
            row += [f"{point['peak_bytes'] / 2**20:,.0f}", f"{_above(point, 'peak_bytes'):,.0f}"]
            row += [f"{_above(point, LATER):,.0f}" if LATER in point else "-"]
            row += [f"{unit * point[name]:,.0f}" if name in point else "-" for name, (_, unit) in more.items()]
            row += [f"{point['state_bytes'] / 2**20:,.3g}"] if state else []
            rows.append(row + _against_stock(point, points))
        made.append(Table(_title(shared, points), columns, rows))
    return made + _paper_table(results)


def _above(point: dict[str, Any], peak: str) -> float:
    """Returns how far a peak is above the loaded model [MiB]."""
    return (point[peak] - point["before_bytes"]) / 2**20


def _peak_of(points: Sequence[dict[str, Any]]) -> str:
    """Returns the field to compare points by: the peak after the first call, unless one of them is older than that."""
    return LATER if all(LATER in point for point in points if not failure(point)) else "peak_bytes"


def _state_unit(points: Sequence[dict[str, Any]]) -> str:
    return ", ".join(["MiB", *sorted({point["dtype"] for point in points if "dtype" in point})])


def _title(shared: dict[str, Any], points: list[dict[str, Any]]) -> str:
    kinds = sorted({point["memory_is"] for point in points if "memory_is" in point})
    star = "; * past the model's own positions" if any(point.get("past_positions") for point in points) else ""
    return f"{workload(shared, MODE_NAMES[shared['mode']])} ({', '.join(kinds)}{star})"


def _against_stock(point: dict[str, Any], points: list[dict[str, Any]]) -> list[str]:
    stock = next(iter(select(points, kind="stock", length=point["length"])), None)
    if stock is None or stock is point:
        return ["", "", ""]
    if why := failure(stock):
        return [why, why, why]
    peak = _peak_of([stock, point])
    theirs, ours = ((one["seconds"], one[peak], _above(one, peak)) for one in (stock, point))
    return [f"{their / our:.2f}x" if our > 0 else "-" for their, our in zip(theirs, ours, strict=True)]


def _paper_table(results: dict[str, Any]) -> list[Table]:
    """Returns the paper's ratios, for points on the paper's shape that were also measured here.

    The paper trained with an optimizer, whose states are equally large on both sides. It does not say whether its
    figures include them.
    """
    shapes = {point.get("model") for point in results["points"] if point.get("parameters") == TABLE_1_PARAMETERS}
    points, rows = [point for point in results["points"] if point.get("model") in shapes], []
    for ratio in RATIOS:
        flash = "with" if ratio.attention == "sdpa" else "without"
        name = "memory" if ratio.figure == "peak_bytes" else "time"
        for segment, found in _by_segment(points, ratio).items():
            here = [found.get(optimizer, "-") for optimizer in (False, True)]
            rows.append([f"{ratio.length:,}", ratio.batch, flash, name, segment, f"{ratio.paper:.2f}x", *here])
    columns = ["tokens", "batch", "FlashAttention", "stock / folded", "segment", "the paper"]
    columns += ["here, no optimizer", "here, with AdamW"]
    return some_table("the paper's ratios for training (126 M parameters, one H100)", columns, rows)


def _by_segment(points: list[dict[str, Any]], ratio: Ratio) -> dict[int, dict[bool, str]]:
    """Returns our ratios, by segment length and by whether the step has an optimizer."""
    found: dict[int, dict[bool, str]] = {}
    for shared, here in group_by([point for point in points if _is_of(point, ratio)], "model", *SHARED):
        for folded, stock in product(select(here, kind="folded"), select(here, kind="stock")):
            fits = not (folded["out_of_memory"] or stock["out_of_memory"])
            ours = f"{stock[ratio.figure] / folded[ratio.figure]:.2f}x" if fits else "OOM"
            found.setdefault(folded["segment_length"], {})[bool(shared["optimizer"])] = ours
    return found


def _is_of(point: dict[str, Any], ratio: Ratio) -> bool:
    attention = "eager" if point["attention"] == "eager" else "sdpa"
    sizes = (point["mode"], point["length"], point["batch"], attention)
    return sizes == ("training", ratio.length, ratio.batch, ratio.attention) and not point["checkpointing"]


def draw(results: dict[str, Any], path: Path) -> None:
    """Draws a row of panels per group, against length: time, peak memory and, except for training, the state."""
    rows = group_by(results["points"], *SHARED)
    looks = _looks(results["points"])
    columns = 3 if any(shared["mode"] != "training" for shared, _ in rows) else 2
    size = (3.9 * columns, 3.1 * len(rows) + 0.25 * len(looks) ** 0.5)
    with picture(path, rows=len(rows), columns=columns, figsize=size, squeeze=False) as panels:
        for line, (shared, points) in zip(panels, rows, strict=True):
            peak = _peak_of(points)
            after = ",\nafter the first call" if peak == LATER else ""
            figures: list[tuple[str, Figure]] = [
                (f"{MODE_NAMES[shared['mode']]} [ms]", lambda point: 1000 * point["seconds"]),
                (f"peak memory above the loaded model{after} [MiB]", partial(_above, peak=peak)),
            ]
            if shared["mode"] != "training":
                title = f"state [{_state_unit(points)}]"
                figures.append((title, lambda point: point["state_bytes"] / 2**20))
            for axes, (title, figure) in zip(line, figures, strict=False):
                _curves(axes, points, figure, looks, title.endswith("[ms]"))
                scale = " (log scale)" if axes.get_yscale() == "log" else ""
                axes.set_title(title + scale, fontsize=9)
            for axes in line[len(figures) :]:
                axes.axis("off")
            line[0].set_ylabel(_title(shared, points).split(" (")[0].replace(", ", "\n"), fontsize=8)
        handles = [panels[0][0].plot([], [], label=text, **look)[0] for text, look in looks.items()]
        panels[0][0].figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)


def _looks(points: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns color, line and marker by label: a color for each kind of one shape, or each of several models."""
    models = list(dict.fromkeys(point.get("model") for point in points))
    looks: dict[str, dict[str, Any]] = {}
    lines: dict[str, int] = {}
    for point in points:
        if label(point) not in looks:
            color = f"C{models.index(point.get('model'))}" if len(models) > 1 else COLORS[point["kind"]]
            line = lines[color] = lines.get(color, -1) + 1
            style, marker = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"))[line % 4]
            looks[label(point)] = {"color": color, "linestyle": style, "marker": marker, "ms": 4}
    return looks


def _curves(axes: Any, points: list[dict[str, Any]], figure: Figure, looks: dict[str, Any], is_time: bool) -> None:
    """Draws a line per model, and with times also their lowest to highest repeat."""
    every = [figure(point) for point in points if not failure(point)]
    for text, look in looks.items():
        mine = sorted((point for point in points if label(point) == text), key=lambda point: point["length"])
        fitting = [point for point in mine if not failure(point)]
        lengths = [point["length"] for point in fitting]
        axes.plot(lengths, list(map(figure, fitting)), **look)
        if is_time:
            low, high = ([1000 * point[f"seconds_{end}"] for point in fitting] for end in ("low", "high"))
            every += high
            axes.fill_between(lengths, low, high, color=look["color"], alpha=0.15)
        for point in mine:
            if point["out_of_memory"]:
                axes.annotate("OOM", (point["length"], 1), xycoords=("data", "axes fraction"), color=look["color"],
                              fontsize=7, ha="center", va="bottom")  # fmt: skip
    token_axis(axes, points)
    if every and min(every) > 0 and max(every) > LOG_FROM * min(every):
        set_log_scale(axes, "y")
    else:
        axes.set_ylim(0, 1.08 * max(every, default=1.0) or 1.0)
    axes.grid(alpha=0.3)
