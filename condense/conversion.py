"""Conversion of a folded model to a stock Llama: only the configuration changes."""

from transformers import LlamaConfig, LlamaForCausalLM

from .configuration import OWN_ATTENTION, CondenseConfig
from .modeling import CondenseForCausalLM


def to_llama(model: CondenseForCausalLM) -> LlamaForCausalLM:
    """The stock Llama with the same weights (shared, not copied) and device, in evaluation mode.

    It has the same attention implementation; transformers' default replaces "auto" and "blocked".
    """
    if model.config.depth is not None:
        raise ValueError("a stock Llama has no depth block: convert the model that had all of its layers.")
    fields = model.config.to_dict()
    for name in [*(set(CondenseConfig.__annotations__)), "model_type", "architectures"]:
        fields.pop(name, None)
    attention = model.config._attn_implementation
    config = LlamaConfig(**fields, attn_implementation=None if attention in OWN_ATTENTION else attention)
    llama = LlamaForCausalLM(config)
    llama.load_state_dict(model.state_dict(), assign=True)
    if (
        model.lm_head.weight is model.model.embed_tokens.weight
    ):  # a checkpoint may hold both although its config ties them
        llama.tie_weights()
    llama.generation_config = model.generation_config
    return llama.to(model.device).eval()  # also moves the rotary tables, which are no weights
