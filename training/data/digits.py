"""The images of scikit-learn's handwritten digits: each is a sequence of 64 pixels, row by row, of values from 0 to 16.

A fixed part of the images is held out for validation.
"""

import hashlib
from functools import cache
from typing import Any

import numpy as np

from .examples import IGNORE_INDEX, Example, Examples, index_in_epoch

SIDE = 8
NUM_PIXELS = SIDE * SIDE
MAX_VALUE = 16
NUM_IMAGES = 1797
NUM_HELD_OUT = 360
SPLIT_SEED = 0


@cache
def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns all images as integers [1797, 64], and the digits that they show [1797]. They come with scikit-learn."""
    from sklearn.datasets import load_digits as load  # takes a second

    data: Any = load()
    return data.data.astype(np.int64), data.target.astype(np.int64)


def split() -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of the 1,437 images to train on, and of the 360 to validate with."""
    order = np.random.default_rng(SPLIT_SEED).permutation(NUM_IMAGES)
    return order[NUM_HELD_OUT:], order[:NUM_HELD_OUT]


class DigitExamples(Examples):
    """Images by number; with a seed, each epoch has its own order. The place of an image is its number times 64."""

    def __init__(self, numbers: np.ndarray, seed: int | None):
        self.images, _ = load_digits()
        self.numbers, self.seed = numbers, seed

    def fingerprint(self) -> str:
        return hashlib.sha256(self.images[self.numbers].tobytes()).hexdigest()

    def sequence(self, number: int, total_length: int) -> list[Example]:
        assert total_length == NUM_PIXELS
        image = int(self.numbers[index_in_epoch(number, len(self.numbers), self.seed)])
        labels = self.images[image].copy()
        labels[0] = IGNORE_INDEX
        return [Example(self.images[image], labels, image * NUM_PIXELS)]
