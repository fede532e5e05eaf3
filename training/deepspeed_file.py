"""Reads the DeepSpeed configuration that a recipe names, for all who look into it.

The recipe decides the optimizer, the batches, the clipping and the precision. A file may leave them out or say "auto";
a value of its own has to be the recipe's.
"""

import json
from math import isinf
from pathlib import Path
from typing import Any

from condense.utils.files import read_text

from .presets import find_deepspeed_config
from .recipe import Recipe

AUTO = "auto"  # Trainer fills in the recipe's value
STAGES = (0, 1, 2, 3)
OPTIMIZER = "it would replace the recipe's optimizer; remove it, and set the recipe's optimizer.* instead"
DIVIDING = (
    "here each rank trains whole layers on texts of its own; remove it, and set zero_optimization.stage=3 instead"
)
REFUSED = {
    "optimizer": OPTIMIZER,
    "scheduler": OPTIMIZER,
    "tensor_parallel": DIVIDING,
    "sequence_parallel_size": DIVIDING,
    "expert_parallel": DIVIDING,
    "torch_autocast": "the recipe's dtype decides the precision; remove it",
}
# Of `zero_optimization`: the only value that works here, and what to do about others.
ONLY_VALUES = {
    "cpu_offload": (False, 'its name is now "offload_optimizer": {"device": "cpu"}; write that instead'),
    "compute_grad_norm": (True, "gradients are clipped and checked by their norm; remove it"),
}
GATHER = "stage3_gather_16bit_weights_on_model_save"
NAMES_OF_GATHER = (GATHER, "gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")


def deepspeed_settings(recipe: Recipe) -> dict[str, Any]:
    """Returns the content of the recipe's DeepSpeed file, with all that the recipe decides.

    `zero_optimization.stage` is 0, 1, 2 or 3, and ZeRO-3 gathers the weights to save them. Raises `ValueError` for a
    file that can't be read, or that contradicts the recipe.
    """
    named = f"deepspeed={recipe.deepspeed}"
    settings = _read(find_deepspeed_config(recipe.deepspeed), named)
    zero = settings.get("zero_optimization") if isinstance(settings, dict) else None
    zero = zero if isinstance(zero, dict) else {}
    stage = zero.get("stage")
    if type(stage) is not int or stage not in STAGES:
        said = "does not say" if stage is None else f"has {stage!r} as"
        raise ValueError(f"{named} {said} zero_optimization.stage: write 0, 1, 2 or 3, without quotes.")
    for key, reason in REFUSED.items():
        if key in settings:
            raise ValueError(f"{named} has {key!r}: {reason}.")
    for key, (value, reason) in ONLY_VALUES.items():
        if zero.get(key, value) is not value:
            raise ValueError(f"{named} has zero_optimization.{key}={zero[key]!r}: {reason}.")
    _fill_batches(settings, recipe, named)
    _fill_precision(settings, recipe, named)
    if stage == 3:
        _fill_gathering(zero, named)
    return settings


def _read(path: Path, named: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for number, (key, _) in enumerate(pairs):
            if key in dict(pairs[:number]):
                raise ValueError(f"the key {key!r} occurs twice")
        return {key: value for key, value in pairs if value is not None}  # null is the default, as for DeepSpeed

    try:
        return json.loads(read_text(path), object_pairs_hook=once)
    except ValueError as error:
        raise ValueError(f"{named} can't be read as JSON: {error}.") from error


def _fill_batches(settings: dict[str, Any], recipe: Recipe, named: str) -> None:
    norm = recipe.optimizer.max_grad_norm
    decided: dict[str, tuple[str, list[Any]]] = {
        "train_batch_size": ("global_batch", [recipe.global_batch]),
        "train_micro_batch_size_per_gpu": ("micro_batch", [recipe.micro_batch]),
        "gradient_accumulation_steps": ("global_batch, micro_batch and the number of ranks", []),
        "gradient_clipping": ("optimizer.max_grad_norm", [0, norm] if isinf(norm) else [norm]),
    }
    for key, (by, own) in decided.items():
        _check_agrees(f"{named} has {key}", settings.get(key, AUTO), by, own)
        settings[key] = AUTO  # Trainer counts a micro-batch as one sequence, so the recipe's numbers are not its own


def _fill_precision(settings: dict[str, Any], recipe: Recipe, named: str) -> None:
    settings.setdefault("bf16", settings.pop("bfloat16", {}))  # the name that it had before
    for name, is_on in {"bf16": recipe.dtype == "bfloat16", "fp16": False}.items():
        section = settings.setdefault(name, {})
        if not isinstance(section, dict):
            raise ValueError(f'{named} has {name}={section!r}: write {{"enabled": "auto"}}, or remove it.')
        _check_agrees(f"{named} has {name}.enabled", section.get("enabled", AUTO), f"dtype={recipe.dtype}", [is_on])
        section["enabled"] = is_on
    overflow = settings["bf16"].get("check_grad_overflow", AUTO)
    _check_agrees(f"{named} has bf16.check_grad_overflow", overflow, "max_skipped_steps", [True])


def _fill_gathering(zero: dict[str, Any], named: str) -> None:
    for name in NAMES_OF_GATHER:
        if zero.pop(name, True) is not True:
            raise ValueError(f"{named} turns off {name}, so the run would end without weights: set it to true.")
    zero[GATHER] = True


def _check_agrees(said: str, value: Any, decided_by: str, own: list[Any]) -> None:
    """Raises `ValueError` for a value that is neither "auto" nor one of the recipe's `own`; True is not 1."""
    if value != AUTO and (value, type(value) is bool) not in [(one, type(one) is bool) for one in own]:
        raise ValueError(f'{said}={value!r}, which the recipe decides by {decided_by}: remove it, or write "auto".')
