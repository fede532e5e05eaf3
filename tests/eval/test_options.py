"""An option is written once: the command line, Python and the stored settings agree, and ranges hold in both."""

import inspect
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import pytest
import typer
from typer.testing import CliRunner

from condense.eval import cli
from condense.eval.options import (
    INDICES,
    NAMES,
    NUMBER,
    NUMBER_OR_ALL,
    NUMBERS,
    PERCENTAGES,
    Option,
    Options,
    describe_fields,
    identify,
    number,
    numbers,
    percentages,
)
from condense.eval.tasks import options as of_tasks
from condense.eval.tasks.options import PasskeyOptions
from condense.labs.continuity.study.options import ProbeOptions

from ..refusals import assert_refused

pytestmark = pytest.mark.unit

KINDS = ("passkey", "recall", "perplexity", "summarization", "suite", "attention")
COMMANDS = {kind: getattr(of_tasks, f"{kind.title()}Options") for kind in KINDS} | {"probe": ProbeOptions}
COMMANDS["fold_cost"] = of_tasks.FoldCostOptions


@dataclass(frozen=True, kw_only=True)
class Example(Options):
    """An example of a command."""

    models: Annotated[Sequence[str], Option("Models.", flags=("--model",))]
    lengths: Annotated[Sequence[int], Option("Lengths.", spelling=NUMBERS, may_change=True)] = (2048, 3)
    layers: Annotated[Sequence[int] | None, Option(spelling=INDICES)] = None
    policy: Annotated[Literal["refuse", "skip"], Option("A choice.")] = "refuse"
    num_rows: Annotated[int, Option("Rows.", flags=("--rows",), min=1)] = 4
    share: Annotated[float, Option(min=0)] = 0.5
    file: Path | None = None
    timed: Annotated[bool, Option(flags=("--speed",))] = False


def given_to(arguments, options=Example):
    """Returns the options that a command line gives, and what it prints."""
    found = []
    app = typer.Typer()
    app.command()(cli.command(options, lambda given, output: found.append((given, output)), "example"))
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    return found, done.output


def test_a_command_line_gives_the_options_of_python(tmp_path):
    least = ["--model", "a", "--model", "b", "--output", str(tmp_path)]
    assert given_to(least)[0] == [(Example(models=["a", "b"]), tmp_path)]
    more = ["--lengths", "1k,7", "--layers", "0,2", "--policy", "skip", "--rows", "2", "--share", "1", "--speed"]
    expected = Example(
        models=["a", "b"], lengths=[1024, 7], layers=[0, 2], policy="skip", num_rows=2, share=1.0, timed=True,
        file=Path("x"),
    )  # fmt: skip
    found, _ = given_to([*least, *more, "--file", "x"])
    assert found == [(expected, tmp_path)] and type(found[0][0].policy) is str


def test_help_and_defaults_are_those_of_the_fields():
    _, shown = given_to(["--help"])
    for words in ("An example of a command.", "Lengths.", "[default: 2k,3]", "<refuse|skip>", "x>=1", "[default: 4]"):
        assert words in " ".join(shown.split()), (words, shown)


def test_ranges_hold_in_python_too(tmp_path):
    for wrong in ({"num_rows": 0}, {"share": -0.1}, {"share": float("nan")}, {"share": float("inf")}):
        (name,) = wrong
        assert_refused(rf"{name}={wrong[name]}: pass \d or more", Example, models=[], **wrong)
    found, shown = given_to(["--model", "a", "--output", str(tmp_path), "--rows", "0"])
    assert found == [] and "--rows" in shown


def test_options_that_may_change_are_not_stored():
    assert identify(Example(models=("a",), layers=(1,))) == {
        "models": ["a"], "layers": [1], "policy": "refuse", "num_rows": 4, "share": 0.5, "file": None, "timed": False,
    }  # fmt: skip


def command_of(name):
    return cli.laboratory_commands.get(name) or getattr(cli, name)


