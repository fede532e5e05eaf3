"""The quality of generated texts: the loss of a reference model, and how varied they are.

Repetition has a low loss, so the entropy of the tokens and the share of distinct ones stand beside it.

Axes: B texts, N tokens of a text, P tokens of its prompt.
"""

from collections import Counter
from itertools import pairwise
from math import log
from typing import Any

import torch
import torch.nn.functional as F

from condense.eval.decoding import neutral_decoding


@torch.no_grad()
def generate(model: Any, prompt_BP: torch.Tensor, num_tokens: int, seed: int, **options: Any) -> torch.Tensor:
    """Returns the prompts, each with `num_tokens` tokens sampled at temperature 1 from the whole vocabulary."""
    torch.manual_seed(seed)
    with neutral_decoding(model):
        model.generation_config.eos_token_id = None  # so all texts have the same length
        return model.eval().generate(
            prompt_BP, max_new_tokens=num_tokens, do_sample=True, temperature=1.0, top_k=0, **options
        )


@torch.no_grad()
def text_quality(reference: Any, text_BN: torch.Tensor, prompt_length: int) -> dict[str, float]:
    """Measures the tokens after the prompts:

    - `reference_loss`: the reference model's mean loss of a token, in nats;
    - `entropy` of their frequencies over all texts, in nats;
    - `distinct_1`, `distinct_2`: different tokens and pairs, divided by their number, over all texts.
    """
    logits_BNV = reference(text_BN).logits[:, prompt_length - 1 : -1].float()
    written_BN = text_BN[:, prompt_length:]
    loss = F.cross_entropy(logits_BNV.flatten(0, 1), written_BN.flatten())
    rows = written_BN.tolist()
    tokens = [token for row in rows for token in row]
    pairs = [pair for row in rows for pair in pairwise(row)]
    shares = [count / len(tokens) for count in Counter(tokens).values()]
    return {
        "reference_loss": float(loss),
        "entropy": -sum(share * log(share) for share in shares),
        "distinct_1": len(set(tokens)) / len(tokens),
        "distinct_2": len(set(pairs)) / len(pairs),
    }
