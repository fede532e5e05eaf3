"""How often a call uses the weight of the embedding."""

import pytest
import torch

from .models import VOCAB, tiny_model

pytestmark = pytest.mark.unit


def uses(model, lengths) -> int:
    """The uses of the embedding for texts of three segments, whose rows end after these numbers of tokens."""
    count = []
    handle = model.model.embed_tokens.register_forward_hook(lambda *_: count.append(1))
    mask = torch.arange(12) < torch.tensor(lengths)[:, None]
    model(torch.randint(VOCAB, (2, 12)), attention_mask=mask.long(), use_cache=False)
    handle.remove()
    return len(count)


def test_ranks_of_zero_3_use_the_weight_equally_often():
    """Each use of a weight that ZeRO-3 divides gathers it from all ranks, so rows that end early must not matter."""
    model = tiny_model(segment_length=4, schedule="sequential")
    assert (uses(model, [12, 12]), uses(model, [12, 4])) == (1, 2)  # equal rows share a use
    model.model.embed_tokens.weight.ds_id = 0
    assert uses(model, [12, 12]) == uses(model, [12, 4]) == 3
