"""The front door: `condense COMMAND`. A command is one function here, which imports its modules when it is called."""

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from condense.cli_convert import convert
from condense.command import App
from condense.eval.cli import Attention, ablate, attention, depth, evaluations, probe, profile, quiet, report
from condense.eval.options import DTYPE_HELP
from condense.extras import check_installed
from condense.training.presets import recipe_names
from condense.version import __version__

app = App(
    help="A Llama with unbounded memory.", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


app.add_typer(evaluations, name="eval")
for command in (convert, profile, attention, probe, depth, ablate, report):
    app.command()(command)

PARENT = "CONDENSE_PARENT"  # see condense.training.subprocesses
LOWEST_TEMPERATURE = 0.01  # logits are divided by the temperature


def print_version(asked: bool) -> None:
    if asked:
        print(f"condense {__version__}")
        raise typer.Exit


@app.callback()
def front_door(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=print_version)] = False,
) -> None:
    """A Llama with unbounded memory."""


@app.command()
def generate(
    model: Annotated[str, typer.Option(help="Folder or hub id: a folded model, or a stock one, which is folded.")],
    prompt: Annotated[str, typer.Option(help="The prompt; it comes after the prompt file where both are given.")] = "",
    prompt_file: Annotated[Path | None, typer.Option(help="A text of any length to read first.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    segment_length: Annotated[int | None, typer.Option(help="For a stock model; default 512.")] = None,
    dtype: Annotated[str, typer.Option(help=DTYPE_HELP)] = "auto",
    attention: Attention = "auto",
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's message in the tokenizer's chat template.")
    ] = False,
    fixed_decoding: Annotated[
        bool, typer.Option("--fixed-decoding", help="Decode by a step of fixed shape: on CUDA a replayed graph.")
    ] = False,
    compiled_decoding: Annotated[
        bool,
        typer.Option(
            "--compiled-decoding",
            help="The same, compiled by torch, which takes up to a minute and a C++ compiler.",
        ),
    ] = False,
    control: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER[,NUMBER]...",
            help="For a model with a depth block: the components of its control; default 0.",
        ),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write the figures as JSON to this file.")] = None,
) -> None:
    """Reads a prompt of any length in constant memory and streams the answer."""
    quiet()
    import torch

    from condense.chat import chat_text, check_chat_template, end_tokens
    from condense.checks import check_attention, check_dtype
    from condense.files import check_output_file
    from condense.prefill import encode

    check_dtype(dtype)
    check_attention(attention)
    sampling = _sampling(temperature)
    if report is not None:
        check_output_file(report)
    text = _prompt_text(prompt, prompt_file)
    fields = {} if segment_length is None else {"segment_length": segment_length}
    components = None if control is None else _components(control, model)
    if chat:
        check_chat_template(_load_tokenizer(model), model)
    loaded, tokenizer = _load_folded(model, dtype=dtype, attn_implementation=attention, **fields)
    loaded.fixed_decoding = "compiled" if compiled_decoding else fixed_decoding

    if chat:  # the template brings its own first token
        input_ids = encode(tokenizer, chat_text(tokenizer, text), add_special_tokens=False)
    else:
        input_ids = encode(tokenizer, text)
    given = {} if components is None else {"control": torch.tensor([components], device=loaded.device)}
    cache, prefill_seconds = _prefill(loaded, input_ids[:, :-1], **given)
    if chat:
        sampling["eos_token_id"] = sorted(end_tokens(loaded, tokenizer, chat=True)) or None
    output, decoding_seconds = _decode(
        loaded, tokenizer, input_ids[:, -1:], cache, seed, max_new_tokens=max_new_tokens, **sampling, **given
    )

    num_tokens, new_ids = input_ids.shape[1], output.sequences[0, 1:]
    figures = {
        "prompt_tokens": num_tokens,
        "prompt_tokens_per_second": (num_tokens - 1) / prefill_seconds if num_tokens > 1 else None,
        "new_tokens": len(new_ids),
        "new_tokens_per_second": len(new_ids) / decoding_seconds,
        "state_bytes": output.past_key_values.num_bytes,
        "segment_length": loaded.config.segment_length,
        "chat": chat,
        "control": components,
        "text": tokenizer.decode(new_ids, skip_special_tokens=True),
    }
    _print_figures(figures)
    if report is not None:
        report.write_text(json.dumps(figures, indent=2, ensure_ascii=False), encoding="utf-8")


