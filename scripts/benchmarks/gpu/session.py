"""The state of one run of the GPU benchmark."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from condense.eval.benchmark.cases import device_and_dtype
from condense.eval.benchmark.memory import PeakMemory, memory_of
from condense.eval.benchmark.models import build_model, cast_parameters
from condense.execution.cuda_graph import GRAPHS

from .sizes import Sizes


class OutOfTimeError(Exception):
    """Raised when the minutes of the run are over."""


@dataclass
class Session:
    """Sizes, device, deadline and folder of a run, and its results so far: points of measurements and checks."""

    sizes: Sizes
    device: torch.device
    dtype: torch.dtype
    deadline: float
    folder: Path  # of the results
    memory: PeakMemory
    part: str = ""
    points: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def check(self, name: str, passed: bool | None, note: str) -> None:
        """Records whether a property holds; None if it can't be checked on this device."""
        self.checks.append({"part": self.part, "name": name, "passed": passed, "note": note})
        if passed is not True:
            log(f"  {'n/a ' if passed is None else 'WRONG'} {name}: {note}")


def new_session(sizes: Sizes, deadline: float, folder: Path) -> Session:
    device, dtype = device_and_dtype("auto")
    return Session(sizes, torch.device(device), getattr(torch, dtype), deadline, folder, memory_of(device))


def has_graphs(session: Session) -> bool:
    return session.device.type in GRAPHS


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def build_models(session: Session, shape: dict[str, Any], kinds: Sequence[str] = ("stock", "folded")) -> dict[str, Any]:
    """Returns models with random weights by kind, made on the device: a CPU takes long for a billion weights."""
    models = {}
    for kind in kinds:
        with session.device:
            models[kind] = cast_parameters(build_model(kind, shape, session.sizes.segment, "sdpa"), session.dtype)
    return models
