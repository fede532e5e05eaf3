"""Memory for the rows of a captured group: the rows of a layer's segments are adjacent, so one product reads them.

In a wave the layers of a band work on consecutive segments, the newest in the lowest layer. So their rows form one
tensor with a constant distance from each layer to the next.

Axes: m layers of a band, s segments, n tokens of a segment, F a width.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass

import torch


class Buffer:
    """Rows of all layers' segments, `distance` segments from each layer to the next.

    A layer may reuse the memory that another layer no longer needs, so the distance may be less than the segments.
    """

    def __init__(self, rows_snF: torch.Tensor, distance: int):
        self.rows_snF, self.distance = rows_snF, distance

    def of_band(self, layers: slice, newest: int) -> torch.Tensor:
        """Returns the rows [m, n, F] of consecutive layers; the first of them is at segment `newest`."""
        _, tokens, width = self.rows_snF.shape
        segment = tokens * width
        shape = layers.stop - layers.start, tokens, width
        strides = (self.distance - 1) * segment, width, 1
        # Not a view: autograd would treat a write to one part as a change of all.
        storage, first = self.rows_snF.untyped_storage(), (layers.start * self.distance + newest) * segment
        return self.rows_snF.new_empty(0).set_(storage, first, shape, strides)


class GroupRows:
    """The buffers of a group: `kept` is the number of a layer's segments whose gradients are needed at a time."""

    def __init__(self, num_layers: int, num_segments: int, kept: int):
        self.num_layers, self.num_segments, self.kept = num_layers, num_segments, kept
        self._uses: defaultdict[int, Counter[int]] = defaultdict(Counter)  # of a weight's layers
        self._buffers: dict[tuple[int, bool], Buffer] = {}

    def of_band(self, key: int, layers: slice) -> "BandRows":
        """Counts a use of the weights `key` by each of the layers; the count tells which segment they are at."""
        uses = self._uses[key]
        newest = uses[layers.start]
        for number in range(layers.start, layers.stop):
            assert uses[number] == newest - (number - layers.start), "a band works on consecutive segments"
            uses[number] += 1
        return BandRows(self, key, layers, newest)

    def buffer(self, key: int, of_gradients: bool, tokens: int, width: int, like: torch.Tensor) -> Buffer:
        if (key, of_gradients) not in self._buffers:
            # The backward pass processes the latest segments first: when layer m + 1 is at a segment, layer m has
            # passed all but the next one after it.
            distance = min(self.num_segments, self.kept + 1) if of_gradients else self.num_segments
            num_segments = (self.num_layers - 1) * distance + self.num_segments
            self._buffers[key, of_gradients] = Buffer(like.new_empty(num_segments, tokens, width), distance)
        return self._buffers[key, of_gradients]

    def clear(self) -> None:
        self._buffers.clear()


@dataclass(frozen=True)
class BandRows:
    """The memory that a kernel writes the rows of a band's layers to."""

    group: GroupRows
    key: int
    layers: slice
    newest: int

    def output(self, rows_xF: torch.Tensor) -> torch.Tensor:
        return self._rows(rows_xF, rows_xF.shape[-1], of_gradients=False)

    def gradient(self, rows_xF: torch.Tensor) -> torch.Tensor:
        return self._rows(rows_xF, 2 * rows_xF.shape[-1], of_gradients=True)

    def _rows(self, rows_xF: torch.Tensor, width: int, of_gradients: bool) -> torch.Tensor:
        tokens = rows_xF.numel() // rows_xF.shape[-1] // (self.layers.stop - self.layers.start)
        return self.group.buffer(self.key, of_gradients, tokens, width, rows_xF).of_band(self.layers, self.newest)
