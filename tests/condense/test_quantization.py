"""Quantized weights: a folded model is quantized as the stock one is, and what can't be done with it is refused.

On a CPU bitsandbytes 0.50 damages weights that are saved after a call in evaluation mode, so models are saved first.
"""

import json
import shutil

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from transformers import BitsAndBytesConfig, FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM, TorchAoConfig
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

from condense import CondenseForCausalLM, to_stock
from condense.hub.adapters import merge_adapters
from condense.hub.loading import check_finite, load_model
from condense.hub.weights import weights_fingerprint
from condense.labs.depth.model import convert_to_depth

from .models import VOCAB, expected_logits, random_adapters, random_ids, tiny_model

SEGMENT, LAYERS, MAPS = 16, 3, 7
TARGETS = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A stock Llama whose widths are multiples of the blocks that are quantized together."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.15, pad_token_id=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("stored")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def four_bits(**fields):
    pytest.importorskip("bitsandbytes")
    fields = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32, **fields}
    return BitsAndBytesConfig(load_in_4bit=True, **fields)


def eight_bits():
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(load_in_8bit=True)


def torchao():
    quantization = pytest.importorskip("torchao.quantization")
    return TorchAoConfig(quantization.Int8WeightOnlyConfig())


METHODS = {
    "nf4": four_bits,
    "nf4, scales quantized": lambda: four_bits(bnb_4bit_use_double_quant=True),
    "fp4": lambda: four_bits(bnb_4bit_quant_type="fp4"),
    "int8": eight_bits,
    "torchao": torchao,
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def both(stored, method):
    stock = LlamaForCausalLM.from_pretrained(stored, quantization_config=method())
    return stock, CondenseForCausalLM.from_pretrained(stored, segment_length=SEGMENT, quantization_config=method())


def quantized(stored, method=four_bits, **options):
    options = {"segment_length": SEGMENT, **options}
    return CondenseForCausalLM.from_pretrained(stored, quantization_config=method(), **options)


@pytest.mark.unit
def test_linear_maps_and_the_embedding_are_exactly_torchs_own():
    """The quantizers of bitsandbytes, FP8 and GGUF, and others, take these types only."""
    model = tiny_model(torch.float32)
    kinds = [type(module) for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)]
    assert kinds.count(nn.Linear) == MAPS * LAYERS + 1 and kinds.count(nn.Embedding) == 1
    assert len(kinds) == MAPS * LAYERS + 2


@pytest.mark.unit
def test_fp8_takes_every_linear_map():
    with torch.device("meta"):
        model = tiny_model(torch.float32)
    replace_with_fp8_linear(model, ["lm_head"], FineGrainedFP8Config())
    names = [name for name, module in model.named_modules() if type(module).__name__ == "FP8Linear"]
    assert len(names) == MAPS * LAYERS and type(model.lm_head) is nn.Linear


@every_method
@torch.no_grad()
def test_within_a_segment_it_is_the_quantized_stock_model(stored, method):
    stock, model = both(stored, method)
    ids = random_ids(2, SEGMENT)
    expected = stock(ids).logits
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-5)
    assert (LlamaForCausalLM.from_pretrained(stored)(ids).logits - expected).abs().max() > 0.1
    assert type(model.lm_head) is nn.Linear and model.lm_head.weight.dtype == torch.float32


@pytest.mark.parametrize("schedule", ["sequential", "auto"])
@torch.no_grad()
def test_over_segments_it_follows_the_equations_with_the_dequantized_weights(stored, schedule):
    """In training mode bitsandbytes computes in float32 on every CPU."""
    model, plain = quantized(stored, schedule=schedule).train(), quantized(stored).dequantize()
    ids = random_ids(2, 4 * SEGMENT + 5)
    expected = expected_logits(plain, ids)
    torch.testing.assert_close(model(ids).logits.double(), expected, atol=1e-3, rtol=1e-3)
    full = CondenseForCausalLM.from_pretrained(stored, segment_length=SEGMENT)
    assert (full(ids).logits.double() - expected).abs().max() > 0.1


@torch.no_grad()
def test_generation_and_waves(stored):
    model, ids = quantized(stored, torchao), random_ids(1, 3 * SEGMENT + 2)
    options = {"max_new_tokens": SEGMENT, "do_sample": False}
    tokens = model.generate(ids, **options)
    for _ in range(SEGMENT):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(tokens, ids)
    model.fixed_decoding = True
    assert torch.equal(model.generate(ids[:, : 3 * SEGMENT + 2], **options), ids)
    for method, said in ((four_bits, "is a Linear4bit, which a wavefront cannot stack"), (torchao, "not a plain")):
        with pytest.raises(ValueError, match=said):
            quantized(stored, method, schedule="wavefront")(ids)


