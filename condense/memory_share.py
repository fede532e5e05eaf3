"""Parses the memory shares of a layer's output on command lines: `0.2`, or `1:0:0:0:0` for each layer."""


def parse_share(text: str) -> float | list[float]:
    """Returns one share, or one for each layer. Raises `ValueError` for other text and numbers outside 0 to 1."""
    try:
        shares = [float(part) for part in text.split(":")]
    except ValueError:
        shares = []
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise ValueError(f"the memory share {text!r}: pass a number from 0 to 1, or one for each layer (1:0:0:0:0).")
    return shares if ":" in text else shares[0]
