"""Registration of models with transformers.

Libraries choose what to do with a model by name. Trainer's label smoothing and pipelines look up its class in
transformers' table of causal language models; if it is missing, they silently treat the model as another kind.
`transformers serve` and TRL take the class that a checkpoint names from the module `transformers`.
"""

import sys
from types import ModuleType

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from .remote_code import RemoteCodeConfig, auto_map
from .transformers_private import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES


def register(
    config_class: type[RemoteCodeConfig],
    causal_lm: type[PreTrainedModel],
    base_model: type[PreTrainedModel] | None = None,
) -> None:
    """Registers a model under its model type and the names of its classes; `base_model` is the model without a head."""
    model_type, classes = config_class.model_type, {"AutoConfig": config_class, "AutoModelForCausalLM": causal_lm}
    AutoConfig.register(model_type, config_class)
    AutoModelForCausalLM.register(config_class, causal_lm)
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] = causal_lm.__name__
    if base_model is not None:
        AutoModel.register(config_class, base_model)
        MODEL_MAPPING_NAMES[model_type] = base_model.__name__
        classes["AutoModel"] = base_model
    for module in _modules_of_transformers():
        for one in classes.values():
            setattr(module, one.__name__, one)
    config_class.auto_map = auto_map(**classes)


def _modules_of_transformers() -> list[ModuleType]:
    """Returns the module `transformers` that is imported from now on, and any that others have imported before.

    They may differ: `transformers.processing_utils` makes a second one, without its earlier attributes.
    """
    holders = [sys.modules, *(getattr(module, "__dict__", {}) for module in list(sys.modules.values()))]
    held = [holder.get("transformers") for holder in holders]
    return [module for module in held if isinstance(module, ModuleType) and module.__name__ == "transformers"]
