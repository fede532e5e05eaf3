"""Counts of a solver's field evaluations, and what probes read from the states along the way.

Axes: T tokens, n tokens of all prompts, D hidden size, N examples.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch

from ..results_store import Record
from .lexicon import PAPER_PAIR, PAPER_PROMPT
from .models import block_in
from .pretraining import Setup
from .probe import probe_accuracy
from .readings import inputs_of
from .steered import parts_of
from .steering_measures import pair_log_probs
from .words import Ids, encode_prompt, encode_word

# torchdiffeq's adaptive_heun starts a step with the previous step's last slope; torchode's (by token) computes one.
EVALUATIONS_PER_STEP = {
    "common": {"dopri5": 6, "adaptive_heun": 1},
    "mean": {"dopri5": 6, "adaptive_heun": 2},
}
EVALUATIONS = 100_000  # at most
BOUNDARY = 0.3  # of u, between the paper's two regimes
TAUS = (0.0, 0.5, 0.67, 1.0)
READINGS = ("sentiment, new prompts", "sentiment, new prompts and words", "sign of u, new prompts")


class Evaluations:
    """Counts the evaluations of a model's block by an adaptive solver."""

    def __init__(self, model: Any, solver: str):
        self.block, self.solver = _exact_block(model), solver

    @torch.no_grad()
    def by_token(self, start_nD: torch.Tensor, u: float, tolerance: float) -> list[int]:
        """Returns the NFE of each token, each with its own steps."""
        block = self.block
        block.settings = replace(
            block.settings, solver=self.solver, rtol=tolerance, atol=tolerance / 10, max_evaluations=EVALUATIONS
        )
        return block.flow(start_nD, _control(u)).num_evaluations.tolist()

    @torch.no_grad()
    def common(self, start_nD: torch.Tensor, u: float, tolerance: float) -> int:
        """Returns the NFE of all tokens together, with one step size for all."""
        from torchdiffeq import odeint

        calls = 0

        def counted(tau: torch.Tensor, state_nD: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return _derivative(self.block, u)(tau, state_nD)

        ends = torch.tensor([0.0, 1.0], dtype=start_nD.dtype)
        odeint(counted, start_nD, ends, rtol=tolerance, atol=tolerance / 10, method=self.solver)
        return calls


def neighbours(effort: Evaluations, starts: Sequence[torch.Tensor], tolerance: float) -> dict[str, Any]:
    """Returns the NFE of each prompt on its own and with the others, both ways. changed: how many then differ."""
    together_nD, lengths = torch.cat(list(starts)), [len(start) for start in starts]
    found: dict[str, Any] = {"prompts": 0, "common_alone": [], "common_together": [], "common_changed": 0,
                             "by_token_changed": 0}  # fmt: skip
    for u in (-1.0, 0.0, 1.0):
        common = effort.common(together_nD, u, tolerance)
        by_token = torch.tensor(effort.by_token(together_nD, u, tolerance)).split(lengths)
        for start, among_others in zip(starts, by_token, strict=True):
            alone = effort.common(start, u, tolerance)
            found["prompts"] += 1
            found["common_alone"].append(alone)
            found["common_changed"] += alone != common
            found["by_token_changed"] += effort.by_token(start, u, tolerance) != among_others.tolist()
        found["common_together"].append(common)
    return found


def prior_share(model: Any, setup: Setup) -> float:
    """Returns the share of the positive word of the paper's pair before any steering."""
    log_2 = pair_log_probs(model, setup.corpus.tokenizer, [PAPER_PROMPT], [PAPER_PAIR], [0.0])[0, 0, 0]
    return float(log_2.softmax(0)[0])


def states_before(model: Any, texts: Sequence[Ids]) -> list[torch.Tensor]:
    """Returns H(0) [T, D] of each text in float64, the input of the block."""
    return [states_TD.double() for states_TD in inputs_of(model, block_in(model), texts)]


@torch.no_grad()
def states_at(block: Any, start_nD: torch.Tensor, control: float) -> torch.Tensor:
    """Returns H(tau) [taus, n, D] at the depths `TAUS`."""
    from torchdiffeq import odeint

    return odeint(_derivative(block, control), start_nD, torch.tensor(TAUS).double(), rtol=1e-6, atol=1e-7)


def measure_probes(model: Any, setup: Setup, seed: int) -> Record:
    parts, tokenizer, block = parts_of("many", seed, setup), setup.corpus.tokenizer, _exact_block(model)
    generator = torch.Generator().manual_seed(seed)
    halves = (parts.train_prompts, parts.test_prompts)

    def texts(prompts: Sequence[str], pairs: Sequence[tuple[str, str]]) -> torch.Tensor:
        """Returns H [taus, N, D] of each prompt with each word."""
        ids = [
            encode_prompt(tokenizer, prompt) + encode_word(tokenizer, word)
            for prompt, pair in product(prompts, pairs)
            for word in pair
        ]
        return states_at(block, torch.cat([state[-1:] for state in states_before(model, ids)]), 0.0)

    def labels(prompts: Sequence[str], words: torch.Tensor) -> torch.Tensor:
        return words.repeat(len(prompts))

    signs, new_signs = (torch.tensor([1, 0] * len(pairs)) for pairs in (parts.train_pairs, parts.test_pairs))
    shuffled, new_shuffled = (_shuffled(words, generator) for words in (signs, new_signs))
    train, test = (texts(half, parts.train_pairs) for half in halves)
    new = texts(parts.test_prompts, parts.test_pairs)
    sentiment = _by_tau(train, test, *(labels(h, w) for w in (signs, shuffled) for h in halves))
    unseen = _by_tau(
        train, new, labels(halves[0], signs), labels(halves[1], new_signs),
        labels(halves[0], shuffled), labels(halves[1], new_shuffled),
    )  # fmt: skip
    ends = []
    for half in halves:
        lasts = [s[-1:] for s in states_before(model, [encode_prompt(tokenizer, prompt) for prompt in half])]
        ends.append(torch.cat([states_at(block, torch.cat(lasts), u) for u in (1.0, -1.0)], dim=1))
    of_u = [torch.tensor([1] * len(half) + [0] * len(half)) for half in halves]
    control = _by_tau(*ends, *of_u, *(_shuffled(values, generator) for values in of_u))
    return {"probes": dict(zip(READINGS, (sentiment, unseen, control), strict=True))}


def _by_tau(train, test, train_labels, test_labels, train_shuffled, test_shuffled) -> list[dict[str, float]]:
    return [
        {
            "tau": tau,
            "accuracy": probe_accuracy(train[number], train_labels, test[number], test_labels),
            "shuffled": probe_accuracy(train[number], train_shuffled, test[number], test_shuffled),
        }
        for number, tau in enumerate(TAUS)
    ]


def _shuffled(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return values[torch.randperm(len(values), generator=generator)]


def _exact_block(model: Any) -> Any:
    return deepcopy(block_in(model)).double().eval()


def _control(u: float) -> torch.Tensor:
    return torch.tensor([[u]], dtype=torch.float64)


def _derivative(block: Any, u: float):
    return lambda tau, state_nD: block.alpha * block.field(tau, state_nD, _control(u))


def fit_effort(controls: Sequence[float], counts: Sequence[float]) -> tuple[float, float, float]:
    """Fits level, slope and curvature of counts = level + slope u + curvature |u| by least squares."""
    u = np.asarray(controls)
    design = np.stack([np.ones_like(u), u, np.abs(u)], axis=1)
    level, slope, curvature = np.linalg.lstsq(design, np.asarray(counts, dtype=float), rcond=None)[0]
    return float(level), float(slope), float(curvature)


def num_steps_of(way: str, solver: str, evaluations: float) -> float:
    """Converts evaluations to steps, accepted or not, common or a mean over tokens: two choose the first step."""
    return (evaluations - 2) / EVALUATIONS_PER_STEP[way][solver]
