"""Texts, cut into windows of segments, and the loss of every token in them.

Axes: N tokens of a text, W windows, S segments of a window, L tokens of a segment, V vocabulary, n segments
that are compared, D hidden size, T tokens whose logits are made at once.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from condense.state.cache_argument import CACHE, cache_of
from condense.training.data.documents import good_documents, read_documents
from condense.training.recipe import Source
from condense.utils.text import encode

from ..decoding import reads_in_parts

TOKENS_AT_ONCE = 2**16  # in the windows that are read together
TOKENS_IN_FLOAT32 = 1024  # logits copied at once
BINS = 32  # for the position in the segment, in pictures
PARTS = 16  # of a text, by position


class Window(NamedTuple):
    """A window of `size` segments of a text from `first` on: S of them, or fewer at the text's end."""

    text: int
    first: int
    size: int


def read_texts(
    tokenizer: Any, data: Sequence[str], max_tokens: int | None = None, text_field: str = "text"
) -> list[torch.Tensor]:
    """Returns the token ids [N] of each document in files or globs (.txt, .jsonl, .parquet), up to `max_tokens`.

    Raises `ValueError` for a broken document, or if there is none.
    """
    reader = read_documents([Source(files=files, text=text_field) for files in data], with_summaries=False)
    texts, num_tokens = list[torch.Tensor](), 0
    for document in good_documents(reader, "refuse"):
        ids_N = encode(tokenizer, document.text)[0]
        texts.append(ids_N if max_tokens is None else ids_N[: max_tokens - num_tokens])
        num_tokens += len(texts[-1])
        if num_tokens == max_tokens:
            break
    if not texts:
        raise ValueError(f"data {', '.join(data)} holds no document: pass files with text.")
    return texts


