"""Replaces layers of an existing model by a depth block."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import LlamaForCausalLM

from condense.checks import check_not_quantized
from condense.hub.source_name import name_as_in_memory
from condense.modeling import CondenseForCausalLM

from .block import DepthBlock, DepthFlow, LayerField
from .fields import field_size_for
from .llama import check_stock, make_stock_block, replace_stock_layers
from .settings import DepthSettings
from .solvers import check_installed

Block = TypeVar("Block", bound=DepthFlow)


def convert_to_depth(
    model: CondenseForCausalLM | LlamaForCausalLM,
    first: int,
    end: int,
    field: str = "mlp",
    seed: int = 0,
    **settings: Any,
) -> Any:
    """Replaces layers `first` to `end - 1` by one depth block; the other layers keep their weights.

    `settings` are fields of `DepthSettings`. An MLP field has random weights from `seed`, as many as the replaced
    layers unless `field_size` is given. The field `layer` has the weights of layer `first`. Its scale is the number of
    replaced layers unless `alpha` is given, so as many Euler steps repeat that layer.

    Changes a folded model and returns it. For a stock Llama, returns a new `DepthLlamaForCausalLM`, which shares the
    weights of the other layers. Raises `ValueError` for an empty range or one outside the stack, unknown settings, a
    model that has a depth block, quantized weights, and a stock Llama with the field `layer`.
    """
    if not isinstance(model, CondenseForCausalLM | LlamaForCausalLM):  # others may have windows or scales of their own
        raise ValueError(f"the model is a {type(model).__name__}: pass a CondenseForCausalLM or a LlamaForCausalLM.")
    config = model.config
    check_not_quantized(config, f"a depth block in place of layers {first}:{end}")
    check_range(config, first, end)
    replaced = list(model.model.layers[first:end])
    chosen = initial_settings(first, end, field, **settings)
    if chosen.field != "layer" and chosen.field_size is None:
        num_parameters = sum(parameter.numel() for layer in replaced for parameter in layer.parameters())
        inputs = config.hidden_size + chosen.control_size + (chosen.field == "mlp_tau")
        size = field_size_for(num_parameters, config.hidden_size, inputs, norm_parameters=config.hidden_size)
        chosen = replace(chosen, field_size=size)
    if not isinstance(model, CondenseForCausalLM):
        check_stock(chosen.to_dict(), config.num_hidden_layers - len(replaced) + 1)
        make = partial(make_stock_block, config, chosen)
        return replace_stock_layers(model, _initialize(model, replaced[0], make, seed))
    made_config = copy.copy(config)
    made_config.depth = chosen.to_dict()
    block = _initialize(model, replaced[0], partial(DepthBlock, made_config), seed)
    if isinstance(block.field, LayerField):
        missing, unexpected = block.field.load_state_dict(replaced[0].state_dict(), strict=False)
        assert not unexpected and all(name.startswith("control_proj") for name in missing)
    model.model.replace_layers(first, end, block)
    config.depth = chosen.to_dict()
    name_as_in_memory(model, config.name_or_path, "changed")
    return model


def check_range(config: Any, first: int, end: int) -> None:
    """Raises `ValueError` if no block can replace layers `first` to `end - 1` of a model of this configuration."""
    if (depth := getattr(config, "depth", None)) is not None:
        raise ValueError(f"the model has a depth block at position {depth['position']}: a model has one.")
    num_layers = config.num_hidden_layers
    whole = all(isinstance(number, int) and not isinstance(number, bool) for number in (first, end))
    if not whole or not 0 <= first < end <= num_layers:
        raise ValueError(f"depth {first}:{end}: choose FIRST:END with 0 <= FIRST < END <= {num_layers}, the layers.")
    if len(shares := set(getattr(config, "memory_shares", ())[first:end])) > 1:
        raise ValueError(
            f"depth {first}:{end}: the layers have the memory shares {', '.join(map(str, sorted(shares)))}, and a "
            "block has one: choose layers of one share, or load the model with another memory_share."
        )


def initial_settings(first: int, end: int, field: str = "mlp", **settings: Any) -> DepthSettings:
    """Returns the settings of a block in place of layers `first` to `end - 1`; see `convert_to_depth`."""
    if field == "layer":
        settings = {"alpha": float(end - first)} | settings
    return DepthSettings.from_dict(dict(position=first, num_replaced=end - first, field=field, **settings))


def _initialize(model: Any, replaced: nn.Module, make: Callable[[], Block], seed: int) -> Block:
    """Makes a block with random weights from its own seed, in the replaced layer's dtype and on its device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        block = make()
        for module in block.modules():
            model._init_weights(module)
    weight = next(replaced.parameters())
    return block.to(weight.device, weight.dtype)


def set_solver(model: Any, solver: str, **settings: Any) -> None:
    """Changes the solver of a model's depth block, and `steps`, `rtol`, `atol`, `max_evaluations` or `gradient`.

    Weights stay; earlier caches no longer fit. Raises `ValueError` like `DepthSettings`, and for a model without a
    depth block.
    """
    flows = [module for module in model.modules() if isinstance(module, DepthFlow)]
    if not flows:
        raise ValueError("the model does not have a depth block: make one with convert_to_depth.")
    allowed = ("steps", "rtol", "atol", "max_evaluations", "gradient")
    if other := [name for name in settings if name not in allowed]:
        raise ValueError(f"set_solver changes {', '.join(allowed)}, not {', '.join(other)}.")
    for flow in flows:
        changed = replace(flow.settings, solver=solver, **settings)
        check_installed(changed)
        flow.settings = changed
    if getattr(model.config, "depth", None) is not None:
        model.config.depth = flows[0].settings.to_dict()
