"""The command `scripts/gpu_bench`: runs parts in order within the time that is left, and writes files after each."""

import argparse
import gc
import json
import os
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from condense.eval.benchmark.cases import SCHEDULES
from condense.eval.benchmark.timing import free_memory
from condense.eval.results import run_metadata, write_results

from .bars import judge, table
from .correctness import captured_groups, correctness, flex, graph
from .kernels import kernels
from .longest import longest
from .losses import losses
from .parts import attentions, decoding, prefills, schedule_table, training, training_large
from .products import products
from .schedule_ratios import draw, is_drawable, schedule_ratios
from .session import OutOfTimeError, Session, log, new_session
from .sizes import REAL, SMOKE, Sizes
from .steps import step_table, steps

ROOT = Path(__file__).resolve().parents[3]
OUTPUT, SMOKE_OUTPUT = ROOT / "runs" / "gpu_bench", ROOT / "runs" / "gpu_bench_smoke"


@dataclass(frozen=True)
class Part:
    """A part of the benchmark. It starts if `needs` seconds are left. If it `decides`, later parts run only if it
    passes."""

    run: Callable[[Session], None]
    description: str
    needs: float
    decides: bool = False


def _tests(session: Session) -> None:
    """Runs the tests of the model; the tests of CUDA run if there is a device."""
    command = [sys.executable, "-m", "pytest", "-v", "tests/condense"]
    log_file = session.folder / "tests.txt"  # written as the tests run, in case the time ends
    with log_file.open("w", encoding="utf-8") as file:
        try:
            code = subprocess.run(command, cwd=ROOT, stdout=file, timeout=session.seconds_left()).returncode
        except subprocess.TimeoutExpired:
            raise OutOfTimeError(f"before the end of the tests: {log_file.name} has their outcomes so far") from None
    session.check("pytest tests/condense", code == 0, log_file.name)


PARTS = {
    "correctness": Part(correctness, "every attention and schedule against float64", 40, decides=True),
    "tests": Part(_tests, "pytest tests/condense, only with --tests", 60, decides=True),
    "kernels": Part(kernels, "FlashAttention's kernel, and waits of the host by segments", 15),
    "loss": Part(losses, "the loss beside torch's fused linear_cross_entropy", 10),
    "captured_groups": Part(captured_groups, "groups of segments by replayed graphs against float64", 20),
    "products": Part(products, "products of a segment and of a diagonal, and of their weights' gradients", 10),
    "steps": Part(steps, "training steps by default beside the stock model's, both shapes", 60),
    "training": Part(training, "memory and time of a training step, Table I shape", 40),
    "prefill": Part(prefills, "long prompts, 1.2 B shape", 40),
    "graph": Part(graph, "new tokens by a replayed graph against ordinary ones", 15),
    "decoding": Part(decoding, "time per token after short and long contexts, 1.2 B shape", 60),
    "schedules": Part(schedule_table, "sequential and wavefront over shapes, segments and lengths", 40),
    "training_large": Part(training_large, "training steps of the 1.2 B shape, with checkpointing", 100),
    "flex": Part(flex, "FlexAttention, compiled, against float64", 30),
    "longest": Part(longest, "longest training text, 1.2 B shape", 45),
}


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 if all parts that ran passed, 1 if one failed, 2 if the request can't be met here."""
    started = time.monotonic()
    options = _options(arguments)
    if options.list:
        for name, part in PARTS.items():
            print(f"{name:16} {part.description}")
        return 0
    if options.judge is not None:
        return _judge_again(options.judge)
    if not (options.smoke or torch.cuda.is_available()):
        print("There is no CUDA device: --smoke runs the same code at tiny sizes without one.", file=sys.stderr)
        return 2
    gc.freeze()  # so `free_memory` does not search the objects of the imports
    names = options.only or [name for name in PARTS if name != "tests" or options.tests]
    output = options.output or (SMOKE_OUTPUT if options.smoke else OUTPUT)
    output.mkdir(parents=True, exist_ok=True)
    session = new_session(SMOKE if options.smoke else REAL, started + 60 * options.minutes, output)
    results: dict[str, Any] = {"kind": "gpu_bench", **_metadata(session, options), "parts": {}}
    for name in names:
        results["parts"][name] = _run_part(session, name, results["parts"])
        results |= {"checks": session.checks, "points": session.points}
        text = _write(output, session.sizes, results)
    print(text)
    return int(any(part["status"] in ("failed", "error") for part in results["parts"].values()))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    def parts(text: str) -> list[str]:
        if unknown := set(text.split(",")) - PARTS.keys():
            raise argparse.ArgumentTypeError(f"{sorted(unknown)}: choose from {', '.join(PARTS)}.")
        return [name for name in PARTS if name in text.split(",")]

    parser = argparse.ArgumentParser(
        prog="scripts/gpu_bench", description="Checks and measures folded models beside stock Llamas on this GPU."
    )
    parser.add_argument(
        "--minutes", type=float, default=8, help="time for all parts; the parts that don't fit are skipped (default: 8)"
    )
    parser.add_argument("--only", type=parts, metavar="PART,PART", help="run only these parts")
    parser.add_argument("--list", action="store_true", help="list the parts and exit")
    parser.add_argument("--output", type=Path, help="folder of the results (default: runs/gpu_bench)")
    parser.add_argument(
        "--judge",
        type=Path,
        metavar="FOLDER",
        help="measure nothing: judge the results of a folder again, and draw its schedules (needs matplotlib)",
    )
    parser.add_argument("--commit", help="the commit of the code, if it is not a git checkout")
    parser.add_argument("--tests", action="store_true", help="also run pytest on tests/condense")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on any device: a rehearsal, no measurement")
    return parser.parse_args(arguments)


