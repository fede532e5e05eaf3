"""The model against the stock Llama, and against the equations as a plain loop (`condense.reference`).

Weights are float64, and so is all that is computed from them.
"""

import pytest
import torch
from transformers import LlamaForCausalLM

from condense import CondenseForCausalLM, to_stock

from ..products import half_of
from .models import MEMORIES, expected_logits, in_float64, random_durations, random_ids, tiny_model

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.unit]

LENGTHS = [1, 4, 5, 6, 10, 13, 23]


@pytest.mark.parametrize("length", [1, 3, 5])
def test_one_segment_equals_the_stock_llama(length):
    model, ids = tiny_model(), random_ids(2, length)
    torch.testing.assert_close(model(ids).logits, in_float64(to_stock(model))(ids).logits, atol=1e-10, rtol=0)


def test_one_segment_of_a_pretrained_llama_equals_the_stock_llama(stories):
    stock = LlamaForCausalLM.from_pretrained(stories).eval()
    folded = CondenseForCausalLM.from_pretrained(stories, segment_length=128).eval()
    ids, longer = torch.randint(0, 512, (2, 128)), torch.randint(0, 512, (2, 200))
    torch.testing.assert_close(folded(ids).logits, stock(ids).logits, atol=1e-4, rtol=0)
    assert not torch.allclose(folded(longer).logits, stock(longer).logits, atol=1e-1)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)
def test_logits_follow_the_equations(length, memory):
    model, ids = tiny_model(**memory), random_ids(2, length)
    torch.testing.assert_close(model(ids).logits, expected_logits(model, ids), atol=1e-10, rtol=0)


@half_of(
    length=(5, 13),
    memory_source=("layer_output", "layer_input"),
    anchor=("end", "start"),
    implementation=("eager", "sdpa", "flex_attention"),
)
def test_durations_follow_the_equations(length, memory_source, anchor, implementation):
    model = tiny_model(memory_source=memory_source, position_anchor=anchor, attn_implementation=implementation)
    ids, durations = random_ids(2, length), random_durations(2, length)
    logits = model(ids, durations=durations).logits
    torch.testing.assert_close(logits, expected_logits(model, ids, durations), atol=1e-10, rtol=0)


def test_anchors_differ_and_unit_durations_do_not_change_logits():
    ids, durations = random_ids(1, 13), random_durations(1, 13)
    end, start = tiny_model(position_anchor="end"), tiny_model(position_anchor="start")
    assert not torch.allclose(end(ids, durations=durations).logits, start(ids, durations=durations).logits, atol=1e-2)
    for model in (end, start):
        assert torch.equal(model(ids, durations=torch.ones(1, 13)).logits, model(ids).logits)


def test_a_duration_of_zero_removes_a_token_from_attention():
    """Later tokens have the logits of the text without it; its duration does not shift their positions either."""
    model, ids = tiny_model(segment_length=50), random_ids(1, 12)
    durations = torch.ones(1, 12, dtype=torch.float64)
    durations[0, 4] = 0
    without = torch.cat([ids[:, :4], ids[:, 5:]], dim=1)
    logits = model(ids, durations=durations).logits
    torch.testing.assert_close(logits[:, 5:], model(without).logits[:, 4:], atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    "fields",
    [
        {"attention_bias": True},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"mlp_bias": True},
    ],
    ids=str,
)
def test_variants_of_llama_follow_the_equations(fields):
    model, ids = tiny_model(**fields), random_ids(1, 13)
    torch.testing.assert_close(model(ids).logits, expected_logits(model, ids), atol=1e-10, rtol=0)


def test_positions_may_start_anywhere():
    model = tiny_model(dtype=torch.float32)
    ids, positions = random_ids(1, 23), torch.arange(23)[None]
    expected = model(ids, position_ids=positions).logits
    assert torch.equal(model(ids, position_ids=positions + 10_000_000).logits, expected)


def test_a_shifted_context_gives_identical_logits():
    """A layer-input memory reaches back one segment per layer; logits do not depend on the position of that context."""
    # All lengths use one schedule, because another schedule rounds differently.
    model = tiny_model(dtype=torch.float32, memory_source="layer_input", schedule="sequential")
    text = random_ids(1, 25)
    alone = model(torch.cat([random_ids(1, 5, seed=1), text], dim=1)).logits[:, -5:]
    assert torch.equal(model(torch.cat([random_ids(1, 100, seed=2), text], dim=1)).logits[:, -5:], alone)
    durations = torch.ones(1, 130)
    durations[0, 3] = 1e7  # global positions in float32 would be wrong by whole tokens from here on
    moved = model(torch.cat([random_ids(1, 105, seed=2), text], dim=1), durations=durations).logits[:, -5:]
    assert torch.equal(moved, alone)
