"""Compares the logged losses and gradient norms of two trainings that differ only in the schedule.

    python -m scripts.benchmarks.schedule_drift FILE graph=RUN/log.jsonl sequential=RUN/log.jsonl
    python -m scripts.benchmarks.schedule_drift docs/results/gpu/h100/zero2.json

The first form stores the logs in FILE. Both print the differences between the logs in FILE.
"""

import json
import sys
from pathlib import Path
from typing import Any

from condense.eval.results import Table

Logs = dict[str, list[dict[str, Any]]]  # the lines of a log by the name of its run
FIGURES = {"loss": "loss", "grad_norm": "norm of the gradient"}
COLUMNS = ["of each step", "steps", "equal", "largest difference", "largest relative difference"]


def read_log(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "loss" in line]


def table(logs: Logs) -> Table:
    """Returns the differences. Raises `ValueError` if the runs logged different steps."""
    first, second = logs.values()
    if [line["step"] for line in first] != [line["step"] for line in second]:
        raise ValueError(f"{' and '.join(logs)} logged different steps: compare runs with the same log_every.")
    rows = []
    for field, name in FIGURES.items():
        pairs = [(one[field], other[field]) for one, other in zip(first, second, strict=True)]
        differences = [abs(one - other) for one, other in pairs]
        relative = [difference / abs(one) for difference, (one, _) in zip(differences, pairs, strict=True)]
        equal = sum(difference == 0 for difference in differences)
        rows.append([name, str(len(pairs)), str(equal), f"{max(differences):.1e}", f"{max(relative):.1e}"])
    speeds = [sorted(line["tokens_per_second"] for line in log)[len(log) // 2] for log in (first, second)]
    names = ", ".join(f"{name} {speed:,.0f}" for name, speed in zip(logs, speeds, strict=True))
    return Table(f"drift between schedules; median tokens/s: {names}", COLUMNS, rows)


def main(arguments: list[str] | None = None) -> None:
    file, *runs = sys.argv[1:] if arguments is None else arguments
    if runs:
        paths = dict(run.split("=", 1) for run in runs)
        logs = {name: read_log(Path(path)) for name, path in paths.items()}
        Path(file).write_text(json.dumps(logs), encoding="utf-8")
    print(table(json.loads(Path(file).read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
