"""Errors of a user's arguments name the value and a remedy."""

import json

import pytest
import torch
from transformers import AttentionInterface, AutoTokenizer, Gemma2Config, GPT2Config, GPT2LMHeadModel

from condense import CondenseConfig, CondenseForCausalLM
from condense.checks import check_tokenizer
from condense.labs.continuity.model import durations_from_time_steps

from ..refusals import assert_refused
from .models import random_ids, tiny_config, tiny_model

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"segment_length": 0}, "segment_length=0"),
        ({"segment_length": -5}, "segment_length=-5"),
        ({"segment_length": 2.5}, "segment_length=2.5"),
        ({"bptt_segments": 0}, "bptt_segments=0"),
        ({"memory_source": "output"}, "memory_source='output'.*layer_output"),
        ({"memory_share": 1.5}, "memory_share=1.5: pass a number from 0 to 1"),
        ({"memory_share": [1.0, -0.1]}, r"memory_share=\[1.0, -0.1\]"),
        ({"memory_share": "half"}, "memory_share='half': pass a number"),
        ({"memory_share": True}, "memory_share=True: pass a number"),
        ({"memory_share": [0.5]}, r"memory_share=\[0.5\]: .* one for each of \d+ layers"),
        ({"memory_share": 0.5, "memory_source": "layer_input"}, "memory_source='layer_input', which is the share 0"),
        ({"schedule": "fast"}, "schedule='fast'.*sequential"),
        ({"position_anchor": "middle"}, "position_anchor='middle'.*end"),
    ],
)
def test_invalid_configurations_are_refused(fields, words, tmp_path):
    assert_refused(words, CondenseConfig, **fields)
    tiny_model(torch.float32).save_pretrained(tmp_path)
    assert_refused(words, CondenseForCausalLM.from_pretrained, tmp_path, **fields)


def test_unknown_attention_implementations_are_refused():
    AttentionInterface.register("custom", lambda *args, **kwargs: None)
    assert_refused("custom.*flash_attention_2", CondenseForCausalLM, tiny_config(attn_implementation="custom"))


def test_a_checkpoint_of_another_family_is_refused(tmp_path):
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=10)).save_pretrained(tmp_path / "gpt2")
    Gemma2Config().save_pretrained(tmp_path / "gemma2")
    for name in ("gpt2", "gemma2"):
        with pytest.raises(
            ValueError, match=f"model_type='{name}', and condense folds checkpoints of the types llama, mistral"
        ):
            CondenseForCausalLM.from_pretrained(tmp_path / name, segment_length=8)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    assert_refused("config.json has model_type=None", CondenseForCausalLM.from_pretrained, tmp_path)


def test_a_vocabulary_that_does_not_fit_is_refused(stories):
    tokenizer = AutoTokenizer.from_pretrained(stories)
    check_tokenizer(tiny_config(vocab_size=len(tokenizer)), tokenizer)
    assert_refused(f"{len(tokenizer)} tokens.*vocabulary of 61", check_tokenizer, tiny_config(), tokenizer)
    for wrong in (61, -1):
        assert_refused(f"token id {wrong}.*vocabulary of 61", tiny_model(), torch.tensor([[3, wrong]]))