def _sampling(temperature: float) -> dict[str, Any]:
    """The arguments of `generate`. Raises `ValueError` for a temperature that divides logits beyond all numbers."""
    if not temperature:
        return {"do_sample": False}
    if temperature < LOWEST_TEMPERATURE:
        raise ValueError(
            f"--temperature {temperature}: pass 0 for the likeliest token, or {LOWEST_TEMPERATURE} or more."
        )
    return {"do_sample": True, "temperature": temperature}


def _prompt_text(prompt: str, prompt_file: Path | None) -> str:
    from condense.files import read_text

    text = ("" if prompt_file is None else read_text(prompt_file)) + prompt
    if not text:
        raise ValueError("there is no prompt: pass --prompt, --prompt-file or both.")
    return text


def _components(control: str, source: str) -> list[float]:
    """The components of `--control`. Raises `ValueError` where the model takes no such control."""
    from math import isfinite

    from condense import CondenseConfig
    from condense.loading import load_config

    try:
        found = [float(part) for part in control.split(",")]
    except ValueError:
        found = []
    if not found or not all(map(isfinite, found)):
        raise ValueError(f"--control {control}: write numbers with commas between them, such as 1.0 or 1,-0.5.")
    size = load_config(CondenseConfig, source).control_size
    if not size:
        raise ValueError(
            f"--control {control}: model {source!r} has no depth block that takes a control; leave it out, or make one "
            "with condense convert --depth."
        )
    if len(found) != size:
        raise ValueError(f"--control {control}: model {source!r} has a control of {size} components, not {len(found)}.")
    return found


def _load_folded(source: str, **options: Any) -> tuple[Any, Any]:
    """A folded model, on the GPU if there is one, and its tokenizer."""
    import torch

    from condense import CondenseForCausalLM
    from condense.loading import load_model, load_tokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(CondenseForCausalLM, source, **options).to(device).eval()
    return model, load_tokenizer(source, model.config)


def _load_tokenizer(source: str) -> Any:
    """The tokenizer of a model that is not loaded."""
    from transformers import AutoConfig

    from condense.loading import load_config, load_tokenizer

    return load_tokenizer(source, load_config(AutoConfig, source))


