"""A profile: a grid of points, each measured in a fresh process."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from tqdm import tqdm

from condense.checks import check_attention, check_dtype
from condense.configuration import OWN_ATTENTION

from ..results import hardware, run_metadata, versions, write_results
from ..results_store import open_results_store
from .point import MODES, Point, Setting
from .show import draw

ROOT = Path(__file__).resolve().parents[2]


DEFAULTS: dict[str, Sequence[Any]] = {
    "modes": MODES,
    "lengths": (1024, 2048, 4096, 8192),
    "batches": (1,),
    "segments": (512,),
    "attentions": ("auto",),
    "checkpointing": (False,),
}
# What the paper measured: without and with FlashAttention, of which sdpa holds a kernel.
TABLE_1 = DEFAULTS | {
    "modes": ("training",),
    "lengths": (1024, 2048, 4096, 8192, 16384),
    "batches": (1, 4),
    "segments": (256, 512),
    "attentions": ("eager", "auto"),
}


def profile(
    output: Path,
    shape: str = "table1",
    kinds: Sequence[str] = ("folded", "stock"),
    modes: Sequence[str] | None = None,
    lengths: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
    segments: Sequence[int] | None = None,
    attentions: Sequence[str] | None = None,
    checkpointing: Sequence[bool] | None = None,
    vocab_size: int | None = None,
    dtype: str = "auto",
    repeats: int = 3,
    snapshots: bool = False,
) -> dict[str, Any]:
    """Measures every combination and writes output/profile.*; see `eval.profile.point` for what a point is.

    `shape` is `table1`, a folder or a hub id; `segments` are lengths of a segment; `vocab_size` replaces the
    shape's own. What is None is as in `TABLE_1` for the shape `table1`, else as in `DEFAULTS`. `snapshots`
    keeps a `torch.cuda.memory` snapshot of each point. Stopped and called again with the same arguments, it
    goes on. Raises `ValueError` for what can't be measured.
    """
    import torch

    from .shapes import KINDS as KNOWN
    from .shapes import TABLE_1_PARAMETERS, shape_of

    chosen = given(
        TABLE_1 if shape == "table1" else DEFAULTS,
        modes=modes,
        lengths=lengths,
        batches=batches,
        segments=segments,
        attentions=attentions,
        checkpointing=checkpointing,
    )
    for items, known, name in ((kinds, KNOWN, "kinds"), (chosen["modes"], MODES, "modes")):
        if wrong := [item for item in items if item not in known]:
            raise ValueError(f"{name}={wrong}: choose from {', '.join(known)}.")
    check_dtype(dtype)
    for name in chosen["attentions"]:
        check_attention(name)
        if name in OWN_ATTENTION and name != "auto" and set(kinds) - {"folded"}:
            raise ValueError(f"attentions={[name]}: only kind folded has it; leave it out, or the other kinds.")
    if snapshots and not torch.cuda.is_available():
        raise ValueError("snapshots are the CUDA allocator's, and there is no GPU: leave them out.")
    fields = shape_of(shape, vocab_size)
    points = list(grid(kinds, **chosen))
    setting = Setting(fields, dtype, repeats, str(output / "snapshots") if snapshots else None)
    settings = {**asdict(setting), "hardware": hardware(), "torch": versions()["torch"]}
    with open_results_store(output / "profile.records.jsonl", settings) as records:
        measured = []
        bar = tqdm(points, unit="point", desc="profile")
        for point in bar:
            key = asdict(point)
            bar.set_postfix_str(f"{point.kind} {point.mode} {point.length:,}")
            measured.append({**key, **records.get(key, lambda point=point: in_a_process("point", point, setting))})
        if shape == "table1" and vocab_size is None:
            assert {point["parameters"] for point in measured} == {TABLE_1_PARAMETERS}
        results = {"kind": "profile", **run_metadata(), **settings, "points": measured}
        write_results(output / "profile", results, measured)
        draw(results, output / "profile")
    return results


def given(defaults: dict[str, Sequence[Any]], **options: Sequence[Any] | None) -> dict[str, Sequence[Any]]:
    """The defaults, but for the options that are not None."""
    return defaults | {name: value for name, value in options.items() if value is not None}


def grid(
    kinds: Sequence[str],
    modes: Sequence[str],
    lengths: Sequence[int],
    batches: Sequence[int],
    segments: Sequence[int],
    attentions: Sequence[str],
    checkpointing: Sequence[bool],
) -> Iterator[Point]:
    """Kinds follow each other, so that what is compared is measured at about the same time.

    A stock model has no segments, and only training has checkpoints: what makes no difference is measured once.
    """
    seen = set()
    for mode, length, batch, attention, saves, segment, kind in product(
        modes, lengths, batches, attentions, checkpointing, segments, kinds
    ):
        segment_length = None if kind == "stock" else segment
        point = Point(kind, mode, length, batch, segment_length, attention, saves and mode == "training")
        if point not in seen:
            seen.add(point)
            yield point


def in_a_process(module: str, point: Point, setting: Setting) -> dict[str, Any]:
    """What `measure` of a module of this package returns in a fresh process."""
    given = json.dumps([asdict(point), asdict(setting)])
    code = f"from eval.profile import {module}, point; point.main({module}.measure)"
    command = [sys.executable, "-c", code, given]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if run.returncode == -9:  # the system's last resort
        return {"out_of_memory": True, "parameters": None}
    if run.returncode:
        raise RuntimeError(f"{point} failed:\n{run.stderr}")
    return json.loads(run.stdout.splitlines()[-1])
