"""A run writes over no model, over no other program's files, and through no link."""

import shutil

import pytest

from condense.training.checkpoints.complete import MARKER
from condense.training.output_folder import check_output
from condense.training.output_lock import output_lock
from condense.training.recipe import load_recipe
from condense.training.train import train

from .runs import folded_recipe

REFUSED = "and no complete checkpoint to go on from, so the run would begin anew and write over what is there: set"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return folded_recipe(tmp_path_factory.mktemp("recipe"), (90, 2), global_batch=1)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_writes_over_no_model(recipe, tmp_path):
    """Neither another one, nor its own start, nor the result of a finished run whose checkpoints were deleted."""
    start = recipe.parent / "start"
    finished = load_recipe(recipe, [f"output={tmp_path / 'finished'}"])
    train(finished)
    check_output(finished.output)
    shutil.rmtree(tmp_path / "finished" / "checkpoint-2")
    shutil.copytree(start, tmp_path / "other")
    for output in (start, tmp_path / "other", tmp_path / "finished"):
        before = contents(output)
        with pytest.raises(ValueError, match=f"output={output} holds config.json {REFUSED}"):
            train(load_recipe(recipe, [f"output={output}"]))
        assert contents(output) == before


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("adapter_model.safetensors", True),
        ("pytorch_model.bin", True),
        ("checkpoint-500/model.safetensors", True),  # of transformers' Trainer: it would be removed as unfinished
        ("log.jsonl", True),
        ("recipe.json", True),
        ("tokenizer.json", True),
        ("slurm-17.out", False),
        ("checkpoint-best/x", False),
        ("tensorboard/events", False),
    ],
)
def test_another_programs_files(tmp_path, name, refused):
    (tmp_path / "out" / name).parent.mkdir(parents=True)
    (tmp_path / "out" / name).write_text("[]")
    if not refused:
        check_output(tmp_path / "out")
        return
    with pytest.raises(ValueError, match=f"out holds {name.partition('/')[0]} {REFUSED}"):
        check_output(tmp_path / "out")


def test_a_run_that_was_killed_goes_on(tmp_path):
    """Before its first checkpoint it has a recipe, and what it leaves is its own; after that it has a checkpoint."""
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "recipe.json").write_text('{"model": {}, "output": "o", "data": {}}')
    (tmp_path / "log.jsonl").touch()
    check_output(tmp_path)
    (tmp_path / "recipe.json").unlink()
    (tmp_path / "config.json").touch()
    (tmp_path / "checkpoint-4" / MARKER).touch()
    check_output(tmp_path)
    check_output(tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", [".run.lock", "log.jsonl", "model.safetensors", "recipe.json", "checkpoint-4"])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_run_writes_through_no_link(tmp_path, name, is_there):
    output, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    output.mkdir()
    if is_there:
        elsewhere.mkdir() if name.startswith("checkpoint") else elsewhere.write_text("precious")
    (output / name).symlink_to(elsewhere)
    (output / "checkpoint-2").mkdir()
    (output / "checkpoint-2" / MARKER).touch()
    with pytest.raises(ValueError, match=f"out/{name} is a link, and results are not written through links: delete it"):
        check_output(output)
    assert elsewhere.exists() == is_there


def test_a_lock_that_is_a_link_empties_no_file(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".run.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(ValueError, match=r"out/.run.lock is a link"), output_lock(tmp_path / "out"):
        pytest.fail("locked")
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_folder_that_is_a_link_is_a_folder(tmp_path):
    """Such as one on a larger disk."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "tensorboard").symlink_to(tmp_path)
    check_output(tmp_path / "out")
