"""A fitted field against numpy's least squares, and against flows that a field can represent."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from condense import CondenseConfig, CondenseForCausalLM
from condense.labs.depth.model import MLPField, convert_to_depth, fit_field, missed_share
from condense.labs.depth.model.initialization import LinearFit, layer_states
from tests.condense.models import tiny_model

pytestmark = pytest.mark.unit

IDS = torch.arange(240).reshape(6, 40) * 7 % 31
OTHER_IDS = torch.arange(200).reshape(5, 40) * 11 % 31


@pytest.fixture(scope="module")
def original():
    torch.manual_seed(0)
    config = CondenseConfig(
        vocab_size=31, hidden_size=8, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, segment_length=16, initializer_range=0.3,
    )  # fmt: skip
    return CondenseForCausalLM(config).eval()


class AddingLayer(nn.Module):
    """A layer that adds a field's value."""

    def __init__(self, field):
        super().__init__()
        self.field = field

    def forward(self, hidden, key_values, metadata):
        return hidden + self.field(0.0, hidden, None), None


def converted(original, **settings):
    return convert_to_depth(copy.deepcopy(original), 1, 3, control_size=0, **settings)


@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_least_squares_as_numpy(ridge):
    generator = np.random.default_rng(0)
    features, targets = generator.normal(3.0, 2.0, (50, 6)), generator.normal(-1.0, 1.0, (50, 3))
    fit = LinearFit()
    for part in (slice(0, 20), slice(20, 50)):
        fit.add(torch.from_numpy(features[part]), torch.from_numpy(targets[part]))
    weights, constant = fit.solve(ridge)
    penalty = ridge * features.var(0).mean() * len(features)
    rows = np.vstack(
        [np.hstack([features, np.ones((50, 1))]), np.hstack([np.sqrt(penalty) * np.eye(6), np.zeros((6, 1))])]
    )
    expected = np.linalg.lstsq(rows, np.vstack([targets, np.zeros((6, 3))]), rcond=None)[0]
    np.testing.assert_allclose(np.vstack([weights, constant[None]]), expected, atol=1e-9)


def test_a_constant_feature_and_few_points_have_a_solution():
    fit = LinearFit()
    fit.add(torch.tensor([[1.0, 2.0, 5.0], [1.0, 3.0, 5.0]]), torch.tensor([[1.0], [2.0]]))
    weights, constant = fit.solve(ridge=0.0)
    torch.testing.assert_close(weights[:, 0], torch.tensor([0.0, 1.0, 0.0]).double())
    assert float(constant) == pytest.approx(-1)


