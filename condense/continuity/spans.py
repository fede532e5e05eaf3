"""Which tokens of a text a part of it is, whatever the tokenizer."""

from typing import Any, NamedTuple


class TextSpan(NamedTuple):
    """Tokens `first` up to `end`, without `end`. `exact`: they are the part and white space around it, nothing else."""

    first: int
    end: int
    exact: bool

    @property
    def tokens(self) -> range:
        return range(self.first, self.end)

    @property
    def is_one_token(self) -> bool:
        return self.exact and self.end - self.first == 1


def encode_with_places(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids as the tokenizer gives them, special tokens included, and where each lies in the text.

    White space at a token's ends is not part of its place. Raises `ValueError` for a tokenizer that can't tell places.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{type(tokenizer).__name__} does not tell where its tokens lie: load a fast tokenizer.")
    encoded = tokenizer(text, return_offsets_mapping=True)
    places = []
    for start, end in encoded["offset_mapping"]:
        places.append(_without_space(text, start, end))
    return list(encoded["input_ids"]), places


def find_spans(tokenizer: Any, text: str, part: str, whole_words: bool = True) -> list[TextSpan]:
    """Every place where `part` stands in `text`. Raises `ValueError` where it stands nowhere."""
    part = part.strip()
    _, places = encode_with_places(tokenizer, text)
    spans, start = [], text.find(part) if part else -1
    while start >= 0:
        end = start + len(part)
        goes_on_before = start > 0 and text[start - 1].isalnum() and part[0].isalnum()
        goes_on_behind = text[end : end + 1].isalnum() and part[-1].isalnum()
        if whole_words and (goes_on_before or goes_on_behind):
            start = text.find(part, start + 1)
            continue
        spans.append(_covering(places, start, end, part))
        start = text.find(part, end)
    if not spans and part and part in text:
        raise ValueError(f"{part!r} stands in {text!r} only within longer words: pass whole_words=False for those.")
    if not spans:
        raise ValueError(f"{part!r} does not stand in {text!r}.")
    return spans


def span_between(tokenizer: Any, text: str, start: int, end: int) -> TextSpan:
    """The tokens of `text[start:end]`, white space at its ends left out."""
    if not 0 <= start < end <= len(text):
        raise ValueError(f"characters {start} to {end} of a text of {len(text)}: name a part of it.")
    first, last = _without_space(text, start, end)
    if first == last:
        raise ValueError(f"characters {start} to {end} of {text!r} hold nothing but white space.")
    return _covering(encode_with_places(tokenizer, text)[1], first, last, text[first:last])


def _without_space(text: str, start: int, end: int) -> tuple[int, int]:
    part = text[start:end]
    first = start + len(part) - len(part.lstrip())
    return first, max(first, end - len(part) + len(part.rstrip()))


def _covering(places: list[tuple[int, int]], start: int, end: int, part: str) -> TextSpan:
    tokens = [n for n, (first, last) in enumerate(places) if first < end and last > start]
    if not tokens:
        raise ValueError(f"no token of the text covers {part!r}: its tokenizer drops it.")
    exact = places[tokens[0]][0] == start and places[tokens[-1]][1] == end
    return TextSpan(tokens[0], tokens[-1] + 1, exact)
