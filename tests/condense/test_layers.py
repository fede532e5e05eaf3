"""A decoder stack in which one block replaces several layers."""

import copy

import pytest
import torch
from torch import nn

from condense.layers import CondenseDecoderLayer

from .models import (
    assert_rows_alone,
    assert_same_gradients,
    gradients,
    greedy,
    logits_in_parts,
    padded_batch,
    random_ids,
    tiny_model,
    torch_checkpoint,
)

pytestmark = pytest.mark.usefixtures("no_grad")

LAYERS = 5


class Identity(nn.Module):
    def forward(self, input_RTD, key_values, metadata):
        return input_RTD, None


class ResidualMLP(nn.Module):
    """Two Euler steps of one vector field for every token, as in an ODE block; it has no memory."""

    def __init__(self, hidden_size):
        super().__init__()
        self.w1, self.w2 = nn.Linear(hidden_size, 7), nn.Linear(7, hidden_size)

    def forward(self, input_RTD, key_values, metadata):
        for _ in range(2):
            input_RTD = input_RTD + 0.5 * self.w2(nn.functional.softplus(self.w1(input_RTD)))
        return input_RTD, None


class HalfStepLayer(nn.Module):
    """A block with attention and a memory: a decoder layer with half its residual update."""

    def __init__(self, config):
        super().__init__()
        self.layer = CondenseDecoderLayer(config, layer_idx=0)

    def forward(self, input_RTD, key_values, metadata):
        output_RTD, memory = self.layer(input_RTD, key_values, metadata)
        return (input_RTD + output_RTD) / 2, memory


BLOCKS = {
    "identity": lambda config: Identity(),
    "without memory": lambda config: ResidualMLP(config.hidden_size),
    "with memory": HalfStepLayer,
}


def model_with(name, **options):
    model = tiny_model(num_hidden_layers=LAYERS, **options)
    torch.manual_seed(3)
    model.model.replace_layers(1, 3, BLOCKS[name](model.config).to(next(model.parameters()).dtype))
    return model


def test_an_identity_equals_the_model_without_those_layers():
    model, ids = tiny_model(num_hidden_layers=LAYERS), random_ids(2, 23)
    shorter = copy.deepcopy(model)
    shorter.model.layers, shorter.config.num_hidden_layers = shorter.model.layers[::4], 2
    model.model.replace_layers(1, 4, Identity())
    torch.testing.assert_close(model(ids).logits, shorter(ids).logits, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_follows_its_formula(name):
    """Within one segment there is no memory: layers and block are functions of the hidden states."""
    model, ids = model_with(name), random_ids(2, 5)
    seen = []
    layers = list(model.model.layers)
    for layer in layers:
        layer.register_forward_hook(lambda layer, inputs, outputs: seen.append((inputs[0], outputs[0])))
    model(ids)
    (_, first), (block_in, block_out), (next_in, _), _ = seen
    assert torch.equal(first, block_in) and torch.equal(block_out, next_in)
    if name == "without memory":
        block, expected = layers[1], block_in
        for _ in range(2):
            hidden = torch.log1p(torch.exp(expected @ block.w1.weight.T + block.w1.bias))
            expected = expected + 0.5 * (hidden @ block.w2.weight.T + block.w2.bias)
        torch.testing.assert_close(block_out, expected, atol=1e-12, rtol=0)
    assert name == "identity" or not torch.equal(block_in, block_out)


@pytest.mark.parametrize("name", BLOCKS)
def test_cache_and_padding_work_as_with_layers(name):
    model, ids = model_with(name), random_ids(2, 31)
    whole = model(ids, use_cache=False).logits
    torch.testing.assert_close(logits_in_parts(model, ids, [7, 1, 1, 12, 1, 9])[0], whole, atol=1e-9, rtol=0)
    _, padded, mask = padded_batch((4, 19, 11), "left")
    assert_rows_alone(model, mask, model(padded, attention_mask=mask).logits, padded)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_generation_works_as_with_layers(name, fixed):
    """`generate`, static steps and drafts give the tokens of a model without a cache."""
    model, ids = model_with(name), random_ids(1, 9)
    expected = greedy(model, ids, 20)
    model.fixed_decoding = fixed
    assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), expected)
    assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False, prompt_lookup_num_tokens=4), expected)


@pytest.mark.parametrize("name", ["without memory", "with memory"])
@torch.enable_grad()
def test_gradient_checkpointing_works_as_with_layers(name):
    model, ids = model_with(name).train(), random_ids(2, 23)
    expected = gradients(model, ids)
    model._set_gradient_checkpointing(True, torch_checkpoint())
    found = gradients(model, ids)
    assert_same_gradients(found, expected, 1e-10)
    assert all(gradient.abs().max() > 0 for gradient in found[1].values())


def test_auto_runs_sequentially_and_wavefront_is_refused():
    model = model_with("without memory", schedule="auto")
    assert model(random_ids(1, 60)).logits.isfinite().all()
    model.config.schedule = "wavefront"
    with pytest.raises(ValueError, match="wavefront"):
        model(random_ids(1, 60))


@pytest.mark.parametrize(("first", "end"), [(-1, 2), (2, 2), (3, 9)])
def test_a_range_outside_the_stack_is_refused(first, end):
    with pytest.raises(ValueError, match="choose 0 <= first < end <= 5"):
        tiny_model(num_hidden_layers=LAYERS).model.replace_layers(first, end, Identity())
