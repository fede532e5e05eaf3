"""The host does not wait for the device between segments, proven on a device that holds no numbers.

On torch's meta device nothing can be read back, so a pass that reads back fails; and what is copied to
it is counted.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from condense import FoldedCache

from ..models import random_ids, tiny_model, torch_checkpoint


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
    model = tiny_model(torch.float32, **fields).to("meta")
    # The rotary tables' base is the one tensor whose values transformers looks at: it is made anew.
    model.model.rotary_emb = tiny_model(torch.float32).model.rotary_emb.to("meta")
    return model


def copies(call):
    with Copies() as counted:
        call()
    return counted.count


@pytest.mark.parametrize("schedule", ["sequential", "wavefront"])
@pytest.mark.parametrize("mode", ["training", "checkpointed training", "prefill"])
def test_segments_copy_nothing_to_the_device_and_read_nothing_back(schedule, mode):
    model = on_meta(schedule=schedule)
    if mode.startswith("checkpointed"):
        model._set_gradient_checkpointing(True, torch_checkpoint())

    def call(segments):
        ids = random_ids(2, 5 * segments)
        if mode == "prefill":
            with torch.no_grad():
                model.eval()(ids.to("meta"), past_key_values=FoldedCache(model.config), logits_to_keep=1)
        else:
            model.train()(ids.to("meta"), labels=ids).loss.backward()

    few, many = (copies(lambda segments=segments: call(segments)) for segments in (4, 16))
    assert 0 < many <= few


@torch.no_grad()
def test_a_new_token_reads_nothing_back():
    model = on_meta()
    cache = FoldedCache(model.config)
    model(random_ids(2, 13).to("meta"), past_key_values=cache)
    for _ in range(7):  # over a border
        assert copies(lambda: model(random_ids(2, 1).to("meta"), past_key_values=cache)) <= 4
