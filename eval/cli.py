"""`condense eval`, `profile`, `attention`, `probe` and `report`: a command is one function and prints what it wrote."""

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

evaluations = typer.Typer(help="The paper's evaluations, on folded and on stock models.", no_args_is_help=True)


class Preset(str, Enum):
    table1 = "table1"


Models = Annotated[
    list[str], typer.Option("--model", help="Folder or hub id, or NAME=FOLDER; several times for several models.")
]


def writable(folder: Path) -> Path:
    """The folder, after checking that results can be written there."""
    from condense.files import check_output_folder

    check_output_folder(folder)
    return folder


Output = Annotated[
    Path,
    typer.Option(help="Folder for the results. Started again, a measurement continues there.", callback=writable),
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: as stored.")]
Attention = Annotated[
    str,
    typer.Option(help="sdpa, eager, flash_attention_2, flex_attention or blocked; auto: see docs/performance.md."),
]


def numbers(text: str) -> list[int]:
    """Of `2048,4096` or `2k,4k,1m`. Raises `ValueError` for what is no list of positive whole numbers."""
    factors = {"k": 2**10, "m": 2**20}
    found = []
    for part in text.lower().split(","):
        number, factor = (part[:-1], factors[part[-1]]) if part[-1:] in factors else (part, 1)
        if not number.strip().isdecimal() or int(number) == 0:
            raise ValueError(f"{text!r}: {part!r} is no positive whole number; write 2048,4096 or 2k,4k,1m.")
        found.append(int(number) * factor)
    return distinct(found, text)


def distinct(found: list[Any], text: str) -> list[Any]:
    """Raises `ValueError` for a list that names something twice: it would be measured, or counted, twice."""
    if twice := [item for item in found if found.count(item) > 1]:
        raise ValueError(f"{text!r} names {twice[0]:g} twice: leave one out.")
    return found


def percentages(text: str) -> list[float]:
    """Shares from 0 to 1 of `0,25,100`. Raises `ValueError` for what is no list of percentages."""
    found = []
    for part in text.split(","):
        try:
            found.append(float(part))
        except ValueError:
            found.append(-1.0)
        if not 0 <= found[-1] <= 100:
            raise ValueError(f"{text!r}: {part!r} is no percentage; write 0,25,100.")
    return [value / 100 for value in distinct(found, text)]


def quiet() -> None:
    """Keeps the libraries' notices and bars out of a command's own."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def show(results: dict[str, Any], module: Any, output: Path) -> None:
    """The tables of a result, and where the rest is."""
    for table in module.tables(results):
        print(table, end="\n\n")
    pictures = f"{results['kind']}-*" if results["kind"].startswith("probe_") else ""
    print(f"{output}/{results['kind']}.json, .csv, {pictures}.png and .svg")


def profile(
    output: Output,
    config: Annotated[str, typer.Option(help="Folder or hub id of a Llama, whose shape is profiled.")] = "",
    preset: Annotated[Preset | None, typer.Option(help="table1: the paper's shape, and its grid by default.")] = None,
    kinds: Annotated[
        str, typer.Option(help="folded, stock, sliding_window; with commas. Default: the first two.")
    ] = "",
    modes: Annotated[str, typer.Option(help="training, prefill, decoding.")] = "",
    lengths: Annotated[str, typer.Option(help="Tokens; k and m are 1,024 and 1,048,576.")] = "",
    batches: Annotated[str, typer.Option(help="Texts at once.")] = "",
    segments: Annotated[str, typer.Option(help="Tokens of a segment.")] = "",
    attention: Annotated[str, typer.Option(help="A list: auto, sdpa, eager, blocked, flash_attention_2 ...")] = "",
    checkpointing: Annotated[str, typer.Option(help="Gradient checkpointing: off, on, or off,on.")] = "off",
    vocabulary: Annotated[int | None, typer.Option(min=2, help="Token types, instead of the shape's own.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float32; auto: bfloat16 on CUDA, else float32.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    snapshots: Annotated[bool, typer.Option("--snapshots", help="Keep a torch.cuda.memory snapshot of each.")] = False,
    schedules: Annotated[
        bool,
        typer.Option("--schedules", help="Instead: a folded model's two schedules in turn, and whether auto is right."),
    ] = False,
) -> None:
    """Memory and speed against length, folded against stock, each case in its own process (table I, figures 5-7).

    With --schedules: a folded model's schedules against each other, and which of them "auto" takes.
    """
    quiet()
    from .benchmark import profile_tables, schedule_tables
    from .benchmark.grid import GridOptions
    from .benchmark.profile import ProfileOptions
    from .benchmark.profile import profile as measure_profile
    from .benchmark.schedules import schedules as measure_schedules

    if (preset is None) == (not config):
        raise ValueError(f"--config={config!r} and --preset={preset and preset.value}: pass one of the two.")
    saves = {"off": False, "on": True}
    if wrong := [item for item in checkpointing.split(",") if item not in saves]:
        raise ValueError(f"--checkpointing={wrong}: write off, on, or off,on.")
    shared: dict[str, Any] = {
        "shape": config or "table1",
        "modes": modes.split(",") if modes else None,
        "lengths": numbers(lengths) if lengths else None,
        "batches": numbers(batches) if batches else None,
        "segments": numbers(segments) if segments else None,
        "attentions": attention.split(",") if attention else None,
        "vocab_size": vocabulary,
        "dtype": dtype,
        "repeats": repeats,
    }
    if schedules:
        given = {"--kinds": kinds, "--checkpointing": checkpointing != "off", "--snapshots": snapshots}
        if wrong := [name for name, value in given.items() if value]:
            raise ValueError(f"--schedules compares a folded model with itself: leave out {', '.join(wrong)}.")
        show(measure_schedules(output, GridOptions(**shared)), schedule_tables, output)
        return
    options = ProfileOptions(
        **shared,
        kinds=kinds.split(",") if kinds else ("folded", "stock"),
        checkpointing=[saves[item] for item in checkpointing.split(",")],
        snapshots=snapshots,
    )
    show(measure_profile(output, options), profile_tables, output)


def report(
    folder: Annotated[Path, typer.Argument(help="What it holds, also in folders below, goes on the page.")],
    title: str = "condense",
) -> None:
    """One HTML page with the tables and plots of what a folder holds; needs no other file."""
    from .report import write_report

    print(write_report(folder, title))


@evaluations.command()
def passkey(
    model: Models,
    output: Output,
    lengths: Annotated[str, typer.Option(help="Tokens, answer included; k and m are 1,024 and 1,048,576.")] = (
        "2k,4k,8k,16k,32k,64k"
    ),
    depths: Annotated[str, typer.Option(help="Percent of the text before the key.")] = "0,25,50,75,100",
    prompts: Annotated[int, typer.Option(min=1, help="In each cell of the grid.")] = 20,
    keys: Annotated[int, typer.Option(min=1, help="Keys in a text, one of which is asked for.")] = 1,
    digits: Annotated[int, typer.Option(min=1, help="Digits of a key.")] = 4,
    seed: int = 0,
    longest_trained: Annotated[int | None, typer.Option(help="Tokens; drawn as a border.")] = None,
    dtype: Dtype = "auto",
    attention: Attention = "auto",
) -> None:
    """Retrieval of a number hidden in long text, by length and depth (figure 8)."""
    quiet()
    from . import passkey as module

    results = module.passkey(
        model, output, numbers(lengths), percentages(depths), prompts, keys, digits,
        seed, longest_trained, dtype, attention,
    )  # fmt: skip
    show(results, module, output)


@evaluations.command()
def perplexity(
    model: Models,
    output: Output,
    data: Annotated[list[str], typer.Option(help="Texts: a file or glob pattern, .txt, .jsonl or .parquet.")],
    text_field: Annotated[str, typer.Option(help="Of .jsonl and .parquet: what holds the text.")] = "text",
    segments: Annotated[int, typer.Option(min=2, help="In a window; one less is the most text before.")] = 8,
    segment_length: Annotated[int, typer.Option(min=1, help="Tokens; for stock models, folded have theirs.")] = 512,
    tokens: Annotated[str, typer.Option(help="Of text, at most; k and m are 1,024 and 1,048,576; or all.")] = "64k",
    curves: Annotated[str, typer.Option(help="With commas; a stock model has the last.")] = (
        "folded,layer_input,full_attention"
    ),
    batch: Annotated[int, typer.Option(min=1, help="Windows at once.")] = 8,
    dtype: Dtype = "auto",
    attention: Attention = "auto",
) -> None:
    """What the memory buys, and how far back: loss by number of segments before, and by position in the segment."""
    quiet()
    from . import perplexity as module

    results = module.perplexity(
        model, output, data, segments, segment_length, None if tokens == "all" else numbers(tokens)[0],
        curves.split(","), batch, text_field, dtype, attention,
    )  # fmt: skip
    show(results, module, output)


class BadDocuments(str, Enum):
    refuse = "refuse"
    skip = "skip"


@evaluations.command()
def summarization(
    model: Models,
    output: Output,
    data: Annotated[str, typer.Option(help="cnn_dailymail, booksum, scitldr, or a .jsonl or .parquet file.")],
    text_field: Annotated[
        str | None, typer.Option(help="Of a file: the document; default text.", show_default=False)
    ] = None,
    summary_field: Annotated[
        str | None, typer.Option(help="Of a file: the reference; default summary.", show_default=False)
    ] = None,
    documents: Annotated[int | None, typer.Option(min=1, help="The first so many; default all.")] = None,
    longest: Annotated[
        int | None, typer.Option(min=1, help="Tokens; documents with a longer prompt are left out and counted.")
    ] = None,
    bad_documents: Annotated[
        BadDocuments, typer.Option(help="Broken lines, missing fields: end with an error, or skip and count them.")
    ] = BadDocuments.refuse,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.3,
    new_tokens: Annotated[int, typer.Option(min=1, help="At most, in each summary.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Documents at once.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="For sampling.")] = 0,
    dtype: Dtype = "auto",
    attention: Attention = "auto",
) -> None:
    """ROUGE of summaries, by length of the document (table II, figures 9, 11, 12)."""
    quiet()
    from . import summarization as module

    results = module.summarization(
        model, output, data, text_field, summary_field, documents, longest, bad_documents.value, temperature,
        new_tokens, batch, seed, dtype, attention,
    )  # fmt: skip
    show(results, module, output)


def attention(
    model: Models,
    output: Output,
    prompt_file: Annotated[
        str, typer.Option("--prompt-file", "--data", help="The text: .txt, or the first that is long enough of others.")
    ],
    layers: Annotated[str, typer.Option(help="From 0, with commas; the first, the middle and the last.")] = "",
    segments: Annotated[str, typer.Option(help="Of the queries, from 1; their keys begin in the one before.")] = (
        "2,4,6"
    ),
    heads: Annotated[str, typer.Option(help="From 0: maps of their own, beside the average over all.")] = "",
    segment_length: Annotated[int, typer.Option(min=1, help="Tokens; for stock models, folded have theirs.")] = 512,
    text_field: Annotated[str, typer.Option(help="Of .jsonl and .parquet: what holds the text.")] = "text",
    dtype: Dtype = "auto",
    attention: Attention = "auto",
) -> None:
    """Scores before softmax over the memory and the current segment, and how much attention memory gets (figure 10)."""
    quiet()
    from . import attention as module

    def places(text: str) -> list[int]:
        if wrong := [part for part in text.split(",") if not part.strip().isdecimal()]:
            raise ValueError(f"{text!r}: {wrong[0]!r} is no whole number; write 0,2,5.")
        return distinct([int(part) for part in text.split(",")], text)

    results = module.attention(
        model, output, prompt_file, places(layers) if layers else None, places(segments),
        places(heads) if heads else [], segment_length, text_field, dtype, attention,
    )  # fmt: skip
    show(results, module, output)
    print(f"{output}/attention_mass.png and .svg")


def probe(
    name: Annotated[
        str,
        typer.Argument(
            help="counting, events, sums, space, boolean, translation, scaling, density, memory, or all of them."
        ),
    ],
    model: Models,
    output: Output,
    data: Annotated[
        Path | None, typer.Option(help="Records in the form of the probe's own; its own.", show_default=False)
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="The first so many records; all.", show_default=False)
    ] = None,
    template: Annotated[str, typer.Option(help="Of counting: sentence, or listed for models that want it.")] = (
        "sentence"
    ),
    position_anchor: Annotated[
        str | None, typer.Option(help="end or start of a token's interval; end, or the folded model's own.")
    ] = None,
    dtype: Dtype = "float32",
    attention: Annotated[str, typer.Option(help="eager, sdpa, or auto: what the model prefers.")] = "auto",
    speed: Annotated[bool, typer.Option("--speed", help="Measure also what running factors together saves.")] = False,
) -> None:
    """The continuity experiments: fractions of tokens, and what lies between two of them."""
    quiet()
    from . import probes
    from .report import write_report

    options: dict[str, Any] = {
        "limit": limit,
        "template": template,
        "position_anchor": position_anchor,
        "dtype": dtype,
        "attention": attention,
        "timed": speed,
    }
    if name == "all":
        if data is not None:
            raise ValueError("--data belongs to one probe: leave it out with all.")
        for results in probes.probe_all(model, output, **options).values():
            show(results, probes, output)
        print(write_report(output, "condense probe all"))
        return
    show(probes.probe(name, model, output, data, **options), probes, output)


PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@evaluations.command(context_settings=PASSED_ON)
def harness(context: typer.Context) -> None:
    """The command line of lm-evaluation-harness, which here knows --model condense."""
    from .harness import main

    main(context.args)
