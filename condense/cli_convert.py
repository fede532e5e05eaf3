"""`condense convert`: a checkpoint to a folded one or back, with a depth block in the place of some layers."""

import inspect
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from condense.eval.cli import quiet
from condense.eval.options import DTYPE_HELP, Option, Options, parameters
from condense.memory_share import parse_share


class ModelFormat(StrEnum):
    condense = "condense"
    stock = "stock"
    llama = "llama"  # the former name of `stock`


@dataclass(frozen=True, kw_only=True)
class BlockOptions(Options):
    """The depth block of the model that is written; None is the default of `DepthSettings`."""

    depth: Annotated[
        str | None, Option("FIRST:END, the layers that a depth block replaces: 2:4 for layers 2 and 3 (from 0).")
    ] = None
    field: Annotated[str | None, Option("Vector field of the block: mlp (the default), mlp_tau or layer.")] = None
    field_size: Annotated[
        int | None, Option("Width of an MLP field; default: as many weights as the replaced layers.", min=1)
    ] = None
    control_size: Annotated[int | None, Option("Components of the control; default 1, 0 for none.", min=0)] = None
    alpha: Annotated[float | None, Option("Scale of the field at first; default 0.1, of layer: the layers.")] = None
    solver: Annotated[
        str | None, Option("euler (the default), midpoint, rk4, or dopri5 and adaptive_heun with steps by token.")
    ] = None
    steps: Annotated[int | None, Option("Steps of euler, midpoint and rk4; default 4.", min=1)] = None
    seed: Annotated[int | None, Option("Seed of the field's weights; default 0.")] = None

    def plan(self) -> "DepthPlan | None":
        """None without `--depth`. Raises `ValueError` for a range or settings that no model has."""
        given = {name: value for name, value in vars(self).items() if value is not None and name != "depth"}
        if self.depth is None:
            if given:
                flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
                raise ValueError(f"{flags}: these describe a depth block; say with --depth FIRST:END where it is.")
            return None
        found = re.fullmatch(r"(\d+):(\d+)", self.depth)
        if found is None or int(found[1]) >= int(found[2]):
            raise ValueError(
                f"--depth {self.depth}: write FIRST:END with FIRST < END, counted from 0: 2:4 for layers 2 and 3."
            )
        plan = DepthPlan(int(found[1]), int(found[2]), given)
        plan.settings()
        return plan


@dataclass(frozen=True)
class DepthPlan:
    """Arguments of `convert_to_depth`."""

    first: int
    end: int
    given: dict[str, Any]

    def settings(self) -> Any:
        from condense.depth.conversion import initial_settings

        return initial_settings(self.first, self.end, **{n: v for n, v in self.given.items() if n != "seed"})


