"""The losses of a trained model by token under different solvers, with the evaluations that each token takes.

Axes: B texts, T tokens, D hidden size.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from condense.depth import set_solver
from condense.depth.solvers import TABLEAUS
from condense.depth.stock import StockDepthBlock

from .readings import accurate, batches, input_of, next_token_losses, read_flow

SHUFFLES = 200


class Run(NamedTuple):
    """A solver at its steps or tolerance. `error` is the distance of the end from the exact one, against the
    displacement."""

    losses_BT: torch.Tensor  # entry t is the loss of the token after t; float64
    evaluations_BT: torch.Tensor  # of token t
    error: float


class Tokens:
    """A model with a block, on texts; each run is computed once."""

    def __init__(self, model: Any, block: StockDepthBlock, ids_BT: torch.Tensor):
        self.model, self.block, self.ids_BT = model, block, ids_BT
        self.done: dict[tuple[str, float], Run] = {}
        self.start_BTD = input_of(model, block, ids_BT)
        with torch.no_grad():
            self.exact_BTD = read_flow(accurate(block)).exact(self.start_BTD.double())

    def run(self, solver: str, amount: float) -> Run:
        """`amount` is the number of equal steps, or the tolerance of an adaptive solver."""
        if (solver, amount) not in self.done:
            is_fixed = solver in TABLEAUS
            settings: dict[str, Any] = {"steps": int(amount)} if is_fixed else {"rtol": amount, "atol": amount}
            set_solver(self.model, solver, **settings)
            self.done[solver, amount] = self._run()
        return self.done[solver, amount]

    @torch.no_grad()
    def _run(self) -> Run:
        losses, evaluations, ends = [], [], []
        hook = self.block.register_forward_hook(lambda block, given, end: ends.append(end))
        try:
            for part in batches(self.ids_BT, self.model.config.vocab_size):
                ids_BT = self.ids_BT[part]
                logits_BTV = self.model(input_ids=ids_BT, use_cache=False).logits
                losses.append(next_token_losses(logits_BTV, ids_BT).double())
                taken = torch.as_tensor(self.block.function_evaluations).expand(ids_BT.shape)
                evaluations.append(taken[:, :-1])
        finally:
            hook.remove()
        error_BTD, moved_BTD = torch.cat(ends) - self.exact_BTD, self.exact_BTD - self.start_BTD
        return Run(torch.cat(losses), torch.cat(evaluations), float(error_BTD.norm() / moved_BTD.norm()))


def equal_steps(solver: str, evaluations: float) -> int:
    """The most steps of a fixed solver that take at most so many evaluations; 1 where even one step takes more."""
    return max(1, int(evaluations) // len(TABLEAUS[solver].c))


def rank_correlation(first: np.ndarray, second: np.ndarray, seed: int = 0) -> dict[str, float] | None:
    """Spearman's correlation, and its 2.5 % and 97.5 % quantiles with the second one shuffled; None where one of them
    is constant."""
    from scipy.stats import rankdata

    ranks, others = (rankdata(values) for values in (first, second))
    ranks, others = ranks - ranks.mean(), others - others.mean()
    size = float(np.linalg.norm(ranks) * np.linalg.norm(others))
    if not size:
        return None
    generator = np.random.default_rng(seed)
    shuffled = [ranks @ generator.permutation(others) / size for _ in range(SHUFFLES)]
    low, high = np.quantile(shuffled, (0.025, 0.975))
    return {"correlation": float(ranks @ others / size), "shuffled_low": float(low), "shuffled_high": float(high)}
