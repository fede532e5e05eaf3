"""A folded model, or a stock Llama, for transformers' own tests of models.

Runs in a folder with transformers' package `tests`, not in this one: see `test_transformers_suite`.
"""

import os
import unittest

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from condense import CondenseConfig, CondenseForCausalLM, CondenseModel
from tests.test_modeling_common import GenerationTesterMixin, ModelTesterMixin, ids_tensor
from tests.test_training_mixin import TrainingTesterMixin

SEGMENT_LENGTH = int(os.environ["SUITE_SEGMENT_LENGTH"])  # 0: a stock Llama
FIELDS = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


class ModelTester:
    """The methods that the mixins call."""

    batch_size, seq_length, is_training = 3, 7, True
    vocab_size, hidden_size, num_hidden_layers = (FIELDS[n] for n in ("vocab_size", "hidden_size", "num_hidden_layers"))
    num_attention_heads, num_key_value_heads = FIELDS["num_attention_heads"], FIELDS["num_key_value_heads"]
    causal_lm_class = CondenseForCausalLM if SEGMENT_LENGTH else LlamaForCausalLM

    def get_config(self):
        return CondenseConfig(**FIELDS, segment_length=SEGMENT_LENGTH) if SEGMENT_LENGTH else LlamaConfig(**FIELDS)

    def prepare_config_and_inputs_for_common(self):
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.tril(torch.ones_like(ids))}


class SuiteTest(ModelTesterMixin, GenerationTesterMixin, TrainingTesterMixin, unittest.TestCase):
    all_model_classes = (CondenseModel, CondenseForCausalLM) if SEGMENT_LENGTH else (LlamaModel, LlamaForCausalLM)

    def setUp(self):
        self.model_tester = ModelTester()
        # A folded model returns no attention maps: the switch of transformers' recurrent models, which skips SDPA too.
        self.has_attentions = not SEGMENT_LENGTH or "sdpa" in self._testMethodName
