"""A classifier that walks from the uniform distribution to the class of an image, in T steps with shared weights.

The true states are h(t) = (1 - t/T) u + (t/T) 1_c, with u uniform and 1_c the one-hot class. A network f(h(t), x) gives
h(t + 1) for an image x. With T = 1 it is an ordinary classifier with a further, constant input.

Axes: B images, P pixels, C classes, T steps, D units.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from condense.training.data.digits import MAX_VALUE, NUM_PIXELS, load_digits, split

NUM_CLASSES = 10
EXPANSION = 2  # units of a block's inner layer, in multiples of D

Forcing = Literal["true", "own"]


@dataclass(frozen=True)
class ClassifierSize:
    hidden_size: int = 64
    blocks: int = 2
    batch: int = 64
    steps: int = 1000
    learning_rate: float = 2e-3


SMALL = ClassifierSize(hidden_size=16, blocks=1, batch=32, steps=40)


class Block(nn.Module):
    def __init__(self, hidden_size: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.up = nn.Linear(hidden_size, EXPANSION * hidden_size)
        self.down = nn.Linear(EXPANSION * hidden_size, hidden_size)

    def forward(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        return hidden_BD + self.down(F.gelu(self.up(self.norm(hidden_BD))))


class Network(nn.Module):
    """Computes the logits [B, C] of the next state from states [B, C] and images [B, P]."""

    def __init__(self, hidden_size: int, blocks: int):
        super().__init__()
        self.embed = nn.Linear(NUM_PIXELS + NUM_CLASSES, hidden_size)
        self.blocks = nn.Sequential(*(Block(hidden_size) for _ in range(blocks)))
        self.head = nn.Sequential(nn.LayerNorm(hidden_size), nn.Linear(hidden_size, NUM_CLASSES))

    def forward(self, state_BC: torch.Tensor, image_BP: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(torch.cat([image_BP, state_BC], dim=-1))))


def blocks_of_equal_operations(size: ClassifierSize, steps: int) -> int:
    """Returns the number of blocks with which one evaluation multiplies as often as `steps` evaluations of `size`."""
    ends = (NUM_PIXELS + 2 * NUM_CLASSES) * size.hidden_size
    block = 2 * EXPANSION * size.hidden_size**2
    return round((steps * (ends + size.blocks * block) - ends) / block)


def true_states(label_B: torch.Tensor, steps: int) -> torch.Tensor:
    """Returns h(0), ..., h(T) [B, T + 1, C]."""
    share_T1 = torch.arange(steps + 1)[:, None] / steps
    return (1 - share_T1) / NUM_CLASSES + share_T1 * F.one_hot(label_B, NUM_CLASSES)[:, None]


def walk_loss(
    network: nn.Module, image_BP: torch.Tensor, label_B: torch.Tensor, steps: int, forcing: Forcing
) -> torch.Tensor:
    """Returns the mean cross-entropy of the next true state over the T steps of each image.

    `forcing`: the network reads true states, or its own, which have no gradient.
    """
    state_BTC = true_states(label_B, steps)
    if forcing == "true":
        logits_BTC = network(state_BTC[:, :-1], image_BP[:, None].expand(-1, steps, -1))
        return F.cross_entropy(logits_BTC.flatten(0, 1), state_BTC[:, 1:].flatten(0, 1))
    losses, state_BC = [], state_BTC[:, 0]
    for step in range(1, steps + 1):
        logits_BC = network(state_BC, image_BP)
        losses.append(F.cross_entropy(logits_BC, state_BTC[:, step]))
        state_BC = logits_BC.detach().softmax(dim=-1)
    return torch.stack(losses).mean()


@torch.no_grad()
def walk(network: nn.Module, image_BP: torch.Tensor, steps: int, later_BP: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the logarithms of the network's own states after 1, ..., T steps from the uniform distribution [B, T, C].

    After its first step the network sees the images `later_BP`, if they are given, instead of `image_BP`.
    """
    state_BC, found = torch.full((len(image_BP), NUM_CLASSES), 1 / NUM_CLASSES), []
    for step in range(steps):
        seen_BP = image_BP if step == 0 or later_BP is None else later_BP
        found.append(network(state_BC, seen_BP).log_softmax(dim=-1))
        state_BC = found[-1].exp()
    return torch.stack(found, dim=1)


class Digits(NamedTuple):
    """Images [B, P] with values from 0 to 1, and their labels [B]."""

    image_BP: torch.Tensor
    label_B: torch.Tensor


def load(held_out: bool) -> Digits:
    values, digits = load_digits()
    training, others = split()
    numbers = others if held_out else training
    return Digits(torch.tensor(values[numbers]).float() / MAX_VALUE, torch.tensor(digits[numbers]))


def shuffled_labels(digits: Digits, seed: int) -> Digits:
    """Returns the same images with permuted labels."""
    order_B = torch.randperm(len(digits.label_B), generator=torch.Generator().manual_seed(seed))
    return digits._replace(label_B=digits.label_B[order_B])


def train_classifier(
    digits: Digits, size: ClassifierSize, blocks: int, steps: int, forcing: Forcing, seed: int
) -> tuple[Network, float]:
    """Returns a trained network of `blocks` blocks that walks in `steps` steps, and the operations of a training step.

    The seed sets the weights and the order of the images; this order does not depend on the other arguments.
    """
    torch.manual_seed(seed)
    network = Network(size.hidden_size, blocks)
    with FlopCounterMode(display=False) as counter:
        walk_loss(network, digits.image_BP[: size.batch], digits.label_B[: size.batch], steps, forcing).backward()
    network.zero_grad()
    optimizer = torch.optim.AdamW(network.parameters(), lr=size.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, size.learning_rate, total_steps=size.steps, pct_start=0.1, cycle_momentum=False
    )
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.long)
    for _ in range(size.steps):
        if len(order) < size.batch:
            order = torch.cat([order, torch.randperm(len(digits.label_B), generator=generator)])
        chosen_B, order = order[: size.batch], order[size.batch :]
        walk_loss(network, digits.image_BP[chosen_B], digits.label_B[chosen_B], steps, forcing).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return network.eval(), float(counter.get_total_flops())


def quality(network: Network, digits: Digits, steps: int) -> dict[str, Any]:
    """Measures a walk over held-out images:

    - `accuracy` and `loss` (in nats) of the last state, and `accuracies` of the likeliest class after each step;
    - `accuracy_other_images` of the last state, if each image is exchanged for another one after the first step. It
      equals the accuracy if later steps do not look at the image.
    """
    log_state_BTC = walk(network, digits.image_BP, steps)
    right_BT = log_state_BTC.argmax(dim=-1) == digits.label_B[:, None]
    others = walk(network, digits.image_BP, steps, digits.image_BP.roll(1, dims=0))[:, -1].argmax(dim=-1)
    return {
        "accuracy": float(right_BT[:, -1].double().mean()),
        "loss": float(F.nll_loss(log_state_BTC[:, -1], digits.label_B)),
        "accuracies": right_BT.double().mean(dim=0).tolist(),
        "accuracy_other_images": float((others == digits.label_B).double().mean()),
    }
