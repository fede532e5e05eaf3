"""Padding is never read: not its embeddings, even where they are NaN, nor its durations."""

import pytest
import torch

from tests.labs.depth.model.models import depth_model, random_control

from .models import padded_batch, tiny_model

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.unit]


def assert_nan_at_padding_reaches_no_token(model, side, control=None, **options):
    """In a batch with an embedding of NaN at padding, each text has the logits that it has alone."""
    texts, ids, mask = padded_batch([13, 9, 2], side)
    controls = [{}] * 3 if control is None else [{"control": row[None]} for row in control]
    expected = [model(text[None], **own).logits[0] for text, own in zip(texts, controls, strict=True)]
    model.model.embed_tokens.weight[0] = torch.nan
    logits = model(ids, attention_mask=mask, **options, **({} if control is None else {"control": control})).logits
    for row, alone in enumerate(expected):
        torch.testing.assert_close(logits[row][mask[row].bool()], alone, atol=1e-12, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "blocked"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_an_embedding_of_nan_at_padding_reaches_no_token(implementation, side, use_cache):
    model = tiny_model(attn_implementation=implementation)
    assert_nan_at_padding_reaches_no_token(model, side, use_cache=use_cache)


@pytest.mark.parametrize("solver", ["euler", "rk4"])
@pytest.mark.parametrize("field", ["mlp", "layer"])
def test_a_flow_with_fixed_steps_is_not_ended_by_padding(field, solver):
    model = depth_model(field, depth={"solver": solver})
    assert_nan_at_padding_reaches_no_token(model, "right", random_control(3, 2))


@pytest.mark.parametrize("side", ["left", "right"])
@torch.enable_grad()
def test_gradients_of_padding_are_zero_and_not_nan(side):
    model = tiny_model()
    _, ids, mask = padded_batch([13, 9, 2], side)
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = torch.nan
    model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
    assert not model.model.embed_tokens.weight.grad[0].any()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())


def test_the_longest_duration_of_a_row_is_not_counted_again_at_its_padding():
    model = tiny_model()
    texts, ids, mask = padded_batch([5, 2], "right")
    durations = torch.ones(2, 5, dtype=torch.float64)
    durations[1, 1] = 2.0**24 - 1
    logits = model(ids, attention_mask=mask, durations=durations).logits
    alone = model(texts[1][None], durations=durations[1:, :2]).logits
    torch.testing.assert_close(logits[1, :2], alone[0], atol=1e-12, rtol=0)


def test_a_flow_that_overflows_only_at_padding_goes_on():
    class OverflowsAfter(torch.nn.Module):
        def forward(self, tau, hidden_RTD, control):
            slope_RTD = torch.zeros_like(hidden_RTD)
            slope_RTD[1, num_tokens:] = torch.inf
            return slope_RTD

    model = depth_model("mlp")
    _, ids, mask = padded_batch([5, 2], "right")
    model.model.layers[1].field, num_tokens = OverflowsAfter(), 2
    assert model(ids, attention_mask=mask, control=random_control(2, 2)).logits.isfinite().all()
    num_tokens = 1
    with pytest.raises(ValueError, match="not finite at tau=0, step 1 of 4"):
        model(ids, attention_mask=mask, control=random_control(2, 2))