@every_method
@torch.no_grad()
def test_it_is_saved_and_loaded_as_often_as_wanted(stored, method, tmp_path):
    """transformers saves a model whose weights were quantized before it was loaded only as it is."""
    model, ids = quantized(stored, method), random_ids(2, 40)
    model.save_pretrained(tmp_path / "0")
    expected = model(ids).logits
    for number in range(2):
        load_model(CondenseForCausalLM, tmp_path / f"{number}").save_pretrained(tmp_path / f"{number + 1}")
    torch.testing.assert_close(CondenseForCausalLM.from_pretrained(tmp_path / "2")(ids).logits, expected)
    assert (tmp_path / "2" / "model.safetensors").stat().st_size < (stored / "model.safetensors").stat().st_size / 2


@every_method
@torch.no_grad()
def test_a_quantized_stock_checkpoint_is_folded(stored, method, tmp_path):
    stock, ids = LlamaForCausalLM.from_pretrained(stored, quantization_config=method()), random_ids(2, SEGMENT)
    stock.save_pretrained(tmp_path)
    model = load_model(CondenseForCausalLM, tmp_path, segment_length=SEGMENT)
    torch.testing.assert_close(model(ids).logits, stock(ids).logits, atol=1e-5, rtol=1e-5)


def adapted(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    settings = peft.LoraConfig(target_modules=TARGETS, r=4, init_lora_weights="gaussian")
    return random_adapters(peft.get_peft_model(model, settings), std=0.1).train()


def adapter_gradients(model, ids, prepare=lambda model: model):
    """The loss and the gradients of the adapters, which are all that is trained."""
    model = adapted(prepare(model))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == set(found) and all("lora_" in name for name in trained)
    assert len(trained) == 2 * len(TARGETS) * LAYERS
    return loss.detach(), found


@pytest.mark.parametrize("method", [four_bits, eight_bits, torchao])
def test_adapters_train_as_on_the_quantized_stock_model(stored, method):
    ids = random_ids(2, SEGMENT)
    stock, folded = (adapter_gradients(model, ids) for model in both(stored, method))
    torch.testing.assert_close(folded, stock, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_train_over_segments(stored, checkpointing):
    """As beside dequantized weights; gradient checkpointing as PEFT prepares it, with a hook on the embedding."""
    peft, ids = pytest.importorskip("peft"), random_ids(2, 3 * SEGMENT + 4)
    options = {"use_gradient_checkpointing": checkpointing, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    found = adapter_gradients(
        quantized(stored), ids, lambda model: peft.prepare_model_for_kbit_training(model, **options)
    )
    expected = adapter_gradients(quantized(stored).dequantize().requires_grad_(False), ids)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


def test_what_needs_full_precision_is_refused(stored, tmp_path):
    model = quantized(stored)
    for action in (
        to_stock,
        lambda model: convert_to_depth(model, 1, 2),
        lambda model: merge_adapters(model, tmp_path),
    ):
        with pytest.raises(ValueError, match=r"quantized \(bitsandbytes\). Do this with the model in full precision"):
            action(model)
    ids, plain = random_ids(1, SEGMENT), model.dequantize()
    with torch.no_grad():
        torch.testing.assert_close(to_stock(plain)(ids).logits, plain(ids).logits, atol=1e-5, rtol=1e-5)


def test_a_package_that_is_not_installed_is_named(stored, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.quantizers.quantizer_bnb_4bit.is_bitsandbytes_available", lambda: False)
    folder = shutil.copytree(stored, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"bitsandbytes.*: install what it needs\."):
        load_model(CondenseForCausalLM, folder)


@pytest.mark.unit
def test_parts_of_weights_are_checked_and_hashed():
    """A weight of several tensors, of which only one holds the numbers that matter."""
    seen = set()
    for value in (1.0, 2.0, float("nan")):
        module = nn.Linear(2, 2, bias=False)
        module.weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.full((2, 2), value)))
        seen.add(weights_fingerprint(module))
        if value == value:
            check_finite(module, "m", "r")
        else:
            with pytest.raises(ValueError, match=r"m: weight holds values that are not finite\. r"):
                check_finite(module, "m", "r")
    assert len(seen) == 3


def test_torchao_scales_are_checked(stored):
    model = quantized(stored, torchao)
    check_finite(model, "model", "remedy")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.scale.fill_(float("inf"))
    with pytest.raises(ValueError, match="model: model.layers.1.mlp.up_proj.weight holds values that are not finite"):
        check_finite(model, "model", "remedy")
