"""Operations, steps and tokens of a run."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from condense import CondenseConfig, CondenseForCausalLM
from condense.training.planning.operations import count_operations, text_flops

from .shapes import LLAMA_1B, SMALL, recipe


def test_flops_are_those_of_the_operations():
    """Within 10 %: the counter takes hidden scores as computed."""
    config = LlamaConfig(**SMALL | {"tie_word_embeddings": True})
    for trained in (recipe(128, segment_length=32, attention="eager"), recipe(64, kind="stock", attention="eager")):
        if trained.model.has_segments:
            shape = CondenseConfig(**SMALL, segment_length=32, schedule="sequential")
            model = CondenseForCausalLM._from_config(shape, attn_implementation="eager")
        else:
            model = LlamaForCausalLM._from_config(config, attn_implementation="eager")
        ids = torch.zeros(2, trained.stages[0].total_length, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model.train()(input_ids=ids, labels=ids).loss.backward()
        assert count_operations(config, trained, 1)["flops"] / 100 == pytest.approx(counter.get_total_flops(), rel=0.1)


@pytest.mark.parametrize("bptt_segments", [None, 2])
def test_a_memory_of_the_input_has_products_of_its_own_only_where_its_gradient_ends(bptt_segments):
    planned, counted, ids = [], [], torch.zeros(1, 128, dtype=torch.long)
    for source in ("layer_output", "layer_input"):
        fields = {"segment_length": 32, "memory_source": source, "bptt_segments": bptt_segments}
        config = CondenseConfig(**SMALL, **fields, schedule="sequential")
        with FlopCounterMode(display=False) as counter:
            CondenseForCausalLM(config).train()(input_ids=ids, labels=ids).loss.backward()
        planned.append(text_flops(config, 32)(128))
        counted.append(counter.get_total_flops())
    assert planned[0] - planned[1] == counted[0] - counted[1] > 0


def test_the_plan_counts_sequences_and_tokens():
    stages = [{"total_length": 1024, "steps": 30}, {"total_length": 4096, "steps": 70}]
    trained = recipe(4096, 2, segment_length=512, global_batch=64, stages=stages)
    numbers = count_operations(LlamaConfig(**LLAMA_1B), trained, 8)
    assert numbers["accumulation"] == 4 and numbers["steps"] == 100 and numbers["sequences"] == 6400
    assert numbers["tokens"] == 64 * (30 * 1024 + 70 * 4096) and numbers["tokens_per_step"] == 64 * 4096
    assert numbers["flops"] == pytest.approx(6 * 1_235_814_400 * numbers["tokens"], rel=0.1)
    json.dumps(numbers)
