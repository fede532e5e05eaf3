"""Models whose groups of segments are replayed from recordings, with the fixture `counts`."""

import copy

import torch

from ..models import assert_same_gradients, gradients, random_ids, reference_gradients, tiny_model

LENGTH = 33  # six whole segments of 5 and a short one
GROUPS = [None, 1, 2, 8]  # 2 leaves a group of its own kind at the beginning and at the end of a text


def graphed(dtype=torch.float64, schedule="graph", **fields):
    return tiny_model(dtype, schedule=schedule, **fields)


def uses(model, ids, times=2):
    """Calls for gradients: from the second on a graph is replayed."""
    for _ in range(times):
        gradients(model, ids)
    return model


def checkpointed(model, **options):
    options = {"checkpoint_segments": 2, **options}
    model.gradient_checkpointing_enable({"use_reentrant": False, **options})
    return model.train()


def trained(group, **fields):
    """A model whose segments are stored, or with checkpoints of so many segments."""
    model = graphed(**fields)
    return model.train() if group is None else checkpointed(model, checkpoint_segments=group)


def assert_follows_equations(model, *batches, detach_after=None):
    """At each use of another text: as without a graph, when it is captured, and from a replay."""
    for ids in batches or [random_ids(2, LENGTH, seed=seed) for seed in range(3)]:
        assert_same_gradients(gradients(model, ids), reference_gradients(model, ids, detach_after=detach_after), 1e-10)


def assert_as_in_order(gradients_of_model, atol=1e-10, rtol=1e-8):
    """What is computed of a model is the same in the sequential order and by graphs."""
    sequential, graph = (gradients_of_model(schedule) for schedule in ("sequential", "graph"))
    torch.testing.assert_close(graph, sequential, atol=atol, rtol=rtol)


def in_order(model):
    """A copy of the model that runs every call in the sequential order."""
    copied = copy.deepcopy(model)
    copied.config.schedule = "sequential"
    return copied
