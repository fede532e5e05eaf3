"""Options of a task, each written once: a field of a frozen dataclass, with its type, default, help and range.

Each field gives a command line parameter (`parameters`, `from_command_line`) and a constructor parameter with checked
range. Measurements are stored under the fields' values (`stored`).
"""

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import typer


class Spelling(NamedTuple):
    """The command line's notation for a value of several parts: `parse` reads it, `write` is the inverse."""

    parse: Callable[[str], Any]
    write: Callable[[Any], str]


@dataclass(frozen=True)
class Option:
    """The part of a field's annotation that is not its type.

    `flags` are the names on the command line if they differ from the field's. `may_change`: a stopped measurement may
    resume with another value. `choices`: the allowed values of a list. `check` raises `ValueError` for a wrong value.
    """

    help: str = ""
    flags: tuple[str, ...] = ()
    min: int | None = None
    spelling: Spelling | None = None
    may_change: bool = False
    choices: Collection[str] = ()
    check: Callable[[Any], None] | None = None


class Options:
    """The base of dataclasses of options. Raises `ValueError` for a value outside its range or twice in a list.

    Subclasses list their own fields before those named in `listed_last`.
    """

    listed_last: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name, field in describe_fields(type(self)).items():
            option, value = field.option, getattr(self, name)
            if option.min is not None and value is not None and not option.min <= value < math.inf:
                raise ValueError(f"{name}={value}: pass {option.min} or more.")
            if option.spelling is not None and isinstance(value, Sequence):
                _check_list(name, list(value), option, option.spelling)
            if option.check is not None:
                option.check(value)


def _check_list(name: str, values: list[Any], option: Option, spelling: Spelling) -> None:
    """Raises `ValueError` for an unknown choice, or one that would be measured or counted twice."""
    if unknown := [value for value in values if option.choices and value not in option.choices]:
        raise ValueError(f"{name} {unknown} are not known: choose from {', '.join(option.choices)}.")
    if twice := [value for value in values if values.count(value) > 1]:
        raise ValueError(f"{name}={spelling.write(values)} names {spelling.write(twice[:1])} twice: leave one out.")


def check_dtype(name: str) -> None:
    """Raises `ValueError` for a dtype in which models can't be loaded."""
    from condense.checks import check_dtype  # loads torch, which the parsers of the command line do without

    check_dtype(name)


def check_attention(name: str) -> None:
    """Raises `ValueError` for an implementation of attention that does not exist or is not installed."""
    from condense.checks import check_attention

    check_attention(name)


def check_rate(value: float) -> None:
    """Raises `ValueError` unless the value is a learning rate."""
    if not 0 < value < math.inf:
        raise ValueError(f"a learning rate of {value}: pass a number above 0.")


def check_share(value: float) -> None:
    """Raises `ValueError` unless the value is a share of a whole."""
    if not 0 <= value <= 1:
        raise ValueError(f"a share of {value}: pass 0 to 1.")


Chosen = TypeVar("Chosen", bound=Options)


class Field(NamedTuple):
    """`default` is `dataclasses.MISSING` if the option is required."""

    type: Any
    option: Option
    default: Any


def describe_fields(options: type[Options]) -> dict[str, Field]:
    """Returns the fields by name."""
    hints, found = get_type_hints(options, include_extras=True), {}
    own: Any = fields(options)  # type: ignore[arg-type]  # each subclass is a dataclass
    for field in sorted(own, key=lambda field: field.name in options.listed_last):
        hint, option = hints[field.name], Option()
        if get_origin(hint) is Annotated:
            hint, option = get_args(hint)
        found[field.name] = Field(hint, option, field.default)
    return found


def identify(options: Options) -> dict[str, Any]:
    """Returns the options by name, except options that may change when a measurement resumes."""
    every = describe_fields(type(options)).items()
    found = {name: getattr(options, name) for name, field in every if not field.option.may_change}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def parameters(options: type[Options]) -> list[inspect.Parameter]:
    """Returns the fields as keyword parameters, which typer turns into flags."""
    return [_parameter(name, field) for name, field in describe_fields(options).items()]


def _parameter(name: str, field: Field) -> inspect.Parameter:
    option, default = field.option, field.default
    if option.spelling is not None and default is not MISSING:
        default = option.spelling.write(default)
    flags = option.flags or (f"--{name.replace('_', '-')}",)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[_flag_type(name, field), typer.Option(*flags, help=option.help or None, min=option.min)],
        default=inspect.Parameter.empty if default is MISSING else default,
    )


