"""`condense convert` with a depth block, as a user calls it."""

import json
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from condense import CondenseForCausalLM
from condense.cli.main import convert
from condense.labs.depth.model import DepthLlamaForCausalLM

from .commands import printed

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.unit]

BLOCK = ["--field", "mlp_tau", "--control-size", 2, "--alpha", 0.5, "--steps", 3, "--seed", 7]


@pytest.fixture(scope="module")
def qwen3(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    tokenizer = AutoTokenizer.from_pretrained(llama)
    config = Qwen3Config(**shape, num_key_value_heads=2, head_dim=8, vocab_size=len(tokenizer), initializer_range=0.3)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def hybrid(llama, tmp_path_factory):
    """A folded hybrid with an MLP, and what the command says of it."""
    folder = tmp_path_factory.mktemp("hybrid") / "made"
    return folder, printed("convert", llama, folder, "--segment-length", 64, "--depth", "0:1", *BLOCK)


def test_an_untrained_memory_is_said(llama, tmp_path):
    """Not of a checkpoint that was folded before, and not of Transformer-XL's memory, which reads a layer's input."""
    said = "Its memory is untrained: `condense train heal` trains one (docs/healing.md).\n"
    assert printed("convert", llama, tmp_path / "folded").endswith(said)
    for source, *options in (
        (tmp_path / "folded", "--segment-length", 64), (llama, "--memory-share", 0), (llama, "--to", "stock"),
        (llama, "--memory-source", "layer_input"),
    ):  # fmt: skip
        assert "memory is untrained" not in printed(
            "convert", source, tmp_path / "-".join(map(str, options[1:])), *options
        )


def test_the_function_needs_no_options_of_a_block(llama, tmp_path, capsys):
    """As the quickstart calls it."""
    convert(str(llama), tmp_path / "folded", segment_length=40, memory_source=None)
    assert "segments of 40 tokens" in capsys.readouterr().out
    assert CondenseForCausalLM.from_pretrained(tmp_path / "folded").config.depth is None


def test_another_family_there_and_back(qwen3, tmp_path, error_line):
    assert "segments of 16 tokens" in printed("convert", qwen3, tmp_path / "folded", "--segment-length", 16)
    assert "a stock Qwen3" in printed("convert", tmp_path / "folded", tmp_path / "back", "--to", "stock")
    ids = torch.randint(2, 50, (1, 40))
    back, first = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "back", qwen3))
    assert type(back) is Qwen3ForCausalLM and torch.equal(back(ids).logits, first(ids).logits)
    for options, words in [
        (["--to", "llama"], "is of the family qwen3, and a stock Llama is not: pass --to stock"),
        (["--to", "stock", "--depth", "1:2"], "a stock hybrid is a Llama, and this model is a folded Qwen3"),
    ]:
        assert words in error_line("convert", tmp_path / "folded", "nowhere", *options)
    options = ["--segment-length", 16, "--depth", "1:2", "--field", "layer"]
    assert "a depth block for layer 1: field layer" in printed("convert", qwen3, tmp_path / "hybrid", *options)
    assert torch.isfinite(CondenseForCausalLM.from_pretrained(tmp_path / "hybrid")(ids).logits).all()


def test_a_window_does_not_keep_a_model_from_becoming_stock(qwen3, tmp_path):
    config = Qwen3Config.from_pretrained(qwen3, use_sliding_window=True, sliding_window=100, max_window_layers=1)
    shutil.copytree(qwen3, tmp_path / "windows")
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "windows")
    assert "a stock Qwen3" in printed("convert", tmp_path / "windows", tmp_path / "stock", "--to", "stock")


def test_convert_writes_a_folded_hybrid(llama, hybrid):
    folder, output = hybrid
    model, source = CondenseForCausalLM.from_pretrained(folder), CondenseForCausalLM.from_pretrained(llama)
    depth, block = model.config.depth, model.model.layers[0]
    chosen = (depth["field"], depth["control_size"], depth["alpha"], depth["solver"], depth["steps"])
    assert chosen == ("mlp_tau", 2, 0.5, "euler", 3)
    field = sum(parameter.numel() for parameter in block.field.parameters())
    assert f"{model.num_parameters():,} parameters, segments of 64 tokens" in output
    assert f"a depth block for layer 0: field mlp_tau of width {depth['field_size']}, {field:,} parameters" in output
    replaced = sum(parameter.numel() for parameter in source.model.layers[0].parameters())
    assert abs(field - replaced) <= 2 * source.config.hidden_size + 3  # the nearest width
    kept = dict(source.named_parameters())
    for name, parameter in model.named_parameters():
        if not name.startswith("model.layers.0."):
            assert torch.equal(parameter, kept[name])
    AutoTokenizer.from_pretrained(folder)


