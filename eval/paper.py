"""The figures that the paper of the fold reports, shown in tables beside ours.

They were measured on one H100, on models of 1 and 3 billion parameters. Figure 8 is only a picture: it shows 100 % at
the finetuned lengths, and gives no numbers for lower accuracies.
"""

from typing import NamedTuple


class Ratio(NamedTuple):
    """A ratio of table I's models, stock over folded. `attention` is "eager" without FlashAttention, "sdpa" with it."""

    length: int
    batch: int
    attention: str
    figure: str
    paper: float


RATIOS = (  # figures 5 to 7
    Ratio(8192, 1, "eager", "peak_bytes", 4.33),
    Ratio(4096, 4, "eager", "peak_bytes", 2.78),
    Ratio(16384, 1, "sdpa", "peak_bytes", 1.77),
    Ratio(4096, 4, "sdpa", "peak_bytes", 1.71),
    Ratio(4096, 1, "sdpa", "seconds", 1.68),
)

# Figure 8: % of keys by tokens. The last two lengths were not in training.
PASSKEY = {2048: "100", 4096: "100", 8192: "100", 16384: "100", 32768: "below 100", 65536: "below 100"}
PASSKEY_SETTINGS = {"num_keys": 1, "num_digits": 4}

# Table II: F1 of ROUGE-1, ROUGE-2 and ROUGE-L by model (length of its finetuning) and tokens of the input.
ROUGE = {
    "Condensation (3 K)": {
        "0-512": (0.4501, 0.2232, 0.3242),
        "512-1024": (0.4368, 0.2008, 0.3022),
        "1024+": (0.3996, 0.1510, 0.2566),
        "overall": (0.4292, 0.1917, 0.2942),
    },
    "Condensation (5.5 K)": {
        "0-512": (0.4532, 0.2260, 0.3258),
        "512-1024": (0.4337, 0.2002, 0.3007),
        "1024+": (0.3985, 0.1501, 0.2557),
        "overall": (0.4282, 0.1918, 0.2936),
    },
    "Full-Finetuned (3 K)": {
        "0-512": (0.4432, 0.2155, 0.3162),
        "512-1024": (0.4271, 0.1953, 0.2947),
        "1024+": (0.3999, 0.1650, 0.2627),
        "overall": (0.4231, 0.1913, 0.2905),
    },
    "Instruction model": {
        "0-512": (0.3354, 0.1376, 0.2171),
        "512-1024": (0.3191, 0.1251, 0.1985),
        "1024+": (0.3022, 0.1095, 0.1820),
        "overall": (0.3180, 0.1236, 0.1981),
    },
}
ROUGE_SETTINGS = {"data": "cnn_dailymail", "temperature": 0.3, "new_tokens": 256}
