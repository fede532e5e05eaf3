"""Adapts PEFT to folded models, and refuses what it can't do with them, without importing PEFT."""

import sys
from functools import partial

from torch import nn
from transformers import LlamaConfig


def add_default_targets(model_type: str) -> None:
    """Adds a model type to PEFT's tables of default targets, with a Llama's entries, because it has a Llama's modules.

    PEFT finds the type in the dictionary of a model's configuration, so a configuration calls this when it makes one.
    PEFT has been imported by then, whichever was imported first.
    """
    constants = sys.modules.get("peft.utils.constants")
    for table in list(vars(constants).values()) if constants else ():
        if isinstance(table, dict) and LlamaConfig.model_type in table:
            table.setdefault(model_type, table[LlamaConfig.model_type])


def check_activated_lora(model: nn.Module) -> None:
    """Raises `ValueError` for adapters of activated LoRA, which begin at a token.

    PEFT tells a call's modules how many tokens before the end of the text this token is, but they see only a segment.
    """
    if "peft.tuners.lora" not in sys.modules:
        return
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, partial) and "alora_offsets" in hook.keywords:
                raise ValueError(
                    "alora_invocation_tokens: activated LoRA counts tokens from the end of the text, but the layers of "
                    "a folded model read it by segments. Use LoRA without them."
                )
