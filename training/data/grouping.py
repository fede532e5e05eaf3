"""Items in lists of a bounded size, so that memory holds a few of them and not all."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def groups(items: Iterable[T], weigh: Callable[[T], int], enough: int, most: int) -> Iterator[list[T]]:
    """Yields the items in lists that end at `most` items, or when their weights add up to `enough`.

    Reads no item before the list that has it is asked for.
    """
    group, weight = list[T](), 0
    for item in items:
        group.append(item)
        weight += weigh(item)
        if len(group) == most or weight >= enough:
            yield group
            group, weight = [], 0
    if group:
        yield group
