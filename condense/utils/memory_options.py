"""Parses the options of a memory on command lines: shares of a layer's output, `0.2` or `1:0:0:0:0` for each layer, and
the token of its sink, or `none`."""


def parse_share(text: str) -> float | list[float]:
    """Returns one share, or one for each layer. Raises `ValueError` for other text and numbers outside 0 to 1."""
    try:
        shares = [float(part) for part in text.split(":")]
    except ValueError:
        shares = []
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise ValueError(f"the memory share {text!r}: pass a number from 0 to 1, or one for each layer (1:0:0:0:0).")
    return shares if ":" in text else shares[0]


def parse_sink(text: str) -> int | None:
    """Returns the id of a token, or None for `none`. Raises `ValueError` for other text."""
    if text != "none" and not text.isdecimal():
        raise ValueError(f"the sink {text!r}: pass the id of a token, such as the bos_token_id, or none.")
    return None if text == "none" else int(text)
