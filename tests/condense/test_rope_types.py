"""Rotary embeddings whose frequencies depend on the length of a text: in a folded model nothing depends on it."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from condense import CondenseForCausalLM

from .models import VOCAB, random_ids, tiny_config, tiny_model

FACTORS = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 4.0, 5.0]}
ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "longrope": {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, **FACTORS},
}
LIMIT = 16  # positions of the model, or of its short factors


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_segments_beyond_the_limit_are_refused(rope):
    with pytest.raises(ValueError, match="2 x 9: choose a segment_length of at most 8"):
        tiny_config(rope_parameters=rope, max_position_embeddings=LIMIT, segment_length=9)
    model = tiny_model(rope_parameters=rope, max_position_embeddings=LIMIT, segment_length=8)
    model.config.segment_length = 9
    with pytest.raises(ValueError, match="at most 8"):
        model(random_ids(1, 4))


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@torch.no_grad()
def test_a_call_is_a_function_of_its_texts(rope, tmp_path):
    """Long and short texts in turn, a row alone and in a padded batch; within a segment it is the stock model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3, head_dim=8,
        num_key_value_heads=3, rope_parameters=rope, max_position_embeddings=LIMIT, initializer_range=0.25,
    )  # fmt: skip
    stock = LlamaForCausalLM(config).double().eval()
    stock.save_pretrained(tmp_path)
    model = CondenseForCausalLM.from_pretrained(tmp_path, segment_length=8, dtype=torch.float64)
    short, long = random_ids(1, 8, seed=1), random_ids(1, 40, seed=2)
    first = model(long).logits
    torch.testing.assert_close(model(short).logits, stock(short).logits, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(model(long).logits, first, atol=0, rtol=0)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, 8:] = 0
    batch = torch.cat([long, torch.nn.functional.pad(short, (0, 32))])
    found = model(batch, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(found[:1], first, atol=1e-9, rtol=0)
    torch.testing.assert_close(found[1:, :8], model(short).logits, atol=1e-9, rtol=0)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@torch.no_grad()
def test_durations_that_reach_the_limit_are_refused(rope):
    model, ids = tiny_model(rope_parameters=rope, max_position_embeddings=LIMIT, segment_length=8), random_ids(1, 16)
    fits = torch.ones(1, 16, dtype=torch.float64)
    torch.testing.assert_close(model(ids, durations=fits).logits, model(ids).logits, atol=1e-9, rtol=0)
    with pytest.raises(ValueError, match="above 15 the rotary frequencies"):
        model(ids, durations=1.5 * fits)
