"""`generate` with durations writes what a loop writes that reads the whole text with all its durations."""

import copy

import pytest
import torch

from condense import FoldedCache, to_stock
from condense.modeling import CondenseModel

from ..models import beam_search, padded_batch, random_ids, tiny_model

NUM_NEW = 11  # several segments of 5


def durations_like(ids, seed=3):
    return 0.3 + 1.5 * torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed))


def schedule(step):
    return 0.2 + 0.35 * (step % 5)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@torch.no_grad()
def naive(model, ids, durations, new=lambda step: 1.0, num_new=NUM_NEW):
    """Greedy decoding without a cache; `new` gives a number or one for each row."""
    for step in range(num_new):
        next_ids = model(ids, durations=durations, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, next_ids], dim=1)
        last = torch.as_tensor(new(step), dtype=durations.dtype).expand(len(ids))[:, None]
        durations = torch.cat([durations, last], dim=1)
    return ids


def generated(model, ids, **options):
    return model.generate(ids, max_new_tokens=NUM_NEW, do_sample=False, **options)


@pytest.mark.parametrize("new", [None, 0.3, schedule, lambda step: torch.tensor([0.3, 1.7]) + 0.1 * step])
def test_greedy_decoding(model, new):
    ids = random_ids(2, 7)
    durations = durations_like(ids)
    function = new if callable(new) else lambda step: 1.0 if new is None else new
    expected = naive(model, ids, durations, function)
    assert torch.equal(generated(model, ids, durations=durations, new_token_duration=new), expected)
    assert not torch.equal(expected, generated(model, ids))


def test_new_durations_alone(model):
    ids = random_ids(1, 7)
    expected = naive(model, ids, torch.ones(1, 7), lambda _: 0.3)
    assert torch.equal(generated(model, ids, new_token_duration=0.3), expected)


@pytest.mark.parametrize("chunk_size", [1, 3])
def test_prompt_in_chunks(model, chunk_size):
    ids = random_ids(2, 17)
    durations = durations_like(ids)
    options = {"durations": durations, "new_token_duration": schedule, "prefill_chunk_size": chunk_size}
    assert torch.equal(generated(model, ids, **options), naive(model, ids, durations, schedule))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_padded_batch_and_beams(model, side, num_beams):
    rows, ids, mask = padded_batch([3, 13, 7], side)
    durations, each = durations_like(ids), torch.tensor([0.4, 1.0, 1.9])
    options = {"durations": durations, "num_beams": num_beams, "new_token_duration": lambda step: each * schedule(step)}
    output = generated(model, ids, attention_mask=mask, **options)
    for row, tokens in enumerate(rows):
        own = durations[row][mask[row].bool()][None]
        options |= {"durations": own, "new_token_duration": lambda step, row=row: float(each[row]) * schedule(step)}
        alone = generated(model, tokens[None], **options)[0, len(tokens) :]
        assert output[row, ids.shape[1] :].tolist() == alone.tolist()


def test_beam_search(model):
    ids = random_ids(1, 7)
    durations, beams = durations_like(ids), 3
    output = generated(model, ids, durations=durations, new_token_duration=schedule, num_beams=beams)

    def at(step):
        return {"durations": torch.cat([durations, torch.tensor([[schedule(before) for before in range(step)]])], 1)}

    assert output[0].tolist() == beam_search(model, ids, NUM_NEW, beams, at)


def test_sampling_several_sequences(model):
    ids = random_ids(2, 7)
    durations, each = durations_like(ids), torch.tensor([0.4, 1.6])
    torch.manual_seed(3)
    output = model.generate(
        ids, durations=durations, new_token_duration=lambda step: each, do_sample=True, top_k=0, max_new_tokens=NUM_NEW,
        num_return_sequences=2,
    )  # fmt: skip
    torch.manual_seed(3)
    ids, durations, each = (tensor.repeat_interleave(2, dim=0) for tensor in (ids, durations, each))
    with torch.no_grad():
        for _ in range(NUM_NEW):
            logits = model(ids, durations=durations, use_cache=False).logits[:, -1].float()
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], dim=1)
            durations = torch.cat([durations, each[:, None]], dim=1)
    assert torch.equal(output, ids)


@pytest.mark.parametrize("kind", ["lookup", "folded", "stock"])
def test_assisted_decoding(model, kind):
    ids = random_ids(1, 7).repeat(1, 3)
    durations = durations_like(ids)
    options = {
        "lookup": {"prompt_lookup_num_tokens": 4},
        "folded": {"assistant_model": copy.deepcopy(model)},
        "stock": {"assistant_model": to_stock(copy.deepcopy(model))},
    }[kind]
    output = generated(model, ids, durations=durations, new_token_duration=schedule, **options)
    assert torch.equal(output, naive(model, ids, durations, schedule))


def test_continued_cache(model):
    """Durations are those of the whole text; steps count from the call's own first token."""
    ids, cache = random_ids(1, 7), FoldedCache(model.config)
    durations = durations_like(ids)
    options = {"max_new_tokens": 4, "do_sample": False, "past_key_values": cache, "new_token_duration": 0.3}
    first = model.generate(ids, durations=durations, **options)
    second = model.generate(first, durations=torch.cat([durations, torch.full((1, 4), 0.3)], dim=1), **options)
    assert torch.equal(second, naive(model, ids, durations, lambda step: 0.3, 8))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"durations": torch.ones(1, 7)}, r"durations of shape \(1, 7\).*\(2, 7\)"),
        ({"durations": torch.ones(2, 8), "num_beams": 2}, r"durations of shape \(2, 8\).*\(2, 7\)"),
        ({"new_token_duration": -1}, "not negative"),
        ({"new_token_duration": lambda step: torch.ones(3)}, "at step 0: .* one for each of 2"),
        ({"new_token_duration": lambda step: "long"}, "gives 'long' at step 0"),
        ({"new_token_duration": [1.0, 3.0]}, r"gives \[1.0, 3.0\] at step 0: pass one number .* or a tensor"),
        ({"new_token_duration": 1.0, "guidance_scale": 1.5}, "guidance_scale"),
    ],
)
def test_refusals_come_before_any_work(model, options, match, monkeypatch):
    monkeypatch.setattr(CondenseModel, "forward", lambda *arguments, **options: pytest.fail("work was done"))
    with pytest.raises(ValueError, match=match):
        generated(model, random_ids(2, 7), **options)
