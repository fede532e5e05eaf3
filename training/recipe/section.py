"""The base of all sections of a recipe, the registry of their kinds, and marks of fields that may change on resume."""

import typing
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema


class Section(BaseModel):
    """Keys and values that are checked when the recipe is loaded, and fixed after that.

    Values may be strings. A field that takes no strings parses them as numbers or booleans. A boolean never counts as
    a number.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _numbers(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        types = {name: set(_value_types(field.annotation)) for name, field in cls.model_fields.items()}
        numeric = {name for name, found in types.items() if found & {int, float} and not found & {str, Path, bool}}
        return {name: _read_numbers(value) if name in numeric else value for name, value in fields.items()}


def number(value: Any) -> Any:
    """Returns the number that a text stands for, such as 1000, 1e3, 0x10 or .inf; other values unchanged."""
    if not isinstance(value, str):
        return value
    with suppress(ValueError):
        return int(value, 0)
    with suppress(ValueError):
        return float(value.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return value


def _read_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _read_numbers(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_read_numbers(part) for part in value]
    return str(value) if isinstance(value, bool) else number(value)  # pydantic would take True for 1


def _value_types(annotation: Any) -> Iterator[Any]:
    """Yields the types of a field's values, those in lists and of a dictionary's values too."""
    arguments = typing.get_args(annotation)
    if not arguments:
        yield annotation
    for argument in arguments[1:] if typing.get_origin(annotation) is dict else arguments:
        if typing.get_origin(annotation) is not typing.Literal:
            yield from _value_types(argument)


S = TypeVar("S", bound=Section)


class Registry(Generic[S]):
    """Maps names to the kinds of a section; as a field's annotation, it chooses the class by the key `kind`.

    Pydantic's unions are closed, but any module can register a kind here. `elsewhere` has dotted names of kinds whose
    modules register them when a recipe first names them.
    """

    def __init__(self, default: str, elsewhere: Mapping[str, str] = MappingProxyType({})):
        self.default, self.elsewhere = default, elsewhere
        self.kinds: dict[str, type[S]] = {}

    def register(self, section: type[S]) -> type[S]:
        """Adds a class under the default of its field `kind`; a decorator."""
        name = section.model_fields["kind"].default
        if name in self.kinds:
            raise ValueError(f"kind={name!r} is already registered: choose another name.")
        self.kinds[name] = section
        return section

    def find(self, fields: Any) -> type[S] | None:
        """Returns the class of a section with these keys and values; None if their kind is unknown."""
        if not isinstance(fields, dict):
            return None
        kind = str(fields.get("kind", self.default))
        if kind not in self.kinds and kind in self.elsewhere:
            resolve_name(self.elsewhere[kind])
        return self.kinds.get(kind)

    def all(self) -> list[type[S]]:
        """Returns the classes of all kinds."""
        for name in self.elsewhere.values():
            resolve_name(name)
        return list(self.kinds.values())

    def parse(self, value: Any) -> Any:
        """Returns a section from its keys and values; a text stands for `source`, or for `kind` without that key."""
        default = self.find({})
        assert default is not None
        key = "source" if "source" in default.model_fields else "kind"
        fields = {key: value} if isinstance(value, str) else value
        if not isinstance(fields, dict):
            return value  # a section already, or what pydantic refuses
        section = self.find(fields)
        if section is None:
            known = ", ".join(map(repr, dict.fromkeys([*self.kinds, *self.elsewhere])))
            raise ValueError(f"kind={fields['kind']!r} is unknown: choose one of {known}")
        return section.model_validate(fields)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.parse, handler(source))


@dataclass(frozen=True)
class MayChange:
    """Marks a field that a resumed run may change."""

    affects_training: bool  # from the checkpoint on


MAY_CHANGE = MayChange(affects_training=False)
MAY_CHANGE_FROM_HERE = MayChange(affects_training=True)


def may_change(section: type[Section], mark: MayChange = MAY_CHANGE, prefix: str = "") -> set[str]:
    """Returns the names of all fields with a mark; nested ones have their path, as in `checkpoints.keep`."""
    found = set()
    for name, field in section.model_fields.items():
        if mark in field.metadata:
            found.add(prefix + name)
        for nested in sections_of(field):
            found |= may_change(nested, mark, f"{prefix}{name}.")
    return found


def registry_of(field: Any) -> Registry | None:
    return next((mark for mark in field.metadata if isinstance(mark, Registry)), None)


def sections_of(field: Any) -> list[type[Section]]:
    """Returns the classes of sections that a field can hold, itself or in a list."""
    registry = registry_of(field)
    return registry.all() if registry else list(_sections(field.annotation))


def _sections(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _sections(argument)


def one_of(values: Collection[Any]) -> AfterValidator:
    """Refuses a value that is not among `values`."""

    def check(value: Any) -> Any:
        if value not in values:
            raise ValueError(f"choose one of {', '.join(map(repr, values))}")
        return value

    return AfterValidator(check)
