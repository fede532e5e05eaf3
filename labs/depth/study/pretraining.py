"""Trains the models of the experiments once: each experiment finds them in the output folder.

Axes: B rows of a batch, N tokens of a row.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2LMHeadModel

from condense.eval.study.training import make_once
from condense.utils.progress import ProgressBar

from ..model.block import NotFiniteError
from .data import Corpus
from .models import Size, block_of, build

CLIPPED_NORM = 1.0
HELD_OUT_WINDOWS = 512  # at most


class Setup(NamedTuple):
    size: Size
    corpus: Corpus

    def describe(self) -> dict[str, Any]:
        """Returns everything that trained weights depend on."""
        return json.loads(json.dumps({"size": asdict(self.size), "corpus": self.corpus.described}))


class Step(NamedTuple):
    """Figures of a training step, with norms before clipping.

    Losses and norms are NaN if the flow is not finite; the block's norm and alpha are NaN without a block.
    """

    loss: float = math.nan
    gradient_norm: float = math.nan
    block_gradient_norm: float = math.nan
    alpha: float = math.nan


def pretrain(arm: str, seed: int, setup: Setup, folder: Path) -> GPT2LMHeadModel:
    """Returns the trained model in eval mode; trains and stores it in `folder`/models/ARM-SEED if needed.

    The block's control is zero during this training. Raises `ValueError` if the folder holds a model with a different
    size or text.
    """
    model = build(arm, setup.size, seed)

    def write(made: Path) -> None:
        log = train(model, setup, seed, f"training {arm}-{seed}")
        save_file(model.state_dict(), made / "model.safetensors")
        (made / "steps.json").write_text(json.dumps({"setup": setup.describe(), "log": log}), encoding="utf-8")

    path = make_once(model_folder(arm, seed, folder), write)
    log_of(arm, seed, setup, folder)
    model.load_state_dict(load_file(path / "model.safetensors"))
    return model.eval()


def model_folder(arm: str, seed: int, folder: Path) -> Path:
    return folder / "models" / f"{arm}-{seed}"


def log_of(arm: str, seed: int, setup: Setup, folder: Path) -> dict[str, list[Any]]:
    """Returns the log of a model stored by `trained`. Raises `ValueError` if its size or text differs."""
    path = model_folder(arm, seed, folder) / "steps.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    if stored["setup"] != setup.describe():
        raise ValueError(f"{path.parent} holds a model of another size or text: pass another --output, or delete it.")
    return stored["log"]


def train(model: GPT2LMHeadModel, setup: Setup, seed: int, name: str) -> dict[str, list[Any]]:
    """Trains with AdamW at a constant rate. Returns the fields of all `Step`s, and also the last alpha.

    A figure that is not finite is None. A step with a loss or gradient that is not finite does not change weights.
    """
    block, steps = block_of(model), list[Step]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=setup.size.learning_rate, fused=True)
    batches = _batches(setup, seed)
    model.train()
    with ProgressBar(range(setup.size.steps), desc=name, unit="step", leave=False) as bar:
        for _ in bar:
            step = _backward(model, next(batches))
            if math.isfinite(step.loss) and math.isfinite(step.gradient_norm):
                optimizer.step()
            optimizer.zero_grad()
            steps.append(step)
            bar.set_postfix_str(f"loss {step.loss:.3f}")
    log = {name: [_finite(getattr(step, name)) for step in steps] for name in Step._fields}
    if block is not None:
        log["alpha"].append(block.alpha.item())
    return log


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _backward(model: GPT2LMHeadModel, ids_BN: torch.Tensor) -> Step:
    """Computes and clips the gradient."""
    block, alpha, block_norm = block_of(model), math.nan, math.nan
    if block is not None:
        alpha = block.alpha.item()
    try:
        loss = model(ids_BN, labels=ids_BN).loss
    except NotFiniteError:
        return Step(alpha=alpha)
    loss.backward()
    if block is not None:
        gradients = [weight.grad for weight in block.parameters() if weight.grad is not None]
        block_norm = torch.nn.utils.get_total_norm(gradients).item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPED_NORM).item()
    return Step(loss.item(), norm, block_norm, alpha)


def _batches(setup: Setup, seed: int) -> Iterator[torch.Tensor]:
    """Yields batches [B, N] of windows without overlap, in an order that depends only on the seed."""
    windows_WN = _windows(setup.corpus.train_ids, setup.size.positions)
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(windows_WN), generator=generator)
        for chosen in order.split(setup.size.batch):
            if len(chosen) == setup.size.batch:
                yield windows_WN[chosen]


def _windows(ids_N: torch.Tensor, length: int) -> torch.Tensor:
    return ids_N[: len(ids_N) // length * length].view(-1, length)


def held_out_windows(setup: Setup) -> torch.Tensor:
    """Returns windows [W, N], evenly spread over the held-out text."""
    return spread(_windows(setup.corpus.held_out_ids, setup.size.positions), HELD_OUT_WINDOWS)


def spread(windows_WN: torch.Tensor, most: int) -> torch.Tensor:
    """Returns at most so many windows, evenly spread over all."""
    return windows_WN[torch.linspace(0, len(windows_WN) - 1, min(most, len(windows_WN))).long()]


@torch.no_grad()
def held_out_loss(model: GPT2LMHeadModel, setup: Setup) -> float | None:
    """Returns the mean loss per token over `held_out_windows`; None if it is not finite."""
    batches = held_out_windows(setup).split(setup.size.batch)
    try:
        return _finite(mean_loss(lambda ids_BN: model(ids_BN, labels=ids_BN).loss, batches))
    except NotFiniteError:
        return None


def mean_loss(loss: Callable[[torch.Tensor], torch.Tensor], batches: Sequence[torch.Tensor]) -> float:
    """Returns the mean over the rows of all batches; the last batch may be smaller."""
    losses = [(loss(ids_BN).item(), len(ids_BN)) for ids_BN in batches]
    return sum(loss * rows for loss, rows in losses) / sum(rows for _, rows in losses)
