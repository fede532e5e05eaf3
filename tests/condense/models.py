"""Tiny models with large random weights, so that nothing is close to zero by accident."""

import torch

from condense import CondenseConfig, CondenseForCausalLM

VOCAB = 61


def tiny_config(**fields) -> CondenseConfig:
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "segment_length": 5,
        "initializer_range": 0.25,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
        **fields,
    }
    attention = fields.pop("attn_implementation", "sdpa")
    return CondenseConfig(**fields, attn_implementation=attention)


def tiny_model(dtype=torch.float64, seed=0, **fields) -> CondenseForCausalLM:
    torch.manual_seed(seed)
    model = CondenseForCausalLM(tiny_config(**fields)).to(dtype).eval()
    with torch.no_grad():  # biases and norms start at 0 and 1: move them
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def weights(model) -> dict:
    return {name: tensor.detach().double() for name, tensor in model.state_dict().items()}


def random_ids(batch_size: int, num_tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, VOCAB, (batch_size, num_tokens), generator=torch.Generator().manual_seed(seed))


def random_durations(batch_size: int, num_tokens: int, seed: int = 0) -> torch.Tensor:
    return 0.1 + 2 * torch.rand(batch_size, num_tokens, generator=torch.Generator().manual_seed(seed)).double()
