"""Copies from the device to the host that are on their way while the host launches other work."""

import torch


class HostCopy:
    """A tensor's values on the host. The copy begins at once; the host waits for it when it first reads the values."""

    def __init__(self, tensor: torch.Tensor):
        tensor = tensor.detach()
        is_on_its_way = tensor.is_cuda and not torch.compiler.is_compiling()
        self._values = tensor.to("cpu", non_blocking=is_on_its_way)  # into pinned memory
        self._copied: torch.cuda.Event | None = None
        if is_on_its_way:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(tensor.device))

    def values(self) -> torch.Tensor:
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        return self._values
