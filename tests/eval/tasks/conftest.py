"""Models and texts of several tests."""

import pytest

from condense.training.small_llama import save_small_llama

from ..measuring import save_folded
from .documents import write_lines


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Writes a stock and a folded model of equal weights, a text, and texts of which the second is long."""
    folder = tmp_path_factory.mktemp("models")
    save_small_llama(folder / "llama", layers=3)
    save_folded(folder / "llama", folder / "folded", 8)
    (folder / "text.txt").write_text("The grass is green. The sky is blue. Here we go, there and back again. " * 12)
    texts = ["The grass is green.", "The sky is blue. Here we go, there and back again. " * 8]
    write_lines(folder / "texts.jsonl", [{"text": text} for text in texts])
    return folder
