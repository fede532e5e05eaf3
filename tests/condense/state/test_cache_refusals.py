"""Caches with an incomplete state, or with the state of another model, are refused."""

import copy
import pickle
import re

import pytest
import torch

from condense import FoldedCache

from ...refusals import assert_refused
from ..models import random_durations, random_ids, tiny_model

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.unit]


class Interrupted(Exception):
    pass


def interrupt(patch, model, call: int) -> None:
    """Raises in call number `call` of the last layer's MLP, as Ctrl-C or a full memory does."""
    mlp, calls = model.model.layers[-1].mlp, iter(range(100))
    forward = mlp.forward

    def raising(hidden):
        if next(calls) == call:
            raise Interrupted
        return forward(hidden)

    patch.setattr(mlp, "forward", raising)


@pytest.mark.parametrize("call", [0, 3, 7])
@pytest.mark.parametrize("read_before", [0, 3, 5], ids=lambda count: f"{count} before")
def test_the_cache_of_an_interrupted_call_is_refused(call, read_before, monkeypatch):
    """A call of eight chunks. A copy of the cache from before it gives the logits of a call without interruption."""
    model, ids = tiny_model(schedule="sequential"), random_ids(2, 40 + read_before)
    cache = FoldedCache(model.config)
    if read_before:
        model(ids[:, :read_before], past_key_values=cache)
    before = copy.deepcopy(cache)
    with monkeypatch.context() as patch:
        interrupt(patch, model, call)
        with pytest.raises(Interrupted):
            model(ids[:, read_before:], past_key_values=cache)
    for attempt in (ids[:, read_before:], ids[:, :1]):
        assert_refused(r"interrupted.*reset.*snapshot.*restore", model, attempt, past_key_values=cache)
    for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert_refused("interrupted", model, ids[:, :1], past_key_values=copied)
    assert_refused("interrupted", model.generate, ids, past_key_values=cache, max_new_tokens=1)
    expected = model(ids, use_cache=False).logits[:, read_before:]
    torch.testing.assert_close(model(ids[:, read_before:], past_key_values=before).logits, expected, atol=1e-9, rtol=0)
    cache.reset()
    torch.testing.assert_close(model(ids, past_key_values=cache).logits[:, read_before:], expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("case", ["in the head", "static step"])
def test_the_cache_of_a_call_that_fails_elsewhere_is_refused(case, monkeypatch):
    """In the head, the cache has all tokens, but the call returned no logits, which need the most memory."""
    model, tokens = tiny_model(), 1 if case == "static step" else 3
    cache = model(random_ids(1, 8)).past_key_values
    model.fixed_decoding = case == "static step"
    model(random_ids(1, tokens), past_key_values=cache)
    with monkeypatch.context() as patch:
        if case == "in the head":
            patch.setattr(model.lm_head, "forward", lambda hidden: (_ for _ in ()).throw(Interrupted))
        else:
            interrupt(patch, model, 0)
        with pytest.raises(Interrupted):
            model(random_ids(1, tokens), past_key_values=cache)
    assert_refused("interrupted", model, random_ids(1, tokens), past_key_values=cache)


def test_a_refused_call_does_not_change_the_cache():
    """A call that is refused before it writes does not count as interrupted."""
    model, ids = tiny_model(), random_ids(2, 12)
    cache = model(ids[:, :7]).past_key_values
    wrong = {
        "durations": torch.full((2, 5), float("nan")),
        "attention_mask": torch.ones(2, 3),
        "position_ids": torch.tensor([[0, 1, 2, 4, 5]]),
    }
    for name, value in wrong.items():
        assert_refused(name.removesuffix("s"), model, ids[:, 7:], past_key_values=cache, **{name: value})
    hook = model.model.layers[0].register_forward_hook(lambda *_: None)
    model.config.schedule = "wavefront"
    assert_refused("hooks", model, random_ids(2, 23), past_key_values=cache)
    hook.remove()
    model.config.schedule = "auto"
    expected = model(ids, use_cache=False).logits[:, 7:]
    torch.testing.assert_close(model(ids[:, 7:], past_key_values=cache).logits, expected, atol=1e-9, rtol=0)


def test_a_refused_first_call_does_not_fix_the_batch_size():
    """It does not start a timeline of durations either."""
    model = tiny_model()
    cache = FoldedCache(model.config)
    with pytest.raises(ValueError, match="within two segments"):
        model(random_ids(2, 3), past_key_values=cache, durations=torch.full((2, 3), 2.0**25))
    assert cache.timeline is None
    expected = model(random_ids(1, 3), use_cache=False).logits
    torch.testing.assert_close(model(random_ids(1, 3), past_key_values=cache).logits, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"input_ids": torch.ones(1, 3)}, "input_ids are torch.float32"),
        ({"inputs_embeds": torch.ones(1, 3, 23, dtype=torch.float64)}, "inputs_embeds are 23 wide"),
        ({"inputs_embeds": torch.ones(1, 3, 24).long()}, "inputs_embeds are 24 wide and torch.int64"),
        ({"input_ids": torch.ones(1, 3).long(), "labels": torch.full((1, 3), 61)}, "labels reach from 61 to 61"),
        ({"input_ids": torch.ones(1, 3).long(), "labels": torch.full((1, 3), -1)}, "labels reach from -1 to -1"),
        ({"input_ids": torch.ones(1, 3).long(), "labels": torch.ones(1, 3)}, "labels are torch.float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_inputs_do_not_make_the_cache_incomplete(arguments, word):
    model = tiny_model()
    cache = model(random_ids(1, 8)).past_key_values
    assert_refused(word, model, **arguments, past_key_values=cache)
    model(random_ids(1, 3), past_key_values=cache)


@pytest.mark.parametrize(
    "fields",
    [
        {"segment_length": 6}, {"memory_source": "layer_input"}, {"memory_share": 0.2}, {"sink_token_id": 7},
        {"num_hidden_layers": 2}, {"num_key_value_heads": 4}, {"head_dim": 6}, {"position_anchor": "start"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    ],
    ids=lambda fields: next(iter(fields)),
)  # fmt: skip
@pytest.mark.parametrize("read_before", [False, True], ids=["empty", "with text"])
def test_the_cache_of_another_model_is_refused(fields, read_before):
    model, other = tiny_model(), tiny_model(**fields)
    cache = FoldedCache(other.config)
    if read_before:
        other(random_ids(1, 8), past_key_values=cache)
    (name,) = fields
    name = "memory_shares" if name.startswith("memory_") else name  # the source is a name of a share
    theirs, own = (getattr(one.config, name) for one in (other, model))
    with pytest.raises(ValueError, match=re.escape(f"made for {name}={theirs!r} and the model has {own!r}")):
        model(random_ids(1, 3), past_key_values=cache)
    assert_refused(name, model.generate, random_ids(1, 9), past_key_values=cache, max_new_tokens=1)


def test_a_cache_is_refused_after_a_field_changes():
    model = tiny_model()
    cache = model(random_ids(1, 8)).past_key_values
    model.config.segment_length = 6
    with pytest.raises(ValueError, match="segment_length=5 and the model has 6"):
        model(random_ids(1, 3), past_key_values=cache)


@pytest.mark.parametrize("with_gradients", [False, True])
def test_a_copy_shares_no_state_with_its_original(with_gradients):
    """A cache with gradients is copied after `detach`."""
    model, ids = tiny_model(), random_ids(2, 23)
    with torch.set_grad_enabled(with_gradients):
        cache = model(ids[:, :8], durations=random_durations(2, 8)).past_key_values
        if with_gradients:
            assert_refused(r"cache.detach\(\)", copy.deepcopy, cache)
            cache.detach()
        copied = copy.deepcopy(cache)
        first, second = (model(ids[:, 8:], past_key_values=each).logits for each in (cache, copied))
    torch.testing.assert_close(second, first, atol=0, rtol=0)


@pytest.mark.parametrize("duration", [1e300, 3e38, 2.0**24 + 2])
def test_durations_above_the_precision_of_positions_are_refused(duration):
    """In float32 rotary tables, larger positions would be infinite, or equal for neighbours."""
    model = tiny_model()
    cache = model(random_ids(1, 8)).past_key_values
    durations = torch.tensor([[1.0, duration, 1.0]], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"within two segments at token .*16,777,216"):
        model(random_ids(1, 3), past_key_values=cache, durations=durations)
    assert cache.get_seq_length() == 8
    assert model(random_ids(1, 3), past_key_values=cache).logits.isfinite().all()  # the refused call has no effect


def test_long_durations_within_the_precision_of_positions():
    model = tiny_model()
    assert model(random_ids(1, 12), durations=torch.full((1, 12), 1e6, dtype=torch.float64)).logits.isfinite().all()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("batch_select_indices", torch.tensor([0, 2]), r"rows \[0, 2\] of a cache with 2 texts"),
        ("batch_select_indices", torch.tensor([-3]), r"rows \[-3\]"),
        ("batch_select_indices", torch.tensor([0.5, 1.0]), r"rows \[0.5, 1.0\]"),
        ("batch_select_indices", torch.tensor([True, False, True]), r"rows \[True, False, True\].*one boolean for"),
        ("batch_select_indices", torch.tensor(1), "rows 1 of a cache"),
        ("batch_select_indices", torch.tensor([], dtype=torch.long), r"rows \[\]"),
        ("reorder_cache", torch.tensor([1, 5]), r"rows \[1, 5\]"),
        ("crop", 3, r"crop\(3\): the cache can remove the last 8 tokens, .* with crop\(-k\)"),
        ("crop", -9, r"crop\(-9\)"),
    ],
)
def test_refused_changes_of_rows_and_columns_change_nothing(name, value, words):
    model, ids = tiny_model(), random_ids(2, 12)
    expected = model(ids, use_cache=False).logits[:, 8:]
    cache = FoldedCache(model.config)
    cache.activate_past_recording()
    model(ids[:, :8], past_key_values=cache, durations=torch.ones(2, 8))
    assert_refused(words, getattr(cache, name), value)
    torch.testing.assert_close(model(ids[:, 8:], past_key_values=cache).logits, expected, atol=1e-9, rtol=0)


