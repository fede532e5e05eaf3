"""Switches of language models through real training, in one process: neutral values, other values, a resume."""

import pytest
import torch
from safetensors.torch import load_file

from condense.training.recipe import load_recipe
from condense.training.small_llama import save_small_llama
from condense.training.train import train
from tests.training.recipes import text_data, write_digits, write_recipe
from tests.training.runs import copy_checkpoint, logged

FOLDED = "model={{kind: condense, segment_length: 10, source: {folder}/start}}"
NEUTRAL = {
    "free_running": "{kind: free_running, steps: 1, feedback: sample}",
    "missing_targets": "{kind: missing_targets, rate: 0, unknown: free_run}",
    "partial_logits": "{kind: partial_logits, rate: 0}",
    "synthetic_states": "{kind: synthetic_states, states: 0}",
}
SWITCHED = {
    "branch": "{kind: free_running, steps: 5, feedback: branch, samples: 2, width: 3}",
    "free_run": "{kind: missing_targets, rate: 0.5, unknown: free_run}",
    "partial_logits": "{kind: partial_logits, rate: 0.5}",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains a model with an objective, once: its output, weights and log."""
    folder = tmp_path_factory.mktemp("runs")
    save_small_llama(folder / "start", width=16)
    write_digits(folder, range(20, 76, 7))
    fields = {"data": text_data(folder, "pack"), "optimizer": {"learning_rate": 1e-2, "warmup_steps": 1}}
    fields |= {"checkpoints": {"every": 2, "keep": 3}, "evaluation": {"sequences": 2, "every": 4}}
    stock = {"kind": "stock", "source": str(folder / "start")}
    path = write_recipe(folder, stock, [(24, 4)], global_batch=4, **fields)
    done = {}

    def run(kind: str, objective: str, *overrides, output=None):
        key = (kind, objective, overrides)
        if key not in done or output is not None:
            output = output or folder / str(len(done))
            given = [FOLDED.format(folder=folder)] if kind == "condense" else []
            train(load_recipe(path, [*given, f"objective={objective}", f"output={output}", *overrides]))
            weights = load_file(output / "model.safetensors")
            done[key] = output, weights, logged(output)
        return done[key]

    return run


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", ["stock", "condense"])
@pytest.mark.parametrize("name", NEUTRAL)
def test_a_neutral_value_trains_as_the_next_token(trained, kind, name):
    output, weights, losses = trained(kind, NEUTRAL[name])
    plain, plain_weights, plain_losses = trained(kind, "{kind: next_token}")
    assert same(weights, plain_weights) and losses == plain_losses
    assert logged(output, "eval_loss") == logged(plain, "eval_loss")


@pytest.mark.parametrize("name", SWITCHED)
def test_other_values_train_otherwise_and_are_validated_alike(trained, name):
    output, weights, losses = trained("condense", SWITCHED[name])
    plain, plain_weights, plain_losses = trained("condense", "{kind: next_token}")
    assert losses[0] != plain_losses[0] and not same(weights, plain_weights)
    before, after = (logged(folder, "eval_loss") for folder in (output, plain))
    assert before[0] == after[0] and before[-1] != after[-1]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["branch", "free_run"])
def test_a_resumed_run_is_the_same(trained, name, tmp_path):
    """Also where it draws random numbers: Trainer restores the generator."""
    output, weights, losses = trained("condense", SWITCHED[name])
    copy_checkpoint(output, tmp_path, 2)
    _, resumed, resumed_losses = trained("condense", SWITCHED[name], output=tmp_path)
    assert resumed_losses == losses and same(resumed, weights)
