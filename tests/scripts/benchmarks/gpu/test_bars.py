"""The ratios of the last table, and the reasons if it has none."""

import pytest

from scripts.benchmarks.gpu.bars import LONGEST_BAR, judge
from scripts.benchmarks.gpu.sizes import REAL

pytestmark = pytest.mark.unit


def test_unknown_limits_are_told():
    def longest(kind, tokens, failed):
        return {
            "row": "longest training text", "kind": kind, "attention": "sdpa", "segment_length": 512,
            "schedule": "sequential", "checkpointing": True, "longest": tokens, "failed": failed,
        }  # fmt: skip

    def verdict(*points):
        return judge(REAL, list(points))[-1]

    assert verdict()["met"] == "unmeasured"
    stock = longest("stock", 1024, 2048)
    assert verdict(stock, longest("folded", None, 8192))["met"] == "OOM"
    ended = verdict(stock, longest("folded", 1024 * LONGEST_BAR, None))
    assert ended["met"] == "yes" and "at least" in ended["of"]
    assert verdict(stock, longest("folded", 4096, None))["met"] == "unknown"
    assert verdict(stock, longest("folded", 4096, 8192))["met"] == "no"
    assert verdict(longest("stock", 1024, None), longest("folded", 4096, 8192))["met"] == "unknown"
