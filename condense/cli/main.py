"""The front door: `condense COMMAND`. Each command is a function here, which imports its modules when called."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from condense.cli.command import App
from condense.cli.convert import convert
from condense.cli.generate import generate
from condense.cli.sample import samples
from condense.eval.cli import attention, evaluations, laboratory_commands, profile, report, studies
from condense.eval.command import quiet
from condense.extras import check_installed
from condense.laboratories import COMMANDS
from condense.training.presets import recipe_names
from condense.version import __version__

app = App(
    help="A Llama with unbounded memory.", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


app.add_typer(evaluations, name="eval")
app.add_typer(studies, name="study")
app.add_typer(samples, name="sample")
for command in (convert, generate, profile, attention, *(laboratory_commands[name] for name in COMMANDS), report):
    app.command()(command)
for former, name in {"depth": "depth", "ablate": "ablations"}.items():  # their names before they were studies
    app.command(former, hidden=True)(laboratory_commands[name])

PARENT = "CONDENSE_PARENT"  # see condense.training.subprocesses


def print_version(asked: bool) -> None:
    if asked:
        print(f"condense {__version__}")
        raise typer.Exit


@app.callback()
def front_door(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=print_version)] = False,
) -> None:
    """A Llama with unbounded memory."""


@app.command(epilog=f"Recipes of this package: {', '.join(recipe_names())}.")
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe of this package by its name, or a YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the recipe, such as optimizer.learning_rate=1e-4."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes: one per GPU, or two on a CPU; a dry run for GPUs elsewhere plans the most, up to 8, that "
            "fit the recipe.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and the memory that it needs, and stop.")
    ] = False,
    report: Annotated[Path | None, typer.Option(help="Write the dry run's figures as JSON to this file.")] = None,
    gpu_memory: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            help="With --dry-run: plan for GPUs of this memory, such as 80, and the largest micro-batch that it holds.",
            show_default=False,
        ),
    ] = None,
    tokens_per_second: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER|LOG",
            help="With --dry-run: hours from a measured rate. A number is the rate of the whole run, all ranks; the "
            "log.jsonl of an earlier run of the same model and length is scaled to the number of ranks.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Runs a recipe on this machine; started again, it resumes from its last complete checkpoint.

    SIGTERM and SIGUSR1 end it after the current step with a checkpoint and exit code 75.
    """
    # Preflight checks the package of report_to.
    check_installed("condense train", "train", without=("tensorboard", *(["deepspeed"] if dry_run else [])))
    if not dry_run:
        _check_no_plan_options(report, gpu_memory, tokens_per_second)
        _run_recipe(recipe, overrides or [], ranks)
        return
    import torch

    from condense.training.launch import load_local_recipe
    from condense.training.planning.dry_run import dry_run as plan_run
    from condense.training.recipe import load_recipe
    from condense.utils.files import atomic_file, check_output_file

    if report is not None:
        check_output_file(report)
    load = load_local_recipe if gpu_memory is None else load_recipe  # for this machine, or for GPUs elsewhere
    figures, text = plan_run(
        load(recipe, overrides or []), ranks, torch.cuda.device_count(), gpu_memory, tokens_per_second
    )
    print(text)
    if report is not None:
        with atomic_file(report) as file:
            file.write_text(json.dumps(figures, indent=2), encoding="utf-8")


def _check_no_plan_options(report: Path | None, gpu_memory: float | None, tokens_per_second: str | None) -> None:
    """Raises `ValueError` for options that belong to a dry run."""
    if report is not None:
        raise ValueError(f"--report {report} needs --dry-run: a run writes log.jsonl into its output.")
    for name, value in (("--gpu-memory", gpu_memory), ("--tokens-per-second", tokens_per_second)):
        if value is not None:
            raise ValueError(f"{name} {value} needs --dry-run: it changes what is planned, not what is run.")


def _run_recipe(recipe: str, overrides: list[str], ranks: int | None) -> None:
    """Checks a run and launches its ranks, unless it is finished. If they were stopped, exits with their code."""
    from condense.training.checkpoints.resume import describe_finished, how_to_resume
    from condense.training.deepspeed_file import deepspeed_settings
    from condense.training.launch import how_ranks_ended, launch, load_local_recipe, num_ranks
    from condense.training.output_folder import check_output
    from condense.training.output_lock import check_unlocked
    from condense.training.preflight import check_run
    from condense.training.subprocesses import STOPPED

    quiet()
    resolved = load_local_recipe(recipe, overrides)
    check_unlocked(resolved.output)
    if (said := describe_finished(resolved)) is not None:
        print(said)
        return
    check_output(resolved.output)
    check_run(resolved, ranks or num_ranks(), deepspeed_settings(resolved))
    try:
        launch(resolved, ranks, checked=True)
    except subprocess.CalledProcessError as error:
        if error.returncode == STOPPED:
            raise typer.Exit(STOPPED) from None
        raise ValueError(how_ranks_ended(error.returncode, resolved)) from None
    except KeyboardInterrupt:
        print(f"\ninterrupted: {how_to_resume(resolved)}", flush=True)
        raise


@app.command(epilog=f"Recipes of this package: {', '.join(recipe_names())}.")
def prepare(
    recipe: Annotated[str, typer.Argument(help="A recipe of this package by its name, or a YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the recipe: the same as for the run."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes, each reading its own file or shard; one per core.", show_default=False),
    ] = None,
) -> None:
    """Turns a recipe's documents into tokens, before a run. Started again, it resumes where it stopped."""
    check_installed("condense prepare", "train", without=("tensorboard", "deepspeed"))
    quiet()
    from condense.training.prepare import num_cores
    from condense.training.prepare import prepare as prepare_documents
    from condense.training.recipe import load_recipe

    prepare_documents(load_recipe(recipe, overrides or []), workers or num_cores())


def check_arguments(arguments: list[str]) -> None:
    """Raises `ValueError` for an argument that is not UTF-8: Python represents its bytes as surrogates."""
    for argument in arguments:
        try:
            argument.encode("utf-8")
        except UnicodeEncodeError:
            shown = os.fsencode(argument).decode("utf-8", "backslashreplace")
            raise ValueError(
                f"argument {shown} is not UTF-8: write it in UTF-8, or rename the file or folder that it names."
            ) from None


def main() -> None:
    """Runs the command. A `ValueError` is for the user: its message is printed without a traceback."""
    gc.freeze()  # imports are not garbage: each collection, and the one at exit, would take half a second
    if PARENT in os.environ:
        from condense.training.subprocesses import end_with_parents

        end_with_parents()
    try:
        check_arguments(sys.argv[1:])
        app()
    except (ValueError, OSError) as error:
        print(f"condense: {error}", file=sys.stderr)
        sys.exit(1)
