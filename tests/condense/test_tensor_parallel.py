"""Tensor parallelism of transformers: two ranks give the loss, gradients and tokens of one."""

import os

import pytest
import torch
from transformers.distributed import DistributedConfig

from condense import CondenseForCausalLM
from tests.training.ranks import run_ranks

from .models import tiny_config

pytestmark = pytest.mark.process


def rank(folder: str) -> None:
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    torch.set_num_threads(1)
    ids = torch.randint(2, 60, (2, 23), generator=torch.Generator().manual_seed(0))
    found = []
    for options in ({}, {"distributed_config": DistributedConfig(tp_plan="auto")}):
        model = CondenseForCausalLM.from_pretrained(folder, **options)
        loss = model(ids, labels=ids).loss
        loss.backward()
        gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
        found.append((whole(loss.detach()), gradients, model.eval().generate(ids, max_new_tokens=6, do_sample=False)))
        divided = type(model.lm_head.weight).__name__ == "DTensor"
        assert divided == bool(options)
    (loss, gradients, tokens), (loss_of_two, gradients_of_two, tokens_of_two) = found
    torch.testing.assert_close(loss_of_two, loss)
    torch.testing.assert_close(gradients_of_two, gradients, atol=1e-5, rtol=1e-4)
    assert torch.equal(tokens_of_two, tokens)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
def test_two_ranks_compute_what_one_does(tied, tmp_path):
    torch.manual_seed(0)
    CondenseForCausalLM(tiny_config(vocab_size=60, tie_word_embeddings=tied)).save_pretrained(tmp_path)
    well, printed = run_ranks(rank, str(tmp_path))
    assert well, printed[-3000:]
