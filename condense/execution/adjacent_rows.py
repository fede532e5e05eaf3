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


@dataclass(frozen=True)
class Place:
    """The input of the products with a weight and with those beside it, or the gradients of their outputs."""

    weight: int  # its id
    of_gradients: bool


class GroupRows:
    """The buffers of a group: `kept` is the number of a layer's segments whose gradients are needed at a time."""

    def __init__(self, num_layers: int, num_segments: int, kept: int):
        self.num_layers, self.num_segments, self.kept = num_layers, num_segments, kept
        self._uses: defaultdict[Place, Counter[int]] = defaultdict(Counter)  # of a place's layers
        self._buffers: dict[Place, Buffer] = {}

    def of_band(self, place: Place, layers: slice) -> "BandRows":
        """Counts a use of the place by each of the layers; the count tells which segment they are at."""
        uses = self._uses[place]
        newest = uses[layers.start]
        for number in range(layers.start, layers.stop):
            assert uses[number] == newest - (number - layers.start), "a band works on consecutive segments"
            uses[number] += 1
        return BandRows(self, place, layers, newest)

    def buffer(self, place: Place, tokens: int, width: int, like: torch.Tensor) -> Buffer:
        if place not in self._buffers:
            # The backward pass processes the latest segments first: when layer m + 1 is at a segment, layer m has
            # passed all but the next one after it. `kept` gradients are those of as many consecutive segments: the
            # weights must have a use in each.
            distance = min(self.num_segments, self.kept + 1) if place.of_gradients else self.num_segments
            num_segments = (self.num_layers - 1) * distance + self.num_segments
            self._buffers[place] = Buffer(like.new_empty(num_segments, tokens, width), distance)
        return self._buffers[place]

    def clear(self) -> None:
        self._buffers.clear()


@dataclass(frozen=True)
class BandRows:
    """The memory that a kernel writes the rows of a band's layers to."""

    group: GroupRows
    place: Place
    layers: slice
    newest: int

    def memory(self, num_rows: int, width: int, like: torch.Tensor) -> torch.Tensor:
        tokens = num_rows // (self.layers.stop - self.layers.start)
        return self.group.buffer(self.place, tokens, width, like).of_band(self.layers, self.newest)
