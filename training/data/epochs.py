"""The order of a fixed number of sequences in each epoch."""

from functools import lru_cache

import numpy as np


class Epochs:
    """Maps the number of a sequence in a run to an index: each epoch has every index once, in an order of its own.

    Without a seed, every epoch has the indices in their order.
    """

    def __init__(self, seed: int | None):
        self.seed = seed

    def index(self, number: int, count: int) -> int:
        epoch, index = divmod(number, count)
        return index if self.seed is None else int(_order(self.seed, epoch, count)[index])


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)
