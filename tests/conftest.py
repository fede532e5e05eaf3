import gc
import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SLOW_TIMEOUT_S = 1800

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"


LAST = "condense"  # many files of seconds, which fill the workers evenly at the end; the others start processes


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.relative_to(ROOT / "tests").parts[0] == LAST)
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))


def pytest_collection_finish():
    gc.freeze()  # garbage collections, of which each `Trainer.train` makes one, then pass over what imports have made


@pytest.fixture(scope="session")
def stories() -> Path:
    """A real pretrained Llama of 260 thousand parameters, where it is at hand."""
    folder = SHARED / "models" / "stories260K"
    if not folder.exists():
        pytest.skip("needs ../shared/models/stories260K beside the checkout")
    return folder


@pytest.fixture(scope="session")
def novel() -> Path:
    path = SHARED / "data" / "novels" / "Austen_Emma.txt"
    if not path.exists():
        pytest.skip("needs ../shared/data/novels beside the checkout")
    return path
