"""Tables and pictures of the stored results of `scripts.benchmarks.gpu.smollm2`."""

from pathlib import Path
from typing import Any

from condense.eval.intervals import format_interval
from condense.eval.results import Table, groups_of, picture

LINEAR_BELOW = 0.01  # of the axis of costs, in nats


def tables(results: dict[str, Any]) -> list[Table]:
    """Returns tables of costs, step times and passkeys, those that have rows."""
    held = results["held_out"]
    title = f"cost above stock [nats a token], {held.get('texts', 0)} texts of {held.get('tokens', 0):,} tokens"
    costs = [[one["name"], "", _mean(one, "mean", "low", "high"), ""] for one in results["references"]]
    costs += [
        [one["arm"], f"{one['tokens']:,}", _mean(one, "cost", "low", "high"),
         _mean(one, "worth", "worth_low", "worth_high")]
        for (_,), points in groups_of(results["points"], "arm").items()
        for one in points
    ]  # fmt: skip
    steps = [
        [one["objective"], one["arm"], f"{one['batch']} x {one['length']:,}", f"{1000 * one['seconds']:,.1f}",
         f"{one['flops_per_second'] / 1e12:,.1f}", "" if one["mfu"] is None else f"{100 * one['mfu']:.1f}"]
        for one in results["steps"]
    ]  # fmt: skip
    answers = [
        [one["arm"], f"{one['tokens']:,}", f"{cell['length']:,}", f"{cell['correct']} of {cell['total']}",
         f"{100 * cell['low']:.0f} to {100 * cell['high']:.0f}", f"{cell['state_bytes'] / 2**20:,.2f}"]
        for one in results["passkeys"]
        for cell in one["lengths"]
    ]  # fmt: skip
    found = [
        Table(title, ["arm", "trained tokens", "cost [95 % interval]", "segments before the last are worth"], costs),
        Table("training steps", ["objective", "arm", "texts", "median [ms]", "TFLOP/s", "MFU [%]"], steps),
        Table("passkeys", ["arm", "trained tokens", "tokens", "right", "95 % interval", "state [MiB]"], answers),
    ]
    return [table for table in found if table.rows]


def _mean(one: dict[str, Any], *names: str) -> str:
    if one[names[0]] is None:
        return "not finite"
    return format_interval((one[name] for name in names), ".4f")


def draw(results: dict[str, Any], folder: Path) -> None:
    """Writes `cost` and `passkeys` as pictures, those that have points."""
    if results["points"]:
        _draw_costs(results, folder / "cost")
    if any(one["lengths"] for one in results["passkeys"]):
        _draw_passkeys(results["passkeys"], folder / "passkeys")


def _draw_costs(results: dict[str, Any], path: Path) -> None:
    fields = (("cost", "low", "high"), ("worth", "worth_low", "worth_high"))
    with picture(path, columns=2, figsize=(11, 4.5)) as panels:
        for panel, names in zip(panels, fields, strict=True):
            for (arm,), points in groups_of(results["points"], "arm").items():
                shown = [one for one in points if one[names[0]] is not None]
                tokens = [one["tokens"] / 1e6 for one in shown]
                (line,) = panel.plot(tokens, [one[names[0]] for one in shown], marker="o", markersize=3, label=arm)
                bounded = [one for one in shown if one[names[1]] is not None]
                panel.fill_between(
                    [one["tokens"] / 1e6 for one in bounded], [one[names[1]] for one in bounded],
                    [one[names[2]] for one in bounded], color=line.get_color(), alpha=0.15, linewidth=0,
                )  # fmt: skip
            panel.set_xlabel("trained tokens [million]")
            panel.grid(alpha=0.3)
        for style, one in zip((":", "--"), results["references"], strict=False):
            if one["mean"] is not None:
                panels[0].axhline(
                    one["mean"], color="black", linewidth=1, linestyle=style, label=f"stock, {one['name']}"
                )
        panels[0].set_yscale("symlog", linthresh=LINEAR_BELOW)
        panels[0].set_title("cost above full attention [nats a token]", fontsize=10)
        panels[1].axhline(0, color="black", linewidth=1)
        panels[1].set_title("worth of segments before the last [nats a token]", fontsize=10)
        panels[0].legend(fontsize=8, title="memory share")


def _draw_passkeys(arms: list[dict[str, Any]], path: Path) -> None:
    with picture(path, columns=2, figsize=(11, 4)) as (rates, states):
        for one in arms:
            lengths = [cell["length"] for cell in one["lengths"]]
            found = [100 * cell["accuracy"] for cell in one["lengths"]]
            (line,) = rates.plot(lengths, found, marker="o", markersize=3, label=one["arm"])
            low, high = ([100 * cell[end] for cell in one["lengths"]] for end in ("low", "high"))
            rates.fill_between(lengths, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
            held = [cell["state_bytes"] / 2**20 for cell in one["lengths"]]
            states.plot(lengths, held, marker="o", markersize=3, label=one["arm"])
        for panel in (rates, states):
            panel.set_xscale("log", base=2)
            panel.set_xlabel("tokens of the text")
            panel.grid(alpha=0.3)
        states.set_yscale("log")
        rates.set_title("passkeys found [%]", fontsize=10)
        states.set_title("state of a text [MiB]", fontsize=10)
        rates.legend(fontsize=8, title="memory share")
