"""`condense eval`, `profile`, `attention`, `probe`, `depth`, `ablate`, `report`: tables, and the names of their files.

The commands of the evaluations and of the experiments get their flags from the dataclasses of their options.
"""

import inspect
import os
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any

import typer

from condense.command import App
from condense.extras import check_installed

from .autoregressivity.experiments import EXPERIMENTS as ABLATIONS
from .autoregressivity.options import AblationOptions
from .benchmark.options import ProfileOptions
from .continuity.options import ProbeOptions
from .depth.experiments import EXPERIMENTS
from .depth.options import DepthOptions
from .healing.options import HealingOptions
from .ingredients.options import IngredientOptions
from .memory.options import MemoryOptions
from .options import ATTENTION_HELP, Options, from_command_line, parameters
from .tasks import find_task
from .tasks import run_task as measure_task
from .tasks.options import (
    AnswersOptions,
    AttentionOptions,
    FactsOptions,
    PasskeyOptions,
    PerplexityOptions,
    RecallOptions,
    SuiteOptions,
    SummarizationOptions,
)

evaluations = App(help="The paper's evaluations, on folded and on stock models.", no_args_is_help=True)


def writable(folder: Path) -> Path:
    """The folder, after a check that results can be written there."""
    from condense.files import check_output_folder

    check_output_folder(folder)
    return folder


Output = Annotated[
    Path,
    typer.Option(help="Folder for the results. A measurement that was stopped resumes there.", callback=writable),
]
Attention = Annotated[str, typer.Option(help=ATTENTION_HELP)]
SCORING = ("evaluate", "rouge-score", "sentencex")  # the last two score summaries, the first is for other programs


def quiet() -> None:
    """Hides the notices and progress bars of the libraries, so that those of the command remain."""
    import torch
    from transformers.utils import logging

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed warns where it finds that out by itself
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def show(results: dict[str, Any], shown_by: Any, output: Path) -> None:
    """Prints the tables of a result, and the names of its files. `shown_by` is the task, or a module with `tables`."""
    for table in shown_by.tables(results):
        print(table, end="\n\n")
    kind = results["kind"]
    written = [f"{kind}.json"]
    written += [".csv"] if (output / f"{kind}.csv").exists() else []
    written += [".png and .svg"] if (output / f"{kind}.png").exists() else []
    written += [f"{kind}-*.png and .svg"] if any(output.glob(f"{kind}-*.png")) else []
    print(f"{output}/{', '.join(written)}" + (" alone: nothing was measured" if len(written) == 1 else ""))


def command(
    options: type[Options], action: Callable[..., None], name: str, *arguments: inspect.Parameter
) -> Callable[..., None]:
    """A command that calls `action(options, output, ...)`, with the flags of the options; `arguments` come first."""

    def run_command(output: Path, **given: Any) -> None:
        check_installed(
            f"condense {name}", "eval", without=["evaluate"] if options is SummarizationOptions else SCORING
        )
        if options is SuiteOptions:
            check_installed(f"condense {name}", "harness")
        if options is DepthOptions:
            check_installed(f"condense {name}", "depth")
        if options is AblationOptions:
            check_installed(f"condense {name}", "autoregressivity")
        if options in (AblationOptions, HealingOptions, IngredientOptions, MemoryOptions):
            check_installed(f"condense {name}", "train")
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


def run_task(kind: str, options: Options, output: Path, *more: str) -> None:
    """Measures one task; the first process prints its results, and the names of its files and of `more` pictures."""
    results = measure_task(kind, options, output)
    if results is None:
        return
    show(results, find_task(kind), output)
    for picture in more:
        print(f"{output}/{picture}.png and .svg")


def run_probe(options: ProbeOptions, output: Path, name: str) -> None:
    """Runs one probe, or all of them and writes a page of their results."""
    from .continuity import probes

    if name == "all":
        for kind, results in probes.probe_all(output, options).items():
            show(results, probes.PROBES[kind], output)
        from .report import write_report

        print(write_report(output, "condense probe all"))
        return
    show(probes.probe(name, output, options), probes.PROBES[name], output)


def run_depth(options: DepthOptions, output: Path, name: str) -> None:
    """Runs one experiment on depth, or all of them and writes a page of their results."""
    from .depth.experiments import depth, depth_all, find_experiment

    if name == "all":
        for kind, results in depth_all(output, options).items():
            show(results, find_experiment(kind), output)
        from .report import write_report

        print(write_report(output, "condense depth all"))
        return
    show(depth(name, output, options), find_experiment(name), output)