def durations(*values):
    return torch.tensor([values], dtype=torch.float64)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"durations": durations(1, -0.5, 1)}, r"token 1 in row 0 is -0.5"),
        ({"durations": durations(1, 1, float("nan"))}, "token 2 in row 0 is nan"),
        ({"durations": durations(float("inf"), 1, 1)}, "token 0 in row 0 is inf"),
        ({"durations": durations(0, 1, 1)}, "token 0 of segment 1.*duration 0"),
        ({"durations": durations(1, 1)}, r"durations of shape \(1, 2\).*\(1, 3\)"),
        ({"durations": torch.ones(1, 3, requires_grad=True)}, "require gradients"),
        ({"labels": torch.ones(1, 4, dtype=torch.long)}, r"labels of shape \(1, 4\).*\(1, 3\)"),
        ({"attention_mask": torch.ones(1, 2)}, r"attention_mask of shape \(1, 2\)"),
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, "attention_mask of shape"),
        ({"position_ids": torch.tensor([[0, 2, 1]])}, "row 0 go from 0 to 2"),
        ({"position_ids": torch.tensor([[0, 1]])}, r"position_ids of shape \(1, 2\)"),
        ({"logits_to_keep": -2}, "logits_to_keep=-2"),
        ({"logits_to_keep": torch.tensor([1])}, "logits_to_keep=tensor"),
        ({"attention_mask": torch.zeros(1, 3), "labels": torch.ones(1, 3, dtype=torch.long)}, "hides every token"),
        ({"inputs_embeds": torch.ones(1, 3, 24)}, "either input_ids or inputs_embeds"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_inputs_are_refused(inputs, words):
    assert_refused(words, tiny_model(), random_ids(1, 3), **inputs)


def test_empty_inputs_are_refused():
    model = tiny_model()
    for ids in (torch.zeros(1, 0, dtype=torch.long), torch.zeros(3, dtype=torch.long)):
        assert_refused("at least one token", model, ids)
    assert_refused("either input_ids or inputs_embeds", model)


@torch.no_grad()
def test_durations_of_zero_are_accepted_if_other_tokens_are_visible():
    """A segment of zeros may follow a memory; a token after two such segments would see no duration."""
    model = tiny_model()
    token_durations = torch.ones(1, 15, dtype=torch.float64)
    token_durations[:, 5:10] = 0
    assert model(random_ids(1, 15), durations=token_durations).logits.isfinite().all()
    token_durations[:, 10] = 0
    assert_refused("row 0, token 0 of segment 3", model, random_ids(1, 15), durations=token_durations)


@torch.no_grad()
def test_a_refused_call_does_not_change_the_state():
    model, ids = tiny_model(), random_ids(2, 20)
    cache = model(ids[:, :3]).past_key_values
    token_durations = torch.ones(2, 17, dtype=torch.float64)
    token_durations[1, 2:13] = 0
    assert_refused("row 1, token 0 of segment 3", model, ids[:, 3:], durations=token_durations, past_key_values=cache)
    after = model(ids[:, 3:], past_key_values=cache).logits
    torch.testing.assert_close(after, model(ids).logits[:, 3:], atol=1e-10, rtol=0)


@torch.no_grad()
def test_durations_may_be_whole_numbers():
    model, ids = tiny_model(), random_ids(1, 8)
    whole = torch.full((1, 8), 2)
    assert torch.equal(model(ids, durations=whole).logits, model(ids, durations=whole.double()).logits)
    options = {"new_token_duration": 0.5, "max_new_tokens": 4, "do_sample": False}
    written = [model.generate(ids, durations=one, **options) for one in (whole, whole.float())]
    assert torch.equal(*written)


@torch.no_grad()
def test_durations_at_padding_do_not_change_logits():
    model = tiny_model()
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 0]])
    token_durations = torch.where(mask.bool(), 0.7, 0.0)
    padded = model(random_ids(1, 10), attention_mask=mask, durations=token_durations).logits[:, 2:9]
    torch.testing.assert_close(padded, model(random_ids(1, 10)[:, 2:9], durations=token_durations[:, 2:9]).logits)


def test_durations_from_time_steps():
    times = torch.tensor([[0.5, 1.0, 3.0]])
    assert durations_from_time_steps(times, 0.0).tolist() == [[0.5, 0.5, 2.0]]
    assert durations_from_time_steps(times, -1.0).tolist() == [[1.5, 0.5, 2.0]]
    for steps, start, words in (
        ([0.5, 1.0, 1.0], 0.0, "time step 2 of row 0 is 1.0 after 1.0"),
        ([0.5, 1.0, 3.0], 0.5, "time step 0 of row 0 is 0.5 after 0.5"),
        ([0.5, float("nan"), 2.0], 0.0, "time step 1"),
    ):
        assert_refused(words, durations_from_time_steps, torch.tensor([steps]), start)


def test_gradient_checkpointing_with_a_cache_is_refused():
    model = tiny_model().train()
    model._set_gradient_checkpointing(True)
    assert_refused("checkpointing", model, random_ids(1, 7), use_cache=True)


def test_labels_may_be_as_narrow_as_ids():
    model, ids = tiny_model(), random_ids(2, 9)
    narrow = model(ids.int(), labels=ids.int())
    assert torch.equal(narrow.loss, model(ids, labels=ids).loss)
    narrow.loss.backward()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"head_dim": 7}, "head_dim=7: .* even"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta='x': pass a number above 0"),
        ({"hidden_act": "sigmoyd"}, "hidden_act='sigmoyd' is not known: choose one of .*silu"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "'spiral' is not known: .*default, .*llama3"),
    ],
)
def test_fields_with_which_no_layer_can_be_made_are_refused(fields, words):
    assert_refused(words, CondenseConfig, **fields)
