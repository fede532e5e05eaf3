"""Counts the answers that a model gets right: a small loss may only mean that the text is easy to predict.

Axes: B rows, N tokens.
"""

from typing import Any

import torch

from condense.configuration import IGNORE_INDEX


def num_right(model: Any, batch: dict[str, torch.Tensor], background: int) -> tuple[int, int]:
    """Returns how many answers in rows [B, N] the model gets right in full, and how many there are.

    An answer is right if each of its tokens is the likeliest one after the tokens before it, as in greedy decoding. The
    labels of a row are `background` tokens of its text, then its answers, with unlabelled tokens in between. Labels
    that differ from the row's own tokens, as of early questions, don't count.
    """
    labels_BN = batch["labels"].where(batch["labels"] == batch["input_ids"], IGNORE_INDEX)
    starts = [int(labels_N.ne(IGNORE_INDEX).nonzero()[background]) for labels_N in labels_BN]
    first = min(starts)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    kept = labels_BN.shape[1] - first + 1  # a token is predicted in the column before it
    said_BN = model(**inputs, use_cache=False, logits_to_keep=kept).logits[:, :-1].argmax(dim=-1)
    right = asked = 0
    for start, labels_N, said_N in zip(starts, labels_BN[:, first:], said_BN, strict=True):
        answer_N, said_N = labels_N[start - first :], said_N[start - first :]
        labelled_N = answer_N.ne(IGNORE_INDEX)
        # An answer begins at each labelled token that follows an unlabelled one.
        begins_N = labelled_N & ~torch.cat([labelled_N.new_zeros(1), labelled_N[:-1]])
        wrong_N = labelled_N & answer_N.ne(said_N)
        answers = int(begins_N.sum())
        asked += answers
        right += answers - len(begins_N.cumsum(0)[wrong_N].unique())
    return right, asked
