"""The block: its formula by hand, and what it is equal to without a flow."""

import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from condense.hub.conversion import to_stock
from condense.labs.depth.model import DepthSettings, MLPField, convert_to_depth, set_solver
from condense.labs.depth.model.stock import StockDepthBlock
from tests.condense.models import in_float64, random_ids, tiny_model

from .models import depth_model, random_control, reference_logits


@pytest.mark.parametrize("num_applied", [1, 3])
def test_layer_field_with_as_many_euler_steps_as_alpha_applies_the_layer_as_often(num_applied):
    """One segment equals a stock Llama with the layer repeated; a single step equals the layer over all segments."""
    base = tiny_model(num_hidden_layers=2 + num_applied)
    for number in range(2, 1 + num_applied):
        base.model.layers[number].load_state_dict(base.model.layers[1].state_dict())
    converted = convert_to_depth(copy.deepcopy(base), 1, 1 + num_applied, field="layer", steps=num_applied)
    assert len(converted.model.layers) == 3 and converted.model.layers[1].alpha.item() == num_applied
    ids = random_ids(2, 17)
    expected = in_float64(to_stock(copy.deepcopy(base)))(ids[:, :5]).logits
    torch.testing.assert_close(converted(ids[:, :5]).logits, expected, rtol=0, atol=1e-10)
    if num_applied == 1:
        torch.testing.assert_close(converted(ids).logits, base(ids).logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("field", "first", "end"), [("mlp", 0, 2), ("mlp_tau", 1, 3), ("layer", 2, 3), ("mlp", 0, 3)])
def test_without_a_scale_the_model_is_that_without_the_layers(field, first, end):
    """Also at both ends of the stack, and in its place."""
    base = tiny_model()
    converted = convert_to_depth(copy.deepcopy(base), first, end, field=field, alpha=0)
    kept = [layer for number, layer in enumerate(base.model.layers) if not first <= number < end]
    base.model.layers = torch.nn.ModuleList(kept)
    base.config.num_hidden_layers = len(kept)
    ids = random_ids(2, 13)
    torch.testing.assert_close(converted(ids).logits, base(ids).logits, rtol=1e-12, atol=1e-12)


def test_conversion_keeps_other_weights_and_gives_the_field_as_many_as_it_replaces():
    base = tiny_model()
    replaced = sum(parameter.numel() for layer in base.model.layers[1:] for parameter in layer.parameters())
    converted = convert_to_depth(copy.deepcopy(base), 1, 3, control_size=3)
    again = convert_to_depth(copy.deepcopy(base), 1, 3, control_size=3)
    other = convert_to_depth(copy.deepcopy(base), 1, 3, control_size=3, seed=1)
    block = converted.model.layers[1]
    size = sum(parameter.numel() for parameter in block.field.parameters())
    assert abs(size - replaced) <= (2 * 24 + 3 + 1) / 2
    kept = base.state_dict()
    for name, tensor in converted.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
        if not name.startswith("model.layers.1."):
            assert torch.equal(tensor, kept[name])
    assert not torch.equal(block.field.up_proj.weight, other.model.layers[1].field.up_proj.weight)
    assert block.alpha.item() == pytest.approx(0.1) and block.alpha.requires_grad
    assert not convert_to_depth(tiny_model(), 0, 1, learn_alpha=False).model.layers[0].alpha.requires_grad


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("field", ["mlp_tau", "layer"])
def test_bfloat16_and_tied_embeddings_stay(field, tied):
    """The state of the flow is float32 all the same: small steps add up."""
    model = tiny_model(torch.bfloat16, tie_word_embeddings=tied)
    convert_to_depth(model, 1, 3, field=field, steps=32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    ids, control = random_ids(2, 12), torch.tensor([[1.0], [-1.0]])
    logits = model(ids, control=control).logits
    assert logits.dtype == torch.bfloat16
    double = copy.deepcopy(model).double()(ids, control=control).logits
    assert (logits - double).norm() / double.norm() < 0.05
    model.train()(ids, labels=ids, control=control).loss.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    if field != "layer":
        set_solver(model.eval(), "dopri5", rtol=1e-4)
        assert (model(ids, control=control).logits - double).norm() / double.norm() < 0.05


def test_a_stock_stack_takes_the_block_and_passes_the_control_on():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=24, n_head=2, vocab_size=61, n_positions=32)).eval()
    settings = DepthSettings(position=1, num_replaced=2, alpha=1, control_size=2)
    field = MLPField(torch.nn.LayerNorm(24), 24, 40, control_size=2)
    model.transformer.h = torch.nn.ModuleList(
        [model.transformer.h[0], StockDepthBlock(field, settings), model.transformer.h[3]]
    )
    ids, control = random_ids(2, 9), random_control(2, 2).float()
    logits, block = model(ids, control=control).logits, model.transformer.h[1]
    assert block.function_evaluations == 4
    by_token = model(ids, control=control[:, None].expand(-1, 9, -1)).logits
    torch.testing.assert_close(by_token, logits)
    assert (model(ids).logits - logits).abs().max() > 1e-3
    torch.testing.assert_close(model(ids, control=torch.zeros(2, 2)).logits, model(ids).logits)
    set_solver(model, "dopri5", rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model(ids, control=control).logits, logits, rtol=0.05, atol=0.05)
    assert block.function_evaluations.shape == (2, 9)
    with pytest.raises(ValueError, match=r"control of shape \(2, 3\) does not fit: pass 2 components"):
        model(ids, control=torch.zeros(2, 3))


def test_output_of_the_model_without_a_head_has_the_evaluations():
    model = depth_model(depth={"solver": "midpoint", "steps": 3})
    ids, control = random_ids(2, 7), random_control(2, 2)
    assert model.model(ids, control=control).function_evaluations.tolist() == [[6] * 7] * 2
    assert tiny_model()(ids).function_evaluations is None
    states = model(ids, control=control, output_hidden_states=True).hidden_states
    assert len(states) == 4 and (states[2] - states[1]).abs().max() > 0.1


def test_the_reference_sees_the_control():
    """So that the comparisons with it do."""
    model, ids = depth_model(), random_ids(1, 7)[0]
    one, other = (reference_logits(model, ids, torch.tensor([u, 0.5], dtype=torch.float64)) for u in (1, -1))
    assert (one - other).abs().max() > 0.1
