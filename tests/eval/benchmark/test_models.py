"""The shapes of the models that are compared."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from condense.eval.benchmark.models import TABLE_1_PARAMETERS, table_1


def test_table_1_is_the_papers():
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**table_1()))
    assert model.num_parameters() == TABLE_1_PARAMETERS == 126_489_088
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (4, 512, 32)
    assert (config.num_key_value_heads, config.head_dim, config.vocab_size) == (8, 64, 128_256)
