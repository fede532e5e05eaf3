"""Tables of a profile against the stock model and against the paper, and curves over length."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..paper import RATIOS, Ratio
from ..results import Table, picture
from .cases import WITHOUT_SEGMENTS
from .tables import group_by, token_axis

MODE_NAMES = {"training": "training step", "prefill": "prefill", "decoding": "new token"}
SHARED = ("mode", "batch", "attention", "checkpointing", "optimizer")  # by all points of a table
MORE: dict[str, tuple[str, float]] = {  # of points on a GPU: the column, and its unit
    "reserved_bytes": ("reserved [MiB]", 2**-20),
    "allocation_retries": ("retries", 1),
    "mfu": ("MFU [%]", 100),
}
COLORS = {"folded": "tab:red", "stock": "tab:blue", "sliding_window": "tab:green", "stock_chunked_loss": "tab:cyan"}


def label(point: dict[str, Any]) -> str:
    name = point["kind"].replace("_", " ")
    if point["kind"] == "folded":
        return f"{name}, segment {point['segment_length']}"
    return name if point["kind"] in WITHOUT_SEGMENTS else f"{name} {2 * point['segment_length']}"


def tables(results: dict[str, Any]) -> list[Table]:
    """A table per group: every point, and the stock model's figures over it. Then the paper's ratios."""
    made = []
    for shared, points in group_by(results["points"], *SHARED):
        state = shared["mode"] != "training"
        columns = [
            "tokens",
            "model",
            f"{MODE_NAMES[shared['mode']]} [ms]",
            "lowest to highest",
            "peak [MiB]",
            "above model",
        ]
        more = {name: unit for name, unit in MORE.items() if any(name in point for point in points)}
        columns += [name for name, _ in more.values()]
        columns += ["state [MiB]"] * state + ["stock's time", "stock's peak", "stock's peak above model"]
        rows = []
        for point in points:
            row: list[Any] = [f"{point['length']:,}", label(point)]
            if point["out_of_memory"]:
                rows.append([*row, "OOM", *[""] * (len(columns) - 3)])
                continue
            row += [f"{1000 * point['seconds']:,.1f}"]
            row += [f"{1000 * point['seconds_low']:,.1f} to {1000 * point['seconds_high']:,.1f}"]
            row += [f"{point['peak_bytes'] / 2**20:,.0f}", f"{_above(point) / 2**20:,.0f}"]
            row += [f"{unit * point[name]:,.0f}" if name in point else "-" for name, (_, unit) in more.items()]
            row += [f"{point['state_bytes'] / 2**20:,.2f}"] if state else []
            rows.append(row + _against_stock(point, points))
        made.append(Table(_title(shared, points), columns, rows))
    return made + _paper_table(results)


def _above(point: dict[str, Any]) -> int:
    return point["peak_bytes"] - point["before_bytes"]


def _title(shared: dict[str, Any], points: list[dict[str, Any]]) -> str:
    kinds = sorted({point["memory_is"] for point in points if "memory_is" in point})
    checkpoints = ", gradient checkpointing" if shared["checkpointing"] else ""
    step = " with AdamW" if shared["optimizer"] else ""
    name = f"{MODE_NAMES[shared['mode']]}{step}, batch {shared['batch']}, attention {shared['attention']}{checkpoints}"
    return f"{name} ({', '.join(kinds)})"


def _against_stock(point: dict[str, Any], points: list[dict[str, Any]]) -> list[str]:
    stock = next((other for other in points if (other["kind"], other["length"]) == ("stock", point["length"])), None)
    if stock is None or stock is point:
        return ["", "", ""]
    if stock["out_of_memory"]:
        return ["OOM", "OOM", "OOM"]
    pairs = (
        (stock["seconds"], point["seconds"]),
        (stock["peak_bytes"], point["peak_bytes"]),
        (_above(stock), _above(point)),
    )
    return [f"{theirs / ours:.2f}x" for theirs, ours in pairs]


def _paper_table(results: dict[str, Any]) -> list[Table]:
    """The ratios that the paper states, for points that were measured here too, on the paper's shape.

    The paper trained, with an optimizer whose states are equally large on both sides; it does not say whether its
    figures count them.
    """
    rows = []
    for ratio in RATIOS:
        flash = "with" if ratio.attention == "sdpa" else "without"
        name = "memory" if ratio.figure == "peak_bytes" else "time"
        for segment, found in _by_segment(results, ratio).items():
            here = [found.get(optimizer, "-") for optimizer in (False, True)]
            rows.append([f"{ratio.length:,}", ratio.batch, flash, name, segment, f"{ratio.paper:.2f}x", *here])
    columns = ["tokens", "batch", "FlashAttention", "stock / folded", "segment", "the paper"]
    columns += ["here, no optimizer", "here, with AdamW"]
    return [Table("the paper's ratios for training (126 M parameters, one H100)", columns, rows)] if rows else []


def _by_segment(results: dict[str, Any], ratio: Ratio) -> dict[int, dict[bool, str]]:
    """Our ratios, by segment length and by whether the step has an optimizer."""
    found: dict[int, dict[bool, str]] = {}
    for folded, stock in _pairs(results, ratio):
        ours = "OOM"
        if not (folded["out_of_memory"] or stock["out_of_memory"]):
            ours = f"{stock[ratio.figure] / folded[ratio.figure]:.2f}x"
        found.setdefault(folded["segment_length"], {})[bool(folded.get("optimizer"))] = ours
    return found


def _pairs(results: dict[str, Any], ratio: Ratio) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for shared, points in group_by(results["points"], *SHARED):
        if shared["checkpointing"] or (shared["mode"], shared["batch"]) != ("training", ratio.batch):
            continue
        if ratio.attention != ("eager" if shared["attention"] == "eager" else "sdpa"):
            continue
        here = [point for point in points if point["length"] == ratio.length]
        for stock in here:
            if stock["kind"] == "stock":
                yield from ((folded, stock) for folded in here if folded["kind"] == "folded")


def draw(results: dict[str, Any], path: Path) -> None:
    """A row of panels per group, against length: time, peak memory and, without training, the state."""
    rows = group_by(results["points"], *SHARED)
    columns = 3 if any(shared["mode"] != "training" for shared, _ in rows) else 2
    size = (3.7 * columns, 3 * len(rows))
    with picture(path, rows=len(rows), columns=columns, figsize=size, squeeze=False) as panels:
        for line, (shared, points) in zip(panels, rows, strict=True):
            figures = [
                ("seconds", 1000, f"{MODE_NAMES[shared['mode']]} [ms]"),
                ("peak_bytes", 2**-20, "peak memory [MiB]"),
            ]
            figures += [("state_bytes", 2**-20, "state [MiB]")] if shared["mode"] != "training" else []
            for axes, (name, unit, title) in zip(line, figures, strict=False):
                _curves(axes, points, name, unit)
                axes.set_title(title, fontsize=9)
            for axes in line[len(figures) :]:
                axes.axis("off")
            line[0].set_ylabel(_title(shared, points).split(" (")[0].replace(", ", "\n"), fontsize=8)
            line[0].legend(fontsize=7)


def _curves(axes: Any, points: list[dict[str, Any]], name: str, unit: float) -> None:
    for text in dict.fromkeys(map(label, points)):
        mine = sorted((point for point in points if label(point) == text), key=lambda point: point["length"])
        fitting = [point for point in mine if not point["out_of_memory"]]
        color = COLORS[mine[0]["kind"]]
        lengths = sorted({point["segment_length"] for point in points if point["kind"] == mine[0]["kind"]}, key=str)
        style, marker = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"))[lengths.index(mine[0]["segment_length"]) % 4]
        values = [unit * point[name] for point in fitting]
        axes.plot([point["length"] for point in fitting], values, style, color=color, marker=marker, ms=4, label=text)
        if name == "seconds":
            low, high = ([unit * point[field] for point in fitting] for field in ("seconds_low", "seconds_high"))
            axes.fill_between([point["length"] for point in fitting], low, high, color=color, alpha=0.15)
        for point in mine:
            if point["out_of_memory"]:
                axes.annotate("OOM", (point["length"], 1), xycoords=("data", "axes fraction"), color=color, fontsize=7,
                              ha="center", va="bottom")  # fmt: skip
    token_axis(axes, points)
    axes.set_ylim(0, 1.08 * max((unit * point[name] for point in points if not point["out_of_memory"]), default=1.0))
    axes.grid(alpha=0.3)
