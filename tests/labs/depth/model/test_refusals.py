"""Bad input ends with a `ValueError` that names the remedy, before any work is done."""

import importlib.util
import logging
import re

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

import condense.control
from condense import CondenseConfig, CondenseForCausalLM, FoldedCache
from condense.labs.depth.model import DepthFlow, DepthSettings, convert_to_depth, set_solver, to_depth_llama
from condense.labs.depth.model.block import NotFiniteError
from tests.condense.models import random_ids, tiny_config, tiny_model

from .models import depth_model, random_control

pytestmark = pytest.mark.unit


SMALL = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def settings(**changes):
    return DepthSettings(**{"position": 0, "num_replaced": 1, **changes})


@pytest.mark.parametrize(("first", "end"), [(1, 1), (2, 1), (-1, 2), (1, 4), (3, 4), (1.0, 2)])
def test_ranges_that_are_empty_reversed_or_outside(first, end):
    model = tiny_model()
    with pytest.raises(ValueError, match=rf"depth {first}:{end}: choose FIRST:END with 0 <= FIRST < END <= 3, the"):
        convert_to_depth(model, first, end)
    assert len(model.model.layers) == 3 and model.config.depth is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"solver": "dopri"}, "solver='dopri' is not known: did you mean 'dopri5'? Known: euler, midpoint"),
        ({"solver": "RK4"}, "solver='RK4' is not known"),
        ({"field": "mlp-tau"}, "field='mlp-tau' is not known: did you mean 'mlp_tau'?"),
        ({"gradient": "ajoint"}, "did you mean 'adjoint'?"),
        ({"learn_alpha": "no"}, "learn_alpha='no': pass True or False"),
        ({"rtol": 0}, "rtol=0: pass a number, as a tolerance one above 0 and below 1"),
        ({"atol": -1e-3}, "atol=-0.001: pass a number"),
        ({"rtol": float("nan")}, "rtol=nan: pass a number"),
        ({"steps": 0}, "steps=0: pass a whole number of at least 1"),
        ({"steps": 2.5}, "steps=2.5: pass a whole number"),
        ({"max_evaluations": 0}, "max_evaluations=0: pass a whole number of at least 1"),
        ({"control_size": -1}, "control_size=-1: pass a whole number of at least 0"),
        ({"field_size": 0}, "field_size=0: pass a whole number of at least 1"),
        ({"alpha": float("inf")}, "alpha=inf: pass a number"),
        ({"field": "layer", "field_size": 8}, "the field 'layer' has the width of a layer"),
        ({"field": "layer", "solver": "dopri5"}, "attends to other tokens at the same depth: choose one of euler"),
        ({"field": "layer", "gradient": "adjoint"}, "choose gradient='direct', with gradient checkpointing"),
        ({"solver": "adaptive_heun", "gradient": "adjoint"}, "needs the same steps for all tokens"),
    ],
)
def test_settings_that_do_not_exist_or_do_not_fit_together(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        settings(**changes)


def test_conversion_refuses_what_it_cannot_convert():
    model = tiny_model()
    for changes, message in (
        ({"step": 1}, r"setting='step' is not known: did you mean 'steps'"),
        ({"solver": "eule"}, "did you mean 'euler'"),
    ):
        with pytest.raises(ValueError, match=message):
            convert_to_depth(model, 1, 2, **changes)
    assert model.config.depth is None
    with pytest.raises(ValueError, match="a depth block at position 1: a model has one"):
        convert_to_depth(convert_to_depth(model, 1, 2), 0, 1)
    with_window = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4))
    with pytest.raises(ValueError, match=r"is a MistralForCausalLM: pass a CondenseForCausalLM or"):
        convert_to_depth(with_window, 0, 1)


def test_configurations_written_by_hand():
    given = {"position": 1, "num_replaced": 1, "field_size": 8}
    model = CondenseForCausalLM(tiny_config(depth=given))
    assert model.config.control_size == 1 and model.model.layers[1].field.up_proj.out_features == 8
    for depth, message in (
        ({"position": 3, "num_replaced": 1, "field_size": 8}, "position=3 in a stack of 3 layers"),
        ({"position": 1, "num_replaced": 1}, "field_size is missing: pass the field's width"),
        ({**given, "slover": "euler"}, "setting='slover' is not known: did you mean 'solver'"),
    ):
        with pytest.raises(ValueError, match=message):
            CondenseForCausalLM(tiny_config(depth=depth))
    assert CondenseConfig().depth is None


def test_set_solver():
    model = depth_model()
    before = dict(model.config.depth)
    for solver, changes, message in (
        ("dopri6", {}, "did you mean 'dopri5'"),
        ("euler", {"alpha": 1}, "set_solver changes steps, rtol, atol, max_evaluations, gradient, not alpha"),
        ("dopri5", {"rtol": 0}, "rtol=0: pass a number"),
    ):
        with pytest.raises(ValueError, match=message):
            set_solver(model, solver, **changes)
    assert model.config.depth == before
    with pytest.raises(ValueError, match="does not have a depth block: make one with convert"):
        set_solver(tiny_model(), "euler")


def test_a_solver_library_that_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    model = depth_model()
    for solver, gradient, package in (("dopri5", "direct", "torchode"), ("rk4", "adjoint", "torchdiffeq")):
        with pytest.raises(ValueError, match=rf"{solver}.* needs the package {package}: pip install {package}"):
            set_solver(model, solver, gradient=gradient)


