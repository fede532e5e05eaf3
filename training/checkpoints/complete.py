"""Checkpoints that are complete or absent.

Trainer and DeepSpeed write a checkpoint's files in place, so a killed run leaves a folder that looks complete. We write
a marker last: only folders that have it count, and older ones are deleted only after that. The marker lists all files
with their sizes, so a checkpoint that later loses a file is refused. It also holds the recipe and hashes of its files,
so a run resumes under the recipe it began with.
"""

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from condense.hub.card import CARD
from condense.utils.files import use_default_mode

from ..full_disk import room_for

MARKER = "complete.json"
FIELDS = {"step", "ranks", "zero_stage", "recipe", "files"}  # of the marker


def checkpoints(folder: Path) -> list[Path]:
    """Returns the complete checkpoints in a folder, oldest first."""
    return [path for path in _all_checkpoints(folder) if (path / MARKER).exists()]


def newest_checkpoint(folder: Path) -> Path | None:
    return found[-1] if (found := checkpoints(folder)) else None


def read_marker(checkpoint: Path) -> dict:
    """Returns the marker's content. Raises `ValueError` for a missing, incomplete or damaged checkpoint."""
    remedy = "Delete the folder to resume from the one before it."
    if not checkpoint.is_dir():
        raise ValueError(f"there is no checkpoint {checkpoint}.")
    try:
        marker = json.loads((checkpoint / MARKER).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # another error of the disk is none of the checkpoint
        marker = None
    if not isinstance(marker, dict) or not marker.keys() >= FIELDS:
        raise ValueError(f"checkpoint {checkpoint} was never completed, or its {MARKER} is damaged. {remedy}")
    for name, size in marker["files"].items():
        path = checkpoint / name
        found = path.stat().st_size if path.exists() else None
        if found != size:
            state = "is missing" if found is None else f"has {found:,} bytes, and {size:,} were written"
            raise ValueError(f"checkpoint {checkpoint} is damaged: {name} {state}. {remedy}")
    return marker


def room_for_checkpoints(output: Path) -> AbstractContextManager[None]:
    """Raises `ValueError` with the folder and the remedy if a disk or quota is full."""
    return room_for(
        output, "Make room, and start the same command again: it resumes from the last complete checkpoint."
    )


def remove_incomplete(folder: Path) -> None:
    """Deletes the checkpoint that a killed run left unfinished: the next run writes it into an empty folder."""
    for path in _all_checkpoints(folder):
        if not (path / MARKER).exists():
            shutil.rmtree(path)


def _all_checkpoints(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(found, key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("checkpoint-"))


class CompleteCheckpoints(TrainerCallback):
    """Completes each checkpoint: calls `write` with its folder, writes the marker, then deletes older ones."""

    def __init__(self, write: Callable[[Path], object] | None, keep: int, recipe: dict[str, Any], **described: Any):
        """`described` is stored in the marker."""
        self.write, self.keep = write, keep
        self.described = {"recipe": recipe, **described}

    def on_save(self, args, state, control, **kwargs):
        if dist.is_initialized():
            dist.barrier()  # every rank has written its part
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self.write is not None:
            self.write(folder)
        use_default_mode(folder)
        partial = folder / f"{MARKER}.partial"
        written = [path for path in folder.rglob("*") if path.is_file() and path.name != CARD]  # users edit it
        files = {str(path.relative_to(folder)): path.stat().st_size for path in written}
        zero_stage = args.deepspeed_plugin.zero_stage if args.deepspeed_plugin else None
        marker = {"step": state.global_step, "ranks": args.world_size, "zero_stage": zero_stage}
        marker |= {**self.described, "files": files}
        partial.write_text(json.dumps(marker), encoding="utf-8")
        partial.rename(folder / MARKER)
        kept = checkpoints(folder.parent)[-self.keep :]
        for old in _all_checkpoints(folder.parent):
            if old not in kept and _step(old) < state.global_step:
                (old / MARKER).unlink(missing_ok=True)
                shutil.rmtree(old)
