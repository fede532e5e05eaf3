"""A CUDA graph on the CPU: the operations of a computation, recorded once and replayed on the same tensors."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from condense.execution.cuda_graph import Graphs


class Recording(TorchDispatchMode):
    """`written` are the tensors that the computation changes: a capture does not compute."""

    def __init__(self, compute, written=()):
        super().__init__()
        before = [tensor.clone() for tensor in written]
        self.records = []
        with self:
            self.outputs = compute()
        for tensor, was in zip(written, before, strict=True):
            tensor.copy_(was)
        with torch.no_grad():
            for output in self.outputs:
                output.zero_()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten._local_scalar_dense.default, "the host reads a number"
        result = function(*args, **(kwargs or {}))
        self.records.append((function, args, kwargs or {}, result))
        return result

    def replay(self):
        replayed = {}

        def current(item):
            if isinstance(item, torch.Tensor):
                return replayed.get(id(item), item)
            return type(item)(map(current, item)) if isinstance(item, tuple | list) else item

        with torch.no_grad():
            for function, args, kwargs, result in self.records:
                new_result = function(*map(current, args), **{name: current(value) for name, value in kwargs.items()})
                results = (result, new_result) if isinstance(result, tuple | list) else ([result], [new_result])
                replayed |= {id(old): new for old, new in zip(*results, strict=True)}
        with torch.inference_mode():  # the outputs may be inference tensors
            for output in self.outputs:
                output.copy_(current(output))


def recordings(counts, written=lambda compute: ()):
    """`Graphs` of recordings; `counts` counts warm-ups, captures and replays."""

    def warm_up(compute, device):
        counts["warm_up"] += 1
        return compute()

    def capture(compute, device):
        counts["capture"] += 1
        recording = Recording(compute, written(compute))

        def replay():
            counts["replay"] += 1
            recording.replay()

        return replay, recording.outputs

    return Graphs(warm_up, capture)
