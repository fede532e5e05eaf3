"""Mistral, Qwen2 and Qwen3, folded: against their stock models, and against the equations as a plain loop."""

import json
from copy import deepcopy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from condense import CondenseConfig, CondenseForCausalLM, layers, to_stock

from .models import (
    VOCAB,
    assert_same_gradients,
    expected_logits,
    gradients,
    in_float64,
    padded_batch,
    random_adapters,
    random_ids,
    reference_gradients,
    torch_checkpoint,
    vary,
)

SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.25, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip
WINDOW = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
TIED_WITH_BIASES = {"head_dim": 10, "tie_word_embeddings": True, "attention_bias": True}
STOCK = {
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE)),  # its default window has 4,096 tokens
    "mistral, wide heads": lambda: MistralForCausalLM(MistralConfig(**SHAPE, head_dim=8, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "qwen2, window": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, **WINDOW)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8)),
    "qwen3, tied, biases": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, **TIED_WITH_BIASES)),
}
LENGTHS = [13, 4, 7]
OWN = {
    "mistral": set(),
    "qwen2": {"q_proj.bias", "k_proj.bias", "v_proj.bias"},
    "qwen3": {"q_norm.weight", "k_norm.weight"},
}


@pytest.fixture(scope="module", params=STOCK)
def stock(request, tmp_path_factory):
    """A stock model with random weights, stored in `folder`."""
    torch.manual_seed(0)
    model = vary(STOCK[request.param]().double().eval())
    model.folder = tmp_path_factory.mktemp("stock")
    model.save_pretrained(model.folder)
    return model


def folded(stock, segment_length=5, **fields) -> CondenseForCausalLM:
    fields |= {"segment_length": segment_length, "dtype": torch.float64}
    return CondenseForCausalLM.from_pretrained(stock.folder, **fields).eval()


@pytest.fixture(scope="module")
def expected(stock):
    """The logits of two texts and the gradients after the equations, with segments of 5."""
    model, ids = folded(stock), random_ids(2, 13)
    with torch.no_grad():
        logits = expected_logits(model, ids)
    return logits, reference_gradients(model, ids)


@pytest.mark.parametrize("schedule", ["sequential", "wavefront"])
@torch.no_grad()
def test_one_segment_equals_the_stock_model_and_more_follow_the_equations(stock, expected, schedule):
    ids = random_ids(2, 13)
    family = stock.config.model_type
    whole, short = folded(stock, 13, schedule=schedule), folded(stock, schedule=schedule)
    assert whole.config.family == family and set(whole.state_dict()) == set(stock.state_dict())
    assert {f"model.layers.0.self_attn.{name}" for name in OWN[family]} <= set(whole.state_dict())
    torch.testing.assert_close(whole(ids).logits, in_float64(deepcopy(stock))(ids).logits, atol=1e-10, rtol=0)
    logits = short(ids).logits
    assert not torch.allclose(logits, whole(ids).logits, atol=1e-2)
    torch.testing.assert_close(logits, expected[0], atol=1e-10, rtol=0)


@pytest.mark.parametrize("schedule", ["sequential", "wavefront"])
def test_gradients_follow_the_equations_and_checkpointing_keeps_them(stock, expected, schedule):
    model, ids = folded(stock, schedule=schedule), random_ids(2, 13)
    plain = gradients(model, ids)
    assert_same_gradients(plain, expected[1], 1e-10)
    model._set_gradient_checkpointing(True, torch_checkpoint(checkpoint_segments=2))
    assert_same_gradients(gradients(model, ids), plain, 1e-10)


GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}


@pytest.fixture(scope="module")
@torch.no_grad()
def texts_alone(stock):
    """A folded model, and for each of some texts the logits and the tokens that it writes after them."""
    model, alone = folded(stock), []
    for text in padded_batch(LENGTHS, "left")[0]:
        written = model.generate(text[None], **GREEDY)[:, len(text) :]
        logits = model(torch.cat([text[None], written], dim=1)).logits  # without a cache
        assert torch.equal(logits.argmax(-1)[:, len(text) - 1 : -1], written)
        alone.append((logits[0, : len(text)], written[0]))
    return model, alone


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_does_not_change_the_tokens_of_a_prompt(texts_alone, side):
    model, alone = texts_alone
    _, ids, mask = padded_batch(LENGTHS, side)
    logits = model(ids, attention_mask=mask).logits
    together = model.generate(ids, attention_mask=mask, **GREEDY)[:, ids.shape[1] :]
    for row, (expected, written) in enumerate(alone):
        torch.testing.assert_close(logits[row][mask[row].bool()], expected, atol=1e-9, rtol=0)
        assert torch.equal(together[row], written)


