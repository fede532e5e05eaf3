"""Switches of language models on two ranks of ZeRO-2: against one process, and resumed."""

import pytest
import torch

from condense import CondenseForCausalLM
from condense.training.recipe import load_recipe
from condense.training.train import train
from tests.training.recipes import text_data, write_digits
from tests.training.runs import copy_checkpoint, folded_recipe, log_lines, logged, run, same_weights

MISSING = "objective={kind: missing_targets, rate: 0.5, unknown: free_run}"
STATES = "objective={kind: synthetic_states, states: 1}"
SAMPLE = "objective={kind: free_running, steps: 4, feedback: sample}"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    write_digits(folder, [200] * 8)
    fields = {"data": text_data(folder), "checkpoints": {"every": 2, "keep": 3}, "evaluation": {"sequences": 3}}
    fields |= {"optimizer": {"learning_rate": 2e-2, "final_learning_rate": 1e-3, "warmup_steps": 2}}
    return folded_recipe(folder, (60, 3), (90, 3), global_batch=8, micro_batch=2, **fields)


def resumed(recipe, finished, output, *overrides) -> tuple[list[float], str]:
    """The losses of a run that goes on after step 2 of a finished one."""
    copy_checkpoint(finished, output, 2)
    return run(recipe, output, *overrides)


@pytest.mark.slow
@pytest.mark.parametrize("objective", [MISSING, STATES], ids=["missing_targets", "synthetic_states"])
def test_two_ranks_train_as_one_process(recipe, tmp_path, objective):
    """By the launcher, with checkpointing and accumulation; then resumed."""
    ranks, one, again = tmp_path / "ranks", tmp_path / "one", tmp_path / "again"
    losses, _ = run(recipe, ranks, objective, "gradient_checkpointing=true", launcher=True)
    train(load_recipe(recipe, [objective, f"output={one}", "micro_batch=4"]))
    lines, own = log_lines(one), log_lines(ranks)
    assert losses == pytest.approx([line["loss"] for line in lines], abs=1e-4)
    assert [line["grad_norm"] for line in own] == pytest.approx([line["grad_norm"] for line in lines], rel=1e-3)
    validated = [logged(output, "eval_loss") for output in (ranks, one)]
    assert validated[0] == pytest.approx(validated[1], abs=1e-4)
    models = [CondenseForCausalLM.from_pretrained(output).state_dict() for output in (ranks, one)]
    for name, tensor in models[0].items():
        torch.testing.assert_close(tensor, models[1][name], atol=2e-4, rtol=1e-3)
    next_token, _ = run(recipe, tmp_path / "plain", "gradient_checkpointing=true")
    assert next_token != pytest.approx(losses, abs=1e-2)  # the control

    again_losses, printed = resumed(recipe, ranks, again, objective, "gradient_checkpointing=true")
    assert "resuming from" in printed and again_losses == losses and same_weights(ranks, again)


@pytest.mark.slow
def test_a_resumed_run_samples_the_same_tokens(recipe, tmp_path):
    """Each rank's generator is in the checkpoint."""
    losses, _ = run(recipe, tmp_path / "whole", SAMPLE)
    again, printed = resumed(recipe, tmp_path / "whole", tmp_path / "again", SAMPLE)
    assert "resuming from" in printed and again == losses and same_weights(tmp_path / "whole", tmp_path / "again")