def test_convert_writes_a_stock_hybrid_and_folds_it_again(llama, hybrid, tmp_path):
    folder, _ = hybrid
    output = printed("convert", llama, tmp_path / "stock", "--to", "llama", "--depth", "0:1", *BLOCK)
    assert "a stock Llama; a depth block" in output
    printed("convert", folder, tmp_path / "from-folded", "--to", "llama")
    printed("convert", tmp_path / "stock", tmp_path / "again", "--segment-length", 64)
    ids, control = torch.arange(3, 13)[None], torch.tensor([[0.5, -1.0]])
    expected = CondenseForCausalLM.from_pretrained(folder)(ids, control=control).logits
    for name in ("stock", "from-folded", "again"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert isinstance(model, CondenseForCausalLM if name == "again" else DepthLlamaForCausalLM)
        torch.testing.assert_close(model(ids, control=control).logits, expected)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "--depth", "1:1"], "--depth 1:1: write FIRST:END with FIRST < END"),
        (["nowhere", "--depth", "2:1"], "--depth 2:1: write FIRST:END with FIRST < END"),
        (["nowhere", "--depth", "-1:2"], "--depth -1:2: write FIRST:END"),
        (["nowhere", "--depth", "first"], "--depth first: write FIRST:END"),
        (["nowhere", "--depth", "0:1", "--field", "lay"], "did you mean 'layer'?"),
        (["nowhere", "--depth", "0:1", "--solver", "eulr"], "did you mean 'euler'?"),
        (["nowhere", "--solver", "rk4", "--seed", "1"], "--solver, --seed: these describe a depth block"),
        (["LLAMA", "--depth", "1:9"], "depth 1:9: choose FIRST:END with 0 <= FIRST < END <= 2"),
        (["HYBRID", "--depth", "0:1"], "the model has a depth block at position 0"),
        (["LLAMA", "--depth", "0:1", "--field", "layer", "--to", "llama"], "fold the model with a segment"),
        (["LLAMA", "--depth", "0:2", "--to", "llama"], "keeps at least one layer"),
    ],
)
def test_refusals_come_before_the_weights(llama, hybrid, arguments, words, monkeypatch, error_line, tmp_path):
    monkeypatch.setattr("condense.hub.loading.load_model", lambda *_, **__: pytest.fail("weights are loaded"))
    source, name, value, *options = arguments
    source = {"LLAMA": llama, "HYBRID": hybrid[0]}.get(source, source)
    assert words in error_line("convert", source, tmp_path / "out", f"{name}={value}", *options)
    assert not (tmp_path / "out").exists()


def test_generate_with_a_control(hybrid, tmp_path):
    """The control holds for the prompt and for new tokens: as the stock `generate` with the same."""
    folder, _ = hybrid
    prompt = "The grass is green. The sky is blue. " * 20  # three segments
    arguments = ["--model", folder, "--prompt", prompt, "--max-new-tokens", 8, "--report", tmp_path / "report.json"]
    answer = printed("generate", *arguments, "--control=-8,6.5")
    model, tokenizer = CondenseForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    control, length = torch.tensor([[-8, 6.5]]), inputs["input_ids"].shape[1]
    expected = model.generate(**inputs, control=control, max_new_tokens=8, do_sample=False)[0, length:]
    assert answer.strip() == tokenizer.decode(expected, skip_special_tokens=True).strip()
    assert json.loads((tmp_path / "report.json").read_text())["control"] == [-8, 6.5]
    assert printed("generate", *arguments) != answer


@pytest.mark.parametrize(
    ("name", "control", "words"),
    [
        ("LLAMA", "1", "has a control of 0 components, not 1"),
        ("HYBRID", "1", "has a control of 2 components, not 1"),
        ("HYBRID", "1,good", "--control 1,good: write numbers"),
        ("HYBRID", "1,nan", "--control 1,nan: write numbers"),
    ],
)
def test_controls_that_a_model_does_not_take(llama, hybrid, name, control, words):
    source = {"LLAMA": llama, "HYBRID": hybrid[0]}[name]
    with pytest.raises(ValueError, match=words):
        printed("generate", "--model", source, "--prompt", "The", f"--control={control}")


