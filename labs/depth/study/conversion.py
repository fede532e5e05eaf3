"""Options of `condense convert` that replace some layers with a depth block."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

from condense.eval.options import Option, Options


@dataclass(frozen=True, kw_only=True)
class BlockOptions(Options):
    """The depth block of the written model; None is the default of `DepthSettings`."""

    depth: Annotated[
        str | None, Option("FIRST:END, the layers that a depth block replaces: 2:4 for layers 2 and 3 (from 0).")
    ] = None
    field: Annotated[str | None, Option("Vector field of the block: mlp (the default), mlp_tau or layer.")] = None
    field_size: Annotated[
        int | None, Option("Width of an MLP field; default: as many weights as the replaced layers.", min=1)
    ] = None
    control_size: Annotated[int | None, Option("Components of the control; default 1, 0 for none.", min=0)] = None
    alpha: Annotated[float | None, Option("Initial scale of the field; default 0.1, of layer: the layers.")] = None
    solver: Annotated[
        str | None, Option("euler (the default), midpoint, rk4, or dopri5 and adaptive_heun with steps per token.")
    ] = None
    steps: Annotated[int | None, Option("Steps of euler, midpoint and rk4; default 4.", min=1)] = None
    seed: Annotated[int | None, Option("Seed of the field's weights; default 0.")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.arguments:
            self.settings()  # refuses impossible ones

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `convert_to_depth`; none without `--depth`. Raises `ValueError` for an impossible range."""
        given = {name: value for name, value in vars(self).items() if value is not None and name != "depth"}
        if self.depth is None:
            if given:
                flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
                raise ValueError(f"{flags}: these describe a depth block; place it with --depth FIRST:END.")
            return {}
        found = re.fullmatch(r"(\d+):(\d+)", self.depth)
        if found is None or int(found[1]) >= int(found[2]):
            raise ValueError(
                f"--depth {self.depth}: write FIRST:END with FIRST < END, counted from 0: 2:4 for layers 2 and 3."
            )
        return {"first": int(found[1]), "end": int(found[2])} | given

    def settings(self) -> Any:
        """Returns the block's `DepthSettings`. Raises `ValueError` for impossible ones."""
        from ..model.conversion import initial_settings

        return initial_settings(**{name: value for name, value in self.arguments.items() if name != "seed"})

    def check(self, config: Any, stock: bool) -> None:
        """Raises `ValueError` if the block does not fit the model, before its weights are loaded."""
        if not self.arguments and config.depth is None:
            return
        from ..model.conversion import check_range
        from ..model.llama import check_llama, check_stock

        depth, num_layers = config.depth, config.num_hidden_layers
        if self.arguments:
            settings = self.settings()
            check_range(config, self.arguments["first"], self.arguments["end"])
            depth, num_layers = settings.to_dict(), num_layers - settings.num_replaced + 1
        if stock:
            check_llama(config)
            check_stock(depth, num_layers)

    def convert(self, model: Any, stock: bool) -> Any:
        """Returns the model with the block, or a stock model made from it."""
        from condense import to_stock

        if not self.arguments and model.config.depth is None:
            return to_stock(model) if stock else model
        from ..model import convert_to_depth, to_depth_llama

        if self.arguments:
            model = convert_to_depth(model, **self.arguments)
        return to_depth_llama(model) if stock else model

    @staticmethod
    def describe(model: Any) -> str:
        if getattr(model.config, "depth", None) is None:
            return ""
        block = model.model.layers[model.config.depth["position"]]
        settings, num_parameters = block.settings, sum(parameter.numel() for parameter in block.field.parameters())
        first, last = settings.position, settings.position + settings.num_replaced - 1
        layers = f"layer {last}" if first == last else f"layers {first} to {last}"
        width = "" if settings.field_size is None else f" of width {settings.field_size:,}"
        steps = "" if settings.is_adaptive else f" with {settings.steps} steps"
        return (
            f"; a depth block for {layers}: field {settings.field}{width}, {num_parameters:,} parameters, control of "
            f"size {settings.control_size}, {settings.solver}{steps}"
        )
