"""Adapters know the model that they were trained on: its copies in other formats are accepted, other models refused."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from condense import CondenseConfig, CondenseForCausalLM
from condense.hub.adapter_base import BASE, describe_base, memory_of_base, other_values, write_base
from condense.hub.adapters import merge_adapters

from ...refusals import assert_refused
from ..models import random_ids, sgd_losses, tiny_model, vary
from .test_adapters import change, lora, save_adapters

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # of PEFT
SHAPE = {"hidden_size": 64, "intermediate_size": 96}


@pytest.fixture(scope="module")
def model():
    return tiny_model(torch.float32, **SHAPE)


@pytest.fixture(scope="module")
def adapters(model, tmp_path_factory):
    return described(model, tmp_path_factory.mktemp("adapters"))


def described(model, folder, settings=None):
    """Adapters of random weights, and the description of their base, as a training writes them."""
    save_adapters(model, settings or lora("q_proj", "v_proj"), folder)
    write_base(describe_base(model), folder)
    return folder


@torch.no_grad()
def rounded(model, bits):
    """Matrices in blocks of 32 numbers on a grid of 2**bits from a block's least to its most, as GGUF's Q4_1."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            blocks = parameter.reshape(-1, 32)
            least, most = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
            step = ((most - least) / (2**bits - 1)).clamp_min(1e-9)  # the padding token's are 0
            parameter.copy_(((blocks - least) / step).round().mul(step).add(least).view_as(parameter))
    return model


@torch.no_grad()
def unrelated(model, part):
    """Other random values of the same spread in the weights of a part."""
    for name, parameter in model.named_parameters():
        if part in name:
            parameter.copy_(torch.randn_like(parameter) * parameter.std())
    return model


def resized(model, tokens):
    model.resize_token_embeddings(tokens)
    return model


def trained(model, steps):
    sgd_losses(model, random_ids(2, 17), steps)
    return model.eval()


