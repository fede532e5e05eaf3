"""The `generate` settings of a checkpoint, and the settings that stop transformers from saving a model.

transformers reads any settings and saves them unchanged, with a warning at most. It refuses to save changed settings
unless each of them has an effect. Training changes them: Trainer gives them the tokenizer's tokens.
"""

import copy
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

SWITCHES = ("do_sample", "num_beams", "use_cache", "return_dict_in_generate")  # these give other settings an effect


def check_settings(fields: dict[str, Any], path: Path) -> None:
    """Raises `ValueError` for the content of a generation_config.json that transformers refuses to load."""
    try:
        GenerationConfig.from_dict(fields)
    except Exception as error:  # damaged values fail in any way
        said = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"{path} can't be used ({said}): correct it, or delete it for the default settings."
        ) from error


def remove_ineffective(settings: GenerationConfig) -> dict[str, Any]:
    """Unsets the settings that have no effect, such as a temperature without `do_sample`, and returns them."""
    defaults, removed = GenerationConfig(), {}
    complaints = _complaints(settings)
    for name, value in settings.to_diff_dict().items():
        if not complaints:
            break
        if name in SWITCHES or not hasattr(defaults, name):
            continue
        without = copy.deepcopy(settings)
        setattr(without, name, getattr(defaults, name))
        if len(fewer := _complaints(without)) < len(complaints):
            setattr(settings, name, getattr(defaults, name))
            removed[name], complaints = value, fewer
    return removed


def _complaints(settings: GenerationConfig) -> list[str]:
    """Returns the lines of transformers' refusal to save the settings."""
    try:
        settings.validate(strict=True)
    except ValueError as error:
        return [line for line in str(error).splitlines() if line.startswith("- ")] or [str(error)]
    return []
