"""What several tests of evaluations need."""

import pytest

from condense.training.small_llama import save_small_llama


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The folder of a small Llama with random weights."""
    folder = tmp_path_factory.mktemp("llama")
    save_small_llama(folder)
    return folder
