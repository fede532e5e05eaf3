"""Snapshots of a cache and removal of its last tokens, compared with a model without a cache."""

import copy
from functools import partial

import pytest
import torch

from condense import FoldedCache
from condense.generation.prefill import prefill
from condense.state.recording import CROP_TOKENS

from ...products import half_of
from ...refusals import assert_refused
from .. import models
from ..models import random_durations, random_ids
from .test_cache_refusals import Interrupted, interrupt

pytestmark = pytest.mark.usefixtures("no_grad")

ROWS = 2
tiny_model = partial(models.tiny_model, num_hidden_layers=2)


def recording_cache(model, *inputs):
    """A cache that has read some tokens, and records the ones that follow."""
    cache = FoldedCache(model.config)
    for ids, durations in inputs:
        model(ids, durations=durations, past_key_values=cache)
    cache.activate_past_recording()
    return cache


def assert_continues(model, cache, read, durations=None):
    """Further tokens after `read` have the logits of a model without a cache."""
    following = random_ids(len(read), 9, seed=100)
    if durations is not None:
        durations = torch.cat([durations, torch.ones(len(read), 9, dtype=durations.dtype)], dim=1)
    whole = model(torch.cat([read, following], dim=1), durations=durations, use_cache=False).logits
    for count in (1, 3, 9):  # within a segment and over borders
        logits = model(following[:, :count], past_key_values=copy.deepcopy(cache)).logits
        torch.testing.assert_close(logits, whole[:, read.shape[1] :][:, :count], atol=1e-9, rtol=0)


@half_of(before=(0, 1, 5, 8, 13), after=([1], [1] * 7, [4], [11], [2, 9, 1]), static=(False, True))
def test_restore_brings_back_a_snapshot(before, after, static):
    """There is or is not a segment border between snapshot and restore; one snapshot is restored twice."""
    model, ids = tiny_model(segment_length=5), random_ids(ROWS, 40)
    model.fixed_decoding = static
    cache = FoldedCache(model.config)
    if before:
        model(ids[:, :before], past_key_values=cache)
    snapshot = cache.snapshot()
    for seed in (1, 2):
        for count in after:
            model(random_ids(ROWS, count, seed=seed), past_key_values=cache)
        cache.restore(snapshot)
        assert cache.get_seq_length() == before
        assert_continues(model, cache, ids[:, :before])


def test_a_snapshot_holds_padded_rows_and_durations():
    model, ids = tiny_model(segment_length=5), random_ids(3, 17)
    mask = torch.ones(3, 17, dtype=torch.long)
    mask[1, :6] = mask[2, :11] = 0
    durations = random_durations(3, 17)
    cache = model(ids, attention_mask=mask, durations=durations).past_key_values
    snapshot = cache.snapshot()
    expected = model(random_ids(3, 8), past_key_values=copy.deepcopy(cache)).logits
    model(random_ids(3, 14, seed=3), durations=random_durations(3, 14), past_key_values=cache)
    cache.restore(snapshot)
    torch.testing.assert_close(model(random_ids(3, 8), past_key_values=cache).logits, expected, atol=1e-9, rtol=0)


def test_a_snapshot_is_restored_after_a_selection_of_rows():
    model, ids = tiny_model(segment_length=5), random_ids(ROWS, 13)
    cache = model(ids).past_key_values
    snapshot = cache.snapshot()
    cache.batch_repeat_interleave(3)
    model(random_ids(3 * ROWS, 4), past_key_values=cache)
    cache.restore(snapshot)
    assert_continues(model, cache, ids)


@pytest.mark.parametrize("schedule", ["sequential", "wavefront"])
def test_a_snapshot_is_restored_after_an_interrupted_call(schedule, monkeypatch):
    model, ids = tiny_model(segment_length=5, schedule=schedule), random_ids(ROWS, 8)
    cache = model(ids).past_key_values
    snapshot = cache.snapshot()
    with monkeypatch.context() as patch:
        if schedule == "sequential":
            interrupt(patch, model, 3)
        else:  # a wavefront refuses layers with a patched forward
            patch.setattr(model.model.norm, "forward", lambda hidden: (_ for _ in ()).throw(Interrupted))
        with pytest.raises(Interrupted):
            model(random_ids(ROWS, 30), past_key_values=cache)
    assert_refused("interrupted", cache.snapshot)
    cache.restore(snapshot)
    assert_continues(model, cache, ids)


def test_a_snapshot_has_the_size_of_the_state_and_belongs_to_one_model():
    model = tiny_model(segment_length=5)
    cache = model(random_ids(1, 300)).past_key_values
    snapshot = cache.snapshot()
    assert sum(buffer.nbytes for buffers in snapshot.buffers for buffer in buffers) <= cache.num_bytes
    assert_refused("another model", FoldedCache(tiny_model(segment_length=6).config).restore, snapshot)


@pytest.mark.parametrize("with_durations", [False, True])
@pytest.mark.parametrize("segment_length", [3, 8, 64])
def test_cropped_tokens_do_not_change_later_logits(segment_length, with_durations):
    """Crops of several sizes cross no border, one border and several borders."""
    model, ids = tiny_model(segment_length=segment_length), random_ids(1, 60)
    durations = random_durations(1, 60) if with_durations else None
    cases = [(7, 5, 3), (7, 5, 5), (8, 1, 1), (1, 20, 19), (15, 20, 20), (20, 17, 1), (3, 9, 9)]
    for num_read, drafted, removed in cases:
        read, known = ids[:, :num_read], None if durations is None else durations[:, :num_read]
        cache = recording_cache(model, (read, known))
        for round_number in range(2):  # some tokens are kept, then further ones are read
            draft = random_ids(1, drafted, seed=round_number)
            draft_durations = None if durations is None else random_durations(1, drafted, seed=round_number)
            model(draft, durations=draft_durations, past_key_values=cache)
            cache.crop(-removed)
            read = torch.cat([read, draft[:, : drafted - removed]], dim=1)
            if known is not None:
                known = torch.cat([known, draft_durations[:, : drafted - removed]], dim=1)
            assert cache.get_seq_length() == read.shape[1]
            assert_continues(model, cache, read, durations=known)