@pytest.mark.parametrize("path", ["layers", "straight"])
def test_a_field_that_is_representable_is_recovered(original, path):
    """Layers that are Euler steps of one field: the path through their outputs has its slopes at these points."""
    original, generator = copy.deepcopy(original), torch.manual_seed(1)
    field = MLPField(copy.deepcopy(original.model.norm), 8, 5, 0)
    for parameter in field.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    count = {"layers": 2, "straight": 1}[path]  # layers that change something
    original.model.layers[1] = AddingLayer(field)
    original.model.layers[2] = AddingLayer(field if count == 2 else lambda tau, hidden, control: 0 * hidden)
    model = converted(original, field_size=5, steps=count, alpha=0.4)
    made = model.model.layers[1].field
    for name in ("norm", "up_proj"):
        getattr(made, name).load_state_dict(getattr(field, name).state_dict())
    fit_field(model, original, IDS, path=path, gain=None, ridge=0.0)
    assert missed_share(model, original, OTHER_IDS) < 1e-5
    scale = count / 0.4  # dH/dtau = alpha F, and a step of length 1 / count adds the layer's change
    torch.testing.assert_close(made.down_proj.weight, scale * field.down_proj.weight, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(made.down_proj.bias, scale * field.down_proj.bias, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(model(IDS).logits, original(IDS).logits, atol=1e-3, rtol=1e-3)


def test_the_states_of_folded_layers(original):
    hidden = original(IDS, output_hidden_states=True).hidden_states
    states = layer_states(original, IDS, 1, 3)
    torch.testing.assert_close(states.flatten(1).sort().values, torch.stack(hidden[1:4]).flatten(1).sort().values)


def test_a_fit_comes_nearer_than_the_random_field(original):
    """One Euler step from a token's state is the least squares of numpy for all tokens, with a control and tau."""
    model = converted(original, field="mlp_tau", field_size=6, steps=1)
    fit_field(model, original, IDS, seed=3)
    block = model.model.layers[1]
    start, _, end = layer_states(original, IDS, 1, 3)
    with torch.no_grad():
        features = F.softplus(block.field.up_proj(block.field.norm(start)))
        reached = block.flow(start, None).end_xD
    rows = np.hstack([features.numpy(), np.ones((len(features), 1))])
    expected = rows @ np.linalg.lstsq(rows, (end - start).numpy(), rcond=None)[0]
    np.testing.assert_allclose((reached - start).numpy(), expected, atol=2e-3)
    again = converted(original, field="mlp_tau", field_size=6, steps=1)
    fit_field(again, original, IDS, seed=4)
    assert not torch.equal(again.model.layers[1].field.down_proj.weight, block.field.down_proj.weight)
    fit_field(again, original, IDS, seed=3)
    assert torch.equal(again.model.layers[1].field.down_proj.weight, block.field.down_proj.weight)


@pytest.mark.parametrize("settings", [{"steps": 3, "alpha": 2.0}, {"field": "layer"}], ids=["mlp", "layer"])
def test_the_missed_share_is_the_error_of_the_end_over_the_variance(original, settings):
    """Against numpy, of hidden states as transformers gives them; of ids that nothing was fitted to."""
    model = converted(original, **settings)
    ids = OTHER_IDS[:, :16].repeat(4, 1)  # a segment, so all is in one order; more rows than one call takes
    ids[10:] = (ids[10:] + 1) % 31
    states = original(ids, output_hidden_states=True).hidden_states
    start, expected, end = (
        state.detach().double().reshape(-1, 8).numpy()
        for state in (states[1], states[3], model(ids, output_hidden_states=True).hidden_states[2])
    )
    share = ((end - expected) ** 2).sum(1).mean() / (expected - start).var(0).sum()
    assert missed_share(model, original, ids) == pytest.approx(share, rel=1e-5) and share > 0.1


def test_the_missed_share_of_a_flow_that_stands_still_and_of_the_mean_change(original):
    model = converted(original, steps=1, alpha=1.0)
    start, _, end = layer_states(original, IDS, 1, 3)
    change = (end - start).double()
    field = model.model.layers[1].field
    with torch.no_grad():
        field.down_proj.weight.zero_()
        field.down_proj.bias.zero_()
        still = float(change.square().sum() / (change - change.mean(0)).square().sum())
        assert missed_share(model, original, IDS) == pytest.approx(still, rel=1e-5) and still > 1
        field.down_proj.bias.copy_(change.mean(0))
    assert missed_share(model, original, IDS) == pytest.approx(1, rel=1e-5)


def test_only_folded_models(original):
    model = converted(original)
    for call in (fit_field, missed_share):
        with pytest.raises(ValueError, match="not have a depth block.*convert_to_depth"):
            call(original, original, IDS)
        with pytest.raises(ValueError, match="a model of 3 layers: pass the model of 4"):
            call(model, model, IDS)
    with pytest.raises(ValueError, match="change all tokens alike"):
        missed_share(model, original, IDS[:1, :1])


def test_refusals(original):
    with pytest.raises(ValueError, match="field 'layer' is not linear.*field='mlp'"):
        fit_field(converted(original, field="layer"), original, IDS)
    model = converted(original)
    with pytest.raises(ValueError, match="path='curved' is not known"):
        fit_field(model, original, IDS, path="curved")
    for ridge in (-1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"ridge={ridge}: pass a gain"):
            fit_field(model, original, IDS, ridge=ridge)
    for gain in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"gain={gain}, .*pass a gain above 0"):
            fit_field(model, original, IDS, gain=gain)
    with pytest.raises(ValueError, match="alpha=0: the flow stands still"):
        fit_field(converted(original, alpha=0.0), original, IDS)
    for measure in (fit_field, missed_share):
        with pytest.raises(ValueError, match="original: segments of 7 tokens, and the model's have"):
            measure(model, tiny_model(num_hidden_layers=4, segment_length=7), IDS)
    wave = copy.deepcopy(original)
    wave.config.schedule = "wavefront"
    with pytest.raises(ValueError, match="a wavefront calls many layers at once: set schedule"):
        fit_field(model, wave, IDS)
