"""Checkpoints that are complete or absent.

Trainer and DeepSpeed write a checkpoint's files in place, so a killed run leaves a folder that looks
whole. A marker is written last; only folders that have it count, and old ones go only after it is there.
"""

import json
import shutil
from pathlib import Path

import torch.distributed as dist
from transformers import TrainerCallback

MARKER = "complete.json"


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    return [path for path in _all_checkpoints(folder) if (path / MARKER).exists()]


def newest_checkpoint(folder: Path) -> Path | None:
    return found[-1] if (found := checkpoints(folder)) else None


def _all_checkpoints(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(found, key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("checkpoint-"))


class CompleteCheckpoints(TrainerCallback):
    """Completes each checkpoint with what `write` adds and the marker, then prunes older ones."""

    def __init__(self, write, keep: int):
        self.write, self.keep = write, keep

    def on_save(self, args, state, control, **kwargs):
        if dist.is_initialized():
            dist.barrier()  # every rank has written its part
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.write(folder)
        partial = folder / f"{MARKER}.partial"
        partial.write_text(json.dumps({"step": state.global_step}), encoding="utf-8")
        partial.rename(folder / MARKER)
        kept = checkpoints(folder.parent)[-self.keep :]
        for old in _all_checkpoints(folder.parent):
            if old not in kept and _step(old) < state.global_step:
                (old / MARKER).unlink(missing_ok=True)
                shutil.rmtree(old)