def test_crop_restores_the_hidden_state_of_the_last_token():
    """Tokens were read one by one; in the next call, a column of padding has the logits of the last token."""
    model, ids = tiny_model(segment_length=4), random_ids(ROWS, 30)
    cache = recording_cache(model, (ids[:, :6], None))
    for n in range(6, 15):
        model(ids[:, n : n + 1], past_key_values=cache)
    cache.crop(-7)
    assert_continues(model, cache, ids[:, :8])
    mask = torch.ones(ROWS, 10, dtype=torch.long)
    mask[1, -1] = mask[1, -2] = 0
    logits = model(ids[:, 8:10], attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(logits[1], model(ids[1:, :8]).logits[0, [7, 7]], atol=1e-9, rtol=0)


def test_tokens_that_were_not_recorded_can_not_be_cropped():
    model = tiny_model(segment_length=4)
    cache = model(random_ids(ROWS, 9)).past_key_values
    cache.crop(0)
    assert_refused("last 0 tokens", cache.crop, -1)
    cache.activate_past_recording()
    model(random_ids(ROWS, 5), past_key_values=cache)
    assert_refused("last 5 tokens", cache.crop, -6)
    model(random_ids(ROWS, CROP_TOKENS + 9), past_key_values=cache)
    assert_refused(f"last {CROP_TOKENS} tokens", cache.crop, -CROP_TOKENS - 1)
    cache.crop(-CROP_TOKENS)
    mask = torch.ones(ROWS, 3, dtype=torch.long)
    mask[0, 0] = 0
    model(random_ids(ROWS, 3), attention_mask=mask, past_key_values=cache)
    assert_refused("last 0 tokens", cache.crop, -1)


def test_a_recording_cache_does_not_grow():
    model = tiny_model(segment_length=4)
    cache = FoldedCache(model.config)
    cache.activate_past_recording()
    sizes = set()
    for _ in range(3):
        model(random_ids(1, CROP_TOKENS + 88), past_key_values=cache)
        sizes.add(cache.num_bytes)
    assert len(sizes) == 1


@pytest.mark.parametrize("with_durations", [False, True])
def test_everything_recorded_can_be_cropped_from_an_empty_cache(with_durations):
    """Back to the empty state, also over segment borders; then the cache reads another text."""
    model, ids = tiny_model(segment_length=4), random_ids(1, 11)
    durations = random_durations(1, 11) if with_durations else None
    cache = recording_cache(model)
    model(ids, durations=durations, past_key_values=cache)
    cache.crop(-11)
    assert cache.get_seq_length() == 0 and cache.num_bytes == 0
    model(ids[:, :6], past_key_values=cache)
    assert_continues(model, cache, ids[:, :6])


def test_a_branch_leaves_no_graph_in_a_restored_cache():
    """A snapshot without gradients is restored without gradients, after calls with them."""
    model, ids = tiny_model(segment_length=4), random_ids(1, 7)
    cache = model(ids).past_key_values
    snapshot = cache.snapshot()
    for seed in range(3):
        branch = random_ids(1, 6, seed=seed)
        with torch.enable_grad():
            model(branch, labels=branch, past_key_values=cache).loss.backward()
        cache.restore(snapshot)
        assert not any(buffer.requires_grad for layer in cache.layers for buffer in layer.buffers)
    assert_continues(model, cache, ids)


@torch.enable_grad()
def test_tokens_that_were_read_with_gradients_are_not_cropped():
    model = tiny_model(segment_length=4)
    cache = FoldedCache(model.config)
    cache.activate_past_recording()
    model(random_ids(1, 7), past_key_values=cache)
    assert_refused("no_grad", cache.crop, -2)


def test_a_restored_cache_keeps_its_tensors_and_their_dtype():
    cache = tiny_model(segment_length=4)(random_ids(1, 7)).past_key_values
    snapshot, buffers = cache.snapshot(), cache.layers[0].buffers
    cache.restore(snapshot)
    assert all(own is before for own, before in zip(cache.layers[0].buffers, buffers, strict=True))
    cache.reset()
    tiny_model(torch.float32, segment_length=4)(random_ids(1, 7), past_key_values=cache)
    cache.restore(snapshot)
    assert cache.layers[0].keys.dtype == torch.float64


def test_columns_of_padding_are_cropped_and_prefill_begins_the_recording_anew():
    model = tiny_model(segment_length=4)
    cache = FoldedCache(model.config)
    cache.activate_past_recording()
    model(random_ids(1, 6), past_key_values=cache)
    model(random_ids(1, 4), attention_mask=torch.tensor([[1, 1, 0, 0]]), past_key_values=cache)
    cache.crop(-3)  # two columns of padding and a token
    assert cache.get_seq_length() == 7
    assert_continues(model, cache, torch.cat([random_ids(1, 6), random_ids(1, 4)[:, :1]], dim=1))
    prefill(model, random_ids(1, 20), cache)
    assert_refused("last 0 tokens", cache.crop, -3)
