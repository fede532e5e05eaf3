"""The name from which other libraries load a model again.

TRL loads the reference model of preference training from `config._name_or_path`. PEFT writes it into an adapter's
configuration, and loads the base model from there. A model that was folded or changed in memory is not in any folder: a
stock model or one with other segments would silently replace it. Its name is therefore one that can't be loaded, and
errors about it say what to do.
"""

import re
from typing import Any

from transformers import PreTrainedConfig

from ..families import FAMILIES

REMEDY = "save_pretrained() it and load that folder)"
HUB_OPTIONS = ("cache_dir", "gguf_file", "local_files_only", "revision", "subfolder", "token")
# A model with others has other outputs.
FIELDS = ("segment_length", "memory_source", "memory_share", "sink_token_id", "position_anchor")


def name_as_in_memory(model: Any, source: Any, change: str) -> None:
    """Gives the model a name that can't be loaded; `change` says what was done to the model of `source`.

    Keeps an empty name, and one that says so already.
    """
    name = str(source or "")
    if name and not name.endswith(REMEDY):
        name = f"{name} ({change} in memory: {REMEDY}"
    model.config.name_or_path = name
    for module in (model, model.base_model):
        module.name_or_path = name


def stored_source(name: Any) -> str:
    """Returns the folder, file or hub id in a model's name, without what `name_as_in_memory` adds; "" for none."""
    return re.sub(r" \(\w+ in memory: .*", "", str(name or ""))


def check_name(model: Any, source: Any, options: dict[str, Any]) -> bool:
    """Renames a model if its configuration differs from the checkpoint `source` that it was loaded from with `options`:
    a stock model's checkpoint, or one with other segments. Returns whether it is a stock model's of a known family.
    """
    if source is None:  # weights that the caller has
        return False
    hub_options = {name: options[name] for name in HUB_OPTIONS if name in options}
    try:
        stored, _ = PreTrainedConfig.get_config_dict(source, **hub_options)
    except OSError:  # only weights: the caller has the configuration
        stored = {}
    if stored.get("model_type") != model.config.model_type:
        name_as_in_memory(model, source, "folded")
        return stored.get("model_type") in FAMILIES
    defaults = type(model.config)
    if any(stored.get(name, getattr(defaults, name)) != getattr(model.config, name) for name in FIELDS):
        name_as_in_memory(model, source, "changed")
    return False