@torch.no_grad()
def test_the_way_back_gives_the_stock_checkpoint(stock, tmp_path):
    ids = random_ids(2, 21)
    model = folded(stock)
    model.save_pretrained(tmp_path / "folded")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "folded", dtype=torch.float64)
    assert type(again) is CondenseForCausalLM and again.config.family == stock.config.model_type
    assert torch.equal(again(ids).logits, model(ids).logits)
    to_stock(again).save_pretrained(tmp_path / "stock")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "stock", dtype=torch.float64)
    assert type(back) is type(stock)
    torch.testing.assert_close(back(ids).logits, stock(ids).logits, atol=1e-10, rtol=0)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (stock.folder, tmp_path / "stock"))
    assert {name: after.get(name) for name in before} == before


def test_adapters_of_a_folded_model_are_those_of_its_stock_model(stock):
    peft = pytest.importorskip("peft")
    ids, found = random_ids(2, 13), []
    for model in (type(stock).from_pretrained(stock.folder, dtype=torch.float64), folded(stock, 13)):
        torch.manual_seed(1)
        settings = peft.LoraConfig(target_modules=["q_proj", "k_proj"], init_lora_weights="gaussian")
        adapted = random_adapters(peft.get_peft_model(model, settings), std=0.1)
        adapted.eval()(ids, labels=ids).loss.backward()
        found.append({name: parameter.grad for name, parameter in adapted.named_parameters() if "lora" in name})
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-4)
    assert len(found[0]) == 12
    merged = adapted.merge_and_unload()
    assert type(merged) is CondenseForCausalLM
    torch.testing.assert_close(merged(ids).loss, adapted(ids).loss)


@torch.no_grad()
def test_queries_and_keys_have_the_dtype_of_values_under_autocast(noted):
    model = CondenseForCausalLM(CondenseConfig(**SHAPE, family="qwen3", segment_length=5))
    calls = noted(layers, "attend")
    with torch.autocast("cpu", torch.bfloat16):
        model(random_ids(2, 13))
    assert {one.dtype for call in calls for one in call.arguments[1:4]} == {torch.bfloat16}


def test_fewer_layers_than_the_checkpoint(tmp_path):
    Qwen2ForCausalLM(Qwen2Config(**SHAPE)).save_pretrained(tmp_path)
    model = CondenseForCausalLM(CondenseConfig.from_pretrained(tmp_path, num_hidden_layers=1))
    assert to_stock(model).config.layer_types == ["full_attention"]


def test_a_window_shorter_than_two_segments_is_refused(tmp_path):
    MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=40)).save_pretrained(tmp_path)
    assert CondenseForCausalLM.from_pretrained(tmp_path, segment_length=20).config.window == {"sliding_window": 40}
    with pytest.raises(ValueError, match="sliding_window=40: .* 2 x 21 tokens .* segment_length of at most 20"):
        CondenseForCausalLM.from_pretrained(tmp_path, segment_length=21)
    unused = Qwen3Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=3)
    Qwen3ForCausalLM(unused).save_pretrained(tmp_path / "unused")  # no layer of three has a window
    CondenseForCausalLM.from_pretrained(tmp_path / "unused", segment_length=20)


def test_other_families_are_refused_by_name(tmp_path):
    GemmaConfig(**SHAPE).save_pretrained(tmp_path)
    listed = "and condense folds checkpoints of the types llama, mistral, qwen2"
    with pytest.raises(ValueError, match=f"model_type='gemma', {listed}"):
        CondenseConfig.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="family='qwen4' is not folded: did you mean 'qwen"):
        CondenseConfig(family="qwen4")


def test_defaults_that_a_file_leaves_out_are_those_of_its_family(tmp_path):
    stored = {"model_type": "qwen2", **SHAPE}
    del stored["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    config = CondenseConfig.from_pretrained(tmp_path)
    assert config.vocab_size == Qwen2Config().vocab_size != CondenseConfig().vocab_size