def convert(
    source: Annotated[
        str, typer.Argument(help="Folder or hub id of a Llama, Mistral, Qwen2 or Qwen3, or of a folded one.")
    ],
    target: Annotated[Path, typer.Argument(help="Folder to write.")],
    segment_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a segment; default that of the adapters' training, of the source, or 512.",
            show_default=False,
        ),
    ] = None,
    memory_source: Annotated[
        str | None, typer.Option(help="layer_output, or layer_input for Transformer-XL.", show_default=False)
    ] = None,
    memory_share: Annotated[
        str | None,
        typer.Option(
            help="Share of a layer's output in its memory, from 0 (layer_input) to 1 (layer_output): one number, or "
            "one for each layer (1:0:0:0).",
            show_default=False,
        ),
    ] = None,
    to: Annotated[
        ModelFormat,
        typer.Option(help="Model to write: a folded one (condense), or a stock one of its family (stock, or llama)."),
    ] = ModelFormat.condense,
    merge: Annotated[
        Path | None, typer.Option(help="Folder of adapters (PEFT) to merge into the weights.", show_default=False)
    ] = None,
    dtype: Annotated[str, typer.Option(help=DTYPE_HELP)] = "auto",
    **depth: Any,
) -> None:
    """Turns a checkpoint into a folded one, or back. Weights do not change, except those that --merge changes and
    those that a depth block replaces (docs/depth.md).
    """
    stock = to is not ModelFormat.condense
    share = None if memory_share is None else parse_share(memory_share)
    given = {"segment_length": segment_length, "memory_source": memory_source, "memory_share": share}
    fields = {name: value for name, value in given.items() if value is not None}
    if stock and fields:
        raise ValueError(f"a stock model has no {' or '.join(fields)}: leave the option out with --to {to}.")
    if stock:
        fields["segment_length"] = 1  # which a stock model does not have: it fits every sliding window
    quiet()
    plan = BlockOptions(**depth).plan()
    from condense import CondenseConfig, CondenseForCausalLM
    from condense.adapters import check_adapters, merge_adapters, trained_segment_length
    from condense.checks import check_dtype
    from condense.families import family_of
    from condense.files import check_new_folder
    from condense.loading import load_config, load_model, load_tokenizer

    check_dtype(dtype)
    check_new_folder(target)
    if merge is not None:
        check_adapters(merge, "condense convert --merge")
        if "segment_length" not in fields and (trained := trained_segment_length(merge)):
            fields["segment_length"] = trained
    config = load_config(CondenseConfig, source, **fields)
    if to is ModelFormat.llama and config.family != to:
        raise ValueError(f"{source!r} is of the family {config.family}, and a stock Llama is not: pass --to stock.")
    _check_block(config, plan, stock)
    model = load_model(CondenseForCausalLM, source, dtype=dtype, **fields)
    tokenizer = load_tokenizer(source, model.config)
    if merge is not None:
        model = merge_adapters(model, merge)
    written = _with_block(model, plan, stock)
    _save(written, tokenizer, target)
    form = f"a stock {family_of(config).title}" if stock else f"segments of {model.config.segment_length} tokens"
    print(f"{target}: {written.num_parameters():,} parameters, {form}{_described_block(written)}")


def _check_block(config: Any, plan: DepthPlan | None, stock: bool) -> None:
    """Raises `ValueError` where the block does not fit the model, before its weights are loaded."""
    if plan is None and config.depth is None:
        return
    from condense.depth.conversion import check_range
    from condense.depth.llama import check_llama, check_stock

    depth, num_layers = config.depth, config.num_hidden_layers
    if plan is not None:
        check_range(config, plan.first, plan.end)
        depth, num_layers = plan.settings().to_dict(), num_layers - (plan.end - plan.first) + 1
    if stock:
        check_llama(config)
        check_stock(depth, num_layers)


def _with_block(model: Any, plan: DepthPlan | None, stock: bool) -> Any:
    from condense import to_stock

    if plan is None and model.config.depth is None:
        return to_stock(model) if stock else model
    from condense.depth import convert_to_depth, to_depth_llama

    if plan is not None:
        model = convert_to_depth(model, plan.first, plan.end, **plan.given)
    return to_depth_llama(model) if stock else model


def _save(model: Any, tokenizer: Any, target: Path) -> None:
    from condense.files import atomic_folder, use_default_mode

    with atomic_folder(target) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        use_default_mode(folder)


def _described_block(model: Any) -> str:
    depth = getattr(model.config, "depth", None)
    if depth is None:
        return ""
    block = model.model.layers[depth["position"]]
    last = depth["position"] + depth["num_replaced"] - 1
    layers = f"layer {last}" if depth["num_replaced"] == 1 else f"layers {depth['position']} to {last}"
    width = "" if depth["field_size"] is None else f" of width {depth['field_size']:,}"
    parameters_of_field = sum(parameter.numel() for parameter in block.field.parameters())
    return (
        f"; a depth block for {layers}: field {depth['field']}{width}, {parameters_of_field:,} parameters, control of "
        f"size {depth['control_size']}, {depth['solver']}"
        + (f" with {depth['steps']} steps" if not block.settings.is_adaptive else "")
    )


_own = [parameter for name, parameter in inspect.signature(convert).parameters.items() if name != "depth"]
convert.__signature__ = inspect.Signature([*_own, *parameters(BlockOptions)])  # type: ignore[attr-defined]
convert.__annotations__ = {}  # typer reads the types of the signature
