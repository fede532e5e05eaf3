"""From a Llama checkpoint to a folded one is a change of configuration; so is the way back."""

from transformers import LlamaConfig, LlamaForCausalLM

from .configuration import OWN_ATTENTION, CondenseConfig
from .modeling import CondenseForCausalLM


def to_llama(model: CondenseForCausalLM) -> LlamaForCausalLM:
    """The stock Llama with the same weights (shared, not copied) and device, in evaluation mode.

    And with the same attention, or transformers' default for one that is condense's own.
    """
    fields = model.config.to_dict()
    for name in [*(set(CondenseConfig.__annotations__)), "model_type", "architectures"]:
        fields.pop(name, None)
    attention = model.config._attn_implementation
    config = LlamaConfig(**fields, attn_implementation=None if attention in OWN_ATTENTION else attention)
    llama = LlamaForCausalLM(config)
    llama.load_state_dict(model.state_dict(), assign=True)
    if model.lm_head.weight is model.model.embed_tokens.weight:  # a checkpoint may hold both in spite of its config
        llama.tie_weights()
    llama.generation_config = model.generation_config
    return llama.to(model.device).eval()  # the rotary tables are no weights