def plan_windows(texts: Sequence[torch.Tensor], num_segments: int, segment_length: int) -> list[Window]:
    """Returns windows at every segment of texts [N]. Raises `ValueError` if no text has S segments and a token."""
    sizes = [(len(text) - 1) // segment_length for text in texts]
    windows = [
        Window(text, first, min(num_segments, size - first))
        for text, size in enumerate(sizes)
        if size >= num_segments
        for first in range(size)
    ]
    if not windows:
        raise ValueError(
            f"the longest of {len(texts)} texts has {max(map(len, texts))} tokens; {num_segments} segments of "
            f"{segment_length} need {num_segments * segment_length + 1}: pass longer texts, or fewer or shorter "
            "segments."
        )
    return windows


def find_pairs(windows: Sequence[Window], num_segments: int) -> np.ndarray:
    """Returns [W, S], true for segments that have windows with every number of segments before them.

    Windows are in the order of the segments in each column, so the true entries of two columns are pairs.
    """
    first_W1 = np.array([window.first for window in windows])[:, None]
    size_W1 = np.array([window.size for window in windows])[:, None]
    before_S = np.arange(num_segments)
    return (first_W1 + before_S >= num_segments - 1) & (before_S < size_W1)


def paired_losses(
    model: Any, texts: Sequence[torch.Tensor], num_segments: int, segment_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns losses [n, S, L] with 0 to S - 1 segments before, and each segment's text [n], for the n segments that
    have windows with every number of segments before them."""
    windows = plan_windows(texts, num_segments, segment_length)
    at_once = max(1, TOKENS_AT_ONCE // (num_segments * segment_length))
    batches = [windows[first : first + at_once] for first in range(0, len(windows), at_once)]
    loss_WSL = np.concatenate([window_losses(model, texts, one, num_segments, segment_length) for one in batches])
    counted_WS = find_pairs(windows, num_segments)
    loss_nSL = np.stack([loss_WSL[counted_WS[:, column], column] for column in range(num_segments)], axis=1)
    # The windows of the first column begin at the predicted segments.
    text_W = np.array([window.text for window in windows])
    return loss_nSL, text_W[counted_WS[:, 0]]


def window_losses(
    model: Any, texts: Sequence[torch.Tensor], windows: Sequence[Window], num_segments: int, segment_length: int
) -> np.ndarray:
    """Returns the losses [W, S, L] of a batch of windows; 0 beyond the segments of a shorter window."""
    longest = max(window.size for window in windows)
    ids_WN = torch.zeros(len(windows), longest * segment_length + 1, dtype=torch.long)
    for row_N, (text, first, size) in zip(ids_WN, windows, strict=True):
        part = texts[text][first * segment_length : (first + size) * segment_length + 1]
        row_N[: len(part)] = part
    loss_WSL = np.zeros((len(windows), num_segments, segment_length))
    loss_WSL[:, :longest] = segment_losses(model, ids_WN, segment_length)
    is_there_WS = np.arange(num_segments) < np.array([window.size for window in windows])[:, None]
    return np.where(is_there_WS[:, :, None], loss_WSL, 0)


@torch.no_grad()
def segment_losses(model: Any, ids_WN: torch.Tensor, segment_length: int) -> np.ndarray:
    """Returns cross-entropies [W, S, L] in nats of tokens 1 to S * L of texts [W, S * L + 1].

    The model reads texts segment by segment, so only one segment's logits are in memory. Models that can't read in
    parts read each text in one call.
    """
    if not reads_in_parts(model):
        loss_WN = np.stack([_text_losses(model, ids_N.to(model.device)) for ids_N in ids_WN])
        return loss_WN.reshape(len(ids_WN), -1, segment_length)
    cache, losses = None, []
    for first in range(0, ids_WN.shape[1] - 1, segment_length):
        part_WL1 = ids_WN[:, first : first + segment_length + 1].to(model.device)
        loss_WL, cache = _read_segment(model, part_WL1, cache)
        losses.append(loss_WL.cpu())
    return torch.stack(losses, dim=1).numpy()


def _read_segment(model: Any, part_WL1: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
    output = model(part_WL1[:, :-1], use_cache=True, **{CACHE: cache})
    rows = zip(output.logits, part_WL1[:, 1:], strict=True)
    return torch.stack([_losses(logits_LV, target_L) for logits_LV, target_L in rows]), cache_of(output)


def _text_losses(model: Any, ids_N: torch.Tensor) -> np.ndarray:
    """Returns the losses [N - 1] of one text."""
    logits_NV = model(ids_N[None, :-1], use_cache=False).logits[0]
    losses = zip(logits_NV.split(TOKENS_IN_FLOAT32), ids_N[1:].split(TOKENS_IN_FLOAT32), strict=True)
    return torch.cat([_losses(logits_LV, target_L) for logits_LV, target_L in losses]).cpu().numpy()


def _losses(logits_LV: torch.Tensor, target_L: torch.Tensor) -> torch.Tensor:
    accurate = torch.promote_types(logits_LV.dtype, torch.float32)
    return F.cross_entropy(logits_LV.to(accurate), target_L, reduction="none")


@torch.no_grad()
def head_losses(model: Any, hidden_ND: torch.Tensor, target_N: torch.Tensor) -> torch.Tensor:
    """Returns the losses [N] of targets after final hidden states; logits are made of some tokens at a time."""
    parts = zip(hidden_ND.split(TOKENS_IN_FLOAT32), target_N.split(TOKENS_IN_FLOAT32), strict=True)
    return torch.cat(
        [_losses(model.lm_head(hidden_TD), target_T.to(hidden_TD.device)) for hidden_TD, target_T in parts]
    )


def by_position(values_L: np.ndarray) -> tuple[np.ndarray, list[float]]:
    """Returns the middles of at most `BINS` parts of a segment and the means over each, for a picture."""
    length, size = len(values_L), -(-len(values_L) // BINS)
    starts = np.arange(0, length, size)
    middles = starts + (np.minimum(starts + size, length) - starts - 1) / 2
    return middles, [float(np.mean(values_L[start : start + size])) for start in starts]


def by_blocks(loss_N: np.ndarray, longest: int) -> dict[str, Any]:
    """Returns `losses`, means of `block` tokens each: a `PARTS`th of the longest text that is compared."""
    block = -(-longest // PARTS)
    means = [float(loss_N[first : first + block].mean()) for first in range(0, len(loss_N), block)]
    return {"tokens": len(loss_N), "block": block, "losses": means}


def parts_of(curve: dict[str, Any]) -> list[tuple[int, float]]:
    """Returns the first token and the mean of each part of `by_blocks`."""
    return [(part * curve["block"], loss) for part, loss in enumerate(curve["losses"])]
