"""Which shards are still needed, by what worker processes have read of them."""

from collections.abc import Sequence

import numpy as np

from .store import Need


class Needed:
    """Counts what shards hold. A shard is needed until the shards of its source up to it hold enough.

    The rest of the shard is then never merged: earlier shards and other sources that are still read only add documents
    before it. Documents are merged in batches, so `num_more` records after those that are enough are needed too.
    """

    def __init__(self, need: Need, max_documents: int | None, num_more: int, num_shards: Sequence[int]):
        self.need, self.num_more = need, num_more
        self.enough = np.array([need.amount, np.inf if max_documents is None else max_documents])
        self.held = [np.zeros((number, 2), int) for number in num_shards]  # of each shard: weight, kept documents
        self.more = [np.zeros(number, int) for number in num_shards]  # of each shard: records after what is enough

    def add(self, source: int, shard: int, num_read: int, lengths: Sequence[int]) -> None:
        """Counts a chunk of `num_read` records; `lengths` are the numbers of tokens of the documents that are kept."""
        if self._is_enough(source, shard):
            self.more[source][shard] += num_read
        self.held[source][shard] += int(self.need.weigh(np.array(lengths, dtype=int)).sum()), len(lengths)

    def __contains__(self, key: tuple[int, int]) -> bool:
        source, shard = key
        return not self._is_enough(source, shard) or self.more[source][: shard + 1].sum() < self.num_more

    def _is_enough(self, source: int, shard: int) -> bool:
        return bool((self.held[source][: shard + 1].sum(0) >= self.enough).any())
