"""`ContinuousLM` refuses arguments, models, tokens and positions that do not fit, and names them."""

import pytest
import torch

from condense.labs.continuity.model import ContinuousLM, Sentence
from tests.condense.models import VOCAB, tiny_model
from tests.refusals import assert_refused

from .test_adapter import GPT2_FIELDS, SMALL, TOKENS, any_model, build

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("llama", {"position_anchor": "middle"}, "position_anchor='middle'.*end, start"),
        ("llama", {"rule": "simpson"}, "rule='simpson'.*rectangle, trapezoid"),
        ("folded", {"rule": "trapezoid"}, "rule='rectangle' only"),
        ("folded", {"position_anchor": "start"}, "position_anchor='start'.*folded model's is 'end'.*config"),
    ],
)
def test_arguments_are_checked(name, arguments, words):
    assert_refused(words, ContinuousLM, any_model(name), **arguments)


@pytest.mark.parametrize("name", ["llama", "folded"])
def test_models_in_training_mode_are_refused(name):
    assert_refused(r"training mode.*model.eval\(\)", ContinuousLM, any_model(name).train())


@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3"])
def test_flash_attention_is_refused_for_stock_models(attention):
    model = any_model("llama")
    model.config._attn_implementation = attention
    assert_refused(f"attn_implementation='{attention}'.*sdpa or eager", ContinuousLM, model)
    folded = tiny_model()
    folded.config._attn_implementation = attention
    assert ContinuousLM(folded).folded


TINY = {"vocab_size": VOCAB, "hidden_size": 24}
OTHERS = {  # by model type
    "opt": {**SMALL, **TOKENS, "ffn_dim": 40, "word_embed_proj_dim": 24},
    "mamba": {**TINY, "num_hidden_layers": 1, **TOKENS},
    "bloom": {**TINY, "n_layer": 1, "n_head": 4},
    "mpt": {"vocab_size": VOCAB, "d_model": 24, "n_layers": 1, "n_heads": 4},
    "codegen": {**GPT2_FIELDS, "n_embd": 32, "rotary_dim": 4},
}


@pytest.mark.parametrize("name", OTHERS)
def test_models_without_support_for_durations_are_refused(name):
    with pytest.raises(
        ValueError,
        match=f"a {name} does not accept durations|durations do not change the logits of a {name}"
        f"|overflow the logits of a {name}",
    ):
        ContinuousLM(build((name, OTHERS[name])))


def test_layers_of_unknown_type_are_named():
    assert_refused("layers of type linear_attention are not supported", ContinuousLM, build(("mamba", OTHERS["mamba"])))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda inputs: inputs | {"attention_mask": None, "position_ids": None},
            "durations do not change the logits of a llama",
        ),
        (
            lambda inputs: inputs | {"attention_mask": 0 * inputs["inputs_embeds"].new_ones(1, 1, 8, 8)},
            "durations of one unit change the logits",
        ),
        (
            lambda inputs: inputs | {"position_ids": inputs["position_ids"] * 2},
            "durations of one unit change the logits of a llama",
        ),
    ],
    ids=["ignored", "not causal", "other positions"],
)
def test_models_with_other_logits_are_refused(change, words):
    model = any_model("llama")
    forward = model.forward
    model.forward = lambda **inputs: forward(**(inputs if "input_ids" in inputs else change(inputs)))
    assert_refused(words, ContinuousLM, model)


@pytest.mark.parametrize("rule", ["rectangle", "trapezoid"])
def test_the_check_does_not_change_the_rule(rule):
    """The trapezoid rule does not give the model's own logits, but it is a valid choice."""
    assert ContinuousLM(any_model("llama"), rule=rule).rule == rule


@pytest.mark.parametrize("wrong", [VOCAB, -1])
@pytest.mark.parametrize("name", ["llama", "folded"])
def test_ids_of_another_tokenizer_are_refused(name, wrong):
    lm = ContinuousLM(any_model(name))
    for read in (lm.embed, lm.logits, lambda sentence: lm.next_logits([sentence])):
        assert_refused(f"vocabulary of {VOCAB} tokens.*another tokenizer", read, Sentence([3, wrong]))


@pytest.mark.parametrize(
    ("embeddings", "words"),
    [(torch.ones(3, 23), "23"), (torch.ones(3, 1), "width 1 "), (torch.ones(3, 24).bfloat16(), "bfloat16")],
)
@pytest.mark.parametrize("name", ["llama", "folded"])
def test_embeddings_that_would_be_broadcast_or_rounded_are_refused(name, embeddings, words):
    lm = ContinuousLM(any_model(name).float())
    for read in (lm.logits, lambda sentence: lm.next_logits([sentence])):
        assert_refused(words, read, Sentence(embeddings=embeddings))


def test_a_folded_model_refuses_fixed_positions():
    lm = ContinuousLM(tiny_model())
    dense = Sentence([3, 4]).densify(2, positions="equal")
    for read in (lm.logits, lambda sentence: lm.next_logits([sentence])):
        assert_refused("positions only from durations.*positions='equal'", read, dense)