def run_ablation(options: AblationOptions, output: Path, name: str) -> None:
    """Runs one ablation, or all of them and writes a page of their results."""
    from .autoregressivity.experiments import ablate, ablate_all, shown_by

    if name == "all":
        for kind, results in ablate_all(output, options).items():
            show(results, shown_by(kind), output)
        from .report import write_report

        print(write_report(output, "condense ablate all"))
        return
    if (found := ablate(name, output, options)) is not None:
        show(found, shown_by(f"ablation_{name}"), output)


def run_study(path: str, options: Options, output: Path) -> None:
    """Runs the study whose class is at `path`, which is imported here since that loads torch."""
    from .runner import run

    study = resolve_name(path)
    show(run(study(options, output), output), study, output)


def run_profile(options: ProfileOptions, output: Path) -> None:
    """Measures a profile, a folded model's schedules or memory by module, and prints the results."""
    from .benchmark import modules, profile, schedules

    if options.modules:
        show(modules.modules(output, options), modules.Modules, output)
    elif options.schedules:
        show(schedules.schedules(output, options), schedules.Schedules, output)
    else:
        show(profile.profile(output, options), profile.Profile, output)


PROBE_NAME = inspect.Parameter(
    "name",
    inspect.Parameter.KEYWORD_ONLY,
    annotation=Annotated[
        str,
        typer.Argument(
            help="counting, events, sums, space, boolean, translation, scaling, density, memory, or all of them."
        ),
    ],
)
DEPTH_NAME = inspect.Parameter(
    "name",
    inspect.Parameter.KEYWORD_ONLY,
    annotation=Annotated[str, typer.Argument(help=f"{', '.join(EXPERIMENTS)}, or all of them.")],
)
ABLATION_NAME = inspect.Parameter(
    "name",
    inspect.Parameter.KEYWORD_ONLY,
    annotation=Annotated[
        StrEnum("Property", {name: name for name in (*ABLATIONS, "all")}),  # type: ignore[misc]
        typer.Argument(help="A property or a design, or all of them.", metavar="NAME"),
    ],
)

passkey = command(PasskeyOptions, partial(run_task, "passkey"), "eval passkey")
facts = command(FactsOptions, partial(run_task, "facts"), "eval facts")
recall = command(RecallOptions, partial(run_task, "recall"), "eval recall")
perplexity = command(PerplexityOptions, partial(run_task, "perplexity"), "eval perplexity")
summarization = command(SummarizationOptions, partial(run_task, "summarization"), "eval summarization")
answers = command(AnswersOptions, partial(run_task, "answers"), "eval answers")
suite = command(SuiteOptions, partial(run_task, "suite"), "eval suite")
healing = command(HealingOptions, partial(run_study, "condense.eval.healing.study:Healing"), "eval healing")
ingredients = command(
    IngredientOptions, partial(run_study, "condense.eval.ingredients.study:Ingredients"), "eval ingredients"
)
memory = command(MemoryOptions, partial(run_study, "condense.eval.memory.study:Memory"), "eval memory")
attention = command(
    AttentionOptions, lambda options, output: run_task("attention", options, output, "attention_mass"), "attention"
)
profile = command(ProfileOptions, run_profile, "profile")
probe = command(ProbeOptions, run_probe, "probe", PROBE_NAME)
depth = command(DepthOptions, run_depth, "depth", DEPTH_NAME)
ablate = command(AblationOptions, run_ablation, "ablate", ABLATION_NAME)
for evaluation in (passkey, facts, recall, perplexity, summarization, answers, suite, healing, memory, ingredients):
    evaluations.command()(evaluation)


def report(
    folder: Annotated[Path, typer.Argument(help="Folder with results; those in folders below it are on the page too.")],
    title: str = "condense",
) -> None:
    """One HTML page with the tables and plots of a folder; the page needs no other file."""
    check_installed("condense report", "eval")
    from .report import write_report

    print(write_report(folder, title))


PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@evaluations.command(context_settings=PASSED_ON)
def harness(context: typer.Context) -> None:
    """The command line of lm-evaluation-harness, with --model condense added."""
    check_installed("condense eval harness", "harness")
    from .harness import main

    main(context.args)
