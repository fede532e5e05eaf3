"""Prefill of long texts: token ids and state equal those of one call."""

import pytest
import torch
from transformers import AutoTokenizer

from condense import FoldedCache, prefill
from condense.training.small_llama import word_tokenizer

from .models import random_ids, tiny_model


def test_encoding_in_blocks_equals_encoding_at_once(stories, novel, monkeypatch):
    text = novel.read_text(encoding="utf-8")[:200_000]
    monkeypatch.setattr(prefill, "CHARACTERS_PER_BLOCK", 5_000)
    for tokenizer in (AutoTokenizer.from_pretrained(stories), word_tokenizer([text])):
        assert prefill.encode(tokenizer, text)[0].tolist() == tokenizer(text)["input_ids"]


@pytest.mark.parametrize("batch_size", [1, 3])
@torch.no_grad()
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
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert output[0, 1:].tolist() == expected[0, 23:].tolist()
    assert isinstance(cache, FoldedCache)
