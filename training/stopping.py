"""Stops a run on a signal: it writes a checkpoint after the current step and ends, to be resumed.

Clusters announce the end of a job by sending some of its processes a signal: SIGTERM, or Slurm's SIGUSR1. After each
step the ranks agree whether any of them has received one.
"""

import signal
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from .subprocesses import PLEASE_SAVE


class Stopped(Exception):
    """A signal has stopped the run, and a checkpoint has been written."""


class StopOnSignal(TrainerCallback):
    """Saves and stops after the step in which any rank received a signal of `numbers`.

    With a curriculum, a run stops at a multiple of `every` steps, because its texts grow with the logged losses.
    """

    def __init__(self, numbers: Collection[signal.Signals], every: int = 1):
        self.every = every
        self.received = 0  # by this rank, and then by any; 0: no signal
        self.stopped = False
        self._numbers = numbers
        self._before: dict[signal.Signals, Any] = {}

    @property
    def name(self) -> str:
        """Returns the name of the signal that came, to this process or to the one that then asked it."""
        sent = signal.Signals(self.received)
        return next((came for came, asks in PLEASE_SAVE.items() if asks == sent), sent).name

    def on_step_begin(self, args, state, control, **kwargs):
        """Before the first step nothing is worth saving, so a signal ends the process at once."""
        if not self._before:
            self._before = {number: signal.signal(number, self._receive) for number in self._numbers}

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every or state.global_step >= state.max_steps:
            return
        if received := self._received_by_any(args.device):  # later signals count at the next agreement
            self.received = received
            self.stopped = True
            control.should_log = control.should_save = control.should_training_stop = True

    def _received_by_any(self, device: torch.device) -> int:
        """Returns a signal that any rank has received, or 0. A process alone does not wait for its device; ranks have
        just done so, for DeepSpeed's gradient norm."""
        if not dist.is_initialized():
            return self.received
        received = torch.tensor(self.received, device=device)
        dist.all_reduce(received, op=dist.ReduceOp.MAX)
        return int(received)

    def on_train_end(self, args, state, control, **kwargs):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: object) -> None:
        self.received = number
