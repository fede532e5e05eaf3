"""The measured points under the rule of `auto` as it is now: sequential / wavefront, and where the rule is wrong."""

import json
from pathlib import Path

from condense import CondenseConfig
from condense.execution.selection import faster_as_wave
from eval.profile.schedules import NEARLY, SCHEDULES, excess, ratio
from eval.results import Table

ITEMSIZE = {"float32": 4, "bfloat16": 2}
UNQUIET = 1.3  # a schedule's slowest repeat over its fastest, from which on a point is marked

columns = ["shape", "mode", "segment", "batch", "tokens", "launches saved", "band [MiB]", "sequential / wavefront"]
rows, excesses = [], []
for path in sorted(Path(__file__).parent.glob("*/schedules.json")):
    results = json.loads(path.read_text())
    for point in results["points"]:
        segment, batch, itemsize = point["segment_length"], point["batch"], ITEMSIZE[point["dtype"]]
        config = CondenseConfig(**results["shape"], segment_length=segment)
        num_layers, num_segments = config.num_hidden_layers, point["length"] // segment
        taken = SCHEDULES[faster_as_wave(config, num_segments, batch, "cpu", itemsize)]
        excesses.append(excess(point | {"auto": taken}))
        band = min(num_layers, num_segments) * batch * segment * config.intermediate_size * itemsize
        spread = max(point[f"{schedule}_seconds_high"] / point[f"{schedule}_seconds_low"] for schedule in SCHEDULES)
        where = [path.parent.name, point["mode"], segment, batch, f"{point['length']:,}"]
        size = [(num_segments - 1) * (num_layers - 1), f"{band / 2**20:.1f}"]
        found = [f"{ratio(point):.2f}{'~' if spread >= UNQUIET else ' '}", taken]
        rows.append([*where, *size, *found, f"{excesses[-1]:.2f}{'!' if excesses[-1] > NEARLY else ' '}"])
right = sum(value <= NEARLY for value in excesses)
title = (
    f"auto's choice is within {NEARLY - 1:.0%} of the better schedule in {right} of {len(rows)} points (! the others)"
)
print(Table(title, [*columns, "auto takes", "its time / the better one's"], rows))
print(f"~ the slowest repeat of one of the two took at least {UNQUIET} times its fastest")
