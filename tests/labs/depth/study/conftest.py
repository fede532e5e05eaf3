"""The small experiments run once for all tests of a folder."""

import pytest

from condense.labs.depth.study.data import load_corpus
from condense.labs.depth.study.models import SMALL
from condense.labs.depth.study.options import DepthOptions
from condense.labs.depth.study.pretraining import Setup


@pytest.fixture(scope="package")
def setup():
    return Setup(SMALL, load_corpus(DepthOptions(small=True), SMALL))
