"""Gradients: through the solver, by the adjoint, under gradient checkpointing; and what each keeps in memory."""

import pytest
import torch
from torchdiffeq import odeint

from condense.labs.depth.model import DepthFlow, DepthSettings, MLPField, set_solver
from condense.labs.depth.model.block import LayerField
from tests.condense.models import random_ids

from .models import depth_model, random_control, reference_logits


def flow(**settings):
    torch.manual_seed(0)
    # Not a Llama's norm, which computes in float32: finite differences need float64.
    field = MLPField(torch.nn.LayerNorm(6), 6, 16, control_size=2, uses_tau=True).double()
    with torch.no_grad():
        for parameter in field.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return DepthFlow(field, DepthSettings(position=0, num_replaced=1, alpha=0.7, control_size=2, **settings)).double()


def gradients(block, hidden, control):
    """Returns the gradients of the start, the control and all parameters as one vector."""
    hidden, control = hidden.clone().requires_grad_(), control.clone().requires_grad_()
    end = block.flow(hidden, control).end_xD
    found = torch.autograd.grad(end.sin().sum(), [hidden, control, *block.parameters()])
    return torch.cat([gradient.flatten() for gradient in found])


def relative(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


HIDDEN, CONTROL = random_control(2, 3, 6), random_control(2, 1, 2, seed=5)


@pytest.mark.parametrize("solver", ["euler", "midpoint", "rk4"])
def test_the_direct_gradient_is_that_of_the_steps(solver):
    """Against finite differences, and through torchdiffeq's own loop."""
    block = flow(solver=solver, steps=3)
    for parameter in block.parameters():
        parameter.requires_grad_(False)
    block.alpha.requires_grad_()
    inputs = HIDDEN.clone().requires_grad_(), CONTROL.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda hidden, control: block.flow(hidden, control).end_xD, inputs)
    end = block.flow(*inputs).end_xD
    found = torch.autograd.grad(end.sin().sum(), [*inputs, block.alpha])
    oracle = odeint(
        lambda tau, hidden: block.alpha * block.field(float(tau), hidden, inputs[1]),
        inputs[0], torch.linspace(0, 1, 4, dtype=torch.float64), method=solver,
    )[-1]  # fmt: skip
    for own, other in zip(found, torch.autograd.grad(oracle.sin().sum(), [*inputs, block.alpha]), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


def test_the_adjoint_is_the_gradient_of_the_continuous_problem():
    """Equal for many accurate steps. With 4 Euler steps it differs from the gradient of what was computed, by a part
    that falls with the step.
    """
    accurate = relative(
        gradients(flow(solver="rk4", steps=64, gradient="adjoint"), HIDDEN, CONTROL),
        gradients(flow(solver="rk4", steps=64), HIDDEN, CONTROL),
    )
    assert accurate < 1e-6
    errors = [
        relative(
            gradients(flow(solver="euler", steps=steps, gradient="adjoint"), HIDDEN, CONTROL),
            gradients(flow(solver="euler", steps=steps), HIDDEN, CONTROL),
        )
        for steps in (4, 64)
    ]
    print(f"relative difference of the adjoint's gradient with 4 and 64 Euler steps: {errors}")
    assert 0.01 < errors[0] < 0.5 and errors[1] < errors[0] / 8
    assert torch.equal(
        flow(steps=4, gradient="adjoint").flow(HIDDEN, CONTROL).end_xD, flow(steps=4).flow(HIDDEN, CONTROL).end_xD
    )


def test_the_adjoint_in_a_model_with_frozen_layers():
    """Also the control gets its gradient, and weights that are frozen get none."""
    ids = random_ids(2, 8)
    found = {}
    for gradient in ("direct", "adjoint"):
        model = depth_model("mlp_tau", depth={"solver": "rk4", "steps": 16, "gradient": gradient}).train()
        model.requires_grad_(False)
        block = model.model.layers[1]
        block.alpha.requires_grad_()
        block.field.control_proj.requires_grad_()
        control = random_control(2, 8, 2).requires_grad_()
        model(ids, labels=ids, control=control).loss.backward()
        assert block.field.up_proj.weight.grad is None
        found[gradient] = block.alpha.grad, block.field.control_proj.weight.grad, control.grad
    for adjoint, direct in zip(found["adjoint"], found["direct"], strict=True):
        torch.testing.assert_close(adjoint, direct, rtol=1e-3, atol=1e-6)


def saved_bytes(**settings):
    """Counts the bytes that the forward pass keeps for the backward pass."""
    block, storages = flow(**settings), {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor  # kept alive, so an address stands for one tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        end = block.flow(HIDDEN.clone().requires_grad_(), CONTROL).end_xD
    end.sum().backward()
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def test_memory_of_the_adjoint_does_not_grow_with_the_steps():
    adjoint = [saved_bytes(solver="euler", steps=steps, gradient="adjoint") for steps in (4, 256)]
    direct = [saved_bytes(solver="euler", steps=steps) for steps in (4, 8, 256)]
    print(f"bytes kept for the backward pass, adjoint {adjoint}, direct {direct}")
    assert adjoint[1] <= adjoint[0] + 64 * 8 * 4  # the grid of torchdiffeq: a number a step
    assert direct[2] - direct[0] == pytest.approx(63 * (direct[1] - direct[0]), rel=0.02)
    assert direct[2] > 20 * adjoint[1]


@pytest.mark.parametrize(
    ("field", "depth"),
    [
        ("mlp", {"solver": "euler"}),
        ("mlp", {"solver": "dopri5", "rtol": 0.1, "atol": 1e-2}),
        ("mlp_tau", {"gradient": "adjoint"}),
        ("layer", {"solver": "midpoint", "steps": 2}),
    ],
    ids=["mlp", "adaptive", "adjoint", "layer"],
)
def test_gradient_checkpointing_gives_the_same_gradients(field, depth):
    ids, found = random_ids(2, 13), []
    for checkpointing in (False, True):
        model = depth_model(field, depth=depth).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        control = random_control(2, 13, 2).requires_grad_()
        output = model(ids, labels=ids, control=control)
        output.loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()} | {"control": control.grad})
        counts = output.function_evaluations
        assert counts.min() >= 2 and (counts.max() <= 100)
        found[-1]["evaluations"] = counts.double()
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=1e-8, atol=1e-10, msg=name)
        assert expected.abs().max() > 0, name


