"""Checks the pickle files of a checkpoint, because DeepSpeed's loader runs any code that they name.

Each file is first loaded with torch's weights-only unpickler. It builds only tensors, plain containers and the few
classes that DeepSpeed writes. Tensors are mapped, not read, so this takes milliseconds. Trainer and transformers load
their own files (*.pth, *.bin) weights-only.
"""

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from condense.utils.files import read_text

POINTERS = ("latest", "latest_universal")  # files naming the folder DeepSpeed loads from


def check_pickles(checkpoint: Path) -> None:
    """Raises `ValueError` for a file of a checkpoint that could run code when it is loaded."""
    for name in POINTERS:
        pointer = checkpoint / name
        if pointer.is_file() and read_text(pointer).strip() not in os.listdir(checkpoint):
            raise ValueError(
                f"{pointer} names no folder of the checkpoint, as DeepSpeed does: do not load it, and take the "
                "checkpoint from a place that you trust."
            )
    with torch.serialization.safe_globals(_written_by_deepspeed()):
        for path in _pickles(checkpoint):
            try:
                torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except pickle.UnpicklingError as error:
                raise ValueError(
                    f"{path} holds more than tensors and DeepSpeed's own classes, and could run code when it is loaded "
                    f"({_cause(error)}): do not load it, and take the checkpoint from a place that you trust."
                ) from error
            except (RuntimeError, EOFError, OSError) as error:
                raise ValueError(
                    f"{path} is damaged ({str(error).splitlines()[0]}): delete the checkpoint's folder to resume from "
                    "the one before it."
                ) from error


def _pickles(checkpoint: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise ValueError(f"{error.filename} can't be read: {error.strerror}. Make it readable.") from error

    for folder, _, names in os.walk(checkpoint, followlinks=True, onerror=refuse):
        yield from (Path(folder) / name for name in sorted(names) if name.endswith(".pt"))


def _written_by_deepspeed() -> list[Any]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    def stage(enum: Any, name: str) -> Any:
        """Replaces `getattr`, which Python before 3.11.4 uses to pickle a member of an enumeration."""
        if enum is not ZeroStageEnum or name not in enum.__members__:
            raise pickle.UnpicklingError(f"Unsupported use of getattr: {name} of {enum}")
        return enum[name]

    return [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address, (stage, "builtins.getattr")]


def _cause(error: Exception) -> str:
    """Returns the line of torch's message that names the class or function."""
    lines = [line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line]
    return lines[0][:200] if lines else str(error).splitlines()[0][:200]
