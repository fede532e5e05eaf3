"""A converted model is a checkpoint like any other."""

import pytest
import torch

from condense import CondenseForCausalLM, FoldedCache
from condense.hub.conversion import to_stock
from condense.labs.depth.model import convert_to_depth, set_solver
from tests.condense.models import random_ids, tiny_model

from .models import depth_model, random_control

pytestmark = pytest.mark.process

FRESH = """
import sys, torch
assert "condense" in sys.modules
assert not [name for name in sys.modules if name.startswith(("condense.labs.depth", "torchode", "torchdiffeq"))]
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/model")
assert not [name for name in sys.modules if name.startswith(("torchode", "torchdiffeq"))]
ids, control, expected = torch.load(sys.argv[1] + "/expected.pt")
output = model(ids, control=control)
torch.testing.assert_close(output.logits, expected, rtol=1e-4, atol=1e-4)
print(type(model.model.layers[1]).__name__, int(output.function_evaluations.sum()))
"""


@torch.no_grad()
def test_loads_in_a_fresh_process_through_the_auto_class(new_process, tmp_path):
    """`import condense` does not load the block; the configuration does."""
    model = depth_model("mlp_tau", 1, 3, depth={"solver": "midpoint", "steps": 3}).float()
    ids, control = random_ids(2, 12), random_control(2, 2).float()
    model.save_pretrained(tmp_path / "model")
    torch.save((ids, control, model(ids, control=control).logits), tmp_path / "expected.pt")
    ran = new_process(FRESH, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["DepthBlock", str(2 * 12 * 6)]


@torch.no_grad()
@pytest.mark.parametrize(("field", "solver"), [("mlp", "dopri5"), ("layer", "rk4")])
def test_a_model_and_its_solver_come_back_as_they_were(tmp_path, field, solver):
    model = depth_model(field)
    set_solver(model, solver, max_evaluations=500)
    model.save_pretrained(tmp_path)
    loaded = CondenseForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    ids, control = random_ids(2, 12), random_control(2, 2)
    output, expected = loaded(ids, control=control), model(ids, control=control)
    torch.testing.assert_close(output.logits, expected.logits)
    assert torch.equal(output.function_evaluations, expected.function_evaluations)
    assert loaded.config.depth == model.config.depth and loaded.config.depth["max_evaluations"] == 500


@torch.no_grad()
def test_a_checkpoint_without_the_block_is_refused(tmp_path):
    """Its weights would be random."""
    tiny_model(torch.float32).save_pretrained(tmp_path)
    depth = convert_to_depth(tiny_model(), 1, 2).config.depth
    with pytest.raises(ValueError, match=r"model.layers.1.alpha"):
        CondenseForCausalLM.from_pretrained(tmp_path, depth=depth)


def test_a_stock_llama_has_no_block():
    with pytest.raises(ValueError, match="a stock model has no depth block: convert the model that had all"):
        to_stock(depth_model())


@torch.no_grad()
def test_a_cache_made_before_a_change_of_the_solver_is_refused():
    model = depth_model("layer")
    ids, control, cache = random_ids(1, 6), random_control(1, 2), FoldedCache(model.config)
    model(ids, control=control, past_key_values=cache)
    set_solver(model, "euler", steps=2)
    with pytest.raises(ValueError, match="the cache was made for depth="):
        model(ids, control=control, past_key_values=cache)
