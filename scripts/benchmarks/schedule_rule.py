"""Applies the present rule of `auto` to measured points: sequential / wavefront, and where the rule is wrong.

Prints docs/results/schedules/rule.txt from the measurements beside it.
"""

import json
from pathlib import Path
from typing import Any

from condense import CondenseConfig
from condense.eval.benchmark.cases import SCHEDULES
from condense.eval.benchmark.schedule_tables import TOLERANCE, excess, ratio
from condense.eval.results import Table
from condense.execution.selection import faster_as_wave

MEASURED = Path(__file__).resolve().parents[2] / "docs" / "results" / "schedules"  # of a checkout
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
UNSTEADY = 1.3  # a schedule's slowest repeat over its fastest: points from here on are marked
COLUMNS = ["shape", "mode", "segment", "batch", "tokens", "launches saved", "band [MiB]", "sequential / wavefront"]
COLUMNS += ["auto takes", "its time / the better one's"]


def row_of(name: str, shape: dict[str, Any], point: dict[str, Any]) -> tuple[list[Any], float]:
    """Returns the row of a point, and the time of the rule's choice over the better schedule's."""
    segment, batch, item_bytes = point["segment_length"], point["batch"], ITEM_BYTES[point["dtype"]]
    config = CondenseConfig(**shape, segment_length=segment)
    num_layers, num_segments = config.num_hidden_layers, point["length"] // segment
    taken = SCHEDULES[faster_as_wave(config, num_segments, batch, "cpu", item_bytes)]
    over = excess(point | {"auto": taken})
    band_bytes = min(num_layers, num_segments) * batch * segment * config.intermediate_size * item_bytes
    spread = max(point[f"{schedule}_seconds_high"] / point[f"{schedule}_seconds_low"] for schedule in SCHEDULES)
    case = [name, point["mode"], segment, batch, f"{point['length']:,}"]
    size = [(num_segments - 1) * (num_layers - 1), f"{band_bytes / 2**20:.1f}"]
    found = [f"{ratio(point):.2f}{'~' if spread >= UNSTEADY else ' '}", taken]
    return [*case, *size, *found, f"{over:.2f}{'!' if over > TOLERANCE else ' '}"], over


def rule_table() -> Table:
    rows = []
    for path in sorted(MEASURED.glob("*.json"), key=lambda path: path.stem):
        results = json.loads(path.read_text())
        rows += [row_of(path.stem, results["shape"], point) for point in results["points"]]
    right = sum(over <= TOLERANCE for _, over in rows)
    counted = f"within {TOLERANCE - 1:.0%} of the better schedule in {right} of {len(rows)} points (! the others)"
    return Table(f"auto's choice is {counted}", COLUMNS, [row for row, _ in rows])


def main() -> None:
    print(rule_table())
    print(f"~ the slowest repeat of one of the two took at least {UNSTEADY} times its fastest")


if __name__ == "__main__":
    main()
