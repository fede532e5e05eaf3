"""LoRA with PEFT: low-rank matrices beside frozen weights; only the matrices are trained.

Axes: x any size, I input width.
"""

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn

from condense.hub.adapter_base import describe_base, write_base
from condense.ops.linear import linear

if TYPE_CHECKING:
    from .recipe import LoRA


class SummedLinear(nn.Linear):
    """A linear map of an adapter. It sums the gradients of all segments in float32, as the model's own maps do."""

    def forward(self, input_xI: torch.Tensor) -> torch.Tensor:
        return linear(input_xI, self.weight, self.bias)


def check_targets(model: Any, lora: "LoRA") -> None:
    """Raises `ValueError` for a target that is not the name of a linear map, and suggests the nearest."""
    names = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for target in lora.targets:
        if target not in names:
            (nearest,) = difflib.get_close_matches(target, names, n=1, cutoff=0)
            raise ValueError(
                f"lora.targets: the model has no linear map {target!r}: did you mean {nearest!r}? It has "
                f"{', '.join(sorted(names))}."
            )


def add_adapters(model: Any, lora: "LoRA") -> Any:
    """Returns PEFT's model around this one, with its own weights frozen; torch's generator draws the adapters.

    It saves adapters alone, and beside them a description of their base. By default PEFT saves the embedding and the
    head too if one of them is adapted or has other rows than the base's configuration says, which a model that was
    folded in memory has in no folder.
    """
    from peft import PeftModelForCausalLM

    class AdaptersAlone(PeftModelForCausalLM):
        def save_pretrained(self, save_directory, **options):
            super().save_pretrained(save_directory, save_embedding_layers=False, **options)
            write_base(base, Path(save_directory))

    check_targets(model, lora)
    base = describe_base(model)  # before DeepSpeed rounds it
    adapted = with_matrices(model, lora)
    adapted.__class__ = AdaptersAlone
    return adapted


def with_matrices(model: Any, lora: "LoRA") -> Any:
    """Returns PEFT's model around this one, with its own weights frozen."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets),
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, settings)
    for layer in adapted.modules():
        if isinstance(layer, LoraLayer):
            for module in layer.modules():
                if type(module) is nn.Linear:
                    module.__class__ = SummedLinear
    return adapted


def adapter_shapes(model: nn.Module, lora: "LoRA") -> list[torch.Size]:
    """Returns the shapes of the matrices that `add_adapters` makes, in its order."""
    return [
        torch.Size(shape)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] in lora.targets
        for shape in ((lora.rank, module.in_features), (module.out_features, lora.rank))
    ]


def own_model(model: Any) -> Any:
    """Returns the causal language model inside the wrappers of Trainer, DeepSpeed and PEFT."""
    model = extract_model_from_parallel(model)
    return model.get_base_model() if hasattr(model, "peft_config") else model
