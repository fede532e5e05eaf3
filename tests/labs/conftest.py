"""Fixtures of the folders that a laboratory's slices belong to."""

from tests.eval.conftest import coarse_pictures, nothing_is_trained
from tests.training.conftest import curves

__all__ = ["coarse_pictures", "curves", "nothing_is_trained"]
