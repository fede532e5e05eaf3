"""Every field of a recipe's optimizer reaches the real optimizer, with DeepSpeed and without it."""

import json
from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments

from condense.training import train as train_module
from condense.training.recipe import Optimizer, load_recipe
from condense.training.train import OPTIMIZERS, RecipeTrainer, train, training_arguments

from .ranks import run_ranks
from .runs import folded_recipe, train_with

pytestmark = pytest.mark.process


@pytest.fixture
def recipe(tmp_path) -> Path:
    rates = {"learning_rate": 2e-3, "final_learning_rate": 1e-3, "warmup_steps": 1, "decay_steps": 1}
    optimizer = {"name": "adamw", **rates, "weight_decay": 0.03, "beta1": 0.8, "beta2": 0.7, "eps": 1e-5}
    fields = {"optimizer": optimizer | {"max_grad_norm": 0.25}, "checkpoints": {"every": 1, "keep": 1}}
    return folded_recipe(tmp_path, (80, 2), global_batch=2, attention="eager", data={"task": "passkey"}, **fields)


class Reporting(RecipeTrainer):
    """Writes down the optimizer that it has trained with."""

    def train(self, *args, **kwargs):
        result = super().train(*args, **kwargs)
        optimizer, clipping = self.optimizer, self.args.max_grad_norm
        if self.is_deepspeed_enabled:
            optimizer, clipping = self.deepspeed.optimizer.optimizer, self.deepspeed.gradient_clipping()
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer  # accelerate's wrapper
        names = ("initial_lr", "lr", "betas", "eps", "fused")
        fields = [{name: group[name] for name in (*names, "weight_decay")} for group in optimizer.param_groups]
        found = {"class": type(optimizer).__name__, "groups": fields, "clipping": clipping}
        Path(self.args.output_dir, "optimizer.json").write_text(json.dumps(found))
        return result


def train_reporting(arguments: list[str]) -> None:
    train_module.RecipeTrainer = Reporting
    train_with(arguments)


def assert_as_given(output: Path) -> None:
    found = json.loads((output / "optimizer.json").read_text())
    assert found["class"] == "AdamW" and found["clipping"] == 0.25
    groups = found["groups"]
    assert [group.pop("weight_decay") for group in groups] == [0.03, 0.0]  # norms are not decayed
    wanted = {"initial_lr": 0.002, "betas": [0.8, 0.7], "eps": 1e-5, "fused": True}
    for group in groups:
        assert group.pop("lr") == pytest.approx(0.001)  # the final one
        assert group == wanted


def test_without_deepspeed(recipe, monkeypatch):
    monkeypatch.setattr(train_module, "RecipeTrainer", Reporting)
    train(load_recipe(recipe))
    assert_as_given(load_recipe(recipe).output)


@pytest.mark.parametrize("config", ["zero2_cpu", "zero3"])
def test_with_deepspeed(recipe, config):
    arguments = ["--recipe", str(recipe), f"deepspeed=deepspeed_configs/{config}.json"]
    succeeded, printed = run_ranks(train_reporting, arguments, ranks=1)
    assert succeeded, printed[-3000:]
    assert_as_given(load_recipe(recipe).output)


def test_the_defaults_are_those_that_trainer_had(recipe):
    """Recipes that name neither the optimizer nor its beta1 and eps train as before."""
    ours = training_arguments(load_recipe(recipe, ["optimizer={warmup_steps: 1}"]), 1, None)
    default = TrainingArguments(output_dir="unused", use_cpu=not torch.cuda.is_available())
    for name in ("optim", "adam_beta1", "adam_epsilon"):
        assert getattr(ours, name) == getattr(default, name)
    assert set(OPTIMIZERS) == {Optimizer().name}