def parameters_of(name):
    """Returns the parameters of a command as click sees them, without --help."""
    app = typer.Typer(add_completion=False)
    app.command()(command_of(name))
    return [one for one in typer.main.get_command(app).params if one.name != "help"]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_flag_is_a_field_and_each_field_a_flag(name):
    """The command that users call, as click sees it, against the constructor that Python calls."""
    flags = {one.name: one for one in parameters_of(name) if one.name not in ("output", "name")}
    fields = describe_fields(COMMANDS[name])
    assert list(flags) == list(fields)
    for field, (_, option, default) in fields.items():
        flag = flags[field]
        assert flag.required == (default is MISSING) and flag.help == (option.help or None)
        if default is not MISSING:
            shown = default if option.spelling is None else option.spelling.write(default)
            assert getattr(flag.default, "value", flag.default) == shown
        (info,) = get_args(inspect.signature(command_of(name)).parameters[field].annotation)[1:]
        assert info.min == option.min


OF_ALL = "ranks device-map dtype attention"  # but probe


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("passkey", f"chat lengths depths prompts cell-tokens keys digits window seed longest-trained {OF_ALL}"),
        ("recall", f"pairs lengths form values overwritten prompts seed {OF_ALL}"),
        ("perplexity", f"data text-field segments segment-length tokens curves batch {OF_ALL}"),
        (
            "fold_cost",
            "data text-field texts tokens segment-lengths shares sink-token-id by-position position-tokens seed "
            f"{OF_ALL}",
        ),
        (
            "summarization",
            "chat data text-field summary-field documents longest bad-documents temperature new-tokens batch seed "
            f"{OF_ALL}",
        ),
        ("suite", f"benchmarks lengths prompts batch seed samples {OF_ALL}"),
        ("attention", f"prompt-file summarize layers segments heads segment-length text-field {OF_ALL}"),
        ("probe", "data limit template spans classes position-anchor dtype attention speed"),
    ],
)
def test_flags_keep_their_names(name, flags):
    params = parameters_of(name)
    names = [one.opts[0].removeprefix("--") for one in params if one.name != "name"]
    assert names == ["model", "output", *flags.split()]
    assert [one.name for one in params if not one.opts[0].startswith("--")] == (["name"] if name == "probe" else [])


@pytest.mark.parametrize(
    ("spelling", "value", "text"),
    [
        (NUMBERS, [2048, 4096, 2**20, 100], "2k,4k,1m,100"),
        (PERCENTAGES, [0.0, 0.25, 1.0, 0.125], "0,25,100,12.5"),
        (INDICES, [0, 2, 15], "0,2,15"),
        (NAMES, ["folded", "full_attention"], "folded,full_attention"),
        (NUMBER, 1536, "1536"),
        (NUMBER_OR_ALL, 2**16, "64k"),
        (NUMBER_OR_ALL, None, "all"),
    ],
)
def test_spellings_are_read_and_written_alike(spelling, value, text):
    assert spelling.write(value) == text and spelling.parse(text) == value


WRONG = [(percentages, "is not a percentage", text) for text in ("half", "0,101", "-1")]
WRONG += [(numbers, "is not a positive whole number", text) for text in ("", "1k,,2k", "0", "-3", "2.5k", "many")]


WRONG += [(number, "pass one number", "1k,2k")]


@pytest.mark.parametrize(("parse", "message", "text"), WRONG)
def test_texts_that_are_no_numbers(parse, message, text):
    assert numbers("64,2k,1M") == [64, 2048, 2**20]
    assert_refused(message, parse, text)


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("depths", (0.5, 0.0, 0.5), "depths=50,0,50 names 50 twice"),
        ("lengths", (2048, 120, 2048), "lengths=2k,120,2k names 2k twice"),
    ],
)
def test_a_list_names_nothing_twice(field, values, message):
    assert_refused(message, PasskeyOptions, models=[], **{field: values})
