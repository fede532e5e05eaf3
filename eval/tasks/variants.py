"""Models with the weights of another and a different memory, in the memory that the weights take already."""

from typing import Any

import torch

from condense import CondenseConfig, CondenseForCausalLM, to_stock
from condense.families import check_family, folded_fields
from condense.rotary import RotaryEmbedding

from ..models import EvaluatedModel


def variant_config(config: Any, **fields: Any) -> CondenseConfig:
    """Returns the configuration of a folded or stock model, folded with these fields.

    Raises `ValueError` for a family that is not folded, and as `CondenseConfig` does.
    """
    known = config.to_dict()
    if config.model_type != CondenseConfig.model_type:
        check_family(config.model_type)
        known = folded_fields(config.model_type, known)
    for name in ("model_type", "architectures", "transformers_version"):
        known.pop(name, None)
    return CondenseConfig(**(known | fields))


def variant(model: Any, attention: str = "auto", **fields: Any) -> CondenseForCausalLM:
    """Returns a folded model with the weights of a folded or stock one (shared, not copied), in evaluation mode.

    `fields` change its configuration, `attention` its implementation.
    """
    config = variant_config(model.config, **fields)
    config._attn_implementation = attention
    with torch.device("meta"):
        made = CondenseForCausalLM(config)
    made.load_state_dict(model.state_dict(), assign=True)
    made.model.rotary_emb = RotaryEmbedding(made.config).to(model.device)  # its tables are not weights
    return made.eval()


class StockInMemory:
    """Returns the stock model of an evaluated one, and keeps it until the next is asked for."""

    def __init__(self) -> None:
        self._kept = dict[str, Any]()

    def __call__(self, evaluated: EvaluatedModel) -> Any:
        if evaluated.name not in self._kept:
            self._kept = {}  # before the next model is loaded
            model = evaluated.model
            self._kept = {evaluated.name: to_stock(model) if isinstance(model, CondenseForCausalLM) else model}
        return self._kept[evaluated.name]
