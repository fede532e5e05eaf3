"""The models of the experiments: sizes of the paper, the twin against a plain loop, stored weights."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from condense.labs.depth.model import set_solver
from condense.labs.depth.study.models import ARMS, PAPER, SMALL, block_of, build, num_parameters
from condense.labs.depth.study.pretraining import held_out_loss, log_of, model_folder, pretrain, train

pytestmark = pytest.mark.unit


def test_the_sizes_of_the_paper():
    with torch.device("meta"):
        baseline, shorter, hybrid = (build(arm, PAPER, 0) for arm in ("baseline", "shorter", "hybrid"))
    assert num_parameters(baseline) == 30_503_424
    assert num_parameters(baseline) - num_parameters(shorter) == 2 * 789_760
    field = num_parameters(block_of(hybrid)) - 1
    step = 256 + 1 + 1 + 256  # a unit of the field more: weights from state and control, bias, weights to the state
    assert abs(field - 857_344) <= step / 2


@pytest.mark.parametrize("arm", ARMS)
def test_arms_share_their_other_layers(arm):
    model, baseline = build(arm, SMALL, 3), build("baseline", SMALL, 3)
    first, end = SMALL.replaced
    layers, other = list(model.transformer.h), list(baseline.transformer.h)
    kept = layers[:first] + layers[-(SMALL.layers - end) :]
    for layer, expected in zip([*kept, model.lm_head], [*other[:first], *other[end:], baseline.lm_head], strict=True):
        for weight, wanted in zip(layer.parameters(), expected.parameters(), strict=True):
            assert torch.equal(weight, wanted)
    block = block_of(model)
    assert (block is None) == (arm in ("baseline", "shorter"))
    if block is not None:
        assert block.alpha.requires_grad == (not arm.startswith("alpha_"))
        assert block.alpha.item() == pytest.approx(1.0 if arm == "alpha_one" else 0.1)


@pytest.mark.parametrize(("arm", "times"), [("twin", 1), ("wide_twin", 4)])
def test_the_twins_are_residual_steps_of_their_own_weights(arm, times):
    model, hybrid = build(arm, SMALL, 0), build("hybrid", SMALL, 0)
    block, field = block_of(model), block_of(hybrid).field
    assert num_parameters(block.field) == pytest.approx(times * num_parameters(field), rel=0.02)
    if arm == "wide_twin":
        assert all(step.up_proj.weight.shape == field.up_proj.weight.shape for step in block.field.fields)
    hidden, control = torch.randn(2, 5, SMALL.width), torch.randn(2, 1, 1)
    expected = hidden
    for step in block.field.fields:
        up = step.up_proj(step.norm(expected)) + step.control_proj(control)
        expected = expected + 0.1 / 4 * step.down_proj(F.softplus(up))
    solution = block.flow(hidden, control)
    torch.testing.assert_close(solution.end_xD, expected)
    assert solution.num_evaluations == 4
    set_solver(model, "adaptive_heun")
    with pytest.raises(ValueError, match="choose the solver euler"):
        block.flow(hidden, control)


def test_trained_models_are_stored(setup, tmp_path):
    short = setup._replace(size=SMALL.__class__(**{**vars(SMALL), "steps": 3}))
    model = pretrain("hybrid", 0, short, tmp_path)
    log = log_of("hybrid", 0, short, tmp_path)
    assert [len(log[name]) for name in ("loss", "gradient_norm", "block_gradient_norm", "alpha")] == [3, 3, 3, 4]
    assert log["alpha"][-1] == pytest.approx(block_of(model).alpha.item())
    before = (model_folder("hybrid", 0, tmp_path) / "model.safetensors").stat().st_mtime_ns
    again = pretrain("hybrid", 0, short, tmp_path)
    assert (model_folder("hybrid", 0, tmp_path) / "model.safetensors").stat().st_mtime_ns == before
    for weight, stored in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(weight, stored)
    with pytest.raises(ValueError, match="holds a model of another size or text"):
        pretrain("hybrid", 0, setup, tmp_path)


def test_a_step_that_is_not_finite_changes_nothing(setup):
    model = build("baseline", SMALL, 0)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.inf
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    log = train(model, setup._replace(size=SMALL.__class__(**{**vars(SMALL), "steps": 2})), 0, "broken")
    assert log["gradient_norm"] == [None, None]
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


@pytest.mark.parametrize("arm", ["hybrid", "wide_twin", "baseline"])
def test_a_rate_that_overflows_is_counted(setup, arm):
    """A flow that is not finite is a step that is not finite, as it is in a model without a flow."""
    given = setup._replace(size=replace(SMALL, steps=4, learning_rate=1e20))
    model = build(arm, given.size, 0)
    log = train(model, given, 0, "overflows")
    for name in ("loss", "gradient_norm"):
        assert log[name][0] is not None and log[name][1:] == [None] * 3
    assert (log["block_gradient_norm"][0] is None) == (arm == "baseline") and log["block_gradient_norm"][1:] == [
        None
    ] * 3
    assert held_out_loss(model, given) is None


def test_other_errors_end_a_training(setup, monkeypatch):
    model = build("hybrid", SMALL, 0)

    def fails(*given, **named):
        raise ValueError("something else")

    monkeypatch.setattr(block_of(model).field, "forward", fails)
    with pytest.raises(ValueError, match="something else"):
        train(model, setup, 0, "fails")


def test_the_log_is_that_of_a_plain_loop(setup):
    """Computes loss and norms of the first two steps with only autograd and torch's AdamW."""
    size = SMALL.__class__(**{**vars(SMALL), "steps": 2})
    log = train(build("hybrid", size, 1), setup._replace(size=size), 1, "hybrid")
    model = build("hybrid", size, 1)
    windows = setup.corpus.train_ids[: len(setup.corpus.train_ids) // 32 * 32].view(-1, 32)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate)
    for step in range(2):
        ids = windows[order[4 * step : 4 * step + 4]]
        logits = model(ids).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        block = torch.cat([p.grad.flatten() for p in block_of(model).parameters()]).norm()
        total = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        figures = [log[name][step] for name in ("loss", "gradient_norm", "block_gradient_norm")]
        assert figures == pytest.approx([loss.item(), total.item(), block.item()], rel=1e-4)
        for weight in model.parameters():
            weight.grad *= min(1.0, 1.0 / (total.item() + 1e-6))
        optimizer.step()
