"""A logits processor for `generate`, in addition to transformers' own."""

import torch
from transformers import LogitsProcessor


class RefuseNonFiniteLogits(LogitsProcessor):
    """Raises `ValueError` when logits are NaN. Greedy decoding would write token 0 without an error."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if torch.isnan(scores).any():  # other processors set -inf
            raise ValueError(
                "the model computes logits that are not numbers (NaN): its weights do not fit their dtype. Use "
                "float32 or bfloat16, or another checkpoint."
            )
        return scores
