"""Measures the time saved by reading shared beginnings once and running all factors together."""

import time
from collections.abc import Sequence
from typing import Any

from ..model.adapter import OutsideTable
from .aggregation import SET
from .classes import watched_classes
from .engine import Reader
from .items import Item, NotValid

NUM_TIMED = 3  # items


def speed(reader: Reader, items: Sequence[Item]) -> dict[str, Any]:
    """Returns the seconds for the first valid items of the data set: factor by factor, and all factors together."""
    seconds, num_timed = {"one_by_one": 0.0, "together": 0.0}, 0
    for item in items:
        if item.group == SET and num_timed < NUM_TIMED and _can_read(reader, item):
            sentences = reader.sentences(item)
            start = time.perf_counter()
            for sentence in sentences:
                reader.probabilities([sentence], reuse_prefix=False)
            seconds["one_by_one"] += time.perf_counter() - start
            start = time.perf_counter()
            reader.probabilities(sentences)
            seconds["together"] += time.perf_counter() - start
            num_timed += 1
    if num_timed == 0:
        return {"items": 0}
    return seconds | {"items": num_timed, "speed_up": seconds["one_by_one"] / seconds["together"]}


def _can_read(reader: Reader, item: Item) -> bool:
    """Whether the item is valid on this model. Reads its first and last sentences, which also warms the model up."""
    try:
        watched_classes(reader.tokenizer, item.watched, reader.classes)
        sentences = reader.sentences(item)
        reader.probabilities([sentences[0], sentences[-1]])
    except (NotValid, OutsideTable):
        return False
    return True