def _judge_again(folder: Path) -> int:
    """Writes and prints the tables of stored results, and draws their schedules. Returns 2 if there are no results."""
    try:
        results = json.loads((folder / "gpu.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        print(f"--judge {folder}: {error}; pass a folder that scripts/gpu_bench wrote.", file=sys.stderr)
        return 2
    print(_write(folder, SMOKE if results["smoke"] else REAL, results))
    if is_drawable(results["points"]):
        draw(results["points"], folder / "schedules")
    return 0


def _run_part(session: Session, name: str, before: dict[str, Any]) -> dict[str, Any]:
    """Runs a part if there is time. Returns its status, and the reason if it is not done."""
    part = PARTS[name]
    broken = [other for other, outcome in before.items() if PARTS[other].decides and outcome["status"] != "done"]
    if broken:
        return _outcome(
            name, "skipped", f"{broken[0]} failed: timings of a wrong model mean little (--only measures them)"
        )
    if session.seconds_left() < part.needs:
        return _outcome(name, "skipped", f"needs {part.needs:.0f} s, {max(session.seconds_left(), 0):.0f} s are left")
    log(f"[{name}] {part.description}; {session.seconds_left():.0f} s left")
    session.part, start = name, time.monotonic()
    status, reason = "done", ""
    try:
        part.run(session)
    except OutOfTimeError as error:
        status, reason = "cut short", str(error)
    except Exception as error:  # earlier points are kept, and the next part may run
        traceback.print_exc()
        status, reason = "error", f"{type(error).__name__}: {error}"
    checks = [check for check in session.checks if check["part"] == name]
    if wrong := [check["name"] for check in checks if check["passed"] is False]:
        status, reason = "failed", f"{len(wrong)} of {len(checks)} checks: {'; '.join(wrong[:5])}"
    try:
        free_memory()
    except RuntimeError as error:  # the device itself is broken: the next part fails too
        log(f"  {error}")
    return _outcome(name, status, reason) | {"seconds": round(time.monotonic() - start, 1)}


def _outcome(name: str, status: str, reason: str) -> dict[str, Any]:
    if reason:
        log(f"[{name}] {status}: {reason}")
    return {"status": status, "reason": reason}


def _metadata(session: Session, options: argparse.Namespace) -> dict[str, Any]:
    found = run_metadata()
    found["command"] = shlex.join(["scripts/gpu_bench", *sys.argv[1:]])
    found["versions"] |= {"cuda": torch.version.cuda} | ({"commit": options.commit} if options.commit else {})
    for package in ("flash-attn", "triton"):
        try:
            found["versions"][package] = version(package)
        except PackageNotFoundError:
            continue
    if session.device.type == "cuda":
        found["versions"]["driver"] = _driver()
        found["gpu_bytes"] = torch.cuda.get_device_properties(0).total_memory
    return found | {
        "smoke": options.smoke,
        "device": session.device.type,
        "dtype": str(session.dtype).removeprefix("torch."),
        "memory_is": session.memory.description,
        "attentions": attentions(),
        "schedules": list(SCHEDULES),
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def _write(output: Path, sizes: Sizes, results: dict[str, Any]) -> str:
    """Judges the points, writes gpu.json, gpu.csv and gpu.txt, each completely or not at all, and returns the text."""
    points = results["points"]
    results |= {"bars": judge(sizes, points)}
    made = [f"{results['hardware']}, {results['dtype']}; memory: {results['memory_is']}"]
    if results["smoke"]:
        made.append("A rehearsal at tiny sizes: these figures are not measurements.")
    for name, part in results["parts"].items():
        made.append(": ".join(filter(None, (name, part["status"], part["reason"]))))
    judged = [bar for bar in results["bars"] if bar["measured"] is not None or results["smoke"]]
    tables = [step_table(points), schedule_ratios(points), table(judged)]
    text = "\n\n".join(["\n".join(made), *(str(table) for table in tables if table.rows)])
    write_results(output / "partial", results, points)
    (output / "partial.txt").write_text(text + "\n", encoding="utf-8")
    for kind in ("json", "csv", "txt"):
        partial, whole = output / f"partial.{kind}", output / f"gpu.{kind}"
        if partial.exists():
            os.replace(partial, whole)
        else:  # without points there is no CSV
            whole.unlink(missing_ok=True)
    return text
