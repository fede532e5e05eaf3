"""Explains what is wrong with a recipe: the key, the value and the nearest key that exists."""

import difflib
import typing
from collections.abc import Mapping
from typing import Any

from .section import Section, registry_of, sections_of


def explain(problem: Mapping[str, Any], recipe: type[Section], fields: Mapping[str, Any]) -> str:
    """Returns one line about one of pydantic's errors in a recipe's `fields`."""
    path, section = _walk(problem["loc"], recipe, fields)
    message = problem["msg"].removeprefix("Value error, ")  # pydantic's name for our own
    if not path and problem["type"] == "value_error":  # it names its keys
        return f"  {message}."
    where = ".".join(map(str, path)) or "the recipe"
    if problem["type"] == "extra_forbidden":
        for tag in ("kind", "task"):
            if (field := section.model_fields.get(tag)) is not None:
                value = field.default if tag == "kind" else typing.get_args(field.annotation)[0]
                keys = ", ".join(section.model_fields)
                return f"  {where} is not a key of {path[-2]}.{tag}={value}, which has {keys}."
        return f"  {where} is not a key of a recipe; did you mean {_nearest(path, section)!r}?"
    if problem["type"] == "missing":
        return f"  {where} is missing."
    if isinstance(problem["input"], Mapping):  # the message says which of its keys
        return f"  {where}: {message}"
    return f"  {where}={problem['input']!r}: {message}"


def _nearest(path: list[int | str], section: type[Section]) -> str:
    """Returns the most similar key of a section, or the path of the same key in a section that it holds."""
    *above, key = map(str, path)
    for name, field in section.model_fields.items():
        if any(key in nested.model_fields for nested in sections_of(field)):
            return ".".join([*above, name, key])
    (nearest,) = difflib.get_close_matches(key, section.model_fields, n=1, cutoff=0)
    return nearest


def _walk(loc: tuple[int | str, ...], section: type[Section], given: Any) -> tuple[list[int | str], type[Section]]:
    """Returns the keys as the user wrote them, and the section that holds the last one.

    Pydantic adds the task of the data, and types if a value may have several.
    """
    path, sections = list[int | str](), [section]
    for key in loc:
        if len(sections) > 1 and (tagged := [one for one in sections if _is_tag(one, key)]):
            sections = tagged
        elif isinstance(key, int):
            path.append(key)
        elif sections:
            path.append(key)
            section = sections[0]
            if (field := section.model_fields.get(key)) is None:
                break
            given = given.get(key) if isinstance(given, Mapping) else None
            registry = registry_of(field)
            found = registry.find(given) if registry else None
            sections = [found] if found else sections_of(field)
        else:
            break
    return path, section


def _is_tag(section: type[Section], key: int | str) -> bool:
    field = section.model_fields.get("task")
    return field is not None and key in typing.get_args(field.annotation)
