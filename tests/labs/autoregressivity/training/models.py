"""Small models with random weights: a folded one and a stock Llama."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.condense.models import tiny_model

VOCABULARY = 13
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip


def small_model(kind: str, dtype=torch.float64):
    if kind == "condense":
        model = tiny_model(dtype, segment_length=5, **SHAPE)
    else:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(dtype)
    with torch.no_grad():
        model.lm_head.weight *= 20  # probabilities far from uniform
    return model.train()


def ids_of(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def perturbed_model():
    """A folded model whose durations matter: with first weights alone they hardly do."""
    model = small_model("condense").eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3), dtype=weight.dtype)
    return model
