"""Ranks that train a model with a sink have the gradients of the equations. The sink uses every weight once more."""

import os

import pytest
import torch

from tests.condense.models import random_ids, reference_gradients, tiny_model

from .ranks import run_ranks

pytestmark = pytest.mark.process

LENGTH = 18  # of each rank's text, in segments of 5


def model_of(**fields):
    return tiny_model(torch.float32, sink_token_id=7, memory_share=[1.0, 0.0, 0.3], **fields).train()


def assert_gradients(found, fields, ids):
    """They are those of the mean of the ranks' losses by the equations, in float64."""
    _, expected = reference_gradients(model_of(**fields), ids, detach_after=fields.get("bptt_segments"))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name].double(), gradient, atol=1e-4, rtol=1e-4)


def under_zero(stage: int, fields: dict, checkpoints: bool) -> None:
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    deepspeed.init_distributed("gloo")
    ids, rank = random_ids(2, LENGTH), int(os.environ["RANK"])
    ids[ids == 7] = 8
    model = model_of(**fields)
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False, "checkpoint_segments": 2})
    settings = {
        "train_batch_size": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    own = ids[rank : rank + 1]
    engine.backward(engine(own, labels=own).loss)
    found = {name: safe_get_full_grad(parameter) for name, parameter in engine.module.named_parameters()}
    assert_gradients(found, fields, ids)


def under_fsdp(fields: dict, checkpoints: bool) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    ids, rank = random_ids(2, LENGTH), dist.get_rank()
    ids[ids == 7] = 8
    model = model_of(**fields)
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False, "checkpoint_segments": 2})
    for module in (*model.model.layers, model.model, model):
        fully_shard(module, mesh=mesh)
    own = ids[rank : rank + 1]
    model(own, labels=own).loss.backward()
    assert_gradients({name: one.grad.full_tensor() for name, one in model.named_parameters()}, fields, ids)


@pytest.mark.parametrize(("fields", "checkpoints"), [({}, False), ({"bptt_segments": 1}, True)], ids=str)
@pytest.mark.parametrize(
    ("run", "arguments"), [(under_zero, (2,)), (under_zero, (3,)), (under_fsdp, ())], ids=["zero2", "zero3", "fsdp"]
)
def test_two_ranks_have_the_gradients_of_both_texts(run, arguments, fields, checkpoints):
    succeeded, printed = run_ranks(run, *arguments, fields, checkpoints)
    assert succeeded, printed[-3000:]