@pytest.mark.parametrize(
    ("control", "message"),
    [
        (torch.zeros(2, 3), r"control of shape \(2, 3\) does not fit: pass 2 components for each text, \(2, 2\), or"),
        (torch.zeros(1, 2), r"control of shape \(1, 2\)"),
        (torch.zeros(2, 5, 2), r"or for each token, \(2, 6, 2\)"),
        (torch.zeros(2), r"control of shape \(2,\)"),
        (torch.full((2, 2), float("nan")), "control has values that are not finite"),
    ],
)
def test_a_control_that_does_not_fit(control, message):
    model = depth_model()
    cache = FoldedCache(model.config)
    with pytest.raises(ValueError, match=message):
        model(random_ids(2, 6), control=control, past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_a_control_that_ends_before_the_prompt():
    for model in (depth_model(), to_depth_llama(depth_model())):
        with pytest.raises(ValueError, match="control has 4 columns and the prompt 6: pass one for each token"):
            model.generate(random_ids(2, 6), control=torch.zeros(2, 4, 2), max_new_tokens=2)


@pytest.mark.parametrize("control", [torch.zeros(2), [1.0, -1.0], 1.0])
def test_generate_refuses_what_is_no_control(control):
    with pytest.raises(ValueError, match=r"pass a tensor \[texts, components\] or"):
        depth_model().generate(random_ids(2, 5), control=control, max_new_tokens=2)


def test_a_control_for_a_model_that_takes_none():
    for model in (tiny_model(), depth_model(depth={"control_size": 0})):
        with pytest.raises(ValueError, match="the model has no depth block that takes one: leave it out"):
            model(random_ids(2, 6), control=torch.zeros(2, 1))
    assert torch.isfinite(model(random_ids(2, 6)).logits).all()


def test_a_control_that_is_not_given_is_zero_and_said_once(caplog):
    condense.control._say_zero.cache_clear()
    model, ids = depth_model(), random_ids(2, 6)
    with caplog.at_level(logging.WARNING, "condense"):
        logits = model(ids).logits
        model(ids)
    assert [record.message for record in caplog.records] == [
        "no control is given: the 2 components of the depth block's control are 0."
    ]
    assert torch.equal(logits, model(ids, control=torch.zeros(2, 2)).logits)


class BreaksAt(torch.nn.Module):
    """A field that is NaN from a depth on."""

    def __init__(self, tau):
        super().__init__()
        self.tau = tau

    def __repr__(self):
        return "BreaksAt()"

    def forward(self, tau, hidden, control):
        after = torch.as_tensor(tau, dtype=hidden.dtype) >= self.tau
        return torch.where(after, torch.nan, 1.0) * hidden


@pytest.mark.parametrize(
    ("solver", "message"),
    [
        ("euler", r"tau=0.5, step 3 of 4"),
        ("rk4", r"tau=0.5, step 3 of 4"),
        ("dopri5", r"tau=0\.[5-9]\d*, evaluation \d+"),
        ("adaptive_heun", r"tau=0\.[5-9]\d*, evaluation \d+"),
    ],
)
def test_a_field_that_is_not_finite_stops_the_flow(solver, message):
    """The error has the depth and the step, even for a single token of a text; no solver tries for ever."""
    block = DepthFlow(BreaksAt(0.5), settings(solver=solver, control_size=0, alpha=1.0))
    with pytest.raises(
        NotFiniteError, match=f"field 'mlp' of the depth block gives values that are not finite at {message}: low"
    ):
        block.flow(torch.randn(2, 3, 4), None)


def test_hidden_states_and_weights_that_are_not_finite():
    for solver in ("midpoint", "dopri5"):
        model = depth_model("mlp", depth={"solver": solver})
        ids, control = random_ids(2, 6), random_control(2, 2)
        with torch.no_grad():
            model.model.layers[1].field.down_proj.bias[0] = torch.inf
            with pytest.raises(ValueError, match=r"not finite at tau=0, (step 1 of 4|evaluation 1)"):
                model(ids, control=control)
            model.model.layers[0].mlp.down_proj.weight.fill_(torch.nan)
            with pytest.raises(ValueError, match="receives hidden states that are not finite: check the layers"):
                model(ids, control=control)


def test_finite_slopes_whose_sum_is_not():
    class Steep(torch.nn.Module):
        def forward(self, tau, hidden, control):
            return torch.full_like(hidden, 2e38)

    block = DepthFlow(Steep(), settings(control_size=0, alpha=1.0))
    with pytest.raises(NotFiniteError, match="the flow of the field 'mlp' overflows: lower the learning rate"):
        block.flow(torch.full((1, 2, 4), 3e38), None)


@torch.no_grad()
def test_too_many_evaluations_name_tolerance_and_field():
    model = depth_model("mlp_tau", depth={"solver": "dopri5", "rtol": 1e-6, "atol": 1e-7, "max_evaluations": 20})
    with pytest.raises(
        ValueError,
        match=r"dopri5 needs more than max_evaluations=20 .* 'mlp_tau' at rtol=1e-06, atol=1e-07 for \d+ of 10 tokens",
    ):
        model(random_ids(2, 6), control=random_control(2, 2))


def test_tolerances_below_the_rounding_of_the_states():
    model, ids = depth_model(solver="dopri5").float(), random_ids(1, 3)
    set_solver(model, "dopri5", rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=r"rtol=1e-12 and atol=1e-12 are below the rounding of torch.float32"):
        model(ids)


def test_pipelines_and_devices():
    """The control moves with the metadata of a chunk."""
    model = depth_model()
    moved = []
    block = model.model.layers[1]
    block.register_forward_pre_hook(lambda _, given: moved.append(given[2].to("meta")))
    model(random_ids(2, 6), control=random_control(2, 6, 2))
    inputs = moved[0].token_inputs
    assert inputs.control_RTC.device.type == "meta" and inputs.control_RTC.shape == (2, 5, 2)
    assert inputs.evaluations is not None
