"""Models in GGUF files, against the stock model that was written and against gguf's own dequantization."""

import json
import logging
import math
import shutil
from importlib.metadata import PackageNotFoundError

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from condense import CondenseConfig, CondenseForCausalLM, CondenseModel, extras
from condense.generation.chat import chat_ids, end_tokens
from condense.gguf_files.header import read_header
from condense.hub.fingerprint import fingerprint
from condense.hub.loading import check_source, load_config, load_model, load_tokenizer

from ..refusals import assert_refused

gguf = pytest.importorskip("gguf")
from ..gguf_files import PROSE, USER_DEFINED, byte_level_tokenizer, stock_model, tokenizer_fields, write_gguf  # noqa: E402

pytestmark = pytest.mark.unit

FAMILIES = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM, "qwen3": Qwen3ForCausalLM}
LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level_tokenizer()


@pytest.fixture
def written(tmp_path, tokenizer):
    """Writes tiny Llamas: takes the arguments of `write_gguf`, and changes to the tokenizer's metadata."""

    def write(model=None, quantization=None, name="model.gguf", arch="llama", tensors=None, own=None, **fields):
        model = stock_model(LlamaForCausalLM) if model is None else model
        own = tokenizer_fields(tokenizer) if own is None else own
        return write_gguf(tmp_path / name, model, own, quantization, arch, tensors, **fields)

    return write


@torch.no_grad()
def logits(model, ids_BN):
    return model(input_ids=ids_BN).logits


def random_ids(length, vocab_size=320):
    return torch.randint(vocab_size, (1, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("quantization", [None, "Q8_0", "Q4_0", "Q5_0"])
@pytest.mark.parametrize("arch", FAMILIES)
def test_weights_are_those_that_gguf_dequantizes(arch, quantization, written, said):
    """A text of a segment then has the stock model's logits, bit by bit."""
    model = stock_model(FAMILIES[arch], **({"head_dim": 16} if arch == "qwen2" else {}))
    expected = {}
    for name, weight in model.state_dict().items():
        if quantization and weight.ndim == 2:
            kind = gguf.GGMLQuantizationType[quantization]
            weight = torch.from_numpy(gguf.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind))
        expected[name] = weight
    path = written(model, quantization, arch=arch)
    folded = CondenseForCausalLM.from_pretrained(path.parent, gguf_file=path.name, segment_length=40)
    assert folded.config.memory_share == 0.2 and folded.config.folded_weights
    assert any(f"'{path}' is folded with memory_share=0.2 and sink_token_id=" in line for line in said())
    torch.testing.assert_close(dict(folded.state_dict()), expected, atol=0, rtol=0)
    assert folded.dtype == torch.float32 and folded.config.family == arch and folded.config.segment_length == 40
    model.load_state_dict(expected)
    assert torch.equal(logits(folded, random_ids(40)), logits(model, random_ids(40)))
    stock = load_model(AutoModelForCausalLM, path)
    assert type(stock) is FAMILIES[arch] and torch.equal(logits(stock, random_ids(90)), logits(model, random_ids(90)))
    assert not getattr(stock, "is_quantized", False)


def test_the_configuration_is_the_written_one(written):
    model = stock_model(LlamaForCausalLM, rope_theta=50000.0, rms_norm_eps=1e-6)
    config = load_config(AutoConfig, written(model))
    expected = model.config.to_dict()
    for name in ("initializer_range", "transformers_version", "architectures", "dtype"):
        expected.pop(name)
    assert {name: config.to_dict()[name] for name in expected} == expected
    folded = load_config(CondenseConfig, written(model), segment_length=24, memory_share=0.2)
    assert (folded.segment_length, folded.memory_share, folded.rms_norm_eps) == (24, 0.2, 1e-6)


@pytest.mark.parametrize("left_out", [(), ("rope.dimension_count",), ("attention.key_length",)])
def test_the_size_of_a_head_is_found(left_out, written):
    path = written(stock_model(Qwen3ForCausalLM), arch="qwen3", **{f"qwen3.{name}": None for name in left_out})
    assert load_config(AutoConfig, path).head_dim == 32  # not 64 / 4, nor the family's 128
    bare = written(**{"llama.attention.key_length": None, "llama.rope.dimension_count": None})
    assert load_config(AutoConfig, bare).head_dim == 16


def test_tied_embeddings_and_biases(written):
    model = stock_model(LlamaForCausalLM, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    folded = load_model(CondenseForCausalLM, written(model, "Q8_0"), segment_length=30)
    stock = load_model(LlamaForCausalLM, written(model, "Q8_0"))
    assert folded.lm_head.weight is folded.model.embed_tokens.weight and folded.model.layers[0].mlp.up_proj.bias.any()
    assert torch.equal(logits(folded, random_ids(30)), logits(stock, random_ids(30)))


def test_a_base_model_and_options_of_transformers(written):
    path = written()
    base = CondenseModel.from_pretrained(path.parent, gguf_file=path.name, segment_length=10)
    whole = load_model(CondenseForCausalLM, path, segment_length=10, dtype="bfloat16", attn_implementation="eager")
    torch.testing.assert_close(base.state_dict(), load_model(CondenseForCausalLM, path).model.state_dict())
    torch.testing.assert_close(base.state_dict(), CondenseModel.from_pretrained(path).state_dict())
    assert whole.dtype == torch.bfloat16 and whole.config._attn_implementation == "eager"
    config = CondenseConfig.from_pretrained(path.parent, gguf_file=path.name, segment_length=7)
    given, report = CondenseForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, config=config, output_loading_info=True
    )
    assert given.config.segment_length == 7 and not report["missing_keys"]
    assert given.name_or_path == f"{path} (folded in memory: save_pretrained() it and load that folder)"


def test_weights_stored_in_half_precision_keep_their_dtype(written):
    path = written(quantization="F16")
    assert load_model(CondenseForCausalLM, path).dtype == load_model(AutoModelForCausalLM, path).dtype == torch.float16


def llama_3_factors(factor, head_dim=64, theta=500000.0):
    """What llama.cpp's converter writes, by hand: short waves stay, long ones are stretched."""
    factors = []
    for pair in range(head_dim // 2):
        turns = 8192 / (2 * math.pi * theta ** (2 * pair / head_dim))  # of the pair in the original context
        smooth = (turns - 1) / (4 - 1)
        factors.append(1.0 if turns > 4 else factor if turns < 1 else 1 / ((1 - smooth) / factor + smooth))
    return factors


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_scaling_of_a_llama_3_is_found_in_its_factors(factor, written):
    """transformers' own reader leaves it out: such a model has other logits."""
    rope = LLAMA_3 | {"factor": factor}
    model = stock_model(LlamaForCausalLM, rope_parameters=rope, rope_theta=None, head_dim=64)
    path = written(model, tensors={"rope_freqs.weight": np.array(llama_3_factors(factor), dtype=np.float32)})
    found = load_model(CondenseForCausalLM, path, segment_length=300)
    assert found.config.rope_parameters == rope
    assert torch.equal(logits(found, random_ids(300)), logits(model, random_ids(300)))
    other = written(model, tensors={"rope_freqs.weight": torch.linspace(1, 9, 32).numpy()})
    assert_refused("other factors than a Llama 3", load_model, CondenseForCausalLM, other)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"type": "none"}, {"rope_type": "default"}),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 128, "finetuned": True},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_other_scalings_of_positions(fields, expected, written):
    path = written(**{f"llama.rope.scaling.{name}": value for name, value in fields.items()})
    assert load_config(CondenseConfig, path).rope_parameters == {"rope_theta": 10000.0, **expected}


