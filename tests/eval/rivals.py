"""Tiny causal models of transformers with random weights, of the kinds that folded models are compared with."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from condense.training.data.fact_kinds import all_texts
from condense.training.data.passkey import PASSKEY_TEXTS
from condense.training.data.recall import RECALL_TEXTS
from condense.training.data.summarization import AFTER, BEFORE
from condense.training.small_llama import word_tokenizer

from .tasks.documents import TEXT

SIZE = {"hidden_size": 32, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}
RIVALS = {  # the fields of each type's configuration
    "mamba": {**SIZE, "state_size": 4},
    "mamba2": {**SIZE, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "rwkv": {**SIZE, "attention_hidden_size": 32, "intermediate_size": 48},
    "recurrent_gemma": {
        **SIZE, **HEADS, "num_hidden_layers": 3, "num_key_value_heads": 1, "lru_width": 32, "attention_window_size": 16,
    },
    "jamba": {
        **SIZE, **HEADS, **EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "mamba_d_state": 4, "use_mamba_kernels": False,
    },
    "bamba": {**SIZE, **HEADS, **MAMBA2, "attn_layer_indices": [1, 3]},
    "qwen3_next": {
        **SIZE, **HEADS, **LINEAR, **EXPERTS, "head_dim": 8, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "gpt_neox": {**SIZE, "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 512},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "llama": {**SIZE, **HEADS, "max_position_embeddings": 512},
}  # fmt: skip


def rival_tokenizer():
    """Knows the words of all tasks."""
    return word_tokenizer([*PASSKEY_TEXTS, *RECALL_TEXTS, *all_texts(), BEFORE, AFTER, TEXT])


def rival(name, tokenizer, **changed):
    """Makes a model whose weights are larger than usual, so the text before a token matters to it."""
    torch.manual_seed(0)
    special = {field: getattr(tokenizer, field) for field in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = AutoConfig.for_model(name, vocab_size=len(tokenizer), **special, **RIVALS[name] | changed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    return model


def save_rival(folder, name, tokenizer, **changed):
    rival(name, tokenizer, **changed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