def test_rows_are_selected_as_a_tensor_selects_them():
    model, ids = tiny_model(), random_ids(3, 12)
    expected = model(ids, use_cache=False).logits[:, 8:]
    for indices in ([-1, 0], [True, False, True], torch.tensor([1], dtype=torch.int32)):
        rows = torch.arange(3)[torch.as_tensor(indices)]
        cache = model(ids[:, :8]).past_key_values
        cache.batch_select_indices(indices)
        logits = model(ids[rows, 8:], past_key_values=cache).logits
        torch.testing.assert_close(logits, expected[rows], atol=1e-9, rtol=0)
    empty = FoldedCache(model.config)
    empty.batch_repeat_interleave(2)
    torch.testing.assert_close(model(ids, past_key_values=empty).logits[:, 8:], expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("fixed_decoding", [False, True])
def test_a_cache_is_refused_after_the_model_moved(fixed_decoding):
    """To another dtype, or another device; a snapshot brings back what it was."""
    model, ids = tiny_model(), random_ids(2, 9)
    model.fixed_decoding = fixed_decoding
    cache = model(ids[:, :8]).past_key_values
    snapshot = cache.snapshot()
    expected = model(ids[:, 8:], past_key_values=cache).logits
    model.float()
    message = r"written in torch.float64 on cpu, and the model computes in torch.float32 on cpu: move the model before"
    assert_refused(message, model, ids[:, 8:], past_key_values=cache)
    cache.restore(snapshot)
    assert_refused(message, model, ids[:, 8:], past_key_values=cache)
    cache.reset()
    model(ids, past_key_values=cache)  # a new text
    cache.restore(snapshot)
    model.double()
    moved = copy.deepcopy(model)
    torch.testing.assert_close(moved(ids[:, 8:], past_key_values=cache).logits, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="on cpu, and the model computes in torch.float64 on meta"):
        copy.deepcopy(model).to("meta")(ids[:, 8:].to("meta"), past_key_values=cache)


def test_a_cache_of_autocast_is_refused_without_it():
    model, ids = tiny_model(torch.float32), random_ids(2, 9)
    cache = FoldedCache(model.config)
    with torch.autocast("cpu", torch.bfloat16):
        model(ids[:, :4], past_key_values=cache)
        model(ids[:, 4:8], past_key_values=cache)
        model(ids[:, 8:], past_key_values=copy.deepcopy(cache))
    with pytest.raises(ValueError, match="written in torch.bfloat16 on cpu, and the model computes in torch.float32"):
        model(ids[:, 8:], past_key_values=cache)
