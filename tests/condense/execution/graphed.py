"""Models whose groups of segments are replayed from recordings, with the fixture `counts`."""

import torch

from ..models import gradients, tiny_model

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
