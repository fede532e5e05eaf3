"""The tokens that cover a part of a text, for any fast tokenizer."""

from typing import Any, NamedTuple


class TextSpan(NamedTuple):
    """Tokens `first` to `end - 1`. `exact`: they contain only the part and white space around it."""

    first: int
    end: int
    exact: bool

    @property
    def tokens(self) -> range:
        return range(self.first, self.end)

    @property
    def is_one_token(self) -> bool:
        return self.exact and self.end - self.first == 1


def encode_with_offsets(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns the ids, special tokens included, and each token's (start, end) in the characters of the text.

    Offsets exclude white space at a token's ends. Raises `ValueError` for a tokenizer that does not report offsets.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{type(tokenizer).__name__} does not report offsets of its tokens: load a fast tokenizer.")
    encoded = tokenizer(text, return_offsets_mapping=True)
    offsets = [_without_space(text, start, end) for start, end in encoded["offset_mapping"]]
    return list(encoded["input_ids"]), offsets


def find_spans(tokenizer: Any, text: str, part: str, whole_words: bool = True) -> list[TextSpan]:
    """Finds the tokens of every occurrence of `part` in `text`. Raises `ValueError` if there is none."""
    part = part.strip()
    _, offsets = encode_with_offsets(tokenizer, text)
    spans, start = [], text.find(part) if part else -1
    while start >= 0:
        end = start + len(part)
        begins_within_word = start > 0 and text[start - 1].isalnum() and part[0].isalnum()
        ends_within_word = text[end : end + 1].isalnum() and part[-1].isalnum()
        is_found = not (whole_words and (begins_within_word or ends_within_word))
        if is_found:
            spans.append(_covering(offsets, start, end, part))
        start = text.find(part, end if is_found else start + 1)
    if not spans:
        where = " as a word" if part and part in text else ""
        raise ValueError(f"{part!r} does not occur in {text!r}{where}: pass a part of the text, or whole_words=False.")
    return spans


def span_between(tokenizer: Any, text: str, start: int, end: int) -> TextSpan:
    """Finds the tokens of `text[start:end]` without the white space at its ends."""
    if not 0 <= start < end <= len(text):
        raise ValueError(
            f"characters {start} to {end} are not a part of {len(text)}: pass 0 <= start < end <= {len(text)}."
        )
    first, last = _without_space(text, start, end)
    if first == last:
        raise ValueError(f"characters {start} to {end} of {text!r} are only white space: pass a part with other text.")
    return _covering(encode_with_offsets(tokenizer, text)[1], first, last, text[first:last])


def containing_span(
    tokenizer: Any, text: str, first: str, last: str, after: str | None = None, before: str | None = None
) -> range:
    """Finds the tokens from the first with `first` in it to the last with `last` in it: the published rule.

    It does not use places in the text. `after` and `before` narrow the search to the span from the first token that
    contains `after` to the first that contains `before`. Raises `ValueError` if no token contains a part.
    """
    names = [tokenizer.decode([token], skip_special_tokens=True) for token in tokenizer(text)["input_ids"]]

    def found(part: str, tokens: range) -> int:
        if (token := next((token for token in tokens if part in names[token]), None)) is None:
            raise ValueError(f"no token contains {part!r}")
        return token

    start = found(after, range(len(names))) if after is not None else 0
    end = found(before, range(len(names))) + 1 if before is not None else len(names)
    tokens = range(found(first, range(start, end)), found(last, range(end - 1, start - 1, -1)) + 1)
    if not tokens:
        raise ValueError(f"the first token that contains {first!r} comes after the last one that contains {last!r}")
    return tokens


def _without_space(text: str, start: int, end: int) -> tuple[int, int]:
    part = text[start:end]
    first = start + len(part) - len(part.lstrip())
    return first, max(first, end - len(part) + len(part.rstrip()))


def _covering(offsets: list[tuple[int, int]], start: int, end: int, part: str) -> TextSpan:
    tokens = [n for n, (first, last) in enumerate(offsets) if first < end and last > start]
    if not tokens:
        raise ValueError(f"no token of the text covers {part!r}, the tokenizer drops it: pass another part.")
    exact = offsets[tokens[0]][0] == start and offsets[tokens[-1]][1] == end
    return TextSpan(tokens[0], tokens[-1] + 1, exact)
