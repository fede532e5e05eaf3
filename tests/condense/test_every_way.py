"""Every way to run gives the reference's logits to 1e-10 in float64, with and without a sink."""

import copy

import pytest
import torch
import torch.nn.functional as F

from condense.labs.autoregressivity.model import to_block_diffusion
from condense.labs.continuity.model import ContinuousLM, Sentence
from condense.labs.depth.model import convert_to_depth

from .models import (
    MEMORIES,
    expected_logits,
    logits_in_parts,
    random_durations,
    random_ids,
    tiny_model,
    torch_checkpoint,
)

pytestmark = pytest.mark.usefixtures("no_grad")

by_memory = pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)
LENGTH = 23  # of both texts, in segments of 5


def whole(model, ids):
    return model(ids, use_cache=False).logits


def in_calls_of_a_cache(model, ids):
    return logits_in_parts(model, ids, [3, 1, 1, 7, 11])[0]


def one_by_one(model, ids):
    return logits_in_parts(model, ids, [1] * LENGTH)[0]


def padded_on_the_left(model, ids):
    mask = F.pad(torch.ones_like(ids), (4, 0))
    return model(F.pad(ids, (4, 0)), attention_mask=mask).logits[:, 4:]


def padded_on_the_right(model, ids):
    mask = F.pad(torch.ones_like(ids), (0, 4))
    return model(F.pad(ids, (0, 4)), attention_mask=mask).logits[:, :LENGTH]


def beside_shorter_rows(model, ids, calls=(LENGTH,)):
    """Their segments begin in other columns."""
    rows = torch.cat([ids, ids]).clone()
    mask = torch.ones_like(rows)
    mask[2, :3], mask[3, :9] = 0, 0
    return logits_in_parts(model, rows, calls, mask=mask)[0][:2]


def beside_shorter_rows_in_calls(model, ids):
    return beside_shorter_rows(model, ids, [10, 1, 1, 1, 10])


def in_static_steps(model, ids):
    model.fixed_decoding = True
    return beside_shorter_rows(model, ids, [10] + [1] * 13)


def packed(model, ids):
    """Both texts and a third as the documents of one row."""
    row = torch.cat([ids[0], ids[0, :8], ids[1]])[None]
    positions = torch.cat([torch.arange(LENGTH), torch.arange(8), torch.arange(LENGTH)])[None]
    logits = model(row, position_ids=positions).logits[0]
    return torch.stack([logits[:LENGTH], logits[-LENGTH:]])


def with_checkpoints(model, ids):
    model._set_gradient_checkpointing(True, torch_checkpoint(checkpoint_segments=2))
    with torch.enable_grad():
        return model.train()(ids, use_cache=False).logits.detach()


def as_sentences(model, ids):
    return torch.stack([ContinuousLM(model).logits(Sentence(row)) for row in ids])


def in_blocks_of_one(model, ids):
    """The noisy stream of block diffusion, without noise."""
    return to_block_diffusion(model, block_length=1)(ids, masked=torch.zeros_like(ids, dtype=torch.bool)).logits


def with_a_layer_as_depth_block(model, ids):
    """One Euler step of a layer with its own scale is the layer."""
    return convert_to_depth(model, 1, 2, field="layer", solver="euler", steps=1, alpha=1.0)(ids).logits


WAYS = [
    whole, in_calls_of_a_cache, one_by_one, padded_on_the_left, padded_on_the_right, beside_shorter_rows,
    beside_shorter_rows_in_calls, in_static_steps, packed, with_checkpoints, as_sentences, in_blocks_of_one,
    with_a_layer_as_depth_block,
]  # fmt: skip


@pytest.fixture(scope="module")
def expected():
    """The reference's logits of the two texts, by the fields of the memory."""
    ids = random_ids(2, LENGTH)
    with torch.no_grad():
        return {str(memory): expected_logits(tiny_model(**memory), ids) for memory in MEMORIES.values()}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@by_memory
def test_logits(memory, way, expected):
    logits = way(tiny_model(**memory), random_ids(2, LENGTH))
    torch.testing.assert_close(logits, expected[str(memory)], atol=1e-10, rtol=0)


@pytest.mark.parametrize("memory", [MEMORIES["share"], MEMORIES["sink, shares"]], ids=["share", "sink, shares"])
def test_an_exported_program(memory, expected):
    model, ids = tiny_model(**memory), random_ids(2, LENGTH)
    logits = torch.export.export(model, (ids,)).module()(ids).logits
    torch.testing.assert_close(logits, expected[str(memory)], atol=1e-10, rtol=0)


@pytest.mark.parametrize("attention", ["eager", "blocked", "flex_attention"])
@pytest.mark.parametrize("schedule", ["sequential", "wavefront"])
@by_memory
def test_attention_implementations_and_schedules(memory, schedule, attention, expected):
    model = tiny_model(attn_implementation=attention, schedule=schedule, **memory)
    torch.testing.assert_close(whole(model, random_ids(2, LENGTH)), expected[str(memory)], atol=1e-10, rtol=0)


@pytest.mark.parametrize("anchor", ["end", "start"])
@by_memory
def test_durations(memory, anchor):
    model, ids, durations = tiny_model(position_anchor=anchor, **memory), random_ids(2, 13), random_durations(2, 13)
    expected = expected_logits(model, ids, durations)
    in_parts, _ = logits_in_parts(model, ids, [3, 1, 9], durations)
    sentences = [Sentence(row, durations=lasting) for row, lasting in zip(ids, durations, strict=True)]
    continuous = torch.stack([ContinuousLM(copy.deepcopy(model)).logits(sentence) for sentence in sentences])
    for logits in (model(ids, durations=durations).logits, in_parts, continuous):
        torch.testing.assert_close(logits, expected, atol=1e-10, rtol=0)
