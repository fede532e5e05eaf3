"""The cache: several calls give the logits of one call, in constant memory, for any mixture of rows."""

import copy
import random

import pytest
import torch
from transformers import DynamicCache

from condense import FoldedCache
from condense.outputs import HiddenStateAccumulator

from ...refusals import assert_refused
from ..models import MEMORIES, assert_rows_alone, logits_in_parts, random_durations, random_ids, tiny_model

pytestmark = pytest.mark.usefixtures("no_grad")


def partitions(total):
    generator = random.Random(0)
    yield [1] * total
    for size in (2, 3, 5, 7, 11):
        yield [size] * (total // size) + ([total % size] if total % size else [])
    sizes = []
    while (left := total - sum(sizes)) > 0:
        sizes.append(generator.randint(1, min(9, left)))
    yield sizes


@pytest.mark.parametrize("with_durations", [False, True], ids=["unit", "durations"])
@pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)
def test_parts_of_any_size_equal_one_call(with_durations, memory):
    model, ids = tiny_model(**memory), random_ids(2, 23)
    durations = random_durations(2, 23) if with_durations else None
    expected = model(ids, durations=durations, use_cache=False).logits
    for sizes in partitions(23):
        logits, _ = logits_in_parts(model, ids, sizes, durations)
        torch.testing.assert_close(logits, expected, atol=1e-9, rtol=1e-9, msg=f"parts of {sizes}")


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("with_durations", [False, True], ids=["unit", "durations"])
def test_padded_rows_equal_rows_alone(side, with_durations):
    model = tiny_model()
    lengths, total = [23, 4, 11, 15], 23
    ids, durations = random_ids(4, total), random_durations(4, total)
    mask = torch.zeros(4, total, dtype=torch.long)
    for row, length in enumerate(lengths):
        start = {"left": total - length, "right": 0, "both": (total - length) // 2}[side]
        mask[row, start : start + length] = 1
    inputs = (ids, durations) if with_durations else (ids,)
    for sizes in [[total], [5, 5, 5, 5, 3], [7, 9, 7], [1] * total]:
        logits, _ = logits_in_parts(model, ids, sizes, durations if with_durations else None, mask)
        assert_rows_alone(model, mask, logits, *inputs)
        if side != "left":  # padding after a text has the logits of its last token
            last = torch.stack([row[real][-1] for row, real in zip(logits, mask.bool(), strict=True)])
            torch.testing.assert_close(logits[:, -1], last, atol=1e-9, rtol=1e-9)


def test_padded_rows_without_a_cache_equal_rows_alone():
    model, ids = tiny_model(), random_ids(3, 17)
    mask = torch.ones_like(ids)
    mask[1, :9] = mask[2, 6:] = 0
    assert_rows_alone(model, mask, model(ids, attention_mask=mask, use_cache=False).logits, ids)


def test_durations_may_begin_in_a_later_call():
    model, ids, durations = tiny_model(), random_ids(1, 18), random_durations(1, 18)
    durations[:, :7] = 1
    expected = model(ids, durations=durations).logits
    first = model(ids[:, :7])
    rest = model(ids[:, 7:], durations=durations[:, 7:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(torch.cat([first.logits, rest], dim=1), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("with_durations", [False, True], ids=["unit", "durations"])
def test_the_state_does_not_grow(with_durations):
    model, sizes = tiny_model(), []
    cache, length = FoldedCache(model.config), model.config.segment_length
    for segment in range(50):
        durations = random_durations(2, length) if with_durations else None
        model(random_ids(2, length, seed=segment), durations=durations, past_key_values=cache, logits_to_keep=1)
        sizes.append((cache.num_bytes, total_bytes(cache)))
    assert sizes[2][0] > 0 and sizes[2] == sizes[49]
    assert cache.get_seq_length() == 50 * length


def total_bytes(root) -> int:
    """Bytes of all tensor storages that can be reached from an object, each counted once."""
    seen, storages, stack = set(), {}, [root]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
        elif hasattr(item, "__dict__"):
            stack.extend(vars(item).values())
    return sum(storages.values())


def test_one_call_holds_no_more_hidden_states_than_it_returns(noted):
    """In one call over many segments, a chunk keeps only the hidden states whose logits are returned."""
    model, calls = tiny_model(segment_length=4), noted(HiddenStateAccumulator, "chunk_hidden")
    model(random_ids(1, 80), use_cache=True, logits_to_keep=1)
    kept = [call.result for call in calls]
    num_elements = [tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in kept]
    assert num_elements == [0] * 19 + [model.config.hidden_size]


@torch.enable_grad()
def test_texts_in_different_caches_are_independent():
    """The model itself has no state: calls with one cache, also failed ones, do not change another cache."""
    model = tiny_model()
    ids, other = random_ids(1, 23), random_ids(1, 23, seed=9)
    expected = model(ids, use_cache=False).logits
    a, b, logits = FoldedCache(model.config), FoldedCache(model.config), []
    for start in range(0, 23, 4):
        logits.append(model(ids[:, start : start + 4], past_key_values=a).logits)
        model(other[:, start : start + 3], past_key_values=b)
        assert_refused("duration", model, other[:, start : start + 3], durations=torch.full((1, 3), -1.0))
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, atol=1e-9, rtol=1e-9)


def test_rows_are_selected_repeated_and_copied():
    model = tiny_model()
    ids, durations = random_ids(3, 12), random_durations(3, 12)
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[1, :3] = 0
    more = random_ids(4, 6, seed=1)

    def state():
        return model(ids, attention_mask=mask, durations=durations).past_key_values

    selected = [2, 0, 0, 1]
    cache = state()
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    cache.reorder_cache(torch.tensor([0, 1, 1, 2]))
    branch = copy.deepcopy(cache)
    after = model(more, past_key_values=cache).logits
    torch.testing.assert_close(model(more, past_key_values=branch).logits, after)
    for new_row, row in enumerate(selected):
        real = mask[row].bool()
        alone = model(ids[row, real][None], durations=durations[row, real][None]).past_key_values
        expected = model(more[new_row][None], past_key_values=alone).logits[0]
        torch.testing.assert_close(after[new_row], expected, atol=1e-9, rtol=1e-9)

    repeated = state()
    repeated.batch_repeat_interleave(2)
    assert repeated.batch_size == 6
    repeated.batch_select_indices(torch.tensor([True, False] * 3))
    plain = model(more[:3], past_key_values=state()).logits
    torch.testing.assert_close(model(more[:3], past_key_values=repeated).logits, plain)


def test_a_selected_row_that_reads_nothing_keeps_its_last_logits():
    """A row whose next columns are all padding returns the logits of the last token it has read."""
    model, ids, more = tiny_model(), random_ids(3, 12), random_ids(3, 4, seed=1)
    read = model(ids, use_cache=True)
    cache, mask = read.past_key_values, torch.ones(3, 16, dtype=torch.long)
    cache.batch_select_indices(torch.tensor([2, 0, 1]))
    mask[:2, 12:] = 0
    after = model(more, past_key_values=cache, attention_mask=mask).logits
    for new_row, row in enumerate((2, 0)):
        torch.testing.assert_close(after[new_row], read.logits[row, -1:].expand(4, -1), atol=1e-12, rtol=0)


def test_reset_removes_all_texts():
    model, ids = tiny_model(), random_ids(2, 13)
    cache = model(random_ids(5, 8)).past_key_values
    cache.reset()
    assert cache.num_bytes == 0 and cache.get_seq_length() == 0
    torch.testing.assert_close(model(ids, past_key_values=cache).logits, model(ids).logits)


@torch.enable_grad()
def test_calls_in_different_autograd_modes_continue_each_other():
    model, ids = tiny_model(), random_ids(2, 21)
    cache, logits = FoldedCache(model.config), []
    for start, mode in zip(range(0, 21, 7), (torch.inference_mode, torch.no_grad, torch.enable_grad), strict=True):
        with mode():
            logits.append(model(ids[:, start : start + 7], past_key_values=cache).logits.clone().detach())
    torch.testing.assert_close(torch.cat(logits, dim=1), model(ids).logits, atol=1e-9, rtol=1e-9)


@torch.enable_grad()
def test_later_writes_without_gradients_keep_the_graph():
    model, ids = tiny_model(), random_ids(1, 9)
    output = model(ids, use_cache=True)
    with torch.no_grad():
        model(random_ids(1, 7), past_key_values=output.past_key_values)
    output.logits.sum().backward()
    assert model.lm_head.weight.grad is not None


def test_wrong_use_is_refused():
    model = tiny_model()
    cache = model(random_ids(2, 7)).past_key_values
    assert_refused("holds 2 texts and the input 3", model, random_ids(3, 7), past_key_values=cache)
    for tokens in (1, -1):
        assert_refused(r"activate_past_recording.*snapshot", cache.crop, tokens)
    assert_refused("DynamicCache", model, random_ids(2, 7), past_key_values=DynamicCache())
