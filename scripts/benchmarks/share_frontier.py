"""Compares the cost of each share of a layer's output in its memory with how far the memory carries facts.

    python -m scripts.benchmarks.share_frontier

Prints two tables and draws docs/results/healing/shares/frontier.png, a point for each share: how much of the cost of
folding distillation wins back, from the records beside it, against the facts found at 64 times the trained length, from
docs/results/memory/facts/one-stage.csv.
"""

import csv
import json
from pathlib import Path
from typing import Any

from condense.eval.intervals import format_seeds
from condense.eval.results import Table, picture

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"  # of a checkout
SHARES = RESULTS / "healing" / "shares"
FACTS = RESULTS / "memory" / "facts" / "one-stage.csv"
LENGTH = 65_536  # tokens, 64 times the longest text in training
# By share: its name, and the run on facts with the same share. All runs have seed 2.
MEMORIES = {
    "1": ("the fold, share 1", "seed-2"),
    "0.5": ("share 0.5", "seed-2-share-0.5"),
    "0.2": ("share 0.2", "seed-2-share-0.2"),
    "1:0:0:0:0": ("lowest layer folded, others 0", "seed-2-lowest-layer"),
    "0": ("Transformer-XL, share 0", "seed-2-transformer-xl"),
}
COLUMNS = [
    "memory", "cost before training [nats]", "left after", "won back before [%]", "after [%]",
    "worth of segments 2 and 3 before [nats]", "facts at 1,024 tokens [%]", "at 65,536", "interval",
]  # fmt: skip


SEGMENT_LENGTH = 64  # of the frontier; the second table has all lengths


def records() -> tuple[float, dict[tuple[str, int], list[dict[str, Any]]]]:
    """Returns the stock model's loss, and the records of each share and segment length, one for each seed."""
    lines = [json.loads(line) for line in (SHARES / "healing.records.jsonl").read_text().splitlines()]
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    stock = 0.0
    for line in lines:
        key, record = line.get("key", {}), line.get("record")
        if key.get("method") == "teacher":
            stock = record["curve"][0]["loss"]
        elif key.get("method") == "distill":
            found.setdefault((key.get("share", "1"), key["segment_length"]), []).append(record)
    return stock, found


def facts() -> dict[tuple[str, int], dict[str, str]]:
    with FACTS.open(newline="") as file:
        return {(row["run"], int(row["length"])): row for row in csv.DictReader(file)}


def frontier() -> tuple[Table, list[tuple[str, float, float]]]:
    """Returns the table, and the points: name, % won back after training, % of facts at `LENGTH`."""
    (stock, found), asked, rows, points = records(), facts(), [], []
    by_share = {share: found[share, SEGMENT_LENGTH] for share in MEMORIES}
    fold = by_share["1"][0]["curve"][0]["loss"] - stock
    for share, (name, run) in MEMORIES.items():
        before = by_share[share][0]["curve"][0]["loss"] - stock
        left = [record["curve"][-1]["loss"] - stock for record in by_share[share]]
        won_back = [100 * (1 - value / fold) for value in left]
        near, far = asked[run, 1_024], asked[run, LENGTH]
        further = [record["memory"]["further"] for record in by_share[share]]
        accuracy = 100 * float(far["accuracy"])
        interval = f"{100 * float(far['low']):.0f} to {100 * float(far['high']):.0f}"
        rows.append(
            [
                name, f"{before:.4f}", format_seeds(left, 4), f"{100 * (1 - before / fold):.1f}",
                format_seeds(won_back, 1), format_seeds(further, 4), f"{100 * float(near['accuracy']):.0f}",
                f"{accuracy:.0f}", interval,
            ]
        )  # fmt: skip
        points.append((name, sum(won_back) / len(won_back), accuracy))
    seeds = {len(runs) for runs in by_share.values()}
    return Table(
        f"cost and reach by share, {'/'.join(map(str, sorted(seeds)))} seeds of healing", COLUMNS, rows
    ), points


def segment_lengths() -> Table:
    """Returns the cost of each share by segment length, before and after training, and its percentage won back."""
    stock, found = records()
    rows = []
    for length in sorted({length for _, length in found}):
        fold = found["1", length][0]["curve"][0]["loss"] - stock
        shares = {share for share, at in found if at == length}
        for share in sorted(shares, key=lambda share: [-float(part) for part in share.split(":")]):
            runs = found[share, length]
            before = runs[0]["curve"][0]["loss"] - stock
            left = [record["curve"][-1]["loss"] - stock for record in runs]
            cells = [f"{100 * (1 - before / fold):.1f}", format_seeds([100 * (1 - value / fold) for value in left], 1)]
            rows.append([str(length), share, f"{before:.4f}", format_seeds(left, 4), *cells, str(len(runs))])
    columns = [
        "segment [tokens]", "share", "cost before training [nats]", "left after", "won back before [%]", "after [%]",
        "seeds",
    ]  # fmt: skip
    return Table("cost by segment length and share", columns, rows)


def main() -> None:
    table, points = frontier()
    print(table)
    print(segment_lengths())
    with picture(SHARES / "frontier", figsize=(5.5, 4)) as panel:
        for number, (name, won_back, accuracy) in enumerate(points):
            panel.plot(accuracy, won_back, "o", color=f"C{number}", label=name)
        panel.axvline(95, color="0.7", linewidth=0.8, linestyle="--")
        panel.axhline(80, color="0.7", linewidth=0.8, linestyle="--")
        panel.set_xlim(0, 102)
        panel.set_ylim(0, 100)
        panel.set_xlabel("single facts right at 64 times the trained length [%]")
        panel.set_ylabel("cost of folding won back [%]")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8, loc="lower center")


if __name__ == "__main__":
    main()
