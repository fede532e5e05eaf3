"""What stands at padding is never read: it may be anything."""

import pytest
import torch

from .models import padded_batch, random_durations, tiny_model

LENGTHS = [13, 4, 7]  # segments of 5


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_embeddings_of_padding_that_are_not_finite(implementation, side):
    model = tiny_model(attn_implementation=implementation)
    _, ids, mask = padded_batch(LENGTHS, side)
    expected = model(ids, attention_mask=mask).logits[mask == 1]
    embeds = model.model.embed_tokens(ids)
    embeds[mask == 0] = torch.nan
    for use_cache in (False, True):
        found = model(inputs_embeds=embeds, attention_mask=mask, use_cache=use_cache).logits[mask == 1]
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@torch.no_grad()
def test_durations_of_padding():
    """Neither a long last token nor one of no duration is counted again at padding."""
    model, durations = tiny_model(), random_durations(3, 13)
    rows, ids, mask = padded_batch(LENGTHS, "right")
    durations[1, 3], durations[2, 6], durations[mask == 0] = 9e6, 0.0, 1e30
    found = model(ids, attention_mask=mask, durations=durations, use_cache=False).logits
    for row, tokens in enumerate(rows):
        alone = model(tokens[None], durations=durations[row : row + 1, : len(tokens)], use_cache=False).logits[0]
        torch.testing.assert_close(found[row, : len(tokens)], alone, atol=1e-9, rtol=0)
