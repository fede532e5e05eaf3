"""Tables, lines and pictures of what folding costs."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..charts import finish
from ..intervals import format_interval
from ..results import Table, groups_of, picture, set_log_scale
from ..runner import Results
from ..tables import select, table
from . import evaluation
from .fold_arms import FULL, LOWEST, NONE, WINDOW
from .fold_choice import RULE, diverges, is_fold
from .windows import parts_of

COLORS = {
    FULL: "black", NONE: "0.5", WINDOW: "tab:purple", "0": "tab:blue", "0.1": "tab:cyan", "0.2": "tab:green",
    LOWEST: "tab:olive", "1": "tab:red",
}  # fmt: skip
ROUNDING = 1e-4  # nats a token, of two ways to read the same keys
TICKS = (-0.5, -0.2, -0.1, -0.05, 0, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20)
OTHER_COLORS = ("tab:orange", "tab:brown", "tab:pink")  # of further shares
NAMES = {FULL: "full attention", NONE: "no memory", WINDOW: "window of as many keys", LOWEST: "lowest layer folded"}


def name_of(memory: str) -> str:
    return NAMES.get(memory, f"share {memory}")


def label_of(memory: str, sink: bool) -> str:
    """Returns the name of a way of reading."""
    sinks = "4 sinks" if memory == WINDOW else "the sink"
    return f"{name_of(memory)}, {sinks}" if sink else name_of(memory)


def data_of(results: Results) -> str:
    return evaluation.data_of(results) if results["data"] else "its own samples, which show less than a text"


def rows(results: Results) -> list[dict[str, Any]]:
    """Returns the costs, then the losses by position: means from the token `first` on, before `end` if it is given."""
    found = []
    for cost in results["costs"]:
        kept = {name: value for name, value in cost.items() if name not in ("by_text", "read")}
        texts = {"diverges": diverges(cost), "texts": len(cost["by_text"]), "first": cost["segment_length"]}
        found.append(kept | texts)
    for curve in results["by_position"]:
        about = {name: curve[name] for name in ("model", "segment_length", "memory", "sink")}
        for first, loss in parts_of(curve):
            end = min(first + curve["block"], curve["tokens"] - 1)
            found.append({**about, "loss": loss, "texts": 1, "first": first, "end": end})
    return found


def tables(results: Results) -> list[Table]:
    """Returns the costs, the losses by position if they were measured, and the choices with their rule."""
    return [_costs(results), *_positions(results), _choices(results)]


def _costs(results: Results) -> Table:
    columns = ["model", "segment [tokens]", "memory", "cost without sinks", "with", "loss without sinks", "with"]
    columns += ["diverges [tokens]"]
    found = []
    for (model, length), costs in groups_of(results["costs"], "model", "segment_length").items():
        shown_model = evaluation.shown_name(model, results)
        found.append([shown_model, length, "full attention", "0", "", f"{costs[0]['stock_loss']:.4f}", "", ""])
        for (memory,), pair in groups_of(costs, "memory").items():
            shown = [format_interval((one["cost"], one["low"], one["high"]), "+.3f") for one in pair]
            losses = [f"{one['loss']:.4f}" for one in pair]
            sinks = " and ".join(("without", "with")[one["sink"]] for one in pair if diverges(one))
            verdict = sinks or (f"not within {pair[0]['read']:,}" if is_fold(pair[0]) else "")
            found.append([shown_model, length, name_of(memory), *shown, *losses, verdict])
    number = max(len(cost["by_text"]) for cost in results["costs"])
    title = (
        "cost of folding before any training: nats a token above full attention, from token L to "
        f"{results['num_tokens']:,} of {number} text{'s' * (number > 1)} ({data_of(results)}), L tokens a segment"
    )
    return Table(title + ("; 95 % t interval over the texts" if number > 1 else ""), columns, found)


def _positions(results: Results) -> Iterator[Table]:
    for (model,), curves in groups_of(results["by_position"], "model").items():
        found = []
        for curve in curves:
            way = label_of(curve["memory"], curve["sink"])
            losses = {f"{first:,}": f"{loss:.2f}" for first, loss in parts_of(curve)}
            found.append({"segment [tokens]": curve["segment_length"] or "", "memory": way, **losses})
        about = f"means of {curves[0]['block']:,} tokens from the one given on [nats/token]"
        yield table(f"{model}: loss by position, {about}", found)


def _choices(results: Results) -> Table:
    columns = ["model", "segment [tokens]", "memory share", "sink token", "cost [nats/token]", "why"]
    found = []
    for one in results["choices"]:
        sink = "none" if one["sink_token_id"] is None else one["sink_token_id"]
        cost = format_interval((one["cost"], one["low"], one["high"]), "+.3f")
        found.append([one["model"], one["segment_length"], one["memory"], sink, cost, one["why"]])
    return Table(f"the choice. {RULE}", columns, found)


def draw(results: Results, path: Path) -> None:
    """Draws the costs by segment length, and the loss by position for each segment length; a row per model."""
    names = [model["name"] for model in results["models"]]
    lengths = [length for (length,) in groups_of(results["by_position"], "segment_length") if length]
    columns = 1 + len(lengths)
    size = (5.5 * columns + 2.5, 4.6 * len(names))
    with picture(path, rows=len(names), columns=columns, figsize=size, squeeze=False) as panels:
        for row, name in zip(panels, names, strict=True):
            costs, curves = (select(results[which], model=name) for which in ("costs", "by_position"))
            is_one = len({cost["segment_length"] for cost in costs}) == 1
            (_draw_bars if is_one else _draw_costs)(row[0], costs)
            row[0].set_title(f"{evaluation.shown_name(name, results)}: cost of folding", fontsize=10)
            for panel, length in zip(row[1:], lengths, strict=True):
                _draw_positions(panel, length, [one for one in curves if one["segment_length"] in (0, length)])
            if columns > 1 or not is_one:
                row[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.02, 0.5))


def _style(memory: str, sink: bool, memories: Sequence[str]) -> dict[str, Any]:
    others = [one for one in memories if one not in COLORS]
    color = COLORS.get(memory) or OTHER_COLORS[others.index(memory) % len(OTHER_COLORS)]
    label, is_full = label_of(memory, sink), memory == FULL
    return {"color": color, "linestyle": "-" if sink or is_full else ":", "linewidth": 1.3, "label": label}


def _set_cost_scale(panel: Any, name: str, costs: Sequence[dict[str, Any]]) -> None:
    """Makes axis "x" or "y" linear up to 0.1 nats and logarithmic above."""
    values = [cost["cost"] for cost in costs]
    getattr(panel, f"set_{name}scale")("symlog", linthresh=0.1)
    ticks = [tick for tick in TICKS if min(0, *values) <= tick <= 1.3 * max(values)]
    getattr(panel, f"set_{name}ticks")(ticks, [f"{tick:g}" for tick in ticks])
    getattr(panel, f"set_{name}ticks")([], minor=True)
    getattr(panel, f"set_{name}label")("nats a token above full attention")
    panel.grid(alpha=0.3)
    panel.set_axisbelow(True)


def _draw_bars(panel: Any, costs: Sequence[dict[str, Any]]) -> None:
    """Draws the costs with one segment length, the first at the top; those without the sink are pale."""
    memories = list(dict.fromkeys(cost["memory"] for cost in costs))
    labels = [label_of(cost["memory"], cost["sink"]) for cost in costs]
    for place, cost in enumerate(costs):
        color = _style(cost["memory"], cost["sink"], memories)["color"]
        panel.barh(place, cost["cost"], color=color, alpha=1 if cost["sink"] else 0.45)
        panel.annotate(f" {cost['cost']:+.3f}", (max(0, cost["cost"]), place), va="center", fontsize=8)
    panel.set_yticks(range(len(labels)), labels, fontsize=8)
    panel.invert_yaxis()
    _set_cost_scale(panel, "x", costs)
    panel.set_xlim(right=2.5 * max(0.1, *(cost["cost"] for cost in costs)))  # room for the numbers
    panel.set_ylabel(f"segments of {costs[0]['segment_length']:,} tokens")


def _draw_costs(panel: Any, costs: Sequence[dict[str, Any]]) -> None:
    memories = list(dict.fromkeys(cost["memory"] for cost in costs))
    for (memory, sink), found in groups_of(costs, "memory", "sink").items():
        points = sorted((cost["segment_length"], cost["cost"]) for cost in found)
        style = _style(memory, sink, memories) | ({} if sink else {"markerfacecolor": "white"})
        panel.plot(*zip(*points, strict=True), marker="o", markersize=4, **style)
    lengths = sorted({cost["segment_length"] for cost in costs})
    set_log_scale(panel, "x")
    panel.set_xticks(lengths, [f"{length:,}" for length in lengths])
    panel.set_xticks([], minor=True)
    panel.axhline(0, color=COLORS[FULL], linewidth=1)
    _set_cost_scale(panel, "y", costs)
    if all(cost["cost"] > -ROUNDING for cost in costs):
        panel.set_ylim(bottom=0)
    panel.set_xlabel("tokens of a segment")


def _draw_positions(panel: Any, length: int, curves: Sequence[dict[str, Any]]) -> None:
    memories = list(dict.fromkeys(curve["memory"] for curve in curves))
    for curve in curves:
        middles = [first + curve["block"] / 2 for first, _ in parts_of(curve)]
        panel.plot(middles, curve["losses"], **_style(curve["memory"], curve["sink"], memories))
    title = f"loss by position, segments of {length:,} tokens"
    finish(panel, title, "position in the text [tokens]", "loss [nats a token]")
