"""`condense sample`: small models with random weights, and texts, to try recipes without a download."""

from enum import StrEnum
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from condense.cli.command import App
from condense.eval.command import quiet, writable
from condense.extras import check_installed
from condense.laboratories import SAMPLES

samples = App(help="Writes small models with random weights, and texts, to try recipes on.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(help="Folder to write.", callback=writable)]
Seed = Annotated[int, typer.Option(help="Seed of all random numbers.")]
Width = Annotated[int, typer.Option(help="Hidden size of the Llama.")]
Layers = Annotated[int, typer.Option(help="Layers of the Llama.")]


class LlamaTask(StrEnum):
    passkey = "passkey"
    recall = "recall"


@samples.command()
def llama(
    folder: Folder,
    seed: Seed = 0,
    width: Width = 64,
    layers: Layers = 2,
    task: Annotated[LlamaTask, typer.Option(help="Its purpose: the words that it knows.")] = LlamaTask.passkey,
) -> None:
    """Writes a small Llama and a tokenizer of whole words."""
    from condense.training.sample_data import copy_files
    from condense.training.small_llama import save_small_llama

    quiet()
    with TemporaryDirectory() as made:
        model = save_small_llama(Path(made), seed, width, layers, str(task))
        copy_files(Path(made), folder)
    print(f"{folder}: a Llama of {model.num_parameters():,} parameters, {model.config.vocab_size} tokens")


@samples.command()
def data(folder: Folder, seed: Seed = 0) -> None:
    """Writes a small Llama, stories, and articles with summaries, for every recipe."""
    check_installed("condense sample data", "train")
    from condense.training.sample_data import write_sample_data

    quiet()
    write_sample_data(folder, seed)


@samples.command()
def facts(
    folder: Folder,
    text: Annotated[
        list[str] | None, typer.Option(help="Texts, by name or glob pattern; repeat it for several.")
    ] = None,
    width: Width = 64,
    layers: Layers = 3,
    words: Annotated[int, typer.Option(help="Words of the texts that the tokenizer knows.")] = 1500,
    seed: Seed = 0,
) -> None:
    """Writes a small Llama that knows the words of the facts, and the commonest words of given texts."""
    check_installed("condense sample facts", "train")
    from condense.training.facts_data import write_facts_llama

    quiet()
    write_facts_llama(folder, text or (), width, layers, words, seed)


for path in SAMPLES.values():
    samples.command()(resolve_name(path))
