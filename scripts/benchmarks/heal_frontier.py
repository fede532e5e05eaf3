"""Shows the cost of folding against the tokens that healing read.

    python -m scripts.benchmarks.heal_frontier results/frontier/loss.json --tokens-per-step 4096

The file is that of `condense eval loss --window`, whose models are a stock model, the untrained fold, named
`untrained`, and checkpoints of runs, named RUN@STEP (`adapters@32`). Prints a table, in which the second and later runs
are compared with the first after as many tokens, text by text. Draws frontier.png beside the file: for each text a line
a run of nats a token above full attention, with 95 % intervals over texts, and its window as a dashed line.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from condense.eval.intervals import format_interval, interval
from condense.eval.results import Table, groups_of, picture
from condense.eval.tasks.loss import WINDOW

CHECKPOINT = re.compile(r"(.+)@(\d+)")
UNTRAINED = "untrained"


class Source(NamedTuple):
    """The costs on the texts of a file: of each run's checkpoints by trained tokens, and of the window."""

    name: str
    runs: dict[str, list[tuple[int, dict[str, Any]]]]
    window: dict[str, Any]


def read_sources(path: Path, tokens_per_step: int) -> list[Source]:
    """Returns the sources of a file; every run starts from the untrained fold.

    Raises `ValueError` for a file without that fold, checkpoints or a window.
    """
    sources = []
    for (source,), costs in groups_of(json.loads(path.read_text(encoding="utf-8"))["costs"], "source").items():
        window = next((one for one in costs if one["way"] == WINDOW), None)
        untrained = next((one for one in costs if one["model"] == UNTRAINED), None)
        named = [(found[1], int(found[2]), one) for one in costs if (found := CHECKPOINT.fullmatch(one["model"]))]
        if not named or window is None or untrained is None:
            raise ValueError(
                f"{path} has no model named {UNTRAINED}, none named RUN@STEP, or no window: "
                "give all to condense eval loss."
            )
        runs: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        for run, step, one in sorted(named, key=lambda each: each[:2]):
            runs.setdefault(run, [(0, untrained)]).append((step * tokens_per_step, one))
        sources.append(Source(Path(source).name, runs, window))
    return sources


def table(sources: list[Source]) -> Table:
    rows = []
    for name, runs, window in sources:
        first = dict(next(iter(runs.values())))
        for run, checkpoints in runs.items():
            for tokens, one in checkpoints:
                other = first.get(tokens)
                pairs = "" if other in (None, one) else format_interval(interval(_differences(one, other)), "+.4f")
                rows.append([name, run, f"{tokens:,}", _cost(one), _cost(one["above_window"]), pairs])
        rows.append([name, "window", "", _cost(window), "", ""])
    reference = next(iter(sources[0].runs))
    columns = ["text", "run", "trained tokens", "above full attention", "above the window", f"above {reference}"]
    return Table("nats a token, with 95 % intervals over texts", columns, rows)


def _differences(one: dict[str, Any], other: dict[str, Any]) -> list[float]:
    return [left - right for left, right in zip(one["by_text"], other["by_text"], strict=True)]


def _cost(one: dict[str, Any]) -> str:
    return format_interval((one[name] for name in ("cost", "low", "high")), "+.4f")


def draw(sources: list[Source], path: Path) -> None:
    size = (3.6 * len(sources), 3.4)
    with picture(path, columns=len(sources), figsize=size, sharey=True, squeeze=False) as ((first, *others),):
        for panel, (name, runs, window) in zip((first, *others), sources, strict=True):
            for run, checkpoints in runs.items():
                tokens = [each / 1e6 for each, _ in checkpoints]
                panel.plot(tokens, [one["cost"] for _, one in checkpoints], marker="o", markersize=3, label=run)
                low, high = ([one[end] for _, one in checkpoints] for end in ("low", "high"))
                panel.fill_between(tokens, low, high, alpha=0.15, linewidth=0)
            panel.axhline(window["cost"], color="black", linewidth=1, linestyle="--", label="window of as many keys")
            panel.axhline(0, color="0.5", linewidth=0.8)
            panel.set_title(name, fontsize=10)
            panel.set_xlabel("trained tokens [million]")
            panel.grid(alpha=0.3)
        first.set_ylabel("above full attention [nats a token]")
        first.legend(fontsize=8)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Shows the cost of folding against the tokens that healing read.")
    parser.add_argument("results", type=Path, help="the loss.json of condense eval loss")
    parser.add_argument("--tokens-per-step", type=int, required=True)
    options = parser.parse_args(arguments)
    sources = read_sources(options.results, options.tokens_per_step)
    print(table(sources))
    draw(sources, options.results.with_name("frontier"))


if __name__ == "__main__":
    main()
