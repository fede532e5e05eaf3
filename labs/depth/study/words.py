"""Computes probabilities of whole words after a prompt.

A word is the text " word"; its probability is the product of the probabilities of its tokens, over the whole
vocabulary. For a word of one token this is the probability at the last position of the prompt.

Axes: R rows (a prompt with a control), W words, T tokens, C components of the control.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

Ids = tuple[int, ...]

ROWS_AT_ONCE = 256


def encode_prompt(tokenizer: Any, text: str) -> Ids:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def encode_word(tokenizer: Any, word: str) -> Ids:
    return tuple(tokenizer.encode(f" {word}", add_special_tokens=False))


def word_log_probs(
    model: torch.nn.Module, prompts: Sequence[Ids], words: Sequence[Ids], control_RC: torch.Tensor
) -> torch.Tensor:
    """Returns log P(word | prompt of the row) [R, W] of every word; words that begin alike share a pass."""
    endings: dict[Ids, list[int]] = defaultdict(list)  # beginnings of words -> words that continue them
    for number, word in enumerate(words):
        for length in range(len(word)):
            endings[word[:length]].append(number)
    total_WR: list[Any] = [0.0] * len(words)
    for beginning, numbers in endings.items():
        next_tokens = torch.tensor([words[number][len(beginning)] for number in numbers]).to(_device(model))
        parts = []
        for at in range(0, len(prompts), ROWS_AT_ONCE):
            rows = [prompt + beginning for prompt in prompts[at : at + ROWS_AT_ONCE]]
            last = torch.tensor([[len(row) - 1] for row in rows])
            parts.append(_log_probs_at(model, rows, last, control_RC[at : at + ROWS_AT_ONCE])[:, 0, next_tokens])
        for column, number in enumerate(numbers):
            total_WR[number] = total_WR[number] + torch.cat([part[:, column] for part in parts])
    return torch.stack(total_WR, dim=1)


def paired_log_probs(
    model: torch.nn.Module, prompts: Sequence[Ids], words: Sequence[Ids], control_RC: torch.Tensor
) -> torch.Tensor:
    """Returns log P(word | prompt) [R] of one word for each row."""
    longest = max(map(len, words))
    rows = [prompt + word[:-1] for prompt, word in zip(prompts, words, strict=True)]
    # A shorter word repeats its last place; the sum leaves the repeats out.
    places = torch.tensor(
        [[len(p) - 1 + min(i, len(w) - 1) for i in range(longest)] for p, w in zip(prompts, words, strict=True)]
    )
    targets = torch.tensor([[*w, *[w[-1]] * (longest - len(w))] for w in words]).to(_device(model))
    counted = torch.tensor([[i < len(w) for i in range(longest)] for w in words]).to(_device(model))
    log_probs = _log_probs_at(model, rows, places, control_RC).gather(-1, targets[..., None])[..., 0]
    return (log_probs * counted).sum(-1)


def _log_probs_at(model: Any, rows: Sequence[Ids], places_RK: torch.Tensor, control_RC: torch.Tensor) -> torch.Tensor:
    """Returns log probabilities [R, K, vocabulary] of the next token at K places of each row."""
    device, longest = _device(model), max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)  # causal: no mask needed
    hidden_RTD = model.transformer(ids, control=control_RC, use_cache=False).last_hidden_state
    at_RKD = hidden_RTD.gather(1, places_RK.to(device)[..., None].expand(-1, -1, hidden_RTD.shape[-1]))
    return F.log_softmax(model.lm_head(at_RKD).float(), dim=-1)


def _device(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device
