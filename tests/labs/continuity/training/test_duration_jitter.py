"""Durations near one unit in training, and of one unit in validation."""

import pytest
import torch

from condense.labs.continuity.training.duration_jitter import DurationJitter
from condense.training.recipe import Recipe
from tests.labs.autoregressivity.training.models import ids_of, perturbed_model

pytestmark = pytest.mark.unit


class Recorded(torch.nn.Module):
    """Remembers the durations that it is called with."""

    def __init__(self, model):
        super().__init__()
        self.model, self.durations = model, []

    def forward(self, **batch):
        self.durations.append(batch.get("durations"))
        return self.model(**batch)


@pytest.fixture(scope="module")
def model():
    return perturbed_model()


def batch_of(rows):
    ids_BN = ids_of(rows, 40)
    return {"input_ids": ids_BN, "labels": ids_BN}


def test_ranks_have_durations_of_their_own(monkeypatch):
    """Their generators are in the same state, and a resumed run goes on with it."""
    found = []
    for rank in (0, 1, 0):
        monkeypatch.setenv("RANK", str(rank))
        torch.manual_seed(7)
        found.append(DurationJitter().durations(ids_of(3, 20)))
    assert torch.equal(found[0], found[2]) and not (found[0] == found[1]).any()
    assert len(found[0].unique()) == 60


def test_durations(model):
    recorded, objective = Recorded(model), DurationJitter(jitter=0.25)
    torch.manual_seed(0)
    for _ in range(2):
        objective.losses(recorded, batch_of(32), 1)
    first, second = recorded.durations
    assert first.shape == (32, 40) and not torch.equal(first, second)
    both = torch.cat([first, second])
    assert 0.75 <= both.min() < 0.77 and 1.23 < both.max() <= 1.25
    # Uniform: mean 1 and standard deviation 0.25 / sqrt(3), within four standard errors.
    assert both.mean() == pytest.approx(1, abs=4 * 0.1443 / both.numel() ** 0.5)
    assert both.std() == pytest.approx(0.1443, abs=0.01)


@torch.no_grad()
def test_losses(model):
    batch, objective = batch_of(2), DurationJitter()
    torch.manual_seed(5)
    found = objective.losses(model, batch, 78).loss
    torch.manual_seed(5)
    durations_BN = objective.durations(batch["input_ids"])
    logits = model(batch["input_ids"], durations=durations_BN).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    even = model(batch["input_ids"]).logits
    plain = torch.nn.functional.cross_entropy(even[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    assert found.item() != pytest.approx(plain.item(), rel=1e-5)
    assert objective.evaluation_losses(model, batch | {}).loss.item() == pytest.approx(78 * plain.item(), rel=1e-5)


FIELDS = {
    "output": "runs/unused",
    "data": {"task": "passkey"},
    "stages": [{"total_length": 64, "steps": 100}],
    "global_batch": 1,
    "objective": {"kind": "duration_jitter"},
}


def test_a_stock_model_takes_no_durations():
    with pytest.raises(ValueError, match=r"needs a folded model, not model.kind='stock': set"):
        Recipe.model_validate(FIELDS | {"model": {"kind": "stock", "source": "any"}})


@pytest.mark.parametrize("jitter", [0, 1])
def test_no_duration_is_zero(jitter):
    with pytest.raises(ValueError, match="jitter"):
        DurationJitter(jitter=jitter)
