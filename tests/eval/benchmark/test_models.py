"""The shapes of the models that are compared."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from condense.eval.benchmark.models import TABLE_1_PARAMETERS, build_model, table_1
from condense.eval.benchmark.workloads import random_ids, training_step
from scripts.benchmarks.gpu.sizes import REHEARSAL

pytestmark = pytest.mark.unit


def test_table_1_is_the_papers():
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**table_1()))
    assert model.num_parameters() == TABLE_1_PARAMETERS == 126_489_088
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (4, 512, 32)
    assert (config.num_key_value_heads, config.head_dim, config.vocab_size) == (8, 64, 128_256)


def test_a_chunked_loss_is_that_of_the_stock_model(monkeypatch):
    """Value and gradients, without the logits of the whole text."""
    monkeypatch.setattr("condense.loss.MAX_LOGITS", 16 * REHEARSAL["vocab_size"])
    sizes: list[int] = []
    models = []
    for kind in ("stock", "stock_chunked_loss"):
        torch.manual_seed(0)
        models.append(build_model(kind, REHEARSAL, None, "sdpa").double())
        models[-1].lm_head.register_forward_hook(lambda _, given, logits: sizes.append(logits[..., 0].numel()))
    ids_BN = random_ids(models[0], 2, 50)
    losses = [model(input_ids=ids_BN, labels=ids_BN).loss for model in models]
    assert sizes == [100, 16, 16, 16, 16, 16, 16, 2]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0, check_dtype=False)  # the stock loss is float32
    for model in models:
        training_step(model, ids_BN)()
    for (name, one), (_, other) in zip(*(model.named_parameters() for model in models), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-7, msg=name)
    logits = [model(input_ids=ids_BN).logits for model in models]
    torch.testing.assert_close(*logits, rtol=0, atol=0)