@pytest.mark.parametrize("bptt_segments", [None, 1])
def test_gradients_over_segments_are_those_of_the_equations(bptt_segments):
    """Gradients pass through the flow's memory unless it is detached."""
    model = depth_model("layer", depth={"solver": "midpoint", "steps": 2}, bptt_segments=bptt_segments)
    ids, control = random_ids(1, 13), random_control(1, 13, 2).requires_grad_()
    watched = [control, model.model.layers[1].alpha, model.model.layers[1].field.self_attn.k_proj.weight]
    watched.append(model.model.embed_tokens.weight)
    found = torch.autograd.grad(model(ids, control=control).logits[0, -1].sum(), watched)
    expected = torch.autograd.grad(
        reference_logits(model, ids[0], control[0], detach_after=bptt_segments)[-1].sum(), watched
    )
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-10)


def test_the_block_holds_its_own_scale_and_calls_its_modules():
    """ZeRO-3 and FSDP need this: they gather a module's own parameters when its forward pass is called."""
    model = depth_model("layer")
    block = model.model.layers[1]
    assert [name for name, _ in block.named_parameters(recurse=False)] == ["alpha"] and block.alpha.shape == (1,)
    assert isinstance(block.field, LayerField) and not list(block.field.parameters(recurse=False))
    assert type(block).__name__ in model._no_split_modules
    called = set()
    for name, module in block.named_modules():
        if list(module.parameters(recurse=False)):
            module.register_forward_pre_hook(lambda *_, name=name: called.add(name))
    control = random_control(1, 2)
    model(random_ids(1, 7), control=control)
    assert called == {name for name, module in block.named_modules() if list(module.parameters(recurse=False))}


def test_training_moves_alpha_and_the_solver_may_change_afterwards():
    model = depth_model("mlp", depth={"alpha": 0.1}).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    ids, losses = random_ids(2, 9), []
    for _ in range(5):
        loss = model(ids, labels=ids, control=random_control(2, 2)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and model.model.layers[1].alpha.item() != pytest.approx(0.1, abs=1e-3)
    set_solver(model, "rk4", steps=2)
    assert model.config.depth["solver"] == "rk4" and model.config.depth["steps"] == 2
    assert model(ids, control=random_control(2, 2)).function_evaluations.unique().tolist() == [8]
