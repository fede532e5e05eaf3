"""An output reports to one run of W&B, over all its resumptions. Offline: the files that `wandb sync` would send."""

import json
import signal
from pathlib import Path

import pytest

from condense import CondenseForCausalLM
from condense.training import train
from condense.training.recipe import load_recipe
from condense.training.stopping import Stopped
from condense.training.wandb_run import wandb_run

from .runs import folded_recipe
from .test_stopping import SignalInStep


@pytest.fixture(scope="module")
def wandb():
    return pytest.importorskip("wandb")


@pytest.fixture
def recipe(wandb, tmp_path, monkeypatch):
    for name in ("WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    fields = {"output": str(tmp_path / "my-run"), "checkpoints": {"every": 2, "keep": 3}, "report_to": "wandb"}
    return load_recipe(folded_recipe(tmp_path, (120, 3), global_batch=2, micro_batch=2, attention="eager", **fields))


def records(file) -> bytes:
    """The contents of a file of W&B, which is a LevelDB log: a long record is divided over blocks of 32 KiB.

    Seven bytes begin the file, and each part of a record: a checksum (4), the length (2) and the type (1).
    """
    data, start, found = file.read_bytes(), 7, b""
    while start + 7 <= len(data):
        if (left := -start % 2**15) and left < 7:  # too little of the block for another part
            start += left
            continue
        length = int.from_bytes(data[start + 4 : start + 6], "little")
        found += data[start + 7 : start + 7 + length]
        start += 7 + length
    return found


def test_a_resumed_output_continues_its_run(wandb, recipe, monkeypatch):
    begun = []
    init = wandb.init
    monkeypatch.setattr(wandb, "init", lambda **options: begun.append(init(**options)) or begun[-1])
    monkeypatch.setattr(CondenseForCausalLM, "forward", SignalInStep(2, micro_batches=1))
    with pytest.raises(Stopped):
        train.train(recipe, stop_on=[signal.SIGUSR1])
    train.train(recipe)
    number = json.loads((recipe.output / "wandb.json").read_text())["id"]
    assert [(run.id, run.name, run.project) for run in begun] == [(number, "my-run", "condense")] * 2
    assert wandb.run is None  # both are finished
    files = list((recipe.output / "wandb").glob("offline-run-*/*.wandb"))
    assert {file.name for file in files} == {f"run-{number}.wandb"}
    for text in (b"train/loss", b"tokens_per_second", b'"shortest"'):
        assert all(text in records(file) for file in files)
    assert all(run.config["recipe"] == recipe.model_dump(mode="json") for run in begun)


def test_a_refusal_names_what_to_do(wandb, recipe, monkeypatch):
    def refuse(**options):
        raise wandb.errors.UsageError("no API key")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ValueError, match="report_to=wandb: no API key. Log in with `wandb login`, set WANDB_MODE="):
        train.train(recipe)


class Run:
    """A run of W&B that only has an id."""

    def __init__(self, id, **options):
        self.id = id or "a-new-one"

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def test_a_run_that_is_killed_while_it_writes_the_id_starts_again(wandb, recipe, monkeypatch):
    def half(path, text, **options):
        with path.open("w") as file:
            file.write(text[: len(text) // 2])
        raise KeyboardInterrupt

    recipe.output.mkdir()
    monkeypatch.setattr(wandb, "init", Run)
    with monkeypatch.context() as killed:
        killed.setattr(Path, "write_text", half)
        with pytest.raises(KeyboardInterrupt), wandb_run(recipe):
            pass
    with wandb_run(recipe):
        pass
    assert json.loads((recipe.output / "wandb.json").read_text()) == {"id": "a-new-one"}


@pytest.mark.parametrize("text", ["", "{}", "[]", '"abc"'])
def test_an_unreadable_id_is_named(wandb, recipe, monkeypatch, text):
    recipe.output.mkdir()
    (recipe.output / "wandb.json").write_text(text)
    monkeypatch.setattr(wandb, "init", Run)
    with pytest.raises(ValueError, match=r"my-run/wandb\.json has no id .* Write .* or delete it"), wandb_run(recipe):
        pass
