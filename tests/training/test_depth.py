"""Training of a model with a depth block: two ranks of ZeRO-2 against one plain process, a stop, the stock hybrid."""

import shutil

import pytest
from transformers import AutoModelForCausalLM

from condense import CondenseForCausalLM
from condense.labs.depth.model import DepthLlamaForCausalLM, convert_to_depth, to_depth_llama

from .runs import assert_same_training, copy_checkpoint, expected, folded_recipe, logged, run, same_weights


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """A recipe whose model has a depth block in the place of its first layer."""
    folder = tmp_path_factory.mktemp("hybrid")
    rates = {"learning_rate": 2e-2, "final_learning_rate": 1e-3, "warmup_steps": 2}
    checkpoints = {"every": 4, "keep": 3}
    path = folded_recipe(folder, (120, 8), global_batch=8, micro_batch=2, optimizer=rates, checkpoints=checkpoints)
    model = CondenseForCausalLM.from_pretrained(folder / "start")
    convert_to_depth(model, 0, 1, control_size=2).save_pretrained(folder / "start")
    return path


@pytest.fixture(scope="module")
def finished(hybrid, tmp_path_factory):
    """The output of a run of two ranks of ZeRO-2, by the launcher."""
    output = tmp_path_factory.mktemp("finished")
    _, printed = run(hybrid, output, "gradient_checkpointing=true", launcher=True)
    assert printed.count("no control is given: the 2 components") == 2  # once on each rank
    return output


def alpha(folder):
    return CondenseForCausalLM.from_pretrained(folder).model.layers[0].alpha.item()


@pytest.mark.slow
def test_two_ranks_of_zero_2_train_a_block_as_one_plain_process(hybrid, finished):
    assert_same_training(hybrid, finished, tolerance=2e-4)
    losses = expected(hybrid)[0]
    assert losses[-1] < losses[0] - 0.3
    assert abs(alpha(finished) - 0.1) > 0.01 and alpha(hybrid.parent / "start") == pytest.approx(0.1)


@pytest.mark.slow
def test_a_run_with_a_block_goes_on_from_its_checkpoint(hybrid, finished, tmp_path):
    copy_checkpoint(finished, tmp_path, 4)
    losses, printed = run(hybrid, tmp_path, "gradient_checkpointing=true")
    assert "resuming from" in printed and losses == logged(finished)
    assert same_weights(finished, tmp_path)


@pytest.mark.slow
def test_the_stock_hybrid_trains_too(hybrid, tmp_path):
    """In bfloat16, whose losses are those of the folded hybrid with one segment, within rounding."""
    whole = tmp_path / "whole"
    model = CondenseForCausalLM.from_pretrained(hybrid.parent / "start", segment_length=128)
    shutil.copytree(hybrid.parent / "start", whole)
    to_depth_llama(model).save_pretrained(whole)
    options = ["dtype=bfloat16", "gradient_checkpointing=true"]
    losses, _ = run(hybrid, tmp_path / "stock", f"model={{kind: stock, source: {whole}}}", *options)
    folded, _ = run(hybrid, tmp_path / "folded", f"model={{segment_length: 128, source: {whole}}}", *options)
    assert losses == pytest.approx(folded, abs=5e-2) and losses[-1] < losses[0] - 0.3
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "stock")) is DepthLlamaForCausalLM
