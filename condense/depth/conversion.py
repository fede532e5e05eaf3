"""Conversion: a depth block in the place of layers of a model that exists."""

import copy
from dataclasses import replace
from typing import Any

import torch

from ..modeling import CondenseForCausalLM
from .block import DepthBlock, DepthFlow, LayerField
from .fields import field_size_for
from .settings import DepthSettings


def convert_to_depth(
    model: CondenseForCausalLM, first: int, end: int, field: str = "mlp", seed: int = 0, **settings: Any
) -> CondenseForCausalLM:
    """Replaces layers `first` to `end - 1` by one depth block; the other layers keep their weights.

    `settings` are those of `DepthSettings`. An MLP field has random weights of `seed`, and as many of them as the
    replaced layers unless `field_size` is given. The field `layer` has the weights of layer `first` and, unless `alpha`
    is given, a scale equal to the number of replaced layers: as many Euler steps repeat that layer.

    Changes the model, and returns it. Raises `ValueError` for an empty range or one outside of the stack, for settings
    that do not exist, and for a model that has a depth block.
    """
    config, layers = model.config, model.model.layers
    if config.depth is not None:
        raise ValueError(f"the model has a depth block at position {config.depth['position']}: a model has one.")
    if not 0 <= first < end <= len(layers):
        raise ValueError(f"depth {first}:{end}: choose FIRST:END with 0 <= FIRST < END <= {len(layers)}, the layers.")
    replaced = list(layers[first:end])
    if field == "layer":
        settings = {"alpha": float(len(replaced))} | settings
    given = {"position": first, "num_replaced": len(replaced), "field": field} | settings
    chosen = DepthSettings.from_dict(given)
    if chosen.field != "layer" and chosen.field_size is None:
        num_parameters = sum(parameter.numel() for layer in replaced for parameter in layer.parameters())
        inputs = config.hidden_size + chosen.control_size + (chosen.field == "mlp_tau")
        size = field_size_for(num_parameters, config.hidden_size, inputs, norm_parameters=config.hidden_size)
        chosen = DepthSettings.from_dict(given | {"field_size": size})
    made_config = copy.copy(config)
    made_config.depth = chosen.to_dict()
    weight = next(replaced[0].parameters())
    block = _new_block(model, made_config, seed).to(weight.device, weight.dtype)
    if isinstance(block.field, LayerField):
        missing, unexpected = block.field.load_state_dict(replaced[0].state_dict(), strict=False)
        assert not unexpected and all(name.startswith("control_proj") for name in missing)
    model.model.replace_layers(first, end, block)
    config.depth = chosen.to_dict()
    return model


def _new_block(model: CondenseForCausalLM, config: Any, seed: int) -> DepthBlock:
    """A block with the random weights that the model's class gives, of a seed of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        block = DepthBlock(config)
        for module in block.modules():
            model._init_weights(module)
    return block


def set_solver(model: Any, solver: str, **settings: Any) -> None:
    """Changes the solver of a model's depth block, and `steps`, `rtol`, `atol`, `max_evaluations` or `gradient`.

    Weights stay; caches made before do not fit afterwards. Raises `ValueError` as `DepthSettings`, and for a model
    without a depth block.
    """
    flows = [module for module in model.modules() if isinstance(module, DepthFlow)]
    if not flows:
        raise ValueError("the model has no depth block, whose solver could change: make one with convert_to_depth.")
    allowed = ("steps", "rtol", "atol", "max_evaluations", "gradient")
    if other := [name for name in settings if name not in allowed]:
        raise ValueError(f"set_solver changes {', '.join(allowed)}, not {', '.join(other)}.")
    for flow in flows:
        flow.settings = replace(flow.settings, solver=solver, **settings)
    if getattr(model.config, "depth", None) is not None:
        model.config.depth = flows[0].settings.to_dict()
