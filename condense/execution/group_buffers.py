"""The workspace of one pass through a captured group: gradients of weights wait in it until one product adds many.

A product of a segment's few tokens takes as long to write its sum as to compute it. So the gradients of a layer's
outputs wait, with its inputs, until there are `WAITING_TOKENS` of them. Kernels write both so that the rows of a
layer's segments are adjacent: the product reads them without a copy. In a wave the layers of a band work on
consecutive segments, the newest in the lowest layer: their rows form one tensor with a constant distance from each
layer to the next.

The gradients of a norm's weights are added up in parts, one for each program of its kernel.

Axes: M layers, m layers of a band, s segments, n tokens of a segment, x a width, O and I output and input widths,
D hidden size, p programs of a kernel.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from ..ops.products import add_product, side_by_side
from ..ops.shared_weights import Begun
from .stacked_products import Gradients, add_products
from .static_sums import StaticSum

WAITING_TOKENS = 4096  # of a layer, before a product adds their gradients


class Buffer:
    """Rows of all layers' segments, `distance` segments from each layer to the next.

    A layer may reuse the rows that another layer no longer needs, so the distance may be less than the segments.
    """

    def __init__(self, rows_snx: torch.Tensor, distance: int):
        self.rows_snx, self.distance = rows_snx, distance

    def of_band(self, layers: slice, newest: int) -> torch.Tensor:
        """Returns the rows [m, n, x] of consecutive layers; the first of them is at segment `newest`."""
        _, tokens, width = self.rows_snx.shape
        segment = tokens * width
        shape = layers.stop - layers.start, tokens, width
        strides = (self.distance - 1) * segment, width, 1
        # Not a view: autograd would treat a write to one part as a change of all.
        storage, first = self.rows_snx.untyped_storage(), (layers.start * self.distance + newest) * segment
        return self.rows_snx.new_empty(0).set_(storage, first, shape, strides)


class GroupBuffers:
    """The buffers of a group that begins with segment `first`; each segment has `tokens` in all its rows."""

    def __init__(self, sums: Mapping[str, StaticSum], num_layers: int, first: int, num_segments: int, tokens: int):
        self.sums, self.num_layers = sums, num_layers
        self.first, self.num_segments, self.tokens = first, num_segments, tokens
        self._rows: dict[tuple[str, bool], Buffer] = {}
        self._parts: dict[tuple[str, int], torch.Tensor] = {}
        self._waiting: defaultdict[tuple, list[tuple[Gradients, torch.Tensor]]] = defaultdict(list)

    @property
    def begun(self) -> dict[str, Begun]:
        """Returns the sums by name, without tokens: they are those of the calls that replay the group."""
        return {name: (one, None) for name, one in self.sums.items()}

    def workspace(
        self, name: str, layers: slice, newest: int, width: int, like_RTx: torch.Tensor, of_gradients: bool
    ) -> torch.Tensor | None:
        """Returns the workspace [m, n, width] for a band's input of the products with a weight and with those beside
        it, or for the gradients of their outputs. The band's lowest layer is at segment `newest`.

        Returns None if no rows will wait, and for several texts in a wave: their rows aren't equally spaced.
        """
        if (
            self.tokens >= WAITING_TOKENS
            or name not in self.sums
            or layers.stop - layers.start not in (1, len(like_RTx))
        ):
            return None
        if (name, of_gradients) not in self._rows:
            # The backward pass processes the latest segments first: when layer m + 1 reaches segment s, layer m has
            # finished every segment after s + 1. The gradients that wait are those of as many consecutive segments:
            # the weights must have a use in each.
            kept = -(-WAITING_TOKENS // self.tokens)
            distance = min(self.num_segments, kept + 1) if of_gradients else self.num_segments
            num_segments = (self.num_layers - 1) * distance + self.num_segments
            rows_snx = like_RTx.new_empty(num_segments, self.tokens, width)
            self._rows[name, of_gradients] = Buffer(rows_snx, distance)
        return self._rows[name, of_gradients].of_band(layers, newest - self.first)

    def parts(self, name: str, layers: slice, num_parts: int, like_xD: torch.Tensor) -> torch.Tensor | None:
        """Returns the parts [m, num_parts, D] of the sum of a norm's weights, to which kernels add."""
        if name not in self.sums:
            return None
        if (name, num_parts) not in self._parts:
            shape = self.num_layers, num_parts, like_xD.shape[-1]
            self._parts[name, num_parts] = like_xD.new_zeros(shape, dtype=torch.float32)
        return self._parts[name, num_parts][layers]

    def add_products(self, names: Sequence[str], layers: slice, gradients: Gradients, input_mnI: torch.Tensor) -> None:
        """Adds the products of gradients [m, n, O] with their common input to the sums, now or together with others."""
        if self.tokens >= WAITING_TOKENS:
            add_products([self.sums.get(name) for name in names], layers, gradients, input_mnI)
            return
        input_mnI = input_mnI.detach()  # autograd's graph keeps this object, which must not keep the graph
        for number in range(len(input_mnI)):
            key = number + layers.start, *names
            self._waiting[key].append(([None if one is None else one[number] for one in gradients], input_mnI[number]))
            if len(self._waiting[key]) * self.tokens >= WAITING_TOKENS:
                self._add_waiting(*key)

    @torch.no_grad()
    def finish(self) -> None:
        """Adds the waiting gradients, and the parts of sums, at the end of a captured backward pass."""
        for key in list(self._waiting):
            self._add_waiting(*key)
        for (name, _), parts_MpD in self._parts.items():
            self.sums[name].add(parts_MpD.sum(1), slice(None))

    def _add_waiting(self, layer: int, *names: str) -> None:
        of_segments, inputs = zip(*self._waiting.pop((layer, *names))[::-1], strict=True)  # the latest came first
        trained = [number for number, one in enumerate(of_segments[0]) if one is not None]
        if not trained:
            return
        totals = [self.sums[names[number]].memory_MOx[layer] for number in trained]
        by_segment = [[gradients[number] for number in trained] for gradients in of_segments]
        joint_OI, joint = side_by_side(totals, dim=0), [side_by_side(one, dim=1) for one in by_segment]
        if joint_OI is not None and all(one is not None for one in joint):
            totals, by_segment = [joint_OI], [[one] for one in joint]
        input_nI = _join(inputs)
        for total_OI, of_outputs in zip(totals, zip(*by_segment, strict=True), strict=True):
            add_product(total_OI, _join(of_outputs).t(), input_nI)


def _join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    joined = side_by_side(parts, dim=0)
    return torch.cat(list(parts)) if joined is None else joined
