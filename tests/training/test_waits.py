"""The host does not wait for the device between the micro-batches of a step.

torch's meta device holds no numbers: whatever reads one back fails.
"""

import numpy as np
import pytest
import torch
from accelerate.utils import send_to_device

from condense.training.data.examples import Example, collate
from condense.training.recipe import load_recipe
from condense.training.recipe.objectives import Losses
from condense.training.train import RecipeTrainer, training_arguments

from .runs import folded_recipe

pytestmark = pytest.mark.process


class Noting:
    """An objective that keeps the batch it gets."""

    def losses(self, model, batch, num_targets):
        self.batch = batch
        return Losses(torch.zeros(()), torch.zeros(1), torch.zeros(1, dtype=torch.long))


@pytest.mark.parametrize("lengths", [[3, 7, 5], [7, 7]], ids=["padded", "whole"])
def test_lengths_and_masks_stay_on_the_host(lengths, tmp_path):
    recipe = load_recipe(folded_recipe(tmp_path, (80, 2), global_batch=1))
    examples = [Example.with_labels_at(slice(1, None), np.arange(length)) for length in lengths]
    batch = collate(examples)
    options = {"args": training_arguments(recipe, 1, None), "train_dataset": [batch | {"name": "one"}]}
    trainer = RecipeTrainer(recipe, None, model=recipe.model.load("sdpa", 0.0), **options)
    trainer.objective = objective = Noting()
    (inputs,) = trainer.get_train_dataloader()
    inputs = send_to_device(trainer._prepare_inputs(inputs), "meta")
    assert inputs["input_ids"].is_meta
    trainer.compute_loss(trainer.model, inputs, num_items_in_batch=1)
    assert trainer.window_tokens == sum(lengths) and trainer.names == ["one"]
    given = objective.batch
    assert given.keys() == batch.keys() and given["labels"].is_meta
    if "attention_mask" in batch:
        assert torch.equal(given["attention_mask"], batch["attention_mask"].bool())
