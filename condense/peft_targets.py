"""The modules that PEFT adapts where the user names none, which it chooses by the type of the model."""

import sys

from transformers import LlamaConfig


def add_default_targets(model_type: str) -> None:
    """Gives a model type the entries of a Llama, whose modules it has, in PEFT's tables of default targets.

    PEFT finds the type in the dictionary of a model's configuration, so that a configuration calls this when it makes
    one. That is after PEFT was imported, whichever was imported first; who does not use PEFT does not import it.
    """
    constants = sys.modules.get("peft.utils.constants")
    for table in list(vars(constants).values()) if constants else ():
        if isinstance(table, dict) and LlamaConfig.model_type in table:
            table.setdefault(model_type, table[LlamaConfig.model_type])
