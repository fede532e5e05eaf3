"""The order in which a fixed number of sequences is asked for, again and again."""

from functools import lru_cache

import numpy as np


class Epochs:
    """Maps the number of a sequence to its place: each epoch all places once, in an order of its own.

    Without a seed all epochs have the order of the places.
    """

    def __init__(self, seed: int | None):
        self.seed = seed

    def place(self, number: int, num_places: int) -> int:
        epoch, place = divmod(number, num_places)
        return place if self.seed is None else int(_order(self.seed, epoch, num_places)[place])


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, num_places: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_places)
