"""Masks are made once: for a call where they depend on the numbers of keys alone, else for all layers of a chunk."""

import pytest
import torch

from condense.attention.mask import AttentionMask

from ..models import random_ids, tiny_model

pytestmark = pytest.mark.unit


def test_once_a_call_a_chunk_or_a_layer(noted):
    biases, visible = noted(AttentionMask, "_additive"), noted(AttentionMask, "_visible")
    model, ids = tiny_model(segment_length=4, schedule="sequential"), random_ids(1, 16)

    def made_in(**options):
        biases.clear()
        model(ids, use_cache=False, **options)
        return len(biases)

    assert made_in() == 1  # all segments with a memory have one mask
    assert made_in(durations=torch.full((1, 16), 0.5)) == 4  # one for each segment
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    assert made_in(labels=ids) == 0  # boolean ones, a quarter of the size, that are not kept
    assert not visible


def test_rows_at_other_offsets(noted):
    """A cache whose rows are at other places of their segments: one mask serves the layers of a chunk."""
    model, ids = tiny_model(segment_length=4), random_ids(2, 6)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]])
    cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    made = noted(AttentionMask, "_visible")
    model(ids[:, :2], attention_mask=torch.cat([mask, mask[:, -2:]], 1), past_key_values=cache)
    assert 1 <= len(made) <= 2  # not once a layer
