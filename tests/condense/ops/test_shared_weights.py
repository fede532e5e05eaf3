"""Gradients of weights that the segments of a call share, in bfloat16 and under autocast.

With memories that are detached at every border, each use of a weight serves the loss of one segment. So the exact
gradient is the sum of those of the segments' losses, each computed separately and all added in float64.
"""

import weakref
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

import condense.loss
from condense import CondenseForCausalLM, modeling
from condense.ops import shared_weights
from condense.ops.shared_weights import SharedWeights
from condense.ops.weight_sum import WeightSum

from ..execution.recording import recorded_graphs
from ..models import random_ids, tiny_model, torch_checkpoint

pytestmark = pytest.mark.process

SEGMENTS, LENGTH = 12, 5
IDS = random_ids(1, SEGMENTS * LENGTH)
# Two roundings to bfloat16, of a use and of the sum, are an error of 0.002 to 0.004. Sums in bfloat16 have
# errors of 0.006 to 0.024. The two uses of a bias nearly cancel.
ROUNDED_TWICE, ROUNDED_TWICE_BIAS = 0.005, 0.01


def model_of(dtype=torch.bfloat16, **fields) -> CondenseForCausalLM:
    return tiny_model(dtype, bptt_segments=1, num_hidden_layers=2, **fields).train()


def gradients(model, labels=IDS, autocast=False) -> dict[str, torch.Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        loss = model(IDS[:, : labels.shape[1]], labels=labels, num_items_in_batch=1).loss
    loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def checkpointed(model, group):
    """A model with checkpoints of so many segments, None without; a graph is captured."""
    if group is not None:
        model._set_gradient_checkpointing(True, torch_checkpoint(checkpoint_segments=group))
    if model.config.schedule == "graph":
        for _ in range(2):
            gradients(model)
    return model


@cache
def exact_gradients(dtype=torch.bfloat16, autocast=False, schedule="sequential", **fields) -> dict:
    model = checkpointed(model_of(dtype, schedule=schedule, **fields), None)
    sums = {name: torch.zeros_like(weight, dtype=torch.float64) for name, weight in model.named_parameters()}
    for segment in range(SEGMENTS):
        first = segment * LENGTH + 1  # the token that is predicted from the segment's first
        labels = torch.full_like(IDS, -100)
        labels[:, first : first + LENGTH] = IDS[:, first : first + LENGTH]
        read = labels if schedule == "graph" else labels[:, : first + LENGTH]  # a graph is of one length
        for name, gradient in gradients(model, read, autocast).items():
            sums[name] += gradient
    return sums


def assert_rounded_twice(found, exact) -> None:
    assert found.keys() == exact.keys()
    for name in exact:
        bound = ROUNDED_TWICE_BIAS if name.endswith("bias") else ROUNDED_TWICE
        assert relative_error(found[name], exact[name]) < bound, name


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


SCHEDULES = {
    "in order": ("sequential", None),
    "wave": ("wavefront", None),
    "checkpoints": ("sequential", 1),
    "checkpointed waves": ("wavefront", 8),
    "graph": ("graph", None),
    "checkpointed graph": ("graph", 1),
}


TIED, WIDE = {"tie_word_embeddings": True}, {"vocab_size": 200}  # more rows than the text has tokens: these wait
FIELDS = [{}, TIED, WIDE, TIED | WIDE, {"family": "qwen2"}, {"family": "qwen3"}]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize(("schedule", "group"), SCHEDULES.values(), ids=SCHEDULES)
def test_sums_in_bfloat16(schedule, group, fields, monkeypatch):
    recorded_graphs(monkeypatch)
    model = checkpointed(model_of(schedule=schedule, **fields), group)
    assert_rounded_twice(gradients(model), exact_gradients(schedule=schedule, **fields))


class OfTheEmbedding(TorchDispatchMode):
    """The operations whose result has the embedding's shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.found = shape, []

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        result = operation(*arguments, **options or {})
        is_new = isinstance(result, torch.Tensor) and result.shape == self.shape and not operation.is_view
        if is_new:
            self.found.append(operation.overloadpacket.__name__)
        return result


@pytest.mark.parametrize("fields", [TIED | WIDE, WIDE], ids=str)
def test_operations_of_the_size_of_the_embedding(fields):
    """If it is tied, the head's gradient is computed, scaled, and gets the rows of the tokens. An embedding of its own
    has these on zeros. There is no sum in float32, and no addition of two gradients."""
    model = model_of(schedule="sequential", **fields)
    with OfTheEmbedding(model.lm_head.weight.shape) as operations:
        gradients(model)
    own = [] if "tie_word_embeddings" in fields else ["zeros_like"]
    assert operations.found == ["mm", "mul", *own, "index_add_"]


def test_rows_that_are_as_many_as_the_embeddings_are_summed_densely():
    weight = torch.nn.Parameter(torch.zeros(4, 2, dtype=torch.bfloat16))
    one = WeightSum([weight])
    for _ in range(3):
        one.add_rows(torch.tensor([1, 1, 3]), torch.ones(3, 2, dtype=torch.bfloat16))
    one.give(torch.full((4, 2), 0.5, dtype=torch.bfloat16))
    (found,) = one.take()
    assert found.dtype == torch.bfloat16 and found[:, 0].tolist() == [0.5, 6.5, 0.5, 3.5]
    assert one.take() == [None]


@pytest.mark.parametrize("group", [None, 1])
def test_sums_under_autocast(group, monkeypatch):
    """Weights are float32, and their gradients too: only the products are rounded, the head's in each block."""
    monkeypatch.setattr(condense.loss, "BLOCK_TOKENS", LENGTH)
    model = checkpointed(model_of(torch.float32, schedule="sequential", family="qwen2"), group)
    exact = exact_gradients(torch.float32, autocast=True, family="qwen2")
    found = gradients(model, autocast=True)
    assert max(relative_error(found[name], exact[name]) for name in exact) < 1e-5


def test_a_weight_is_cast_once_under_autocast(noted):
    """A copy for each segment would hold the weights as often as the text has segments."""
    model, casts = model_of(torch.float32, schedule="sequential"), noted(SharedWeights, "cast")
    gradients(model, autocast=True)
    storages = {call.result.untyped_storage().data_ptr() for call in casts}
    assert len(casts) > SEGMENTS * len(storages) and len(storages) == 7 * 2 + 1


def test_weights_that_are_frozen_or_have_hooks():
    """A hook on a parameter sees its gradient once, as ZeRO and DistributedDataParallel expect."""
    model, seen = model_of(schedule="wavefront"), []
    for name, weight in model.named_parameters():
        weight.requires_grad_("layers.0" not in name)
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(lambda weight: seen.append(id(weight)))
    found = gradients(model)
    exact = exact_gradients(schedule="wavefront")
    exact = {name: gradient for name, gradient in exact.items() if "layers.0" not in name}
    assert len(seen) == len(set(seen)) == len(exact)
    assert all(found.pop(name) is None for name in list(found) if "layers.0" in name)
    assert_rounded_twice(found, exact)


def test_backward_passes_do_not_add_to_each_other():
    """A pass for some tensors never reaches the weights, and a graph may be kept for another pass."""
    model = model_of(schedule="sequential")
    embeds = model.model.embed_tokens(IDS).detach().requires_grad_()
    loss = model(inputs_embeds=embeds, labels=IDS, num_items_in_batch=1).loss
    weight = model.model.layers[1].mlp.up_proj.weight
    torch.autograd.grad(loss, embeds, retain_graph=True)
    (once,) = torch.autograd.grad(loss, weight, retain_graph=True)
    (twice,) = torch.autograd.grad(loss, weight)
    assert torch.equal(once, twice)
    assert torch.equal(once, gradients(model)["model.layers.1.mlp.up_proj.weight"])


@pytest.mark.parametrize(
    ("schedule", "dtype"),
    [("sequential", torch.bfloat16), ("wavefront", torch.bfloat16), ("sequential", torch.float32)],
    ids=["in order", "wave", "autocast"],
)
def test_second_derivatives_are_those_of_autograd(schedule, dtype, monkeypatch):
    """The gradient of a squared gradient of the logits."""
    found = []
    for share in (shared_weights.share_weights, lambda recomputed, sums=True: nullcontext()):
        monkeypatch.setattr(modeling, "share_weights", share)
        model = model_of(dtype, schedule=schedule, attn_implementation="eager")
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            logits = model(IDS[:, : 3 * LENGTH], use_cache=False).logits
        lower, upper = (layer.mlp.up_proj.weight for layer in model.model.layers)
        (first,) = torch.autograd.grad(logits.square().mean(), lower, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), upper)[0])
    assert relative_error(found[0], found[1].double()) < 0.01


