"""The pictures of the ablations, and parts of the pictures of all experiments."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from condense.eval.intervals import interval
from condense.eval.results import picture, set_log_scale

from .grid import IMAGES, LANGUAGE, MODELS, PROPERTIES, is_seen_by_loss

KINDS = {"change": "-", "change_at_equal_operations": ":"}
SAMPLES = {"frechet_difference": "-"}
Intervals = Sequence[tuple[float, float | None, float | None]]  # means, with bounds or None
COLORS = {"folded": "tab:blue", "stock": "tab:orange", "diffusion": "tab:green"}
MARKERS = "osDv^"


def draw_property(results: dict[str, Any], path: Path) -> None:
    """Draws the change of the loss by the value of the switch, for language models and beside them the diffusion model.

    Both have one scale, unless the loss of the diffusion model does not see the switch: then its samples are drawn.
    """
    name = results["property"]
    with picture(path, columns=2, figsize=(11, 4)) as panels:
        for panel, models in zip(panels, (LANGUAGE, IMAGES), strict=True):
            is_seen = all(is_seen_by_loss(name, model) for model in models)
            if is_seen and panel is panels[1]:
                panel.sharey(panels[0])
            values = [value for value in results["values"] if value["model"] in models]
            variants = list(dict.fromkeys(value["variant"] for value in values))
            for model in models:
                for variant in variants:
                    found = [v for v in values if (v["model"], v["variant"]) == (model, variant)]
                    _draw_curves(panel, found, COLORS[model], MARKERS[variants.index(variant)], model, variant,
                                 KINDS if is_seen else SAMPLES)  # fmt: skip
            panel.axhline(0, color="grey", lw=0.8)
            is_share = all(value["level"] < 1 for value in values)
            panel.set_xlabel("share" if is_share else "k")
            if not is_share:
                panel.set_xscale("log", base=2)
                levels = sorted({1, *(value["level"] for value in values)})
                panel.set_xticks(levels, [f"{level:g}" for level in levels])
            panel.set_ylabel("change of the validation loss [%]" if is_seen else "difference of the Fréchet distance")
            panel.set_title(" and ".join(models), fontsize=10)
            panel.grid(alpha=0.3)
            if is_seen:
                panel.plot([], [], color="grey", ls=":", label="at equal operations")
            panel.legend(fontsize=7)


def _draw_curves(
    panel: Any, values: list[dict], color: str, marker: str, model: str, variant: str, kinds: dict[str, str]
) -> None:
    if not values:
        return
    levels = [0 if values[0]["level"] < 1 else 1, *(value["level"] for value in values)]
    unit, label = 1 if kinds is SAMPLES else 100, " ".join(filter(None, (model, variant)))
    for number, (kind, style) in enumerate(kinds.items()):
        found = [(0.0, 0.0, 0.0), *(interval([unit * change for change in value[kind]]) for value in values)]
        named = {} if number else {"label": label}
        draw_curve(
            panel, levels, found, band=0 if number else 0.1, color=color, ls=style, marker=marker, lw=1.2, **named
        )


def draw_curve(panel: Any, x: Sequence[float], found: Intervals, band: float = 0.1, **style: Any) -> None:
    """Draws a line through means, and a band of opacity `band` over the intervals."""
    (line,) = panel.plot(x, [mean for mean, _, _ in found], **{"marker": "o", "ms": 4} | style)
    known = [(at, low, high) for at, (_, low, high) in zip(x, found, strict=True) if low is not None]
    if band and len(known) > 1:
        panel.fill_between(*zip(*known, strict=True), color=line.get_color(), alpha=band, lw=0)


def draw_bounds(panel: Any, x: Sequence[float], found: Intervals, **style: Any) -> None:
    """Draws a vertical line over each interval."""
    for at, (_, low, high) in zip(x, found, strict=True):
        if low is not None:
            panel.plot([at, at], [low, high], **style)


def scale(found: Intervals, unit: float) -> Intervals:
    """Returns means and bounds in another unit."""
    return [(unit * mean, low and unit * low, high and unit * high) for mean, low, high in found]


def draw_summary(results: dict[str, Any], path: Path) -> None:
    """Draws a bar for each property, halved, and kind of model."""
    rows = {(row["property"], row["model"]): row for row in results["rows"] if row["is_main"]}
    width = 0.8 / len(MODELS)
    with picture(path, figsize=(9, 3.8)) as panel:
        for number, model in enumerate(MODELS):
            names = [name for name in PROPERTIES if is_seen_by_loss(name, model)]
            places = [list(PROPERTIES).index(name) + (number - 1) * width for name in names]
            halved = [rows[name, model] for name in names]
            found = scale([(row["change"], row["low"], row["high"]) for row in halved], 100)
            panel.bar(places, [mean for mean, _, _ in found], width, color=COLORS[model], label=model)
            draw_bounds(panel, places, found, color="black", lw=0.8)
            for place, name in enumerate(PROPERTIES):
                if name not in names:  # not a change of 0
                    panel.annotate("not seen\nby the loss", (place + (number - 1) * width, 0), ha="center", fontsize=6)
        panel.axhline(0, color="grey", lw=0.8)
        panel.set_xticks(range(len(PROPERTIES)), [name.replace("_", "\n") for name in PROPERTIES])
        panel.set_ylabel("change of the validation loss [%]")
        panel.set_title("each property halved", fontsize=10)
        panel.legend(fontsize=8)


def log_scale(panel: Any) -> None:
    """Makes the y axis logarithmic, with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import LogLocator, NullFormatter

    set_log_scale(panel, "y")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_formatter(NullFormatter())
