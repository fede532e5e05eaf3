"""The small experiments run once for all tests of a folder."""

import pytest

from condense.eval.depth.data import load_corpus
from condense.eval.depth.models import SMALL
from condense.eval.depth.options import DepthOptions
from condense.eval.depth.pretraining import Setup


@pytest.fixture(scope="package")
def setup():
    return Setup(SMALL, load_corpus(DepthOptions(small=True), SMALL))
