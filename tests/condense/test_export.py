"""An exported program computes what the model computes, for any number of texts and lengths within a segment."""

import io
import re

import pytest
import torch
from torch.export import Dim

from condense import FoldedCache
from tests.labs.depth.model.models import depth_model, random_control

from ..refusals import assert_refused
from .models import random_durations, random_ids, tiny_model

pytestmark = pytest.mark.usefixtures("no_grad")

SEGMENT = 8


def exported(model, inputs, shapes=None, **options):
    """The program after it was saved and loaded."""
    names = None if shapes is None else {"input_ids": shapes} | dict.fromkeys(options)
    program = torch.export.export(model, (inputs,), options, dynamic_shapes=names)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


def model_of(**fields):
    return tiny_model(segment_length=SEGMENT, num_hidden_layers=2, **fields)


def batch():
    return Dim("batch", min=1, max=64)


CASES = [
    ({}, False),
    ({}, True),
    ({"attn_implementation": "eager"}, False),
    ({"attn_implementation": "auto"}, False),
    ({"memory_share": 0.3, "family": "qwen3"}, False),
    ({"sink_token_id": 7, "memory_share": 0.2}, False),
]


@pytest.mark.parametrize(("fields", "gradients"), CASES, ids=str)
def test_any_number_of_texts_of_any_length_that_ends_in_the_same_segment(fields, gradients):
    """Except one token and all of a segment: their attention is another operation."""
    model = model_of(**fields)
    shortest, longest = 2 * SEGMENT + 2, 3 * SEGMENT - 1
    with torch.set_grad_enabled(gradients):
        shapes = {0: batch(), 1: Dim("length", min=shortest, max=longest)}
        program = exported(model, random_ids(2, 2 * SEGMENT + 5), shapes)
    for rows, length in ((1, shortest), (5, longest), (2, 2 * SEGMENT + 4)):
        ids = random_ids(rows, length, seed=length)
        torch.testing.assert_close(program(ids).logits, model(ids).logits, atol=1e-12, rtol=0)
    with pytest.raises((AssertionError, RuntimeError)):
        program(random_ids(1, longest + 1))


@pytest.mark.parametrize("length", [1, 2 * SEGMENT, 2 * SEGMENT + 1])
def test_any_number_of_texts_of_one_length(length):
    model = model_of()
    program = exported(model, random_ids(2, length), {0: batch()})
    for rows in (1, 3):
        ids = random_ids(rows, length, seed=rows)
        torch.testing.assert_close(program(ids).logits, model(ids).logits, atol=1e-12, rtol=0)


def test_the_shape_of_the_example_if_no_dimension_is_dynamic():
    model = model_of(attn_implementation="blocked")  # whose number of texts is always fixed
    program = exported(model, random_ids(2, 21))
    ids = random_ids(2, 21, seed=1)
    torch.testing.assert_close(program(ids).logits, model(ids).logits, atol=1e-12, rtol=0)


@pytest.mark.gpu
def test_on_a_gpu():
    model, ids = model_of().cuda(), random_ids(2, 21).cuda()
    program = exported(model, ids, {0: batch(), 1: Dim("length", min=2 * SEGMENT + 2, max=3 * SEGMENT - 1)})
    other = random_ids(3, 19, seed=1).cuda()
    torch.testing.assert_close(program(other).logits, model(other).logits, atol=1e-9, rtol=0)


def test_logits_of_the_last_token_hidden_states_and_the_base_model():
    model, ids, other = model_of(), random_ids(2, 21), random_ids(3, 19, seed=1)
    shapes = {0: batch(), 1: Dim("length", min=2 * SEGMENT + 2, max=3 * SEGMENT - 1)}
    last = exported(model, ids, shapes, logits_to_keep=1)(other, logits_to_keep=1).logits
    torch.testing.assert_close(last, model(other).logits[:, -1:], atol=1e-12, rtol=0)
    states = exported(model, ids, shapes, output_hidden_states=True)(other, output_hidden_states=True).hidden_states
    torch.testing.assert_close(states, model(other, output_hidden_states=True).hidden_states, atol=1e-12, rtol=0)
    base = exported(model.model, ids, shapes)(other).last_hidden_state
    torch.testing.assert_close(base, model.model(other).last_hidden_state, atol=1e-12, rtol=0)


def test_embeddings_instead_of_tokens():
    model, ids = model_of(), random_ids(2, 21)
    embeddings = model.get_input_embeddings()
    shapes = {"inputs_embeds": {0: batch()}}
    program = torch.export.export(model, (), {"inputs_embeds": embeddings(ids)}, dynamic_shapes=shapes).module()
    given = embeddings(random_ids(5, 21)).detach()
    torch.testing.assert_close(program(inputs_embeds=given).logits, model(inputs_embeds=given).logits)


def test_a_depth_block_with_its_control():
    model, ids, control = depth_model("layer", segment_length=SEGMENT), random_ids(2, 13), random_control(2, 2)
    program = exported(model, ids, None, control=control)
    output, expected = program(ids, control=control + 1), model(ids, control=control + 1)
    torch.testing.assert_close(output.logits, expected.logits, atol=1e-12, rtol=0)
    assert torch.equal(output.function_evaluations, expected.function_evaluations)


def test_a_range_over_several_segments_names_the_one_that_fits():
    """torch's own words, which need no reading of this package."""
    with pytest.raises(Exception, match=re.escape(f"{SEGMENT + 2} <= ")):
        exported(model_of(), random_ids(2, 13), {1: Dim("length", min=2, max=30)})


UNFIT = {
    "attention_mask": torch.ones(2, 13, dtype=torch.long),
    "position_ids": torch.arange(13)[None],
    "labels": random_ids(2, 13),
    "durations": random_durations(2, 13),
    "use_cache": True,
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_decides_how_a_text_is_read_is_refused(name):
    message = f"{name} is given: torch.export takes input_ids or inputs_embeds of texts without padding"
    model = model_of()
    for one in (model, model.model):
        if name != "labels" or one is model:
            assert_refused(message, torch.export.export, one, (random_ids(2, 13),), {name: UNFIT[name]})


def test_a_call_that_is_not_exported_returns_its_cache_as_before():
    output = model_of()(random_ids(2, 13))
    assert any(isinstance(value, FoldedCache) for value in output.values())
