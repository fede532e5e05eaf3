"""`condense eval`, `profile`, `attention`, `probe` and `report`: a command prints tables and the names of its files.

The commands of the evaluations and of the probes get their flags from the dataclasses of their options.
"""

import inspect
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from .continuity.options import ProbeOptions
from .options import ATTENTION_HELP, Options, from_command_line, numbers, parameters
from .tasks import find_task
from .tasks.options import AttentionOptions, PasskeyOptions, PerplexityOptions, SummarizationOptions

evaluations = typer.Typer(help="The paper's evaluations, on folded and on stock models.", no_args_is_help=True)


class Preset(str, Enum):
    table1 = "table1"


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


def quiet() -> None:
    """Hides the notices and progress bars of the libraries, so that those of the command remain."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def show(results: dict[str, Any], shown_by: Any, output: Path) -> None:
    """Prints the tables of a result, and the names of its files. `shown_by` is the task, or a module with `tables`."""
    for table in shown_by.tables(results):
        print(table, end="\n\n")
    pictures = f"{results['kind']}-*" if results["kind"].startswith("probe_") else ""
    print(f"{output}/{results['kind']}.json, .csv, {pictures}.png and .svg")


def command(
    options: type[Options], action: Callable[..., None], name: str, *arguments: inspect.Parameter
) -> Callable[..., None]:
    """A command that calls `action(options, output, ...)`, with the flags of the options; `arguments` come first."""

    def run_command(output: Path, **given: Any) -> None:
        quiet()
        others = {argument.name: given.pop(argument.name) for argument in arguments}
        action(from_command_line(options, given), output, **others)

    models, *rest = parameters(options)
    folder = inspect.Parameter("output", inspect.Parameter.KEYWORD_ONLY, annotation=Output)
    run_command.__name__, run_command.__doc__, run_command.__annotations__ = name, options.__doc__, {}
    run_command.__signature__ = inspect.Signature([*arguments, models, folder, *rest])  # type: ignore[attr-defined]
    return run_command


def run_task(kind: str, options: Options, output: Path) -> None:
    """Measures one task and prints its results."""
    from .runner import run

    task = find_task(kind).load(options)
    show(run(task, output), task, output)


def run_attention(options: AttentionOptions, output: Path) -> None:
    run_task("attention", options, output)
    print(f"{output}/attention_mass.png and .svg")


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

passkey = command(PasskeyOptions, partial(run_task, "passkey"), "passkey")
perplexity = command(PerplexityOptions, partial(run_task, "perplexity"), "perplexity")
summarization = command(SummarizationOptions, partial(run_task, "summarization"), "summarization")
attention = command(AttentionOptions, run_attention, "attention")
probe = command(ProbeOptions, run_probe, "probe", PROBE_NAME)
for evaluation in (passkey, perplexity, summarization):
    evaluations.command()(evaluation)


def profile(
    output: Output,
    config: Annotated[str, typer.Option(help="Folder or hub id of a Llama, whose shape is profiled.")] = "",
    preset: Annotated[
        Preset | None, typer.Option(help="table1: the shape of the paper, with its grid as default.")
    ] = None,
    kinds: Annotated[
        str, typer.Option(help="folded, stock, sliding_window; with commas. Default: the first two.")
    ] = "",
    modes: Annotated[str, typer.Option(help="training, prefill, decoding.")] = "",
    lengths: Annotated[str, typer.Option(help="Tokens; k and m are 1,024 and 1,048,576.")] = "",
    batches: Annotated[str, typer.Option(help="Texts in a batch.")] = "",
    segments: Annotated[str, typer.Option(help="Tokens of a segment.")] = "",
    attention: Annotated[str, typer.Option(help="A list: auto, sdpa, eager, blocked, flash_attention_2 ...")] = "",
    checkpointing: Annotated[str, typer.Option(help="Gradient checkpointing: off, on, or off,on.")] = "off",
    vocabulary: Annotated[
        int | None, typer.Option(min=2, help="Size of the vocabulary; default that of the shape.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float32; auto: bfloat16 on CUDA, else float32.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    snapshots: Annotated[
        bool, typer.Option("--snapshots", help="Keep a torch.cuda.memory snapshot of each point.")
    ] = False,
    schedules: Annotated[
        bool,
        typer.Option(
            "--schedules", help="Compare the two schedules of a folded model instead, and check the choice of auto."
        ),
    ] = False,
) -> None:
    """Memory and speed against length, folded against stock, each point in a fresh process (table I, figures 5-7).

    With --schedules: the two schedules of a folded model against each other, and the choice of "auto".
    """
    quiet()
    from . import profile as module

    if (preset is None) == (not config):
        raise ValueError(f"--config={config!r} and --preset={preset and preset.value}: pass one of the two.")
    saves = {"off": False, "on": True}
    if wrong := [item for item in checkpointing.split(",") if item not in saves]:
        raise ValueError(f"--checkpointing={wrong}: write off, on, or off,on.")
    shape = config or "table1"
    modes_given = modes.split(",") if modes else None
    lengths_given = numbers(lengths) if lengths else None
    batches_given = numbers(batches) if batches else None
    segments_given = numbers(segments) if segments else None
    attentions = attention.split(",") if attention else None
    if schedules:
        given = {"--kinds": kinds, "--checkpointing": checkpointing != "off", "--snapshots": snapshots}
        if wrong := [name for name, value in given.items() if value]:
            raise ValueError(f"--schedules compares a folded model with itself: leave out {', '.join(wrong)}.")
        from .profile import schedules as side_by_side

        found = side_by_side.schedules(
            output, shape, modes_given, lengths_given, batches_given, segments_given, attentions, vocabulary, dtype,
            repeats,
        )  # fmt: skip
        show(found, side_by_side, output)
        return
    results = module.profile(
        output,
        shape,
        kinds.split(",") if kinds else ("folded", "stock"),
        modes_given,
        lengths_given,
        batches_given,
        segments_given,
        attentions,
        [saves[item] for item in checkpointing.split(",")],
        vocabulary,
        dtype,
        repeats,
        snapshots,
    )
    show(results, module, output)


def report(
    folder: Annotated[Path, typer.Argument(help="Folder with results; those in folders below it are on the page too.")],
    title: str = "condense",
) -> None:
    """One HTML page with the tables and plots of a folder; the page needs no other file."""
    from .report import write_report

    print(write_report(folder, title))


PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@evaluations.command(context_settings=PASSED_ON)
def harness(context: typer.Context) -> None:
    """The command line of lm-evaluation-harness, with --model condense added."""
    from .harness import main

    main(context.args)
