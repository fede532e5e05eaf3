"""A finished or interrupted run goes on with more steps or another learning rate, and with its optimizer's state."""

import resource
import subprocess
from pathlib import Path

import pytest
import torch

import condense.cli.main
from condense import CondenseForCausalLM
from condense.training import train
from condense.training.checkpoints.resume import describe_finished, find_checkpoint
from condense.training.recipe import load_recipe

from .runs import fails, folded_recipe, log_lines, logged, plain_training, run, same_weights

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    fields = {"optimizer": {"learning_rate": 1e-3, "final_learning_rate": 1e-3, "warmup_steps": 2}}
    fields |= {"attention": "eager", "checkpoints": {"every": 2, "keep": 9}}
    folder, stages = tmp_path_factory.mktemp("recipe"), [(120, 2), (100, 2)]
    return folded_recipe(folder, *stages, global_batch=4, micro_batch=2, **fields)


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory) -> Path:
    """The output of a run of 7 steps in one process, at a constant rate."""
    output = tmp_path_factory.mktemp("whole")
    train.train(load_recipe(recipe, [f"output={output}", "steps=7"]))
    return output


def learning_rates(output: Path) -> list[float]:
    return [line["learning_rate"] for line in log_lines(output)]


def test_more_steps_end_as_a_run_that_was_never_finished(recipe, whole, tmp_path, capsys):
    """Bit for bit, in one process; twice, the second time from a checkpoint that knows two numbers of steps."""
    for steps in (4, 5, 7):
        train.train(load_recipe(recipe, [f"output={tmp_path}", f"steps={steps}"]))
    printed = capsys.readouterr().out
    assert "checkpoint-5 with another recipe: stages was [{'total_length': 120, 'steps': 2}" in printed
    assert "The optimizer's state is kept, and the learning rate follows the new recipe." in printed
    assert logged(tmp_path) == logged(whole)
    assert same_weights(tmp_path, whole)


def test_more_steps_on_two_ranks_of_zero_2(recipe, tmp_path):
    run(recipe, tmp_path / "whole", "steps=7")
    run(recipe, tmp_path / "parts")
    run(recipe, tmp_path / "parts", "steps=7")
    assert same_weights(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize("share", [0.5, 1.5])
def test_a_full_disk_is_said_and_the_run_resumes(recipe, whole, tmp_path, share):
    """The limit of a file's size cuts off the weights, or only the optimizer's state, which is twice as large."""
    size = (whole / "model.safetensors").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * size), limits[1]))
    try:
        with pytest.raises(ValueError, match=f"^{tmp_path} can't be written: .*Make room, and start the same command"):
            train.train(load_recipe(recipe, [f"output={tmp_path}", "steps=7"]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    train.train(load_recipe(recipe, [f"output={tmp_path}", "steps=7"]))
    assert same_weights(tmp_path, whole)


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_learning_rate_holds_from_the_checkpoint_on(recipe, tmp_path, ranks):
    """Against a plain loop: four steps at the former rates, then three at a tenth of them, with the same moments."""
    other = ["steps=7", "optimizer.learning_rate=1e-4", "optimizer.final_learning_rate=1e-4"]
    for overrides in ([], other):
        if ranks == 1:
            train.train(load_recipe(recipe, [f"output={tmp_path}", *overrides]))
        else:
            run(recipe, tmp_path, *overrides)
    rates = [1e-3] * 4 + [1e-4] * 3
    assert learning_rates(tmp_path) == pytest.approx(rates, rel=1e-12)
    _, _, weights = plain_training(load_recipe(recipe, ["output=o", "steps=7"]), 1, rates)
    trained = CondenseForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, tensor in trained.items():
        torch.testing.assert_close(tensor, weights[name], atol=2e-5, rtol=0)


def test_an_interrupted_run_takes_another_rate_too(recipe, whole, tmp_path):
    """From a checkpoint of another output: step 5 of 7 is the first one at the new rate."""
    others = ["optimizer.learning_rate=2e-3", f"resume={whole / 'checkpoint-4'}"]
    train.train(load_recipe(recipe, [f"output={tmp_path}", "steps=7", *others]))
    assert [line["step"] for line in log_lines(tmp_path)] == [5, 6, 7]
    assert learning_rates(tmp_path)[0] > 1e-3  # of a cosine from 2e-3 to 1e-3
    assert not same_weights(tmp_path, whole)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["steps=3"], "4 steps are done, and the recipe has 3"),
        (["stages.0.total_length=100"], "stages was"),
        (["stages=[{total_length: 120, steps: 1}, {total_length: 100, steps: 9}]"], "stages was"),
        (["stages.1.steps=4", "stages.1.total_length=200"], "stages was"),
        (["steps=8", "optimizer.weight_decay=0.1"], "optimizer.weight_decay was 0.01 and is 0.1"),
    ],
    ids=["fewer steps", "other texts", "another order", "a longer longest text", "another weight decay"],
)
def test_what_a_run_can_not_follow_is_refused(recipe, whole, overrides, words):
    given = ["output=other", f"resume={whole / 'checkpoint-4'}"]
    assert find_checkpoint(load_recipe(recipe, [*given, "steps=9"])) == whole / "checkpoint-4"
    with pytest.raises(
        ValueError, match=f"{words}.*except for its steps and its learning rate: undo the change"
    ) as error:
        find_checkpoint(load_recipe(recipe, [*given, *overrides]))
    assert "optimizer.learning_rate" not in str(error.value)