def _prefill(model: Any, input_ids: Any, **options: Any) -> tuple[Any, float]:
    """The cache after a prompt, None for an empty one, and the seconds."""
    from tqdm import tqdm

    from condense.prefill import prefill

    start, num_tokens, cache = time.perf_counter(), input_ids.shape[1], None
    if num_tokens:
        with tqdm(total=-(-num_tokens // model.config.segment_length), unit="segment", desc="reading") as bar:
            cache = prefill(model, input_ids, progress=bar.update, **options)
    return cache, time.perf_counter() - start


def _decode(model: Any, tokenizer: Any, last_token: Any, cache: Any, seed: int, **options: Any) -> tuple[Any, float]:
    """The output of `generate` after the last token of the prompt, streamed to the terminal, and the seconds."""
    import torch
    from transformers import LogitsProcessorList, TextStreamer

    from condense.generation import RefuseNonFiniteLogits

    torch.manual_seed(seed)
    start = time.perf_counter()
    with torch.no_grad():
        output = model.generate(
            last_token.to(model.device),
            attention_mask=torch.ones(1, 1, dtype=torch.long, device=model.device),
            past_key_values=cache,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            logits_processor=LogitsProcessorList([RefuseNonFiniteLogits()]),
            return_dict_in_generate=True,
            **options,
        )
    return output, time.perf_counter() - start


def _print_figures(figures: dict[str, Any]) -> None:
    rate = figures["prompt_tokens_per_second"]
    read_rate = "" if rate is None else f" at {rate:,.0f} tokens/s"
    print(
        f"read {figures['prompt_tokens']:,} tokens{read_rate}, wrote {figures['new_tokens']:,} at "
        f"{figures['new_tokens_per_second']:,.1f} tokens/s; state held: {figures['state_bytes']:,} bytes",
        file=sys.stderr,
    )


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
            help="Processes: one per GPU, or two on a CPU; in a dry run the GPUs here, or the most up to 8 that the "
            "recipe divides by.",
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
            help="With --dry-run: the largest micro-batch that a GPU of this memory holds, such as 80.",
            show_default=False,
        ),
    ] = None,
    tokens_per_second: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER|LOG",
            help="With --dry-run: hours from a measured rate. A number is that of the whole run, over all ranks; the "
            "log.jsonl of a former run of the same model and length is scaled to the number of ranks.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Runs a recipe on this machine; started again, it resumes from its last complete checkpoint.

    SIGTERM and SIGUSR1 end it after the current step with a checkpoint and exit code 75.
    """
    # Preflight checks the package of report_to.
    check_installed("condense train", "train", without=("tensorboard", *(["deepspeed"] if dry_run else [])))
    if report is not None and not dry_run:
        raise ValueError(f"--report {report} needs --dry-run: a run writes log.jsonl into its output.")
    for name, value in (("--gpu-memory", gpu_memory), ("--tokens-per-second", tokens_per_second)):
        if value is not None and not dry_run:
            raise ValueError(f"{name} {value} needs --dry-run: it changes what is planned, not what is run.")
    from condense.files import check_output_file
    from condense.training.checkpoints.resume import finished
    from condense.training.launch import how_ranks_ended, launch, local_overrides, num_ranks
    from condense.training.output_lock import check_unlocked
    from condense.training.preflight import check_run
    from condense.training.recipe import load_recipe
    from condense.training.subprocesses import STOPPED

    if report is not None:
        check_output_file(report)
    given = overrides or []
    if not dry_run:
        quiet()
        resolved = load_recipe(recipe, local_overrides(given))
        check_unlocked(resolved.output)
        if (said := finished(resolved)) is not None:
            print(said)
            return
        check_run(resolved, ranks or num_ranks(), resolved.deepspeed_settings())
        try:
            launch(recipe, given, ranks)
        except subprocess.CalledProcessError as error:
            if error.returncode == STOPPED:
                raise typer.Exit(STOPPED) from None
            raise ValueError(how_ranks_ended(error.returncode)) from None
        return
    import torch

    from condense.training.planning.dry_run import dry_run as describe

    planned = load_recipe(recipe, given)
    figures, text = describe(planned, ranks, torch.cuda.device_count(), gpu_memory, tokens_per_second)
    print(text)
    if report is not None:
        report.write_text(json.dumps(figures, indent=2), encoding="utf-8")


@app.command(epilog=f"Recipes of this package: {', '.join(recipe_names())}.")
def prepare(
    recipe: Annotated[str, typer.Argument(help="A recipe of this package by its name, or a YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the recipe: the same as those of the run."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes, each reading a file or shard of its own; one per core.", show_default=False
        ),
    ] = None,
) -> None:
    """Turns a recipe's documents into tokens, before a run; started again, it resumes where it was stopped."""
    check_installed("condense prepare", "train", without=("tensorboard", "deepspeed"))
    quiet()
    from condense.training.prepare import num_cores
    from condense.training.prepare import prepare as prepare_documents
    from condense.training.recipe import load_recipe

    prepare_documents(load_recipe(recipe, overrides or []), workers or num_cores())


def main() -> None:
    """Runs the command. A `ValueError` is for the user: its message is printed without a traceback."""
    gc.freeze()  # what was imported is no garbage: each search of it, and the one at the end, takes half a second
    if PARENT in os.environ:
        from condense.training.subprocesses import end_with_parents

        end_with_parents()
    try:
        app()
    except (ValueError, OSError) as error:
        print(f"condense: {error}", file=sys.stderr)
        sys.exit(1)
