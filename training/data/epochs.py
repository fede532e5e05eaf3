"""The order of a fixed number of sequences in each epoch."""

from functools import lru_cache

import numpy as np


class Epochs:
    """Maps the number of a sequence to its place: each epoch has every place once, in its own order.

    Without a seed, every epoch has the places in their order.
    """

    def __init__(self, seed: int | None):
        self.seed = seed

    def place(self, number: int, num_places: int) -> int:
        epoch, place = divmod(number, num_places)
        return place if self.seed is None else int(_order(self.seed, epoch, num_places)[place])


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, num_places: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_places)