@pytest.mark.parametrize("fields", [{"type": "longrope"}, {"type": "yarn", "factor": 2.0, "attn_factor": 3.0}])
def test_a_scaling_that_is_not_known_is_refused(fields, written):
    path = written(**{f"llama.rope.scaling.{name}": value for name, value in fields.items()})
    assert_refused("scales rotary positions", load_config, CondenseConfig, path)


def test_the_tokenizer_is_the_written_one(written, tokenizer):
    """White space before digits included, where transformers' own conversion differs: the control."""
    path = written()
    found = load_tokenizer(path, load_config(AutoConfig, path))
    assert found.get_vocab() == tokenizer.get_vocab() and len(found) == 320
    for text in (PROSE, *PROSE.split("\n"), "f(1,\n  22)", "|  12 |   7 |", "<|turn|>a  9<|end|>", ""):
        assert found(text).input_ids == tokenizer.encode(text).ids
        assert found.decode(found(text).input_ids) == text
    plain = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert plain(PROSE).input_ids != tokenizer.encode(PROSE).ids
    assert (found.bos_token, found.eos_token, found.pad_token) == ("<|turn|>", "<|end|>", "<|pad|>")


def test_chat_and_the_settings_of_generate(written):
    """A turn's end is an end of generation, too."""
    path = written(**{
        "tokenizer.ggml.eot_token_id": 2, "general.sampling.temp": 0.6, "general.sampling.top_k": 30
    })  # fmt: skip
    for model in (load_model(CondenseForCausalLM, path), load_model(AutoModelForCausalLM, path)):
        found = load_tokenizer(path, model.config)
        settings = model.generation_config
        assert (settings.temperature, settings.top_k, settings.do_sample, settings.eos_token_id) == (
            0.6,
            30,
            True,
            [0, 2],
        )
        assert end_tokens(model, found) == {0, 2} and model.config.eos_token_id == [0, 2]
        assert chat_ids(found, "Hi") == found("<|turn|>Hi<|turn|>").input_ids


