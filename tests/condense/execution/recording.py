"""A CUDA graph on the CPU: the operations of a computation, recorded once and replayed on the same tensors."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from condense.execution import cuda_graph
from condense.execution.cuda_graph import Graphs, Pool


class Recording(TorchDispatchMode):
    """`written` are the tensors that the computation changes: a capture does not compute.

    Every tensor stays where it was recorded, and a replay writes its new values there, as a graph does.
    """

    def __init__(self, compute, written=()):
        super().__init__()
        before = [tensor.clone() for tensor in written]
        self.records = []
        with self:
            self.outputs = compute()
        for tensor, was in zip(written, before, strict=True):
            tensor.copy_(was)
        for output in self.outputs:
            output.data.zero_()  # not noticed by autograd, which a capture is not either

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten._local_scalar_dense.default, "the host reads a number"
        result = function(*args, **(kwargs or {}))
        self.records.append((function, args, kwargs or {}, result))
        return result

    def replay(self):
        with torch.inference_mode():  # the recorded tensors may be inference tensors
            for function, args, kwargs, result in self.records:
                new_result = function(*args, **kwargs)
                results = (result, new_result) if isinstance(result, tuple | list) else ([result], [new_result])
                for old, new in zip(*results, strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.data.copy_(new)


def recorded_graphs(monkeypatch, written=lambda compute: ()):
    """Recordings take the place of CUDA graphs; the counts of warm-ups, captures and replays."""
    counts = {"warm_up": 0, "capture": 0, "replay": 0}
    monkeypatch.setitem(cuda_graph.GRAPHS, "cpu", recordings(counts, written))
    return counts


def recordings(counts, written=lambda compute: ()):
    """`Graphs` of recordings; `counts` counts warm-ups, captures and replays."""

    def warm_up(compute, device):
        counts["warm_up"] += 1
        return compute()

    def capture(compute, device, pool=None):
        counts["capture"] += 1
        recording = Recording(compute, written(compute))

        def replay():
            counts["replay"] += 1
            recording.replay()

        return replay, recording.outputs

    return Graphs(lambda device: Pool(None, None), warm_up, capture)
