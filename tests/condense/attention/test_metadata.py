"""The data that all layers share is computed once, and the rotary embedding is that of transformers."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from condense.attention.metadata import rotary_tables
from condense.ops.kernels.rotary import rotate

from ..models import Operations, tiny_model

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("schedule", ["sequential", "wavefront"])
def test_a_call_makes_one_mask_for_all_layers_and_chunks(attention, schedule):
    model = tiny_model(attn_implementation=attention, schedule=schedule, num_hidden_layers=3)
    ids = torch.ones(2, 5 * model.config.segment_length, dtype=torch.long)
    with torch.no_grad(), Operations() as found:
        model(ids)
    # One with a memory; sdpa asks for none before there is a memory.
    assert found.counts["tril"] == (2 if attention == "eager" else 1)


def test_rotation_is_that_of_transformers():
    config = tiny_model().config
    rotary_emb = LlamaRotaryEmbedding(config)
    query, key = torch.randn(2, 1, 3, 7, config.head_dim, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(5, 12)[None]
    expected = apply_rotary_pos_emb(query, key, *rotary_emb(query, positions))
    tables = rotary_tables(rotary_emb, query, positions)
    assert torch.equal(rotate(query, tables), expected[0]) and torch.equal(rotate(key, tables), expected[1])
