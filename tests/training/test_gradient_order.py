"""Gradients that come in another order on each rank, as from a wave and from captured groups, against their mean."""

import json
import os

import pytest
import torch

from condense.training.gradient_order import reduce_in_order

from .ranks import run_ranks

pytestmark = pytest.mark.process

ORDERS = [(0, 1, 2, 3), (3, 1, 0, 2)]  # of each rank's uses: the last used weight has the first gradient


class Used(torch.nn.Module):
    """Uses its weights in an order of its own."""

    def __init__(self, order):
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.full((n + 1,), n + 1.0) for n in range(4)])
        self.order = order

    def forward(self, factor):
        total = torch.zeros(())
        for n in self.order:
            total = (total + (self.weights[n] * factor * (n + 1)).sum()) * 1.0
        return total


def one_step(stage: int, overlaps: bool, in_order: bool) -> None:
    import deepspeed

    rank = int(os.environ["RANK"])
    deepspeed.init_distributed("gloo")
    model = Used(ORDERS[rank])
    settings = {
        "train_batch_size": 2,
        "gradient_clipping": 1e9,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, "overlap_comm": overlaps},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, zero, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    if in_order:
        reduce_in_order(zero)
    engine.backward(engine(torch.tensor(1.0 + rank)))
    engine.step()
    print("WEIGHTS", json.dumps([weight.tolist() for weight in engine.module.weights]), flush=True)


@pytest.mark.parametrize(("stage", "overlaps"), [(1, False), (2, False), (2, True)])
def test_ranks_with_other_orders_have_the_mean_of_their_gradients(stage, overlaps):
    succeeded, printed = run_ranks(one_step, stage, overlaps, True)
    assert succeeded, printed[-3000:]
    found = [json.loads(line.split(" ", 1)[1]) for line in printed.splitlines() if line.startswith("WEIGHTS")]
    # The gradient of weight n is (n + 1) times the rank's factor, 1 or 2.
    expected = [[n + 1 - 1.5 * (n + 1)] * (n + 1) for n in range(4)]
    assert found == [expected, expected]


def test_deepspeed_alone_mixes_them():
    """The reason for the order: a release that no longer does this needs none."""
    succeeded, printed = run_ranks(one_step, 2, False, False)
    assert succeeded, printed[-3000:]
    found = [json.loads(line.split(" ", 1)[1]) for line in printed.splitlines() if line.startswith("WEIGHTS")]
    assert found[0] != [[n + 1 - 1.5 * (n + 1)] * (n + 1) for n in range(4)]