def test_special_tokens_with_letters_of_any_script(written, tokenizer):
    """transformers' conversion leaves them out, and adds <|endoftext|> to the vocabulary: the control."""
    fields = tokenizer_fields(tokenizer)
    fields["tokenizer.ggml.tokens"][1] = "<｜turn▁of｜>"  # noqa: RUF001
    path = written(own=fields)
    found = load_tokenizer(path, load_config(AutoConfig, path))
    assert found("a<｜turn▁of｜>").input_ids[-1] == 1 and found.bos_token_id == 1 and len(found) == 320  # noqa: RUF001
    assert len(AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)) > 320


def test_words_of_a_llama_3_are_taken_whole(written, tokenizer):
    """Its texts begin with the first token, as in llama.cpp, where the file doesn't say."""
    fields = tokenizer_fields(tokenizer)
    removed = {fields["tokenizer.ggml.tokens"][token] for token in (318, 319)}
    fields["tokenizer.ggml.merges"] = [
        merge for merge in fields["tokenizer.ggml.merges"] if not removed & {merge.replace(" ", ""), *merge.split(" ")}
    ]
    fields["tokenizer.ggml.tokens"][318:] = ["<think>", "zqzqz"]
    fields["tokenizer.ggml.token_type"][318] = USER_DEFINED
    del fields["tokenizer.ggml.add_bos_token"]
    for rule, begins, words in (("llama-bpe", [1], 1), ("gpt-2", [], 5)):
        path = written(own=fields | {"tokenizer.ggml.pre": rule}, name=f"{rule}.gguf")
        found = load_tokenizer(path, load_config(AutoConfig, path))
        assert found("").input_ids == begins and len(found("zqzqz", add_special_tokens=False).input_ids) == words
        assert found("a<think>").input_ids[-1] == 318 and 318 not in found.all_special_ids


def test_a_rule_that_is_not_known_is_named(written, tokenizer, caplog):
    path = written(own=tokenizer_fields(tokenizer, **{"tokenizer.ggml.pre": "viking"}))
    with caplog.at_level(logging.WARNING):
        load_tokenizer(path, load_config(AutoConfig, path))
    assert "'viking'" in caplog.text and "GPT-2's" in caplog.text


def test_a_sentencepiece_tokenizer_is_that_of_the_checkpoint(written, stories):
    stored = json.loads((stories / "tokenizer.json").read_text())["model"]
    tokens = sorted(stored["vocab"], key=stored["vocab"].get)
    ranks = {"".join(merge): rank for rank, merge in reversed(list(enumerate(stored["merges"])))}
    own = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(ranks.get(token, 9999)) for token in tokens],
        "tokenizer.ggml.token_type": [3] * 3 + [6 if token.startswith("<0x") else 1 for token in tokens[3:]],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    model = stock_model(LlamaForCausalLM, vocab_size=512, eos_token_id=2)
    path = written(model, own=own)
    found, expected = load_tokenizer(path, load_config(AutoConfig, path)), AutoTokenizer.from_pretrained(stories)
    for text in (PROSE, "  two spaces", "a</s>b <s> c", "", "日本 9"):
        assert found(text).input_ids == expected(text).input_ids
    path = written(model, own=own | {"tokenizer.ggml.add_space_prefix": False}, name="other.gguf")
    without = load_tokenizer(path, load_config(AutoConfig, path))
    assert without("He").input_ids == [1, *without.convert_tokens_to_ids(["H", "e"])] and without.decode(
        [54]
    ) == expected.decode([54])


def test_the_folder_around_a_file_does_not_matter(written, tmp_path, tokenizer):
    """Folders of downloads hold other models' files."""
    path = written()
    expected = load_tokenizer(path, load_config(AutoConfig, path))(PROSE).input_ids
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).write_text('{"model_type": "gpt2", "bos_token": "x", "temperature": 3}')
    assert load_tokenizer(path, load_config(AutoConfig, path))(PROSE).input_ids == expected
    assert load_model(AutoModelForCausalLM, path).generation_config.temperature is None
    assert load_model(CondenseForCausalLM, path).generation_config.temperature is None


