"""Prefill of long texts: the state equals that of one call."""

import pytest
import torch

from condense import FoldedCache
from condense.generation import prefill

from ..models import random_ids, tiny_model

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.unit]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_prefill_equals_one_call(batch_size, monkeypatch):
    model, ids = tiny_model(), random_ids(batch_size, 43)
    monkeypatch.setattr(prefill, "TOKENS_PER_CALL", 20)
    reported = []
    cache = prefill.prefill(model, ids, progress=reported.append)
    assert sum(reported) == 9  # segments of 5, the last of them short
    more = random_ids(batch_size, 4, seed=1)
    whole = model(torch.cat([ids, more], dim=1)).logits[:, -4:]
    torch.testing.assert_close(model(more, past_key_values=cache).logits, whole, atol=1e-9, rtol=1e-9)


def test_generate_continues_after_prefill():
    model, ids = tiny_model(), random_ids(1, 23)
    cache = prefill.prefill(model, ids[:, :-1])
    output = model.generate(ids[:, -1:], past_key_values=cache, max_new_tokens=12, do_sample=False)
    assert output[0, 1:].tolist() == model.generate(ids, max_new_tokens=12, do_sample=False)[0, 23:].tolist()
    assert isinstance(cache, FoldedCache)
