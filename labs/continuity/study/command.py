"""`condense probe`: the continuity experiments; `condense sample questions`: texts that teach a model their tasks."""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from condense.eval.command import command, name_argument, quiet, run_experiments, writable

from .options import ProbeOptions

NAMES = "counting, wholes, events, sums, space, boolean, translation, scaling, density, memory"
probe = command(
    ProbeOptions,
    partial(run_experiments, "condense.labs.continuity.study.probes:probe", "condense probe"),
    "probe",
    name_argument(f"{NAMES}, or all of them."),
)


def questions(
    folder: Annotated[Path, typer.Argument(help="Folder to write.", callback=writable)],
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    questions: Annotated[int, typer.Option(help="Questions of each kind.")] = 100_000,
    width: Annotated[int, typer.Option(help="Hidden size of the Llamas.")] = 128,
    layers: Annotated[int, typer.Option(help="Layers of the Llamas.")] = 3,
) -> None:
    """Questions that teach small models to count, add and answer, for the probes; and Llamas to train on them."""
    from condense.training.sample_data import copy_files

    from .questions import write_questions

    quiet()
    with TemporaryDirectory() as made:
        write_questions(Path(made), seed, questions, width, layers)
        copy_files(Path(made), folder)
    print(f"{folder}: {questions:,} questions each to count, add and answer, and Llamas to train on them")