def test_batched_gradients():
    model = model_of(schedule="sequential")
    embeds = model.model.embed_tokens(IDS[:, : 2 * LENGTH]).detach().requires_grad_()
    logits = model(inputs_embeds=embeds, use_cache=False).logits
    grads = torch.randn(2, *logits.shape, generator=torch.Generator().manual_seed(0)).to(logits.dtype)
    (batched,) = torch.autograd.grad(logits, embeds, grads, is_grads_batched=True, retain_graph=True)
    for one, each in zip(batched, grads, strict=True):
        (expected,) = torch.autograd.grad(logits, embeds, each, retain_graph=True)
        torch.testing.assert_close(one, expected, rtol=0.05, atol=0.05)


@pytest.mark.usefixtures("collected_by_hand")
def test_sums_are_freed_with_the_graph(monkeypatch):
    model, made, make = model_of(schedule="sequential"), [], WeightSum.__init__

    def noted(self, *given):
        made.append(weakref.ref(self))
        make(self, *given)

    monkeypatch.setattr(WeightSum, "__init__", noted)
    gradients(model)
    assert made and all(one() is None for one in made)


@pytest.mark.parametrize(
    ("dtype", "schedule", "group", "error", "words"),
    [
        (torch.bfloat16, "sequential", None, RuntimeError, "modified by an inplace operation"),
        (torch.bfloat16, "wavefront", None, RuntimeError, "modified by an inplace operation"),
        (torch.float64, "wavefront", None, RuntimeError, "modified by an inplace operation"),
        (torch.float64, "auto", 1, ValueError, "weights have changed since the forward pass"),  # when it is used again
    ],
)
def test_a_weight_that_changes_before_the_backward_pass_is_refused(dtype, schedule, group, error, words):
    model = checkpointed(model_of(dtype, schedule=schedule), group)
    loss = model(IDS, labels=IDS).loss
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(2)
    with pytest.raises(error, match=words):
        loss.backward()


def test_checkpoints_of_a_functional_call_are_refused_outside_of_it():
    model = checkpointed(model_of(torch.float64), 1)
    weights = {name: (2 * weight).detach().requires_grad_() for name, weight in model.named_parameters()}
    loss = functional_call(model, weights, (IDS,), {"labels": IDS}).loss
    with pytest.raises(ValueError, match="within functional_call"):
        loss.backward()
