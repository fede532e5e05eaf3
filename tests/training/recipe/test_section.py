"""Fields that a resumed run may change are marked in the schema, and kinds are looked up in a registry."""

from typing import Literal

import pytest

from condense.training.recipe import MAY_CHANGE, MAY_CHANGE_FROM_HERE, MODELS, Recipe, Section
from condense.training.recipe.section import Registry, may_change

pytestmark = pytest.mark.unit


def test_fields_that_may_change_on_resume():
    assert MAY_CHANGE in Recipe.model_fields["output"].metadata
    assert may_change(Recipe) == {
        "output", "resume", "report_to", "deepspeed", "attention", "micro_batch", "gradient_checkpointing",
        "max_skipped_steps", "record_memory_history", "checkpoints.keep", "data.prepared", "model.schedule",
        "model.offload_memories", "model.checkpoint_segments", "evaluation.reference_loss", "evaluation.every",
        "log_every",
    }  # fmt: skip
    assert may_change(Recipe, MAY_CHANGE_FROM_HERE) == {
        "curriculum.steps", "optimizer.learning_rate", "optimizer.final_learning_rate", "optimizer.warmup_steps",
        "optimizer.decay_steps",
    }  # fmt: skip


def test_a_section_is_chosen_by_its_kind():
    recipe = {"output": "o", "data": {"task": "passkey"}, "curriculum": {"steps": 60, "tokens_per_step": 4096}}
    folded = Recipe(model="m", **recipe)
    assert folded.model == MODELS.kinds["condense"](source="m")
    assert Recipe(model=folded.model, **recipe).model is folded.model
    assert Recipe.model_validate_json(folded.model_dump_json(exclude={"micro_batch"})) == folded
    stages = {"stages": [{"total_length": 60, "steps": 60}], "global_batch": 2, "curriculum": None}
    assert type(Recipe(model={"kind": "stock", "source": "m"}, **recipe | stages).model) is MODELS.kinds["stock"]


def test_a_kind_has_one_class():
    class One(Section):
        kind: Literal["one"] = "one"

    registry = Registry[Section](default="one")
    registry.register(One)
    with pytest.raises(ValueError, match="kind='one' is already registered: choose another name"):
        registry.register(One)