@pytest.mark.parametrize("rope_type", ["default", "llama3"])
def test_a_stock_export_has_the_names_of_transformers_4(rope_type, llama, tmp_path, caplog):
    """transformers 5 reads the same configuration as without them, and says nothing."""
    rope = {"rope_type": rope_type, "rope_theta": 500000.0}
    scaling = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    rope |= scaling if rope_type == "llama3" else {}
    source, exported = tmp_path / "source", tmp_path / "exported"
    shutil.copytree(llama, source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"rope_parameters": rope, "max_position_embeddings": 4096}))
    printed("convert", source, exported, "--to", "stock", "--dtype", "bfloat16")
    stored = json.loads((exported / "config.json").read_text())
    assert stored["rope_theta"] == 500000.0 and stored["rope_parameters"] == rope
    assert stored.get("rope_scaling") == (scaling | {"rope_type": "llama3"} if rope_type == "llama3" else None)
    assert stored["torch_dtype"] == stored["dtype"] == "bfloat16"
    with caplog.at_level("WARNING", logger="transformers"):
        found = AutoConfig.from_pretrained(exported).to_dict()
        tokenizer = AutoTokenizer.from_pretrained(exported)
        AutoModelForCausalLM.from_pretrained(exported)
    assert not caplog.records
    former = {"rope_theta", "rope_scaling", "torch_dtype"}
    (exported / "config.json").write_text(json.dumps({name: stored[name] for name in stored.keys() - former}))
    assert found == AutoConfig.from_pretrained(exported).to_dict()
    expected = AutoTokenizer.from_pretrained(llama)
    assert type(tokenizer) is type(expected) and tokenizer("A tale, 12").input_ids == expected("A tale, 12").input_ids


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("TokenizersBackend", "PreTrainedTokenizerFast"),  # one class
        (None, "PreTrainedTokenizerFast"),
        ("PreTrainedTokenizerFast", "PreTrainedTokenizerFast"),
        ("GPT2Tokenizer", "GPT2Tokenizer"),
    ],
)
def test_a_stock_export_names_a_tokenizer_class_that_transformers_4_has(given, written, llama, tmp_path):
    shutil.copytree(llama, tmp_path / "source")
    path = tmp_path / "source" / "tokenizer_config.json"
    fields = json.loads(path.read_text()) | {"tokenizer_class": given}
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    printed("convert", tmp_path / "source", tmp_path / "exported", "--to", "stock")
    assert json.loads((tmp_path / "exported" / path.name).read_text())["tokenizer_class"] == written


def test_a_stock_export_names_its_special_tokens_as_transformers_4_does(llama, tmp_path):
    """It fails for transformers 5's list, `extra_special_tokens`."""
    shutil.copytree(llama, tmp_path / "source")
    tokenizer = AutoTokenizer.from_pretrained(llama)
    special = tokenizer.convert_ids_to_tokens([7, 9])
    tokenizer.add_special_tokens({"extra_special_tokens": special})
    tokenizer.save_pretrained(tmp_path / "source")
    printed("convert", tmp_path / "source", tmp_path / "exported", "--to", "stock")
    stored = json.loads((tmp_path / "exported" / "tokenizer_config.json").read_text())
    assert stored["additional_special_tokens"] == special and "extra_special_tokens" not in stored
    found = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert found.all_special_tokens == tokenizer.all_special_tokens and len(found) == len(tokenizer)


def test_a_gguf_file_there_and_back(tmp_path, error_line):
    pytest.importorskip("gguf")
    from transformers import LlamaForCausalLM

    from .gguf_files import PROSE, byte_level_tokenizer, stock_model, tokenizer_fields, write_gguf

    model, tokenizer = stock_model(LlamaForCausalLM), byte_level_tokenizer()
    path = write_gguf(tmp_path / "m.gguf", model, tokenizer_fields(tokenizer))
    said = printed("convert", path, tmp_path / "folded", "--segment-length", 16)
    assert "segments of 16 tokens" in said and "Its memory is untrained" in said
    assert CondenseForCausalLM.from_pretrained(tmp_path / "folded").config.segment_length == 16
    answer = ["--prompt", PROSE, "--max-new-tokens", 5, "--temperature", 0]
    expected = printed("generate", "--model", tmp_path / "folded", *answer)
    assert (
        printed("generate", "--model", path, "--segment-length", 16, *answer).split("\n")[0] == expected.split("\n")[0]
    )
    printed("convert", path, tmp_path / "stock", "--to", "stock")
    stock, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "stock"), torch.tensor([tokenizer.encode(PROSE).ids])
    torch.testing.assert_close(stock(ids).logits, model(ids).logits, atol=0, rtol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "stock")(PROSE).input_ids == ids[0].tolist()
    path.write_bytes(path.read_bytes()[:-300])
    assert "is incomplete" in error_line("convert", path, tmp_path / "other")