def test_a_fingerprint_is_of_the_file_and_not_of_its_name(written, tmp_path):
    path = written()
    shutil.copy(path, tmp_path / "copy.gguf")
    other = written(quantization="Q8_0", name="other.gguf")
    assert fingerprint(str(path)) == fingerprint(str(tmp_path / "copy.gguf")) != fingerprint(str(other))
    header = read_header(path).num_bytes
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert fingerprint(str(path)) != fingerprint(str(tmp_path / "copy.gguf"))
    assert fingerprint(str(path), weights=False) == fingerprint(str(tmp_path / "copy.gguf"), weights=False)
    assert 1000 < header < len(data)


@pytest.mark.parametrize("load", [load_config, load_model])
def test_damaged_files_are_refused(load, written, tmp_path):
    loaded = CondenseConfig if load is load_config else CondenseForCausalLM
    path = written()
    data = path.read_bytes()

    def assert_damage(said, content):
        path.write_bytes(content)
        assert_refused(said, load, loaded, path)

    assert_damage("does not begin with GGUF", b"GGML" + data[4:])
    assert_damage("does not begin with GGUF", b"")
    assert_damage("has version 9", data[:4] + b"\x09" + data[5:])
    for size in (5, 100, 2000, read_header(written()).num_bytes - 1):
        assert_damage("damaged or incomplete", data[:size])
    assert_damage(f"is incomplete: it has {len(data) - 900:,} of at least", data[:-900])
    assert_refused("there is no file", load, loaded, tmp_path / "none.gguf")
    assert_refused("there is no file 'none.gguf'", load, loaded, "none.gguf")


def test_models_that_are_not_folded_are_refused(written, tokenizer):
    refused = {
        "architecture 'gemma'": {"general.architecture": None, "arch": "gemma"},
        "one of 3 parts": {"split.count": 3},
        "no llama.block_count": {"llama.block_count": None},
        "rotates only 16": {"llama.rope.dimension_count": 16},
        "holds, beside the weights of its kind, blk.0.attn_q_norm.weight": {
            "tensors": {"blk.0.attn_q_norm.weight": torch.ones(32).numpy()}
        },
        "lacks blk.2.attn_k.weight and 8 more": {"llama.block_count": 3},
    }
    for said, changes in refused.items():
        assert_refused(said, check_source, written(**changes))
    path = written(own=tokenizer_fields(tokenizer, **{"tokenizer.ggml.model": "bert"}))
    assert_refused("of the kind 'bert'", load_tokenizer, path, load_config(AutoConfig, path))
    with pytest.raises(ValueError, match=r"token_embd|embed_tokens.weight \[320, 64\], but the model has \[320, 32\]"):
        load_model(CondenseForCausalLM, written(**{"llama.embedding_length": 32}))


def test_a_file_on_the_hub(written, tmp_path):
    path = written()
    snapshot = tmp_path / "cache" / "models--owner--name" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    shutil.copy(path, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    options = {"gguf_file": path.name, "cache_dir": tmp_path / "cache", "local_files_only": True}
    config = CondenseConfig.from_pretrained("owner/name", segment_length=9, **options)
    found = CondenseForCausalLM.from_pretrained("owner/name", segment_length=9, **options)
    assert config.segment_length == found.config.segment_length == 9 and config.hidden_size == 64
    expected = CondenseForCausalLM.from_pretrained(path.parent, gguf_file=path.name, segment_length=9)
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), atol=0, rtol=0)


def test_adapters_beside_a_file_are_refused(written, tmp_path):
    path = written()
    (tmp_path / "adapter_config.json").write_text("{}")
    assert_refused("holds adapters", load_model, CondenseForCausalLM, path)


def test_the_extra_is_named_where_gguf_is_missing(written, monkeypatch):
    path, version = written(), extras.version

    def without_gguf(name):
        if name == "gguf":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(extras, "version", without_gguf)
    monkeypatch.setattr(extras, "requires", lambda name: ['gguf>=0.19; extra == "gguf"'])
    for load, loaded in ((load_config, CondenseConfig), (load_model, AutoModelForCausalLM)):
        assert_refused(
            r"a GGUF file needs gguf \(missing\): in a checkout pip install -e '\.\[gguf\]'", load, loaded, path
        )


def test_the_extra_is_named_in_a_checkout_that_is_not_installed(written, monkeypatch):
    path = written()
    monkeypatch.setattr(extras, "requires", lambda name: [])
    monkeypatch.setattr("condense.gguf_files.config.find_spec", lambda name: None if name == "gguf" else name)
    assert_refused(r"a GGUF file needs gguf: .*\.\[gguf\]", load_config, CondenseConfig, path)


def test_zero_3_is_refused(written, monkeypatch):
    monkeypatch.setattr("condense.hub.loading.is_deepspeed_zero3_enabled", lambda: True)
    assert_refused("ZeRO-3", load_model, CondenseForCausalLM, written())
