"""Checkpoints of former recipes are compared under today's keys."""

import pytest

from condense.training.checkpoints.resume import migrate
from condense.training.recipe import Recipe

RECIPE = {
    "output": "o",
    "data": {"task": "passkey"},
    "stages": [{"total_length": 64, "steps": 20}],
    "global_batch": 8,
    "optimizer": {"warmup_steps": 10, "beta2": 0.9},
}
FORMER_OPTIMIZER = {
    "learning_rate": 1e-3, "final_learning_rate": 0.0, "warmup_steps": 10, "decay_steps": None, "weight_decay": 0.01,
    "beta2": 0.9, "max_grad_norm": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("former", "model"),
    [
        (
            {"folded": True, "segment_length": 32, "bptt_segments": 2, "schedule": "sequential"},
            {"source": "m", "segment_length": 32, "bptt_segments": 2, "schedule": "sequential"},
        ),
        ({"folded": True, "segment_length": None, "bptt_segments": None, "schedule": "auto"}, {"source": "m"}),
        (
            {"folded": False, "segment_length": None, "bptt_segments": None, "schedule": "auto"},
            {"kind": "llama", "source": "m"},
        ),
    ],
)
def test_a_former_recipe_is_todays(former, model):
    today = Recipe(model=model, **RECIPE).model_dump(mode="json")
    others = {name: value for name, value in today.items() if name not in ("model", "objective", "optimizer")}
    stored = {"model": "m", "optimizer": FORMER_OPTIMIZER, "offload_memories": False, **former, **others}
    assert migrate(stored) == today
    assert migrate(today) == today
    assert stored["model"] == "m" and stored["optimizer"] == FORMER_OPTIMIZER  # its own copy
