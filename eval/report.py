"""One HTML page with the tables and plots of everything that a folder holds.

    python -m eval.report FOLDER

Looks for what the other commands wrote (`passkey.json`, `profile.json`, `log.jsonl`) in the folder and
below it, and writes FOLDER/report.html, which needs no other file.
"""

import argparse
import base64
import json
import platform
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .profile import PANELS, hardware

PACKAGES = ("torch", "transformers", "deepspeed", "accelerate")


def write_report(folder: Path, title: str = "condense") -> Path:
    """Writes the page and returns its path."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    runs = [run for path in sorted(folder.rglob("log.jsonl")) if (run := _read_run(path))]
    passkeys = [_read_passkey(path) for path in sorted(folder.rglob("passkey.json"))]
    profiles = [_read_profile(path) for path in sorted(folder.rglob("profile.json"))]
    if not runs + passkeys + profiles:
        raise ValueError(f"{folder} holds no passkey.json, profile.json or log.jsonl: measure something first.")
    curves = None
    if runs:
        draw_curves(runs, folder / "training.png")
        curves = _embed(folder / "training.png")
    page = environment.get_template("report.html.j2").render(
        title=title,
        date=date.today().isoformat(),
        hardware=hardware(),
        versions=_versions(),
        runs=runs,
        curves=curves,
        passkeys=passkeys,
        comparison=_compare(passkeys),
        profiles=profiles,
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def draw_curves(runs: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (upper, lower) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
    for run in runs:
        lines = [line for line in run["lines"] if "loss" in line]
        steps = [line["step"] for line in lines]
        upper.plot(steps, [line["loss"] for line in lines], label=run["name"], linewidth=1)
        if all("segments" in line for line in lines):
            lower.step(steps, [line["segments"] for line in lines], label=run["name"], where="post")
    upper.set_yscale("log")
    upper.set_title("training loss", fontsize=10)
    lower.set_title("length of the text [segments]", fontsize=10)
    for axes in (upper, lower):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _read_run(path: Path) -> dict | None:
    """None where nothing was logged yet."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    losses = [line for line in lines if "loss" in line]
    if not losses:
        return None
    return {
        "name": _name(path),
        "lines": lines,
        "steps": losses[-1]["step"],
        "loss": sum(line["loss"] for line in losses[-10:]) / len(losses[-10:]),
        "segments": losses[-1].get("segments"),
        "seconds": sum(line.get("train_runtime", 0) for line in lines),
    }


def _read_passkey(path: Path) -> dict:
    results = json.loads(path.read_text(encoding="utf-8"))
    lengths = sorted({cell["length"] for cell in results["cells"]})
    rows = []
    for length in lengths:
        cells = [cell for cell in results["cells"] if cell["length"] == length]
        correct, total = (sum(cell[name] for cell in cells) for name in ("correct", "total"))
        segments = -(-length // results["segment_length"]) if results["segment_length"] else None
        rows.append({"length": length, "segments": segments, "correct": correct, "total": total})
    return {**results, "name": _name(path), "rows": rows, "picture": _embed(path.with_suffix(".png"))}


def _read_profile(path: Path) -> dict:
    results = json.loads(path.read_text(encoding="utf-8"))
    rows = []
    for length in sorted({point["length"] for point in results["points"]}):
        pair = {point["kind"]: point for point in results["points"] if point["length"] == length}
        cells = [(unit * pair["folded"][name], unit * pair["stock"][name]) for name, _, unit in PANELS]
        rows.append({"length": length, "cells": [(folded, stock, stock / folded) for folded, stock in cells]})
    labels = [label for _, label, _ in PANELS]
    return {**results, "name": _name(path), "rows": rows, "labels": labels, "picture": _embed(path.with_suffix(".png"))}


def _compare(passkeys: list[dict]) -> list[dict]:
    """Accuracy by length, one column per model."""
    lengths = sorted({row["length"] for results in passkeys for row in results["rows"]})
    table = []
    for length in lengths:
        found = [next((row for row in results["rows"] if row["length"] == length), None) for results in passkeys]
        segments = next((row["segments"] for row in found if row), None)
        table.append({"length": length, "segments": segments, "cells": found})
    return table


def _name(path: Path) -> str:
    """A result's name is the folder that its run lives in."""
    return path.parent.parent.name


def _embed(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--title", default="condense")
    options = parser.parse_args(arguments)
    print(write_report(options.folder, options.title))


if __name__ == "__main__":
    main()
