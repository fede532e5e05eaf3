"""Computes the time of a launch in measured prefills of the 1.2 B shape, whose launches are counted.

Prints docs/results/gpu/launches.txt from gpu.json beside it and from docs/results/costs/costs.txt.
"""

import json
import re
from pathlib import Path

from condense.eval.benchmark.cases import SCHEDULES
from condense.eval.results import Table

from .costs import SEGMENT
from .gpu.sizes import REAL

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"  # of a checkout
COUNTED = re.compile(r" *([\d,]+) tokens: sequential ([\d,]+), wavefront ([\d,]+);")
COLUMNS = ["tokens", "schedule", "launches", "measured [ms]", "a launch [us]"]


def launches_table() -> Table:
    counts: dict[tuple[int, str], int] = {}
    for found in COUNTED.finditer((RESULTS / "costs" / "costs.txt").read_text()):
        tokens, *launches = (int(number.replace(",", "")) for number in found.groups())
        counts |= {(tokens, schedule): count for schedule, count in zip(SCHEDULES, launches, strict=True)}
    rows = []
    for point in json.loads((RESULTS / "gpu" / "gpu.json").read_text())["points"]:
        is_large = point["hidden_size"] == REAL.large["hidden_size"]
        count = counts.get((point["length"], point["schedule"]))
        if is_large and point["mode"] == "prefill" and point["segment_length"] == SEGMENT and count is not None:
            times = f"{1e3 * point['seconds']:,.1f}", f"{1e6 * point['seconds'] / count:.1f}"
            rows.append([point["length"], point["schedule"], f"{count:,}", *times])
    rows.sort(key=lambda row: (row[0], SCHEDULES.index(row[1])))
    title = f"prefill of the 1.2 B shape, segments of {SEGMENT}"
    return Table(title, COLUMNS, [[f"{tokens:,}", *others] for tokens, *others in rows])


def main() -> None:
    print(launches_table())


if __name__ == "__main__":
    main()
