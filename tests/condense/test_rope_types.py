"""Rotary frequencies that follow the length of a text in transformers: here the answer depends on the call alone."""

import pytest
import torch

from condense import CondenseConfig, CondenseForCausalLM
from condense.hub.conversion import to_stock

from ..refusals import assert_refused
from .models import (
    assert_rows_alone,
    in_float64,
    logits_in_parts,
    padded_batch,
    random_durations,
    random_ids,
    tiny_model,
)

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.unit]

FACTORS = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 4.0, 8.0, 16.0]}
ROPES = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "longrope": {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24, **FACTORS,
    },
}  # fmt: skip
LIMITS = {"dynamic": {"max_position_embeddings": 24}, "longrope": {"max_position_embeddings": 96}}
by_type = pytest.mark.parametrize("name", list(ROPES))


def model_of(name, **fields):
    return tiny_model(rope_parameters=dict(ROPES[name]), **LIMITS[name], **{"segment_length": 12, **fields})


@by_type
def test_a_text_within_a_segment_has_the_stock_logits(name):
    model, ids = model_of(name), random_ids(2, 12)
    model(random_ids(2, 60, seed=1))  # would leave other frequencies behind
    torch.testing.assert_close(model(ids).logits, in_float64(to_stock(model))(ids).logits, atol=1e-12, rtol=0)


@by_type
def test_the_answer_depends_on_the_call_alone(name):
    model, ids = model_of(name), random_ids(1, 60)
    fresh = model(ids).logits
    far = 10 * random_durations(1, 60)  # positions far above the limit
    timed = model(ids, durations=far).logits
    torch.testing.assert_close(model(ids).logits, fresh, atol=0, rtol=0)
    torch.testing.assert_close(model(ids, durations=far).logits, timed, atol=0, rtol=0)
    torch.testing.assert_close(logits_in_parts(model, ids, [7, 1, 30, 22])[0], fresh, atol=1e-12, rtol=0)
    _, padded, mask = padded_batch([60, 13, 5], "left")
    assert_rows_alone(model, mask, model(padded, attention_mask=mask).logits, padded, atol=1e-12)


@by_type
def test_a_row_with_long_durations_does_not_change_its_neighbour(name):
    model, ids = model_of(name), random_ids(2, 20)
    durations = torch.stack([torch.ones(20), torch.full((20,), 50.0)]).double()
    torch.testing.assert_close(model(ids, durations=durations).logits[:1], model(ids[:1]).logits, atol=1e-12, rtol=0)


@by_type
def test_new_tokens_of_static_shape_are_the_same(name):
    model, ids = model_of(name), random_ids(2, 20)
    expected = model.generate(ids, max_new_tokens=20, do_sample=False)
    model.fixed_decoding = True
    assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), expected)


@by_type
def test_segments_whose_frequencies_would_depend_on_the_length_are_refused(name, tmp_path):
    limit = "max_position_embeddings=24" if name == "dynamic" else "original_max_position_embeddings=24"
    message = rf"rope_type='{name}': above {limit} .* 2 x 13 tokens.*segment_length of at most 12"
    assert_refused(message, model_of, name, segment_length=13)
    model = model_of(name).float()
    to_stock(model).save_pretrained(tmp_path)
    assert_refused(message, CondenseForCausalLM.from_pretrained, tmp_path, segment_length=13)
    loaded = CondenseForCausalLM.from_pretrained(tmp_path, segment_length=12)
    assert torch.equal(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    model.config.segment_length = 13
    assert_refused(message, model, random_ids(1, 3))


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}])
def test_other_types_have_no_limit(rope):
    """Beyond it, a text within a segment has the stock logits."""
    model = tiny_model(rope_parameters={"rope_theta": 1e4, **rope}, max_position_embeddings=24, segment_length=512)
    ids = random_ids(2, 60)
    torch.testing.assert_close(model(ids).logits, in_float64(to_stock(model))(ids).logits, atol=1e-12, rtol=0)


def test_changed_frequencies_are_used():
    """Halved ones are those of a linear scale of two; a float64 model computes its own only while nothing changed."""
    model, ids = tiny_model(), random_ids(2, 23)
    own = model(ids).logits
    with torch.no_grad():
        model.model.rotary_emb.inv_freq *= 0.5
    scaled = tiny_model(rope_parameters={"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0})
    torch.testing.assert_close(model(ids).logits, scaled(ids).logits, atol=1e-10, rtol=0)
    assert (model(ids).logits - own).abs().max() > 1e-2


def test_a_model_in_half_precision_keeps_its_frequencies(tmp_path):
    """As one that is loaded in it; the positions of a long segment need them."""
    model = tiny_model(torch.float32, segment_length=300)
    frequencies = model.model.rotary_emb.inv_freq.clone()
    model.save_pretrained(tmp_path)
    loaded = CondenseForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    for cast in (model.half(), model.bfloat16()):
        assert torch.equal(cast.model.rotary_emb.inv_freq, frequencies)
    assert model.to("meta").model.rotary_emb.inv_freq.is_meta
    model = tiny_model(torch.float32, segment_length=300).bfloat16()
    # Logits in bfloat16 may differ: attention on a CPU depends on where its tensors lie.
    like, positions = torch.zeros(1, dtype=torch.bfloat16), torch.arange(600)[None]
    tables = [one.model.rotary_emb(like, positions) for one in (model, loaded)]
    assert all(map(torch.equal, *tables)) and torch.equal(loaded.model.rotary_emb.inv_freq, frequencies)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": 0.0},
        {"rope_type": "linear", "factor": -1.0},
        {"rope_type": "linear", "factor": "2"},
        {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
        {"rope_type": "llama3", "factor": 2.0},
        {"rope_type": "longrope"},
        {"rope_type": None},
    ],
)
def test_rope_parameters_without_a_frequency_for_each_pair_are_refused(rope):
    with pytest.raises(ValueError, match=r"rope_parameters=\{.* do not fit \(.*correct them in config.json"):
        CondenseConfig(rope_parameters={"rope_theta": 1e4, **rope})
