"""Builds a command from its options: flags from a dataclass, checks of the installed extras, tables at the end."""

import importlib
import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any

import typer

from condense.extras import check_installed

from .options import ATTENTION_HELP, Options, from_command_line, parameters
from .table_layout import terminal_width


def writable(folder: Path) -> Path:
    """Returns the folder if results can be written there."""
    from condense.utils.files import check_output_folder

    check_output_folder(folder)
    return folder


Output = Annotated[
    Path, typer.Option(help="Folder for the results. A measurement that was stopped resumes there.", callback=writable)
]
Attention = Annotated[str, typer.Option(help=ATTENTION_HELP)]
SCORING = ("evaluate", "rouge-score", "sentencex")  # the last two score summaries; other programs use the first


def quiet() -> None:
    """Hides the notices and progress bars of the libraries, and leaves the command's own."""
    import torch
    from transformers.utils import logging

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed warns if it has to find that out itself
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def show(results: dict[str, Any], shown_by: Any, output: Path) -> None:
    """Prints a result's tables and the names of its files. `shown_by` is the task or a module with `tables`."""
    for table in shown_by.tables(results):
        print(table.within(terminal_width()), end="\n\n")
    kind = results["kind"]
    written = [f"{kind}.json"]
    written += [".csv"] if (output / f"{kind}.csv").exists() else []
    written += [".png and .svg"] if (output / f"{kind}.png").exists() else []
    written += [f"{kind}-*.png and .svg"] if any(output.glob(f"{kind}-*.png")) else []
    print(f"{output}/{', '.join(written)}" + (" only: nothing was measured" if len(written) == 1 else ""))


def command(
    options: type[Options],
    action: Callable[..., None],
    name: str,
    *arguments: inspect.Parameter,
    extras: Sequence[str] = (),
    scores: bool = False,
) -> Callable[..., None]:
    """Returns a command that calls `action(options, output, ...)`, with flags for the options after `arguments`.

    It needs the extra `eval` (the packages that score summaries only if it `scores` them) and further `extras`.
    """

    def run_command(output: Path, **given: Any) -> None:
        check_installed(f"condense {name}", "eval", without=["evaluate"] if scores else SCORING)
        for extra in extras:
            check_installed(f"condense {name}", extra)
        quiet()
        # A plain string: a choice of the command line can't be passed to other processes.
        others = {argument.name: str(given.pop(argument.name)) for argument in arguments}
        chosen = from_command_line(options, given)
        if not hasattr(chosen, "ranks"):
            from .ranks import check_alone

            check_alone(name)
        action(chosen, output, **others)

    models, *rest = parameters(options)
    folder = inspect.Parameter("output", inspect.Parameter.KEYWORD_ONLY, annotation=Output)
    run_command.__name__, run_command.__doc__, run_command.__annotations__ = name.split()[-1], options.__doc__, {}
    run_command.__signature__ = inspect.Signature([*arguments, models, folder, *rest])  # type: ignore[attr-defined]
    return run_command


def name_argument(meaning: str, kind: Any = str, **options: Any) -> inspect.Parameter:
    """Returns the argument NAME of a command that runs one of several experiments."""
    annotation = Annotated[kind, typer.Argument(help=meaning, **options)]  # type: ignore[valid-type]
    return inspect.Parameter("name", inspect.Parameter.KEYWORD_ONLY, annotation=annotation)


def run_study(path: str, options: Options, output: Path) -> None:
    """Runs the study whose class is at `path`, which is imported here because that loads torch."""
    from .runner import run

    study = resolve_name(path)
    show(run(study(options, output), output), study, output)


def run_experiments(path: str, title: str, options: Options, output: Path, name: str) -> None:
    """Runs one experiment of a laboratory, or all of them with a report under a title.

    `path` leads to the function that runs one. Its module also has NAME_all, which runs all, and `shown_by`, which
    returns the object with the tables for a kind of results. Only the first of several processes prints.
    """
    module_name, _, function = path.partition(":")
    module = importlib.import_module(module_name)
    if name != "all":
        if (found := getattr(module, function)(name, output, options)) is not None:
            show(found, module.shown_by(found["kind"]), output)
        return
    for found in getattr(module, f"{function}_all")(output, options).values():
        show(found, module.shown_by(found["kind"]), output)
    from .report import write_report

    print(write_report(output, f"{title} all"))
