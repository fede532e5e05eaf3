"""The passkey data: appendix C's text, the wanted lengths, keys anywhere."""

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from training.data.passkey import PasskeyTask
from training.small_llama import passkey_tokenizer


def words(tokenizer, ids):
    return tokenizer.decode(ids).replace("<s>", "").split()


def test_the_text_is_that_of_the_paper():
    tokenizer = passkey_tokenizer()
    passkeys = PasskeyTask(tokenizer).batch(1, 130, np.random.default_rng(0), depth=0.5)
    key = passkeys.keys[0]
    expected = f"""There is a critical piece of information hidden within a large amount of irrelevant text.
    Your task is
    to locate it and remember it carefully. I will test your ability to recall this information.
    The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.
    The passkey is {key}. Remember it carefully. {key} is the passkey.
    The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.
    What is the passkey? The passkey is"""
    assert words(tokenizer, passkeys.prompt_ids_BN[0]) == words(tokenizer, tokenizer(expected)["input_ids"])
    assert words(tokenizer, passkeys.answer_ids_BA[0]) == list(key)


@pytest.mark.parametrize("num_tokens", [80, 81, 103, 104, 640, 10_240])
def test_lengths_are_reached_and_never_exceeded(num_tokens):
    task = PasskeyTask(passkey_tokenizer())
    passkeys = task.batch(3, num_tokens, np.random.default_rng(0))
    total = passkeys.prompt_ids_BN.shape[1] + passkeys.answer_ids_BA.shape[1]
    assert num_tokens - len(task.filler) < total <= num_tokens


def test_too_short_is_named():
    with pytest.raises(ValueError, match="needs 70 tokens and 69 are allowed"):
        PasskeyTask(passkey_tokenizer()).batch(1, 69, np.random.default_rng(0))


@pytest.mark.parametrize("depth", [-0.1, 1.5, 50])
def test_depths_outside_are_named(depth):
    with pytest.raises(ValueError, match=f"depth={depth}"):
        PasskeyTask(passkey_tokenizer()).batch(1, 200, np.random.default_rng(0), depth)


def test_depths_and_uniform_places():
    task = PasskeyTask(passkey_tokenizer())
    start, filler = len(task.preamble), len(task.filler)
    length = 70 + 4 * filler
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        passkeys = task.batch(2, length, np.random.default_rng(0), depth)
        assert passkeys.sentence_at_B == [start + int(4 * depth) * filler] * 2
    places = task.batch(5_000, length, np.random.default_rng(0)).sentence_at_B
    counts = np.bincount([(place - start) // filler for place in places], minlength=5)
    assert len(counts) == 5 and abs(counts - 1000).max() < 150  # five standard deviations
    digits = "".join(task.batch(5_000, length, np.random.default_rng(1)).keys)
    assert abs(np.bincount([int(d) for d in digits], minlength=10) - 2000).max() < 220


def test_seeds():
    task = PasskeyTask(passkey_tokenizer())
    first, same, other = (task.batch(4, 300, np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert torch.equal(first.prompt_ids_BN, same.prompt_ids_BN) and first.keys != other.keys


def test_labels_are_the_answer_and_a_predictable_background():
    tokenizer = passkey_tokenizer()
    task = PasskeyTask(tokenizer)
    batch = task.training_batch(200, 200, background=3, generator=np.random.default_rng(0))
    labelled = batch["labels"] != -100
    assert torch.equal(batch["labels"][labelled], batch["input_ids"][labelled])
    assert labelled[:, -4:].all() and (labelled.sum(1) == 4 + 3).all() and not labelled[:, 0].any()
    digits = torch.tensor(tokenizer.convert_tokens_to_ids(list("0123456789")))
    for ids, row in zip(batch["input_ids"], labelled, strict=True):
        first_mention = torch.isin(ids, digits).nonzero()[:4, 0]
        assert not row[first_mention].any()


def test_other_tokenizers(stories):
    """A tokenizer of real text: the frame is the paper's and the answer follows the question."""
    tokenizer = AutoTokenizer.from_pretrained(stories)
    passkeys = PasskeyTask(tokenizer).batch(3, 900, np.random.default_rng(0))
    for prompt, answer, key in zip(passkeys.prompt_ids_BN, passkeys.answer_ids_BA, passkeys.keys, strict=True):
        text = tokenizer.decode(torch.cat([prompt, answer]))
        assert text.count(key) == 3 and text.rstrip().endswith(key)
