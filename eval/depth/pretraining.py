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

from condense.depth.block import NotFiniteError
from condense.files import atomic_folder
from condense.progress import ProgressBar
from condense.training.output_lock import output_lock

from .data import Corpus
from .models import Size, block_of, build

CLIPPED_NORM = 1.0
HELD_OUT_WINDOWS = 512  # at most, evenly spread over the held-out text


class Setup(NamedTuple):
    size: Size
    corpus: Corpus

    def describe(self) -> dict[str, Any]:
        """Returns everything that trained weights depend on."""
        return json.loads(json.dumps({"size": asdict(self.size), "corpus": self.corpus.described}))


def trained(arm: str, seed: int, setup: Setup, folder: Path) -> GPT2LMHeadModel:
    """Returns the trained model in eval mode; trains and stores it in `folder`/models/ARM-SEED if needed.

    The block's control is zero during this training. Raises `ValueError` if the folder holds models with a different
    size or text, or another process is training this one there.
    """
    path, model = model_folder(arm, seed, folder), build(arm, setup.size, seed)
    if path.exists():
        log_of(arm, seed, setup, folder)
        model.load_state_dict(load_file(path / "model.safetensors"))
        return model.eval()
    with output_lock(path.parent, path.name):
        log = train(model, setup, seed, f"training {arm}-{seed}")
        with atomic_folder(path) as made:
            save_file(model.state_dict(), made / "model.safetensors")
            (made / "steps.json").write_text(json.dumps({"setup": setup.describe(), "log": log}), encoding="utf-8")
    return model.eval()


def model_folder(arm: str, seed: int, folder: Path) -> Path:
    return folder / "models" / f"{arm}-{seed}"


def log_of(arm: str, seed: int, setup: Setup, folder: Path) -> dict[str, list[Any]]:
    """Returns the log of a model stored by `trained`. Raises `ValueError` if its size or text differs."""
    path = model_folder(arm, seed, folder) / "steps.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    if stored["setup"] != setup.describe():
        raise ValueError(f"{path.parent} has a different size or text: pass another --output, or delete it.")
    return stored["log"]


def train(model: GPT2LMHeadModel, setup: Setup, seed: int, name: str) -> dict[str, list[Any]]:
    """Trains using AdamW at a constant rate. Returns by step the loss, the gradient norms before clipping, and alpha.

    A step with a loss or gradient that is not finite does not change weights; its figures are None. Without a finite
    flow there is neither loss nor gradient. `block_gradient_norm` and `alpha` are None in a model without a block.
    """
    block = block_of(model)
    log: dict[str, list[Any]] = {key: [] for key in ("loss", "gradient_norm", "block_gradient_norm", "alpha")}
    optimizer = torch.optim.AdamW(model.parameters(), lr=setup.size.learning_rate, fused=True)
    batches = _batches(setup, seed)
    model.train()
    with ProgressBar(range(setup.size.steps), desc=name, unit="step", leave=False) as bar:
        for _ in bar:
            alpha = None if block is None else block.alpha.item()
            loss, norm, block_norm = _gradients(model, next(batches))
            if math.isfinite(norm) and math.isfinite(loss):
                optimizer.step()
            optimizer.zero_grad()
            for key, value in zip(log, (loss, norm, block_norm, alpha), strict=True):
                log[key].append(value if value is not None and math.isfinite(value) else None)
            bar.set_postfix_str(f"loss {loss:.3f}")
    if block is not None:
        log["alpha"].append(block.alpha.item())
    return log


def _gradients(model: GPT2LMHeadModel, ids_BN: torch.Tensor) -> tuple[float, float, float | None]:
    """Computes and clips the gradient. Returns the loss and the norms for all weights and for the block, NaN if the
    flow is not finite."""
    block = block_of(model)
    try:
        loss = model(ids_BN, labels=ids_BN).loss
    except NotFiniteError:
        return math.nan, math.nan, math.nan
    loss.backward()
    block_norm = None if block is None else _norm(block.parameters())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPED_NORM).item()
    return loss.item(), norm, block_norm


def _norm(parameters: Iterator[torch.nn.Parameter]) -> float:
    return torch.nn.utils.get_total_norm([given.grad for given in parameters if given.grad is not None]).item()


def _batches(setup: Setup, seed: int) -> Iterator[torch.Tensor]:
    """Batches [B, N] of windows without overlap, in an order that depends only on the seed."""
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
    windows_WN = _windows(setup.corpus.held_out_ids, setup.size.positions)
    number = min(HELD_OUT_WINDOWS, len(windows_WN))
    return windows_WN[torch.linspace(0, len(windows_WN) - 1, number).long()]


@torch.no_grad()
def held_out_loss(model: GPT2LMHeadModel, setup: Setup) -> float | None:
    """Returns the mean loss per token over `held_out_windows`; None if it is not finite."""
    batches = held_out_windows(setup).split(setup.size.batch)
    try:
        mean = mean_loss(lambda ids_BN: model(ids_BN, labels=ids_BN).loss, batches)
    except NotFiniteError:
        return None
    return mean if math.isfinite(mean) else None


def mean_loss(loss: Callable[[torch.Tensor], torch.Tensor], batches: Sequence[torch.Tensor]) -> float:
    """Returns the mean over the rows of all batches; the last batch may be smaller."""
    losses = [(loss(ids_BN).item(), len(ids_BN)) for ids_BN in batches]
    return sum(loss * rows for loss, rows in losses) / sum(rows for _, rows in losses)
