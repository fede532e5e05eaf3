"""The host does not wait for the device between segments.

torch's meta device holds no numbers: a call that reads a number back fails. The tests count copies to the device.
"""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from condense import FoldedCache, modeling
from condense.ops.host_copy import HostCopy

from ..models import gradients, padded_batch, random_ids, tiny_model, torch_checkpoint
from .recording import recorded_graphs


class Copies(TorchDispatchMode):
    """Counts copies from the host to the device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            source = args[1] if function.overloadpacket is torch.ops.aten.copy_ else args[0]
            self.count += source.device.type == "cpu" and result.device.type == "meta"
        return result


def on_meta(**fields):
    model = tiny_model(torch.float32, num_hidden_layers=2, **fields)
    rotary_emb = copy.deepcopy(model.model.rotary_emb)
    model = model.to("meta")
    # transformers reads the values of the rotary frequencies, so these move alone.
    model.model.rotary_emb = rotary_emb.to("meta")
    return model


def num_copies(call):
    with Copies() as counted:
        call()
    return counted.count


@pytest.mark.parametrize("schedule", ["sequential", "wavefront"])
@pytest.mark.parametrize("mode", ["training", "checkpointed training", "prefill"])
def test_segments_neither_copy_to_the_device_nor_read_back(schedule, mode):
    model = on_meta(schedule=schedule)
    if mode.startswith("checkpointed"):
        model._set_gradient_checkpointing(True, torch_checkpoint(checkpoint_segments=2))

    def call(segments):
        ids = random_ids(2, 5 * segments)
        if mode == "prefill":
            with torch.no_grad():
                model.eval()(ids.to("meta"), past_key_values=FoldedCache(model.config), logits_to_keep=1)
        else:
            model.train()(ids.to("meta"), labels=ids).loss.backward()

    few, many = (num_copies(lambda segments=segments: call(segments)) for segments in (4, 8))
    assert 0 < many <= few


@pytest.mark.parametrize("schedule", ["sequential", "wavefront", "graph"])
def test_labels_are_read_back_after_layers_are_launched(schedule, monkeypatch):
    """Before, the host would wait for the device to end the step before, and the device then for the host."""
    recorded_graphs(monkeypatch)
    model, ids, order = tiny_model(schedule=schedule).train(), random_ids(2, 23), []
    gradients(model, ids)  # a graph is captured at the second use
    values, make = HostCopy.values, modeling.make_executor

    def make_noting(*arguments):
        executor = make(*arguments)
        for name in ("submit", "finish"):
            method = getattr(executor, name)

            def noting(*metadata, method=method):
                outputs = method(*metadata)
                order.extend(["launched"] * len(outputs))
                return outputs

            setattr(executor, name, noting)
        return executor

    monkeypatch.setattr(modeling, "make_executor", make_noting)
    monkeypatch.setattr(HostCopy, "values", lambda copy: order.append("read") or values(copy))
    gradients(model, ids)
    assert order.index("read") == (5 if schedule == "graph" else 1)  # chunks whose last layer was launched
    assert order.count("read") == 1


def test_a_mask_on_the_host_is_not_moved():
    model, ids, mask = on_meta().train(), *padded_batch([7, 18, 12], "right")[1:]
    model(ids.to("meta"), attention_mask=mask, labels=ids).loss.backward()  # a meta tensor has no values to read
    assert all(weight.grad.is_meta for weight in model.parameters())


@torch.no_grad()
def test_a_mask_is_read_once(monkeypatch):
    """A copy of it, or of a part, would fail: the mask on the device has no numbers except for its one reader."""
    model, ids, mask = tiny_model(), *padded_batch([7, 18, 12], "right")[1:]
    expected = model(ids, attention_mask=mask).logits
    on_device, cpu = mask.to("meta"), torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda one: mask if one is on_device else cpu(one))
    assert torch.equal(model(ids, attention_mask=on_device).logits, expected)


@torch.no_grad()
def test_a_decoding_step_does_not_read_back():
    model = on_meta()
    cache = model(random_ids(2, 13).to("meta")).past_key_values
    for _ in range(7):  # across a segment border
        assert num_copies(lambda: model(random_ids(2, 1).to("meta"), past_key_values=cache)) <= 4
