"""The walk to a label against naive loops over images and steps, and its experiment from end to end."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from condense.labs.autoregressivity.study.classification import DEEP, FREE, SHUFFLED, WALK, Classification
from condense.labs.autoregressivity.study.experiments import ablate
from condense.labs.autoregressivity.study.options import AblationOptions
from condense.labs.autoregressivity.study.walking_classifier import (
    SMALL,
    ClassifierSize,
    Network,
    blocks_of_equal_operations,
    load,
    quality,
    shuffled_labels,
    train_classifier,
    true_states,
    walk,
    walk_loss,
)


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return Network(8, 2)


@pytest.fixture(scope="module")
def some_digits():
    return load(held_out=False)._replace(**{k: v[:5] for k, v in load(held_out=False)._asdict().items()})


def test_true_states_by_hand():
    """Half of the way to class 3 of 10: all classes have 0.05, and class 3 has 0.5 more."""
    states = true_states(torch.tensor([3]), 2)[0]
    assert torch.equal(states[0], torch.full((10,), 0.1)) and states[1, 3] == pytest.approx(0.55)
    assert states[1, 0] == pytest.approx(0.05) and states[2].tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("forcing", ["true", "own"])
def test_the_loss_equals_a_loop_over_images_and_steps(network, some_digits, forcing):
    """A loop over images and steps; own states are numbers, so no gradient passes through them."""
    steps, terms = 3, []
    for image, label in zip(*some_digits, strict=True):
        own = [0.1] * 10
        for t in range(steps):
            true, target = ([(1 - s / steps) / 10 + s / steps * (c == label) for c in range(10)] for s in (t, t + 1))
            logits = network(torch.tensor([true if forcing == "true" else own]), image[None])[0]
            probabilities = logits.exp() / logits.exp().sum()
            terms.append(-sum(share * probabilities[c].log() for c, share in enumerate(target)))
            own = probabilities.tolist()
    expected = sum(terms) / len(terms)
    found = walk_loss(network, *some_digits, steps, forcing)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    gradients = [torch.autograd.grad(loss, list(network.parameters())) for loss in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_the_walk_equals_a_loop_and_knows_no_label(network, some_digits):
    images, labels = some_digits
    others = images.roll(1, dims=0)
    found, exchanged = walk(network, images, 3), walk(network, images, 3, others)
    for number in range(len(images)):
        for states, later in ((found, images), (exchanged, others)):
            state = torch.full((1, 10), 0.1)
            for t in range(3):
                state = network(state, (images if t == 0 else later)[number : number + 1]).softmax(-1)
                torch.testing.assert_close(states[number, t].exp(), state[0], rtol=1e-4, atol=1e-6)
    measured = quality(network, some_digits, 3)
    likeliest = found.argmax(-1)
    assert measured["accuracies"] == [pytest.approx((likeliest[:, t] == labels).double().mean()) for t in range(3)]
    assert measured["accuracy"] == measured["accuracies"][-1]
    assert measured["loss"] == pytest.approx(-found[range(5), -1, labels].mean().item())


def test_one_step_is_an_ordinary_classifier():
    """An ordinary training loop on class numbers, with the same weights and order, gives the same network."""
    digits, size = load(held_out=False), ClassifierSize(hidden_size=8, blocks=1, batch=500, steps=5)
    found, _ = train_classifier(digits, size, 1, 1, "true", seed=3)
    torch.manual_seed(3)
    network = Network(8, 1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=size.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, size.learning_rate, total_steps=5, pct_start=0.1, cycle_momentum=False
    )
    generator = torch.Generator().manual_seed(3)
    order = torch.cat([torch.randperm(len(digits.label_B), generator=generator) for _ in range(2)])
    for step in range(5):
        chosen = order[500 * step : 500 * (step + 1)]
        logits = network(torch.full((500, 10), 0.1), digits.image_BP[chosen])
        optimizer.zero_grad()
        F.cross_entropy(logits, digits.label_B[chosen]).backward()
        optimizer.step()
        schedule.step()
    for one, other in zip(found.parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_deeper_network_has_the_operations_of_the_walk():
    size = ClassifierSize()
    images = torch.zeros(1, 64)
    for steps in (1, 2, 4, 8, 16):
        counted = []
        for blocks, evaluations in ((size.blocks, steps), (blocks_of_equal_operations(size, steps), 1)):
            with FlopCounterMode(display=False) as counter:
                walk(Network(size.hidden_size, blocks), images, evaluations)
            counted.append(counter.get_total_flops())
        one_block = 2 * 2 * 2 * size.hidden_size**2
        assert abs(counted[0] - counted[1]) <= one_block / 2, steps


def test_shuffled_labels_are_the_same_ones_at_other_images():
    digits = load(held_out=False)
    shuffled = shuffled_labels(digits, 1)
    assert torch.equal(shuffled.image_BP, digits.image_BP)
    assert torch.equal(shuffled.label_B.bincount(), digits.label_B.bincount())
    assert (shuffled.label_B == digits.label_B).double().mean() < 0.2


def test_the_experiment_from_end_to_end(tmp_path):
    results = ablate("classification", tmp_path, AblationOptions(small=True, seeds=2))
    cells = {(cell["classifier"], cell["steps"], cell["seed"]): cell for cell in results["cells"]}
    assert len(cells) == 10 and results["size"]["steps"] == SMALL.steps
    assert cells[WALK, 1, 0]["accuracy"] > 0.5 and all(cells[SHUFFLED, 2, seed]["accuracy"] < 0.3 for seed in (0, 1))
    for forced in (WALK, FREE):
        assert cells[forced, 2, 0]["parameters"] == cells[WALK, 1, 0]["parameters"] < cells[DEEP, 2, 0]["parameters"]
    assert cells[WALK, 1, 0]["accuracy"] != cells[WALK, 1, 1]["accuracy"]
    (table,) = Classification.tables(json.loads((tmp_path / "ablation_classification.json").read_text()))
    assert [row[:2] for row in table.rows] == [["direct", 1], [WALK, 2], [FREE, 2], [DEEP, 2], [SHUFFLED, 2]]
    assert all((tmp_path / f"ablation_classification.{kind}").exists() for kind in ("csv", "png", "svg"))
