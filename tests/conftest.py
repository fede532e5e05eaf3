import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SLOW_TIMEOUT_S = 1800

SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))


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
