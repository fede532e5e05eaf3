"""Counts a solver's field evaluations, and probes the states along the way.

Axes: T tokens, n tokens of all prompts, D hidden size, N examples.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch

from condense.eval.results_store import Record

from .lexicon import PAPER_PAIR, PAPER_PROMPT
from .models import block_in
from .pretraining import Setup
from .probe import probe_accuracy
from .readings import accurate, control_of, inputs_of, read_flow
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
    """Counts the evaluations (NFE) of a model's block by an adaptive solver, in float64."""

    def __init__(self, model: Any, solver: str):
        self.block, self.solver = accurate(block_in(model)), solver

    @torch.no_grad()
    def by_token(self, start_nD: torch.Tensor, u: float, tolerance: float) -> list[int]:
        """Returns the NFE of each token, each with its own steps."""
        block = self.block
        block.settings = replace(
            block.settings, solver=self.solver, rtol=tolerance, atol=tolerance / 10, max_evaluations=EVALUATIONS
        )
        return block.flow(start_nD, control_of(block, u)).num_evaluations.tolist()

    @torch.no_grad()
    def common(self, start_nD: torch.Tensor, u: float, tolerance: float) -> int:
        """Returns the NFE of all tokens together, with one step size for all."""
        from torchdiffeq import odeint

        (field,), calls = read_flow(self.block, u).pieces, list[torch.Tensor]()

        def counted(tau: torch.Tensor, state_nD: torch.Tensor) -> torch.Tensor:
            calls.append(tau)
            return field(tau, state_nD)

        ends = torch.tensor([0.0, 1.0], dtype=start_nD.dtype)
        odeint(counted, start_nD, ends, rtol=tolerance, atol=tolerance / 10, method=self.solver)
        return len(calls)


def neighbours(effort: Evaluations, starts: Sequence[torch.Tensor], tolerance: float) -> dict[str, Any]:
    """Returns the NFE of prompts on their own and together, and in how many they differ: with common steps or by token.

    Counts at u = -1, 0 and 1 are added up.
    """
    together_nD, lengths = torch.cat(list(starts)), [len(start) for start in starts]
    alone, together, changed = list[int](), list[int](), {"common_changed": 0, "by_token_changed": 0}
    for u in (-1.0, 0.0, 1.0):
        together.append(effort.common(together_nD, u, tolerance))
        by_token = torch.tensor(effort.by_token(together_nD, u, tolerance)).split(lengths)
        for start, among_others in zip(starts, by_token, strict=True):
            alone.append(effort.common(start, u, tolerance))
            changed["common_changed"] += alone[-1] != together[-1]
            changed["by_token_changed"] += effort.by_token(start, u, tolerance) != among_others.tolist()
    return {"prompts": len(alone), "common_alone": alone, "common_together": together} | changed


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

    (field,) = read_flow(block, control).pieces
    return odeint(field, start_nD, torch.tensor(TAUS).double(), rtol=1e-6, atol=1e-7)


class Examples(NamedTuple):
    """The examples of a probe: states [taus, N, D] and two kinds of labels [N]."""

    states: torch.Tensor
    labels: torch.Tensor
    shuffled: torch.Tensor


def measure_probes(model: Any, setup: Setup, seed: int) -> Record:
    """Returns the accuracy of each of `READINGS` by tau."""
    parts, tokenizer, block = parts_of("many", seed, setup), setup.corpus.tokenizer, accurate(block_in(model))
    generator = torch.Generator().manual_seed(seed)

    def states(texts: Sequence[Ids], *controls: float) -> torch.Tensor:
        """Returns H [taus, N, D] of the last token of each text, at each control."""
        lasts_nD = torch.cat([state_TD[-1:] for state_TD in states_before(model, texts)])
        return torch.cat([states_at(block, lasts_nD, u) for u in controls], dim=1)

    def shuffle(labels: torch.Tensor) -> torch.Tensor:
        return labels[torch.randperm(len(labels), generator=generator)]

    def with_words(prompts, pairs, labels: torch.Tensor, others: torch.Tensor) -> Examples:
        """Continues each prompt with each word; labels are by word."""
        ids = [
            encode_prompt(tokenizer, prompt) + encode_word(tokenizer, word)
            for prompt, pair in product(prompts, pairs)
            for word in pair
        ]
        return Examples(states(ids, 0.0), labels.repeat(len(prompts)), others.repeat(len(prompts)))

    def with_controls(prompts) -> Examples:
        signs = torch.tensor([1] * len(prompts) + [0] * len(prompts))
        ids = [encode_prompt(tokenizer, prompt) for prompt in prompts]
        return Examples(states(ids, 1.0, -1.0), signs, shuffle(signs))

    known, new = (torch.tensor([1, 0] * len(pairs)) for pairs in (parts.train_pairs, parts.test_pairs))
    known_labels, new_labels = ((labels, shuffle(labels)) for labels in (known, new))
    trained = with_words(parts.train_prompts, parts.train_pairs, *known_labels)
    new_prompts = with_words(parts.test_prompts, parts.train_pairs, *known_labels)
    both_new = with_words(parts.test_prompts, parts.test_pairs, *new_labels)
    controls = [with_controls(prompts) for prompts in (parts.train_prompts, parts.test_prompts)]
    found = [_by_tau(*halves) for halves in ((trained, new_prompts), (trained, both_new), controls)]
    return {"probes": dict(zip(READINGS, found, strict=True))}


def _by_tau(train: Examples, test: Examples) -> list[dict[str, float]]:
    return [
        {
            "tau": tau,
            "accuracy": probe_accuracy(train.states[number], train.labels, test.states[number], test.labels),
            "shuffled": probe_accuracy(train.states[number], train.shuffled, test.states[number], test.shuffled),
        }
        for number, tau in enumerate(TAUS)
    ]


def fit_effort(controls: Sequence[float], counts: Sequence[float]) -> tuple[float, float, float]:
    """Fits level, slope and curvature of counts = level + slope u + curvature |u| by least squares."""
    u = np.asarray(controls)
    design = np.stack([np.ones_like(u), u, np.abs(u)], axis=1)
    level, slope, curvature = np.linalg.lstsq(design, np.asarray(counts, dtype=float), rcond=None)[0].tolist()
    return level, slope, curvature


def num_steps_of(way: str, solver: str, evaluations: float) -> float:
    """Converts evaluations to steps, accepted or not, common or a mean over tokens: two choose the first step."""
    return (evaluations - 2) / EVALUATIONS_PER_STEP[way][solver]
