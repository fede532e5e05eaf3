"""The base of all sections of a recipe, sections that are looked up by kind, and fields that may change on resume."""

import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


class Section(BaseModel):
    """Keys and values that are checked when the recipe is loaded, and fixed after that."""

    model_config = ConfigDict(extra="forbid", frozen=True)


S = TypeVar("S", bound=Section)


class Registry(Generic[S]):
    """The kinds of a section by name. As the annotation of a field, it chooses the section's class by its key `kind`.

    Pydantic's unions are closed when their class is made; a kind can be registered here by any module. `elsewhere` has
    the dotted names of kinds whose modules are imported when a recipe names them, and register them then.
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
        """The class of the keys and values of a section; None where their kind is unknown."""
        if not isinstance(fields, dict):
            return None
        kind = fields.get("kind", self.default)
        if kind not in self.kinds and kind in self.elsewhere:
            resolve_name(self.elsewhere[kind])
        return self.kinds.get(kind)

    def all(self) -> list[type[S]]:
        """The classes of all kinds."""
        for name in self.elsewhere.values():
            resolve_name(name)
        return list(self.kinds.values())

    def parse(self, value: Any) -> Any:
        """A section from its keys and values, or from a text, which stands for the key `source`."""
        fields = {"source": value} if isinstance(value, str) else value
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

    affects_training: bool


MAY_CHANGE = MayChange(affects_training=False)  # neither the batches nor what is learned from them
MAY_CHANGE_FROM_HERE = MayChange(affects_training=True)  # the steps from the checkpoint on


def may_change(section: type[Section], mark: MayChange = MAY_CHANGE, prefix: str = "") -> set[str]:
    """The names of all fields with a mark, those of nested sections with their path, as `checkpoints.keep`."""
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
    """The classes of sections that a field can hold, itself or in a list."""
    registry = registry_of(field)
    return registry.all() if registry else list(_sections(field.annotation))


def _sections(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _sections(argument)


def one_of(names: Collection[str]) -> AfterValidator:
    """Refuses a text that is none of `names`, which are listed once, where they are implemented."""

    def check(value: str) -> str:
        if value not in names:
            raise ValueError(f"choose one of {', '.join(map(repr, names))}")
        return value

    return AfterValidator(check)