COPIES = {
    "itself": lambda model: model,
    "bfloat16": lambda model: model.bfloat16(),
    "float16": lambda model: model.half(),
    "8 bits": lambda model: rounded(model, 8),
    "4 bits in bfloat16": lambda model: rounded(model, 4).bfloat16(),
    "2 bits": lambda model: rounded(model, 2),
    "more tokens": lambda model: resized(model, 67),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_the_base_are_accepted(name, model, adapters):
    merged = merge_adapters(COPIES[name](copy.deepcopy(model)), adapters)
    assert not torch.equal(
        merged.model.layers[0].self_attn.q_proj.weight, model.model.layers[0].self_attn.q_proj.weight
    )


@torch.no_grad()
def one_percent_more(model):
    model.model.layers[1].input_layernorm.weight.mul_(1.01)
    return model


OTHERS = {
    "seed": (lambda _: tiny_model(torch.float32, seed=1, **SHAPE), "has other values than theirs"),
    "matrices": (lambda model: unrelated(model, "proj"), "self_attn.q_proj.weight has other values"),
    "embedding": (lambda model: unrelated(model, "embed"), "its model.embed_tokens.weight has other values"),
    "one layer's map": (lambda model: unrelated(model, "2.mlp.up"), "its model.layers.2.mlp.up_proj.weight has other"),
    "a norm": (one_percent_more, "its model.layers.1.input_layernorm.weight has other values"),
    "training": (lambda model: trained(model, 3), "norm.weight has other values"),
    "more layers": (
        lambda _: tiny_model(torch.float32, num_hidden_layers=4, **SHAPE),
        "it has model.layers.3.input_lay",
    ),
    "fewer layers": (
        lambda _: tiny_model(torch.float32, num_hidden_layers=2, **SHAPE),
        "it lacks model.layers.2.input",
    ),
    "wider": (
        lambda _: tiny_model(torch.float32, **(SHAPE | {"intermediate_size": 128})),
        r"mlp.gate_proj.weight has the shape \[128, 64\], and theirs \[96, 64\]",
    ),
    "smaller in all": (
        lambda _: tiny_model(torch.float32, vocab_size=50),
        r"the shape \[50, 24\], and theirs \[61, 64\]",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_refused(name, model, adapters):
    make, words = OTHERS[name]
    other = make(copy.deepcopy(model))
    before = copy.deepcopy(other.state_dict())
    assert_refused(rf"this model is not the one .* trained on: .*{words}.* Pass the", merge_adapters, other, adapters)
    assert all(torch.equal(tensor, before[key]) for key, tensor in other.state_dict().items())


def test_without_a_description_nothing_is_compared(model, adapters, tmp_path):
    """PEFT's own adapters, and those of former versions; the error of other values says so."""
    shutil.copytree(adapters, tmp_path, dirs_exist_ok=True)
    other = tiny_model(torch.float32, seed=1, **SHAPE)
    assert_refused(f"all the same, delete {BASE}", merge_adapters, other, tmp_path)
    (tmp_path / BASE).unlink()
    merge_adapters(other, tmp_path)


def test_what_is_not_told_apart(model, adapters):
    """A base into which adapters were merged: its norms are the same, and its maps change less than by quantization."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for layer in changed.model.layers:
            layer.self_attn.q_proj.weight.mul_(1.05)
    assert other_values(changed, adapters) is None


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_may_be_stored_as_its_own(tied, tmp_path):
    """The weights of one model, with the head tied in one copy and not in the other."""
    base = tiny_model(torch.float32, tie_word_embeddings=tied, **SHAPE)
    if not tied:
        base.lm_head.weight.data.copy_(base.model.embed_tokens.weight)
    copied = tiny_model(torch.float32, tie_word_embeddings=not tied, **SHAPE)
    copied.load_state_dict(base.state_dict())
    adapters = described(base, tmp_path)
    found, expected = (merge_adapters(one, adapters).state_dict() for one in (copied, base))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_vocabulary_that_was_extended_for_the_training(model, tmp_path):
    """Adapters of the layers alone do not show it; the remedy gives a model that is accepted."""
    described(resized(copy.deepcopy(model), 63), tmp_path)
    words = (
        r"do not fit the model. They were trained with at least 63 tokens, and the model has 61: add .*embeddings\(63\)"
    )
    assert_refused(words, merge_adapters, copy.deepcopy(model), tmp_path)
    merge_adapters(resized(copy.deepcopy(model), 63), tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"memory": {}, "weights": []}', '{"memory": {}, "weights": {"a": 1}}']
)
def test_a_damaged_description(text, model, adapters, tmp_path):
    shutil.copytree(adapters, tmp_path, dirs_exist_ok=True)
    (tmp_path / BASE).write_text(text)
    assert_refused(f"{BASE} is damaged: .* Copy it again", merge_adapters, copy.deepcopy(model), tmp_path)


STOCK = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "initializer_range": 0.2, "bos_token_id": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """The folder of a stock checkpoint with a tokenizer, and the model."""
    from ...gguf_files import byte_level_tokenizer

    folder = tmp_path_factory.mktemp("stock")
    torch.manual_seed(0)
    made = vary(LlamaForCausalLM(LlamaConfig(**STOCK, dtype="float32")))
    made.save_pretrained(folder)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    return folder, made


@pytest.fixture(scope="module")
def of_stock(stock, tmp_path_factory):
    """Adapters of that checkpoint, folded in memory in segments of 24 tokens with the memory of a stock one."""
    model = CondenseForCausalLM.from_pretrained(stock[0], segment_length=24, attn_implementation="sdpa")
    return described(model, tmp_path_factory.mktemp("of_stock"))


def converted(*arguments):
    from typer.testing import CliRunner

    from condense.cli.main import app

    done = CliRunner().invoke(app, ["convert", *map(str, arguments)])
    assert done.exit_code == 0, done.output


def source_of(kind, stock, folder):
    """The checkpoint as a user has it."""
    path, made = stock
    if kind == "stock":
        return path
    if kind == "folded":  # with another memory
        model = CondenseForCausalLM.from_pretrained(path, segment_length=9, memory_share=1.0, sink_token_id=None)
        model.save_pretrained(folder / "folded")
        shutil.copy(path / "tokenizer.json", folder / "folded")
        return folder / "folded"
    pytest.importorskip("gguf")
    from ...gguf_files import byte_level_tokenizer, tokenizer_fields, write_gguf

    return write_gguf(folder / "m.gguf", made, tokenizer_fields(byte_level_tokenizer()), "Q4_1")


@pytest.mark.parametrize("kind", ["stock", "folded", "gguf"])
def test_the_merged_model_has_the_memory_that_the_adapters_learned(kind, stock, of_stock, tmp_path):
    """Whatever copy of the base they are merged into, and although the training named none."""
    converted(source_of(kind, stock, tmp_path), tmp_path / "merged", "--merge", of_stock)
    config = CondenseConfig.from_pretrained(tmp_path / "merged")
    found = (config.segment_length, config.memory_share, config.memory_source, config.sink_token_id)
    assert found == (24, 0.2, "layer_output", 1)


def test_convert_refuses_other_shapes_before_the_weights_are_read(of_stock, stock, tmp_path, monkeypatch, error_line):
    shutil.copytree(stock[0], tmp_path / "other")
    change(tmp_path / "other" / "config.json", num_hidden_layers=3)
    change(of_stock / "adapter_config.json", base_model_name_or_path="owner/name (folded in memory: save it)")
    assert AutoConfig.from_pretrained(tmp_path / "other").num_hidden_layers == 3
    monkeypatch.setattr("condense.hub.loading.load_model", lambda *_, **__: pytest.fail("weights are read"))
    line = error_line("convert", tmp_path / "other", tmp_path / "merged", "--merge", of_stock)
    assert "trained on: it has model.layers.2.input_layernorm.weight" in line and "trained on, 'owner/name'." in line


def test_convert_refuses_other_values_and_writes_nothing(of_stock, stock, tmp_path, error_line):
    shutil.copytree(stock[0], tmp_path / "other")
    torch.manual_seed(5)
    LlamaForCausalLM(LlamaConfig(**STOCK)).save_pretrained(tmp_path / "other")
    line = error_line("convert", tmp_path / "other", tmp_path / "merged", "--merge", of_stock)
    assert "has other values than theirs" in line and not (tmp_path / "merged").exists()


def test_the_description_is_small_and_readable(adapters):
    found = json.loads((adapters / BASE).read_text())
    assert found["memory"]["segment_length"] == 5 and found["weights"]["model.norm.weight"]["shape"] == [64]
    assert {len(weight["values"]) for weight in found["weights"].values()} == {32}


def test_the_adapters_of_smollm2_fit_the_base_that_they_describe():
    folder = Path(__file__).parents[3] / "docs" / "results" / "smollm2" / "healing" / "adapters"
    memory = memory_of_base(folder)
    assert (memory["segment_length"], memory["memory_share"], memory["sink_token_id"]) == (256, 0.2, 1)
    described = json.loads((folder / BASE).read_text())["weights"]
    adapters = load_file(folder / "adapter_model.safetensors")
    assert len(adapters) == 2 * 4 * 30
    for name, weight in adapters.items():
        base = described[name.removeprefix("base_model.model.").split(".lora_")[0] + ".weight"]["shape"]
        assert weight.dtype == torch.bfloat16
        assert weight.shape == ((16, base[1]) if ".lora_A." in name else (base[0], 16))
