"""Adapters that PEFT has trained, merged into the weights of their model."""

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open

from .extras import check_installed

FILES = ("adapter_config.json", "adapter_model.safetensors")
RECIPE = "recipe.json"  # of the training, beside the adapters


def check_adapters(folder: Path) -> None:
    """Raises `ValueError` for a folder without adapters, and where PEFT is not installed."""
    check_installed("condense convert --merge", "adapters")
    for name in FILES:
        if not (folder / name).is_file():
            raise ValueError(
                f"--merge {folder}: it holds no {name}. Pass the output of a training with lora, or a folder that "
                "PEFT's save_pretrained has written."
            )


def trained_segment_length(folder: Path) -> int | None:
    """The tokens of a segment with which `condense train` has trained a folder of adapters, or one of its checkpoints;
    None where no recipe says it: the adapters are of another program, or have the segments of their model."""
    recipe = (folder.parent if folder.name.startswith("checkpoint-") else folder) / RECIPE
    try:
        length = json.loads(recipe.read_text(encoding="utf-8"))["model"]["segment_length"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # none, or a file that is no recipe of this package
        return None
    return length if isinstance(length, int) else None


def merged(model: Any, folder: Path) -> Any:
    """The model with the adapters of a folder added to its weights: W + (alpha / rank) B A.

    Raises `ValueError` for adapters of another model.
    """
    from peft import PeftModel

    targets = json.loads((folder / FILES[0]).read_text(encoding="utf-8")).get("target_modules") or []
    if model.config.tie_word_embeddings and "lm_head" in targets:
        raise ValueError(
            f"--merge {folder}: it has an adapter of lm_head, which is tied to the embedding of this model: merged, it "
            "would change the embedding too. Train adapters without lm_head."
        )
    with safe_open(folder / FILES[1], framework="pt") as file:
        stored = set(file.keys())
    try:
        adapted = PeftModel.from_pretrained(model, str(folder))
    except (RuntimeError, ValueError, KeyError) as error:  # PEFT's for other shapes and other names
        raise ValueError(
            f"--merge {folder}: the adapters do not fit the model ({str(error).splitlines()[0]}). Pass the model that "
            f"they were trained on, {_base(folder)!r}."
        ) from error
    from peft import get_peft_model_state_dict

    if stored != set(get_peft_model_state_dict(adapted)):
        raise ValueError(
            f"--merge {folder}: the adapters are those of other layers than the model has. Pass the model that they "
            f"were trained on, {_base(folder)!r}."
        )
    return adapted.merge_and_unload()


def _base(folder: Path) -> str | None:
    return json.loads((folder / FILES[0]).read_text(encoding="utf-8")).get("base_model_name_or_path")