def _flag_type(name: str, field: Field) -> Any:
    """Returns the type of a flag, in a form that typer knows."""
    origin, arguments = get_origin(field.type), get_args(field.type)
    if field.option.spelling is not None:
        return str
    if origin is Literal:
        return Enum(name, {choice: choice for choice in arguments}, type=str)  # type: ignore[misc]
    if arguments and get_origin(arguments[0]) is Literal:  # or None
        choices: Any = Enum(name, {choice: choice for choice in get_args(arguments[0])}, type=str)  # type: ignore[misc]
        return choices | None
    return list[arguments[0]] if origin is Sequence else field.type  # type: ignore[valid-type]


def from_command_line(options: type[Chosen], given: Mapping[str, Any]) -> Chosen:
    """Returns the options of a command. Raises `ValueError` for text that cannot be parsed."""
    return options(**{name: _value(given[name], field) for name, field in describe_fields(options).items()})


def _value(given: Any, field: Field) -> Any:
    spelling = field.option.spelling
    if spelling is None:
        return given.value if isinstance(given, Enum) else given
    is_default = field.default is not MISSING and given == spelling.write(field.default)
    return field.default if is_default else spelling.parse(given)


def numbers(text: str) -> list[int]:
    """Parses numbers such as `2048,4096` or `2k,4k,1m`. Raises `ValueError` for other text."""
    factors = {"k": 2**10, "m": 2**20}
    found = []
    for part in text.lower().split(","):
        number, factor = (part[:-1], factors[part[-1]]) if part[-1:] in factors else (part, 1)
        if not number.strip().isdecimal() or int(number) == 0:
            raise ValueError(f"{text!r}: {part!r} is not a positive whole number; write 2048,4096 or 2k,4k,1m.")
        found.append(int(number) * factor)
    return found


def percentages(text: str) -> list[float]:
    """Parses percentages such as `0,25,100` to shares from 0 to 1. Raises `ValueError` for other text."""
    found = []
    for part in text.split(","):
        try:
            found.append(float(part))
        except ValueError:
            found.append(-1.0)
        if not 0 <= found[-1] <= 100:
            raise ValueError(f"{text!r}: {part!r} is not a percentage; write 0,25,100.")
    return [value / 100 for value in found]


def indices(text: str) -> list[int]:
    """Parses whole numbers such as `0,2,5`. Raises `ValueError` for other text."""
    if wrong := [part for part in text.split(",") if not part.strip().isdecimal()]:
        raise ValueError(f"{text!r}: {wrong[0]!r} is not a whole number; write 0,2,5.")
    return [int(part) for part in text.split(",")]


def number(text: str) -> int:
    """Parses one number like `numbers`. Raises `ValueError` for several."""
    found = numbers(text)
    if len(found) > 1:
        raise ValueError(f"{text!r}: pass one number.")
    return found[0]


def number_or_all(text: str) -> int | None:
    """Parses a number like `numbers`, or None for `all`."""
    return None if text == "all" else number(text)


def _short(number: int) -> str:
    for letter, factor in (("m", 2**20), ("k", 2**10)):
        if number % factor == 0:
            return f"{number // factor}{letter}"
    return str(number)


def _join(write: Callable[[Any], str]) -> Callable[[Sequence[Any] | None], str]:
    """Joins the values with commas; returns nothing for None, which lets the task choose."""
    return lambda values: ",".join(map(write, values or ()))


NUMBERS = Spelling(numbers, _join(_short))
PERCENTAGES = Spelling(percentages, _join(lambda share: f"{100 * share:g}"))
INDICES = Spelling(indices, _join(str))
NAMES = Spelling(lambda text: text.split(","), _join(str))
NUMBER = Spelling(number, _short)
NUMBER_OR_ALL = Spelling(number_or_all, lambda number: "all" if number is None else _short(number))

DTYPE_HELP = "float32, bfloat16, float16, or auto: as stored."
ATTENTION_HELP = "sdpa, eager, flash_attention_2, flex_attention, varlen or blocked; auto: see docs/performance.md."

Models = Annotated[
    Sequence[str],
    Option("Folder, hub id or GGUF file, or NAME=FOLDER; repeat it for several models.", flags=("--model",)),
]
Dtype = Annotated[str, Option(DTYPE_HELP, may_change=True, check=check_dtype)]
Attention = Annotated[str, Option(ATTENTION_HELP, check=check_attention)]
SegmentLength = Annotated[
    int, Option("Tokens, for stock models; folded models have their own.", min=1, may_change=True)
]
TextField = Annotated[str, Option("Field of .jsonl and .parquet files that holds the text.", may_change=True)]
Ranks = Annotated[
    int,
    Option(
        "Processes that share the work, each with a GPU of its own; torchrun may start them instead.",
        min=1,
        may_change=True,
    ),
]
DeviceMap = Annotated[
    Literal["auto"] | None,
    Option("auto splits a model that does not fit on one GPU over all of them.", may_change=True),
]
