"""Computes a trained model's losses by token under different solvers, and each token's evaluations.

Axes: B texts, T tokens, D hidden size.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..model import set_solver
from ..model.settings import FIXED_SOLVERS
from ..model.solvers import TABLEAUS
from .divergence import distances
from .models import block_in
from .readings import accurate, batches, input_of, next_token_losses, read_flow

SHUFFLES = 200
EXACT = 1e-12  # rtol and atol of dopri5, in float64: the best points come within 1e-9 of the exact end


class Run(NamedTuple):
    """A solver at its steps or tolerance, in the model's dtype; `error` is in float64.

    It is the distance from the exact end of the flow, relative to the displacement.
    """

    losses_BT: torch.Tensor  # entry t is the loss of the token after t; float64
    evaluations_BT: torch.Tensor  # entry t belongs to token t
    error: float


class Tokens:
    """Runs a model with a block on texts, each solver once."""

    def __init__(self, model: Any, ids_BT: torch.Tensor):
        self.model, self.block, self.ids_BT = model, block_in(model), ids_BT
        self.done: dict[tuple[str, float], Run] = {}
        self.start_BTD = input_of(model, self.block, ids_BT).double()
        self.reading = read_flow(accurate(self.block))
        with torch.no_grad():
            self.exact_BTD = self.reading.exact(self.start_BTD, EXACT)

    @torch.no_grad()
    def run(self, solver: str, amount: float) -> Run:
        """Runs a solver with `amount` equal steps or, if it is adaptive, with this tolerance."""
        if (solver, amount) not in self.done:
            is_fixed = solver in FIXED_SOLVERS
            settings: dict[str, Any] = {"steps": int(amount)} if is_fixed else {"rtol": amount, "atol": amount}
            set_solver(self.model, solver, **settings)
            end_BTD = self.reading.end(self.start_BTD, solver, amount)
            error = distances(end_BTD, self.exact_BTD, self.start_BTD)["to_displacement"]
            self.done[solver, amount] = Run(*self._predict(), error)
        return self.done[solver, amount]

    def _predict(self) -> tuple[torch.Tensor, torch.Tensor]:
        losses, evaluations = [], []
        for part in batches(self.ids_BT, self.model.config.vocab_size):
            ids_BT = self.ids_BT[part]
            logits_BTV = self.model(input_ids=ids_BT, use_cache=False).logits
            losses.append(next_token_losses(logits_BTV, ids_BT).double())
            evaluations.append(torch.as_tensor(self.block.function_evaluations).expand(ids_BT.shape)[:, :-1])
        return torch.cat(losses), torch.cat(evaluations)


def equal_steps(solver: str, evaluations: float) -> int:
    """Returns how many steps of a fixed solver the evaluations pay for, at least 1."""
    return max(1, int(evaluations) // len(TABLEAUS[solver].c))


def rank_correlation(taken_BT: np.ndarray, losses_BT: np.ndarray, seed: int = 0) -> dict[str, Any] | None:
    """Computes Spearman's correlation over all tokens; None if either input is constant.

    `shuffled` has correlations with the losses of each position shuffled over texts, which keeps the position's effect.
    """
    from scipy.stats import rankdata

    ranks_BT, others_BT = (rankdata(values).reshape(values.shape) for values in (taken_BT, losses_BT))
    ranks_BT, others_BT = ranks_BT - ranks_BT.mean(), others_BT - others_BT.mean()
    size = float(np.linalg.norm(ranks_BT) * np.linalg.norm(others_BT))
    if not size:
        return None
    generator = np.random.default_rng(seed)
    shuffled = [float((ranks_BT * generator.permuted(others_BT, axis=0)).sum() / size) for _ in range(SHUFFLES)]
    return {"correlation": float((ranks_BT * others_BT).sum() / size), "shuffled": shuffled}


def shuffled_middle(shuffled: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Returns the 2.5 % and 97.5 % quantiles of the mean over seeds by Fisher's z; each seed has its own shuffles."""
    means = np.tanh(np.arctanh(np.asarray(shuffled)).mean(axis=0))
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)