def test_steps_of_a_recipe(recipe):
    assert [stage.steps for stage in load_recipe(recipe, ["steps=11"]).stages] == [2, 9]
    curriculum = ["stages=null", "global_batch=null", "curriculum={steps: 60, tokens_per_step: 4096}"]
    with pytest.raises(ValueError, match="steps=2: the stages before the last one have 2 steps; give a larger number"):
        load_recipe(recipe, ["steps=2"])
    text = recipe.read_text().replace("micro_batch: 2\n", "")
    recipe.with_name("curriculum.yaml").write_text(text)
    assert load_recipe(recipe.with_name("curriculum.yaml"), [*curriculum, "steps=70"]).steps == 70


def test_a_finished_run_says_so_and_starts_no_ranks(recipe, whole, monkeypatch, capsys, tmp_path):
    def start(*args, **kwargs):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(condense.CondenseForCausalLM, "from_pretrained", start)
    condense.cli.main.train(str(recipe), [f"output={whole}", "steps=7"])
    printed = capsys.readouterr().out
    assert f"all of its 7 steps are done, and the model is in {whole}" in printed
    assert f"from {whole}/checkpoint-7 with the optimizer's state, give more steps, such as steps=14" in printed
    for overrides in (["steps=8"], [f"output={tmp_path}"]):  # the controls
        assert describe_finished(load_recipe(recipe, [f"output={whole}", "steps=7", *overrides])) is None


def test_a_finished_run_without_its_model_is_not_finished(recipe, tmp_path):
    """It was killed after its last checkpoint: the ranks start, and write the model."""
    given = load_recipe(recipe, [f"output={tmp_path}"])
    train.train(given)
    assert describe_finished(given) is not None
    (tmp_path / "model.safetensors").unlink()
    assert describe_finished(given) is None
    (tmp_path / ".run.lock").write_text("{}")
    assert describe_finished(given) is None
    train.train(given)
    assert describe_finished(given) is not None and (tmp_path / "model.safetensors").exists()


def test_ranks_of_the_launcher_say_it_once(recipe, whole, tmp_path):
    assert "are done" not in fails(recipe, tmp_path, "optimizer.warmup_steps=9")
    run(recipe, tmp_path)
    before = (tmp_path / "model.safetensors").stat().st_mtime_ns
    _, printed = run(recipe, tmp_path)
    assert printed.count("this run is finished: all of its 4 steps are done") == 1, printed
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns == before


def test_what_a_run_prints(recipe, tmp_path):
    """Each notice once, and none about what is as it should be; at its end where the model is."""
    _, printed = run(recipe, tmp_path, "micro_batch=1")
    assert "accumulation" not in printed and printed.count("[transformers]") <= 1, printed
    assert printed.count(f"all 4 steps are done: the model is in {tmp_path}") == 1
