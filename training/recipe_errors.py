"""What is wrong with a recipe, in words that name the key, the value and the nearest key that exists."""

import difflib
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel


def explain(problem: Mapping[str, Any], recipe: type[BaseModel]) -> str:
    """One line for one of pydantic's errors."""
    place, model = _walk(problem["loc"], recipe)
    where = ".".join(map(str, place)) or "the recipe"
    if problem["type"] == "extra_forbidden":
        (nearest,) = difflib.get_close_matches(str(place[-1]), model.model_fields, n=1, cutoff=0)
        return f"  {where} is no key of a recipe; did you mean {nearest!r}?"
    if problem["type"] == "missing":
        return f"  {where} is missing."
    if isinstance(problem["input"], Mapping):  # the message says which of its keys
        return f"  {where}: {problem['msg']}"
    return f"  {where}={problem['input']!r}: {problem['msg']}"


def _walk(loc: tuple[int | str, ...], model: type[BaseModel]) -> tuple[list[int | str], type[BaseModel]]:
    """The keys as the user wrote them (pydantic adds the kind of data), and the section that the last one is in."""
    place: list[int | str] = []
    remaining = list(loc)
    while remaining:
        key = remaining.pop(0)
        place.append(key)
        field = model.model_fields.get(str(key))
        if field is None or not remaining:
            break
        sections = _sections(field.annotation)
        if isinstance(remaining[0], int):
            place.append(remaining.pop(0))
        tagged = [section for section in sections if _is_tag(section, remaining[0])] if remaining else []
        if tagged:
            remaining.pop(0)
        if not sections or not remaining:
            break
        model = (tagged or sections)[0]
    return place, model


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in typing.get_args(annotation) for section in _sections(argument)]


def _is_tag(section: type[BaseModel], key: int | str) -> bool:
    field = section.model_fields.get("task")
    return field is not None and key in typing.get_args(field.annotation)
