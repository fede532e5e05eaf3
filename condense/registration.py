"""Registration of models with transformers.

Libraries choose what to do with a model by name: Trainer's label smoothing and pipelines look up its class in
transformers' table of causal language models. If it is missing, they silently treat the model as another kind.
"""

from types import MappingProxyType

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from .transformers_private import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES


def register(
    config_class: type[PreTrainedConfig],
    causal_lm: type[PreTrainedModel],
    base_model: type[PreTrainedModel] | None = None,
) -> None:
    """Registers a model under its model type and the names of its classes; `base_model` is the model without a head."""
    model_type = config_class.model_type
    AutoConfig.register(model_type, config_class)
    AutoModelForCausalLM.register(config_class, causal_lm)
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] = causal_lm.__name__
    if base_model is not None:
        AutoModel.register(config_class, base_model)
        MODEL_MAPPING_NAMES[model_type] = base_model.__name__
    # TRL asks each configuration for its remote code if its model is not transformers' own: there is none.
    config_class.auto_map = MappingProxyType({})
