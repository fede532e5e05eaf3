"""What generation needs beside transformers' own."""

import torch
from transformers import LogitsProcessor


class RefuseNonFiniteLogits(LogitsProcessor):
    """Ends generation where a model computes no numbers: greedy decoding would write token 0 without a word.

    Raises `ValueError`.
    """

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if torch.isnan(scores).any():  # -inf is what other processors set
            raise ValueError(
                "the model computes logits that are not numbers (NaN): its weights do not fit their dtype. Take "
                "float32 or bfloat16, or another checkpoint."
            )
        return scores
