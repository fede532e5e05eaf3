"""`condense convert`: folds a checkpoint or converts it back, with an optional depth block in place of some layers."""

import inspect
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any

import typer

from condense.cli.measure import Measure, Text, check_measurable, measured_fields
from condense.eval.command import quiet
from condense.eval.options import DTYPE_HELP, parameters
from condense.laboratories import BLOCK_OPTIONS
from condense.utils.memory_options import parse_share, parse_sink

BlockOptions: Any = resolve_name(BLOCK_OPTIONS)

Share = Annotated[
    str | None,
    typer.Option(
        help="Share of a layer's output in its memory, from 0 (layer_input) to 1 (layer_output): one number, or one "
        "for each layer (1:0:0:0); default from the adapters' training, the source, or 0.2.",
        show_default=False,
    ),
]
Sink = Annotated[
    str | None,
    typer.Option(
        metavar="ID|none",
        help="Token whose keys and values stand in place of each memory's first row (an attention sink); default from "
        "the adapters' training, the source, or a stock checkpoint's bos_token_id.",
        show_default=False,
    ),
]


class ModelFormat(StrEnum):
    condense = "condense"
    stock = "stock"
    llama = "llama"  # the former name of `stock`


def convert(
    source: Annotated[
        str,
        typer.Argument(help="Folder, hub id or GGUF file of a Llama, Mistral, Qwen2 or Qwen3, or of a folded model."),
    ],
    target: Annotated[Path, typer.Argument(help="Folder to write.")],
    text: Text = None,
    segment_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a segment; default from the adapters' training, the source, or 512.", show_default=False
        ),
    ] = None,
    memory_source: Annotated[
        str | None, typer.Option(help="layer_output, or layer_input for Transformer-XL.", show_default=False)
    ] = None,
    memory_share: Share = None,
    sink_token_id: Sink = None,
    to: Annotated[
        ModelFormat,
        typer.Option(help="Model to write: a folded one (condense), or a stock one of its family (stock, or llama)."),
    ] = ModelFormat.condense,
    merge: Annotated[
        Path | None, typer.Option(help="Folder of adapters (PEFT) to merge into the weights.", show_default=False)
    ] = None,
    dtype: Annotated[str, typer.Option(help=DTYPE_HELP)] = "auto",
    measure: Measure = False,
    **block: Any,
) -> None:
    """Turns a checkpoint into a folded one, or back. Only --merge and a depth block (docs/depth.md) change weights."""
    stock = to is not ModelFormat.condense
    share = None if memory_share is None else parse_share(memory_share)
    sink = {} if sink_token_id is None else {"sink_token_id": parse_sink(sink_token_id)}
    fields = _given_fields(to, sink, segment_length=segment_length, memory_source=memory_source, memory_share=share)
    quiet()
    blocks = BlockOptions(**block)
    check_measurable(measure, text, to=stock, merge=merge, depth=blocks.depth)
    import torch
    from transformers import AutoConfig

    from condense import CondenseConfig, CondenseForCausalLM
    from condense.checks import check_dtype
    from condense.families import family_of
    from condense.hub.adapters import check_adapters, check_base, merge_adapters, trained_memory
    from condense.hub.loading import load_config, load_model, load_tokenizer
    from condense.hub.untrained import diverges
    from condense.utils.files import check_new_folder
    from condense.utils.notices import without_notices

    check_dtype(dtype)
    check_new_folder(target)
    if merge is not None:
        check_adapters(merge, "condense convert --merge")
        if not stock:
            trained = trained_memory(merge, source)
            if {"memory_source", "memory_share"} & fields.keys():  # each says what the memory is made of
                trained = {name: value for name, value in trained.items() if not name.startswith("memory_")}
            fields = trained | fields
    with without_notices() if stock or measure else nullcontext():
        config = load_config(CondenseConfig, source, **fields)
    if merge is not None:
        with torch.device("meta"):
            check_base(CondenseForCausalLM(config), merge)
    from_stock = load_config(AutoConfig, source).model_type != config.model_type
    if to is ModelFormat.llama and config.family != to:
        raise ValueError(f"{source!r} is of the family {config.family}, and a stock Llama is not: pass --to stock.")
    blocks.check(config, stock)
    fields, cost = measured_fields(source, target, text, config, fields) if measure else (fields, "")
    with without_notices() if stock or merge is not None else nullcontext():
        model = load_model(CondenseForCausalLM, source, dtype=dtype, **fields)
    tokenizer = load_tokenizer(source, model.config)
    if merge is not None:
        model = merge_adapters(model, merge)
    written = blocks.convert(model, stock)
    _write(target, written, tokenizer, former_names_of=source if stock else None)
    form = f"a stock {family_of(config).title}" if stock else f"segments of {model.config.segment_length} tokens"
    print(f"{target}: {written.num_parameters():,} parameters, {form}{blocks.describe(written)}{cost}")
    if not stock and from_stock and merge is None and any(model.config.memory_shares) and not diverges(model.config):
        print("Its memory is untrained: `condense train heal` trains one (docs/healing.md).")


def _given_fields(to: ModelFormat, sink: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Returns the fields of the configuration that are given; the `sink` may be None. Raises `ValueError` for those of
    a stock model."""
    fields = {name: value for name, value in options.items() if value is not None} | sink
    if to is ModelFormat.condense:
        return fields
    if fields:
        raise ValueError(f"a stock model has no {' or '.join(fields)}: leave the option out with --to {to}.")
    return {"segment_length": 1}  # stock models ignore it: it fits every sliding window


def _write(target: Path, model: Any, tokenizer: Any, former_names_of: str | None) -> None:
    """Saves a model and its tokenizer, a stock model made of `former_names_of` with transformers 4's names, too."""
    from condense.hub.conversion import write_former_names
    from condense.hub.loading import tokenizer_class
    from condense.utils.files import atomic_folder, use_default_mode

    with atomic_folder(target) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if former_names_of is not None:
            write_former_names(folder, tokenizer_class(former_names_of))
        use_default_mode(folder)


_own = [parameter for name, parameter in inspect.signature(convert).parameters.items() if name != "block"]
convert.__signature__ = inspect.Signature([*_own, *parameters(BlockOptions)])  # type: ignore[attr-defined]
convert.__annotations__ = {}  # typer reads the types of the signature
