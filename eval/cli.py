"""`condense eval`, `profile`, `attention`, `report`, and the commands of the laboratories.

They get their flags from the dataclasses of their options.
"""

from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated

import typer

from condense.cli.command import App
from condense.extras import check_installed
from condense.laboratories import COMMANDS, STUDIES

from .benchmark.options import ProfileOptions
from .command import command, run_study, show
from .healing.options import HealingOptions
from .memory.options import MemoryOptions
from .options import Options
from .tasks import find_task
from .tasks import run_task as measure_task
from .tasks.options import (
    AnswersOptions,
    AttentionOptions,
    FactsOptions,
    FoldCostOptions,
    FoldStabilityOptions,
    LossOptions,
    PasskeyOptions,
    PerplexityOptions,
    RecallOptions,
    SuiteOptions,
    SummarizationOptions,
)

evaluations = App(help="Measures models that exist: the paper's evaluations, on any model.", no_args_is_help=True)
studies = App(help="Trains models to answer a question, and shows what they answer.", no_args_is_help=True)


def run_task(kind: str, options: Options, output: Path, *more: str) -> None:
    """Measures one task; the first process prints its results, and the names of its files and of `more` pictures."""
    results = measure_task(kind, options, output)
    if results is None:
        return
    show(results, find_task(kind), output)
    for picture in more:
        print(f"{output}/{picture}.png and .svg")


def run_profile(options: ProfileOptions, output: Path) -> None:
    """Measures a profile, a folded model's schedules or memory by module, and prints the results."""
    from .benchmark import modules, profile, schedules

    if options.modules:
        show(modules.modules(output, options), modules.Modules, output)
    elif options.schedules:
        show(schedules.schedules(output, options), schedules.Schedules, output)
    else:
        show(profile.profile(output, options), profile.Profile, output)


passkey = command(PasskeyOptions, partial(run_task, "passkey"), "eval passkey")
facts = command(FactsOptions, partial(run_task, "facts"), "eval facts")
recall = command(RecallOptions, partial(run_task, "recall"), "eval recall")
perplexity = command(PerplexityOptions, partial(run_task, "perplexity"), "eval perplexity")
fold_cost = command(FoldCostOptions, partial(run_task, "fold_cost"), "eval fold-cost")
loss = command(LossOptions, partial(run_task, "loss"), "eval loss")
fold_stability = command(FoldStabilityOptions, partial(run_task, "fold_stability"), "eval fold-stability")
summarization = command(SummarizationOptions, partial(run_task, "summarization"), "eval summarization", scores=True)
answers = command(AnswersOptions, partial(run_task, "answers"), "eval answers")
suite = command(SuiteOptions, partial(run_task, "suite"), "eval suite", extras=["harness"])
healing = command(
    HealingOptions, partial(run_study, "condense.eval.healing.study:Healing"), "study healing", extras=["train"]
)
memory = command(
    MemoryOptions, partial(run_study, "condense.eval.memory.study:Memory"), "study memory", extras=["train"]
)
attention = command(
    AttentionOptions, lambda options, output: run_task("attention", options, output, "attention_mass"), "attention"
)
profile = command(ProfileOptions, run_profile, "profile")
laboratory_commands = {name: resolve_name(path) for name, path in (COMMANDS | STUDIES).items()}
for evaluation in (passkey, facts, recall, perplexity, loss, fold_cost, fold_stability, summarization, answers, suite):
    evaluations.command()(evaluation)
for study in (healing, memory, *(laboratory_commands[name] for name in STUDIES)):
    studies.command()(study)


def report(
    folder: Annotated[Path, typer.Argument(help="Folder with results; results in its subfolders are included.")],
    title: str = "condense",
) -> None:
    """Writes one self-contained HTML page with the tables and plots of a folder."""
    check_installed("condense report", "eval")
    from .report import write_report

    print(write_report(folder, title))


PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@evaluations.command(context_settings=PASSED_ON)
def harness(context: typer.Context) -> None:
    """Runs the command line of lm-evaluation-harness, with --model condense added."""
    check_installed("condense eval harness", "harness")
    from .harness import main

    main(context.args)
