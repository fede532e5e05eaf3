"""Lists what the package uses of transformers without a promise that it stays, and why.

`tests/test_transformers_private.py` compares `PRIVATE_NAMES` with the code, and looks for each name in the installed
transformers: after a release it says first what is gone. Classes and functions of model files, and tables, are
imported here only.
"""

from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, apply_rotary_pos_emb

__all__ = [
    "GGUF_PRE_TOKENIZER_SPLITS",  # how tokenizers of GGUF files split texts, by llama.cpp's names
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",  # pipelines and label smoothing look for a model's class here
    "MODEL_MAPPING_NAMES",  # as above, for models without a head
    "PRIVATE_NAMES",
    "LlamaAttention",  # in a stock Llama with a depth block
    "LlamaDecoderLayer",  # as above
    "apply_rotary_pos_emb",  # attention maps of stock models compute their scores again
    "get_tokenizer_config",  # the name of a tokenizer's class in its file, which a loaded one no longer has
]

# Names by the class that has them: overridden, called or set by this package.
PRIVATE_NAMES = {
    "PreTrainedConfig": {
        "_attn_implementation": "the only name under which the chosen implementation can be read",
        "_name_or_path": "a size without weights has no source to show",
    },
    "PreTrainedModel": {
        "_can_record_outputs": "hidden states of a stock Llama with a depth block",
        "_gradient_checkpointing_func": "Trainer's and accelerate's options of checkpointing are in it",
        "_hf_peft_config_loaded": "save_pretrained then writes adapters, which have another card",
        "_init_weights": "initialises added modules like the model's own",
        "_is_stateful": "whether a cache can go back, which decides about drafts",
        "_keys_to_ignore_on_load_unexpected": "a base model is loaded from a checkpoint with a head",
        "_no_split_modules": "device maps keep layers together",
        "_set_gradient_checkpointing": "checkpoints groups of segments in place of layers",
        "_skip_keys_device_placement": "a cache stays where its layers put it",
        "_supports_flash_attn": "choice of attn_implementation",
        "_supports_flex_attn": "choice of attn_implementation",
        "_supports_sdpa": "choice of attn_implementation",
        "_tied_weights_keys": "embedding and head of small models are one weight",
        "_tp_plan": "tensor parallelism of the head",
    },
    "GenerationMixin": {
        "_assisted_decoding": "drafts: which tokens the cache has read already",
        "_get_candidate_generator": "drafts without arguments that the assistant does not take",
        "_get_logits_processor": "generation by blocks applies generate's options",
        "_get_stopping_criteria": "a folded model has no longest text to be reminded of",
        "_prepare_cache_for_generation": "a FoldedCache in place of a growing cache",
        "_prepare_generation_config": "settings that a checkpoint stores for another cache",
        "_prepare_special_tokens": "generation by blocks ends where generate ends",
    },
    "Trainer": {
        "_get_grad_norm": "a gradient that is not finite ends the run before the optimizer moves",
        "_get_num_items_in_batch": "objectives count their targets themselves",
        "_get_train_sampler": "the data set has the order, and restores its own position",
        "_prepare_inputs": "validation moves its batches as training does",
        "_save": "a weight with two names is written once",
    },
}
