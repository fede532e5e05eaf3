"""Measures how far a control moves the next word, its cost on ordinary text, and interference between dimensions.

Axes: U values of the control, P prompts, N pairs of words, S settings of the control, W words.
"""

from collections.abc import Sequence
from itertools import product
from math import exp
from pathlib import Path
from typing import Any

import torch

from condense.eval.results_store import Record

from .lexicon import Signs
from .pretraining import Setup, held_out_windows, mean_loss
from .probe import minimise
from .steered import joint_examples, jointly_steered, lexicon_of
from .words import Ids, encode_prompt, encode_word, word_log_probs

WINDOWS_BETWEEN = 8  # every eighth held-out window is enough for a difference on the same text
GROUPS = ("trained", "new prompts", "new words", "both new")


@torch.no_grad()
def pair_log_probs(
    model: Any, tokenizer: Any, prompts: Sequence[str], pairs: Sequence[tuple[str, str]], controls: Sequence[float]
) -> torch.Tensor:
    """Returns log P [U, P, N, 2] of the positive and the negative word."""
    words = [encode_word(tokenizer, word) for pair in pairs for word in pair]
    rows = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    control_RC = torch.tensor(controls).repeat_interleave(len(rows))[:, None]
    log_RW = word_log_probs(model, rows * len(controls), words, control_RC)
    return log_RW.view(len(controls), len(rows), len(pairs), 2)


def figures(log_UPN2: torch.Tensor, controls: Sequence[float]) -> dict[str, Any]:
    """Computes figures for one group of prompts and pairs, with equal weight for both signs of u.

    accuracy: how often the asked word is the likelier one. asked: its mean probability. shift: the change of the
    positive word's log odds from u = -1 to +1. share: the mean share of the positive word at each control.
    """
    plus, minus = controls.index(1.0), controls.index(-1.0)
    odds_UPN = log_UPN2[..., 0] - log_UPN2[..., 1]
    right = ((odds_UPN[plus] > 0).double() + (odds_UPN[minus] < 0).double()) / 2
    asked = (log_UPN2[plus, ..., 0].exp() + log_UPN2[minus, ..., 1].exp()) / 2
    return {
        "accuracy": float(right.mean()),
        "asked": float(asked.mean()),
        "shift": float((odds_UPN[plus] - odds_UPN[minus]).mean()),
        "share": odds_UPN.sigmoid().mean((1, 2)).tolist(),
    }


def ceiling(model: Any, word: Ids) -> float:
    """Returns the largest probability of a word that the frozen last norm and head allow for any hidden state.

    Changes to earlier layers can't exceed it.
    """
    return exp(sum(_highest_log_prob(model, token) for token in word))


def _highest_log_prob(model: Any, token: int) -> float:
    row_D = model.lm_head.weight[token].detach()
    state_D = (row_D / row_D.std()).requires_grad_(True)

    def loss() -> torch.Tensor:
        return -model.lm_head(model.transformer.ln_f(state_D)).log_softmax(-1)[token]

    minimise(loss, [state_D])
    return -float(loss().detach())


@torch.no_grad()
def text_loss(model: Any, setup: Setup, u: float) -> float:
    """Returns the mean loss per token of the held-out text at a control."""
    batches = held_out_windows(setup)[::WINDOWS_BETWEEN].split(setup.size.batch)
    return mean_loss(lambda ids: model(ids, labels=ids, control=torch.full((len(ids), 1), u)).loss, batches)


def measure_joint(method: str, seed: int, setup: Setup, folder: Path) -> Record:
    """Steers by several controls at once; returns the settings of all controls, and `disturbances` by group."""
    parts, tokenizer = lexicon_of(setup).joint_split(seed), setup.corpus.tokenizer
    examples = joint_examples(parts.train_prompts, parts.train_words, tokenizer)
    model = jointly_steered(method, seed, setup, folder, examples)
    settings: list[Signs] = list(parts.train_words)
    groups = product((parts.train_words, parts.test_words), (parts.train_prompts, parts.test_prompts))
    found = {}
    for name, (words, prompts) in zip(GROUPS, groups, strict=True):
        signs, ids = zip(*((s, encode_word(tokenizer, word)) for s, own in words.items() for word in own), strict=True)
        rows = [encode_prompt(tokenizer, prompt) for prompt in prompts]
        control = torch.tensor(settings).repeat_interleave(len(rows), dim=0)
        with torch.no_grad():
            log_RW = word_log_probs(model, rows * len(settings), ids, control)
        found[name] = disturbances(log_RW.view(len(settings), len(rows), len(ids)), settings, signs)
    return {"settings": list(map(list, settings)), "groups": found}


def disturbances(log_SPW: torch.Tensor, settings: Sequence[Signs], words: Sequence[Signs]) -> dict[str, Any]:
    """Measures how dimensions interfere, from log P of the words at each setting S of all controls and each prompt.

    A dimension is right if its +1 words together are likelier than its -1 words exactly when its control is +1.
    accuracy [dimension][setting]. effects [control][dimension]: the mean log odds of the dimension's words at control
    +1, minus the same at -1.
    """
    plus_SD, plus_WD = torch.tensor(settings) > 0, torch.tensor(words) > 0
    odds = [log_SPW[..., plus_W].logsumexp(-1) - log_SPW[..., ~plus_W].logsumexp(-1) for plus_W in plus_WD.T]
    odds_SPD = torch.stack(odds, dim=-1)
    right_SD = ((odds_SPD > 0) == plus_SD[:, None]).double().mean(1)
    mean_SD = odds_SPD.mean(1)
    effects = [(mean_SD[plus_S].mean(0) - mean_SD[~plus_S].mean(0)).tolist() for plus_S in plus_SD.T]
    return {"accuracy": right_SD.T.tolist(), "effects": effects}
