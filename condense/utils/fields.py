"""Fields of JSON records, also within their objects and lists."""

from itertools import chain
from typing import Any

MISSING = object()


def find_field(fields: Any, name: str) -> Any:
    """Returns the value of a field, or `MISSING`.

    `content.text` is `text` in the object `content`, unless a field has this very name. Numbers index the items of a
    list from 0. The fields of null are null.
    """
    if fields is None:
        return None
    if isinstance(fields, list):
        fields = {str(number): item for number, item in enumerate(fields)}
    if not isinstance(fields, dict):
        return MISSING
    if name in fields:
        return fields[name]
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        prefix = ".".join(parts[:count])
        found = find_field(fields[prefix], name[len(prefix) + 1 :]) if prefix in fields else MISSING
        if found is not MISSING:
            return found
    return MISSING


def field_names(fields: dict[str, Any]) -> str:
    """Returns the names of all fields, including fields of nested objects, as an error shows them."""
    names = [
        [f"{name}.{inner}" for inner in value] if isinstance(value, dict) and value else [name]
        for name, value in fields.items()
    ]
    return ", ".join(map(repr, chain.from_iterable(names))) or "none"
