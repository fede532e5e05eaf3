"""The ratios that the paper reports (section on memory and speed, figures 5 to 7): stock over folded, on one H100."""

from typing import NamedTuple


class Ratio(NamedTuple):
    """`attention` is "eager" without FlashAttention and "sdpa" with it."""

    length: int
    batch: int
    attention: str
    figure: str
    paper: float


RATIOS = (
    Ratio(8192, 1, "eager", "peak_bytes", 4.33),
    Ratio(4096, 4, "eager", "peak_bytes", 2.78),
    Ratio(16384, 1, "sdpa", "peak_bytes", 1.77),
    Ratio(4096, 4, "sdpa", "peak_bytes", 1.71),
    Ratio(4096, 1, "sdpa", "seconds", 1.68),
)
