"""The launcher's command line."""

import pytest
import torch

from condense.training import launch
from condense.training.launch import _devices
from condense.training.recipe import load_recipe

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("visible", "ranks", "expected"),
    [
        (None, 2, ["--num_gpus", "2"]),
        ("2,3", 2, ["--include", "localhost:2,3"]),
        ("5, 3,1", 2, ["--include", "localhost:5,3"]),
    ],
)
def test_visible_gpus_are_the_ones_that_train(monkeypatch, visible, ranks, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert _devices(ranks) == expected


@pytest.mark.parametrize(("visible", "ranks"), [("1", 2), ("GPU-8932f937", 1)])
def test_gpus_that_the_launcher_can_not_be_told(monkeypatch, visible, ranks):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ValueError, match=f"CUDA_VISIBLE_DEVICES={visible}: {ranks} ranks need"):
        _devices(ranks)


def test_ranks_receive_the_recipe_that_was_resolved(monkeypatch, tmp_path):
    """With infinite numbers, which JSON does not have."""
    given, received = load_recipe("passkey_quickstart", ["optimizer.max_grad_norm=.inf", f"output={tmp_path}"]), []

    def run(command, environment):
        received.append(load_recipe(command[command.index("--recipe") + 1]))
        return 0

    monkeypatch.setattr(launch, "run_to_end", run)
    monkeypatch.setattr(launch, "was_finished", lambda output: True)
    launch.launch(given, ranks=1)
    assert received == [given] and received[0].model_fields_set == given.model_fields_set
