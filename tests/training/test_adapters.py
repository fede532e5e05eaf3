"""LoRA in a recipe: what is trained and saved, resumed, merged, and refused."""

import json
import shutil
import sys

import peft
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import condense.ops.linear
from condense import CondenseConfig, CondenseForCausalLM
from condense.cli.main import app, main
from condense.hub.adapter_base import BASE
from condense.hub.adapters import trained_memory
from condense.training.adapters import add_adapters
from condense.training.distillation import Distillation
from condense.training.planning.dry_run import dry_run
from condense.training.preflight import check_run
from condense.training.recipe import LoRA, load_recipe
from condense.training.train import train

from ..condense.models import tiny_model
from .runs import folded_recipe, logged, run, same_weights, tie

MEMORY = {"segment_length": 24, "memory_share": 0.2, "sink_token_id": 3}


def recipe_in(folder, *targets):
    fields = {"lora": {"rank": 4, "alpha": 12, "targets": targets}, "checkpoints": {"every": 3, "keep": 3}}
    fields |= {"optimizer": {"learning_rate": 5e-2, "warmup_steps": 1}}
    return folded_recipe(folder, (120, 6), global_batch=4, micro_batch=2, **fields)


def convert(*arguments):
    done = CliRunner().invoke(app, ["convert", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return recipe_in(tmp_path_factory.mktemp("lora"), "q_proj", "v_proj", "down_proj")


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory):
    output = tmp_path_factory.mktemp("finished")
    train(load_recipe(recipe, [f"output={output}"]))
    return output


def test_adapters_alone_are_trained_and_saved(finished):
    losses = logged(finished)
    assert losses[-1] < losses[0] - 0.1
    stored = load_file(finished / "adapter_model.safetensors")
    assert len(stored) == 2 * 3 * 2 and all("lora_" in name for name in stored)  # layers, targets, matrices
    assert all(tensor.abs().max() > 0 for tensor in stored.values())  # B begins at 0
    settings = json.loads((finished / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 12)
    assert not (finished / "model.safetensors").exists()


def test_their_base_is_described_beside_them(recipe, finished):
    """In the output and in each checkpoint: the model as it was loaded, before any training."""
    base = CondenseForCausalLM.from_pretrained(recipe.parent / "start")
    for folder in (finished, finished / "checkpoint-3", finished / "checkpoint-6"):
        found = json.loads((folder / BASE).read_text())
        assert found["memory"]["segment_length"] == 40 and found["memory"]["memory_share"] == base.config.memory_share
        shapes = {name: list(weight.shape) for name, weight in base.named_parameters(remove_duplicate=False)}
        assert {name: weight["shape"] for name, weight in found["weights"].items()} == shapes
        for name, weight in base.named_parameters():
            ends = found["weights"][name]["values"][:: len(found["weights"][name]["values"]) - 1]
            expected = weight.detach().flatten()[[0, -1]]
            torch.testing.assert_close(torch.tensor(ends), expected, atol=0, rtol=1e-3)


@pytest.mark.parametrize("targets", ["q_proj", "lm_head"])
def test_saving_them_asks_no_folder_for_the_base(recipe, tmp_path, recwarn, targets):
    """PEFT would look for the vocabulary of a model that was folded in memory, and warn at each checkpoint."""
    convert(recipe.parent / "start", tmp_path / "stock", "--to", "stock")
    changes = [f"model={tmp_path / 'stock'}", "model.segment_length=40", "stages.0.steps=2"]
    train(load_recipe(recipe, [f"output={tmp_path / 'out'}", *changes, f"lora.targets=[{targets}]"]))
    assert not [str(one.message) for one in recwarn if "adapters" in one.filename or "peft" in one.filename]
    names = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert names and all(targets in name and "lora_" in name for name in names)


def test_a_resumed_run_is_the_same(recipe, finished, tmp_path):
    shutil.copytree(finished / "checkpoint-3", tmp_path / "checkpoint-3")
    train(load_recipe(recipe, [f"output={tmp_path}"]))
    assert logged(tmp_path) == logged(finished)[3:]
    assert same_weights(tmp_path, finished, "adapter_model.safetensors")


@torch.no_grad()
def test_convert_merges_them(recipe, finished, tmp_path):
    """W + (alpha / rank) B A, written out."""
    source = recipe.parent / "start"
    convert(source, tmp_path / "merged", "--merge", finished)
    expected = CondenseForCausalLM.from_pretrained(source).state_dict()
    for name, matrix_RI in load_file(finished / "adapter_model.safetensors").items():
        if "lora_A" in name:
            matrix_OR = load_file(finished / "adapter_model.safetensors")[name.replace("lora_A", "lora_B")]
            weight = name.removeprefix("base_model.model.").replace("lora_A.", "")
            expected[weight] = expected[weight] + 12 / 4 * matrix_OR @ matrix_RI
    found = CondenseForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], (24, 0.2, "layer_output")),
        (["--segment-length", "12"], (12, 0.2, "layer_output")),
        (["--memory-share", "1:0"], (24, [1, 0], "layer_output")),
        (["--memory-source", "layer_input"], (24, 1, "layer_input")),
    ],
)
@pytest.mark.parametrize("of_former_version", [False, True])
def test_the_merged_model_has_the_memory_of_the_training(
    recipe, finished, tmp_path, options, expected, of_former_version
):
    """A stock checkpoint says nothing of segments and memories: a file beside the adapters does, formerly the recipe
    alone."""
    stock, adapters = tmp_path / "stock", tmp_path / "adapters"
    shutil.copytree(finished, adapters)
    for described in (adapters / "recipe.json", adapters / "checkpoint-3" / BASE, adapters / BASE):
        trained = json.loads(described.read_text())
        trained["model" if described.name == "recipe.json" else "memory"] |= MEMORY
        described.write_text(json.dumps(trained))
    if of_former_version:
        for folder in (adapters, adapters / "checkpoint-3"):
            (folder / BASE).unlink()
    convert(recipe.parent / "start", stock, "--to", "stock")
    assert "memory is untrained" not in convert(stock, tmp_path / "merged", "--merge", adapters, *options)
    config = CondenseConfig.from_pretrained(tmp_path / "merged")
    assert (config.segment_length, config.memory_share, config.memory_source) == expected
    found = trained_memory(adapters / "checkpoint-3", str(stock))
    assert found | MEMORY == found and config.sink_token_id == 3
    convert(stock, tmp_path / "merged-stock", "--merge", adapters, "--to", "stock")


@pytest.mark.parametrize(
    ("stored", "of_stock", "of_folded"),
    [
        ({}, {"memory_share": 1.0, "sink_token_id": None}, {}),  # of a former version
        ({"memory_share": 0.2}, {"memory_share": 0.2, "sink_token_id": None}, {"memory_share": 0.2}),
        ({"sink_token_id": "auto"}, {}, {}),
        ({"sink_token_id": "none"}, {"sink_token_id": None}, {"sink_token_id": None}),
        ({"sink_token_id": 3}, {"sink_token_id": 3}, {"sink_token_id": 3}),
        ({"kind": "stock"}, {}, {}),
    ],
)
def test_adapters_of_former_versions_know_no_sink(llama, folded, tmp_path, stored, of_stock, of_folded):
    (tmp_path / "recipe.json").write_text(json.dumps({"model": {"source": "elsewhere", **stored}}))
    assert trained_memory(tmp_path, str(llama)) == of_stock
    assert trained_memory(tmp_path, str(folded)) == of_folded


@pytest.mark.parametrize("text", ['{"rate": 1}', '{"model": "llama"}', "[]", "{", '{"model": {"segment_length": "x"}}'])
def test_a_recipe_of_another_program_says_nothing_of_memories(llama, tmp_path, text):
    (tmp_path / "recipe.json").write_text(text)
    assert trained_memory(tmp_path, str(llama)) == {}


def test_a_teacher_shares_the_frozen_weights(recipe):
    model, given = tiny_model(torch.float32), load_recipe(recipe, ["objective={kind: distill}", "output=o"])
    objective = given.objective
    assert isinstance(objective, Distillation)
    adapted = add_adapters(objective.prepare_model(model, given), given.lora)
    weights = {tensor.data_ptr() for name, tensor in adapted.state_dict().items() if "lora" not in name}
    assert {tensor.data_ptr() for tensor in objective._teacher.state_dict().values()} <= weights
    ids = torch.randint(2, 61, (2, 13))
    adapted.to(torch.bfloat16)  # as DeepSpeed does
    objective.losses(adapted, {"input_ids": ids, "labels": ids}, 24).loss.backward()
    weights = {tensor.data_ptr() for name, tensor in adapted.state_dict().items() if "lora" not in name}
    assert {tensor.data_ptr() for tensor in objective._teacher.state_dict().values()} <= weights
    gradients = [name for name, parameter in adapted.named_parameters() if parameter.grad is not None]
    assert gradients and all("lora_" in name for name in gradients)


def test_gradients_of_adapters_are_summed_in_float32(recipe, noted):
    """As those of the model's own maps: each weight of an adapter adds its uses to one sum."""
    model = add_adapters(tiny_model(torch.float32), load_recipe(recipe, ["output=o"]).lora).to(torch.bfloat16).train()
    assert type(model.base_model.model.lm_head) is torch.nn.Linear  # of no adapter
    products, ids = noted(condense.ops.linear, "summed_linear"), torch.randint(2, 61, (2, 23))
    model(input_ids=ids, labels=ids).loss.backward()
    summed = {id(call.arguments[2]) for call in products}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 3 * 3 and {id(parameter) for parameter in trained} <= summed
    assert all(parameter.grad is not None for parameter in trained)


def test_quantized_weights_are_refused(recipe, tmp_path):
    start = shutil.copytree(recipe.parent / "start", tmp_path / "start")
    config = json.loads((start / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (start / "config.json").write_text(json.dumps(config))
    words = r"training from model='.*start': the model's weights are quantized \(bitsandbytes\). Do this .* in full"
    with pytest.raises(ValueError, match=words):
        check_run(load_recipe(recipe, ["output=unused", f"model.source={start}"]), 1, None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["lora.targets=[q_prj]"], "no linear map 'q_prj': did you mean 'q_proj'"),
        (["lora.targets=[]"], "lora.targets"),
        (["lora.rank=0"], "lora.rank"),
        (["model.schedule=wavefront"], "without lora: set model.schedule=auto"),
        (["objective={kind: multi_token, tokens: 2}"], "lora does not go with objective.kind='multi_token'"),
    ],
)
def test_refusals(recipe, options, words):
    with pytest.raises(ValueError, match=words):
        check_run(load_recipe(recipe, ["output=unused", *options]), 1, None)


def test_another_run_from_the_weights_of_a_checkpoint_merges_them_first(recipe, finished, tmp_path):
    """A checkpoint of a run with lora holds no model: the remedy is a command that makes one."""
    checkpoint = finished / "checkpoint-3"
    with pytest.raises(ValueError, match="comes from another recipe: lora.rank was 4 and is 5") as refused:
        check_run(load_recipe(recipe, [f"output={tmp_path / 'o'}", f"resume={checkpoint}", "lora.rank=5"]), 1, None)
    command, _, override = str(refused.value).partition("with condense ")[2].partition(", then ")
    assert override == "model=MERGED output=FOLDER."
    convert(*command.replace("MERGED", str(tmp_path / "merged")).removeprefix("convert ").split())
    check_run(load_recipe(recipe, [f"output={tmp_path / 'o'}", f"model={tmp_path / 'merged'}", "lora.rank=5"]), 1, None)


def cut_weights(checkpoint):
    path = checkpoint / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[8] = ord("x")  # the same size, and no header
    path.write_bytes(data)


def break_settings(checkpoint):
    path = checkpoint / "adapter_config.json"
    path.write_text(path.read_text().replace("{", "[", 1))


def add_adapters_below(checkpoint):
    (checkpoint / "more").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(checkpoint / name, checkpoint / "more")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_weights, "adapter_model.safetensors is damaged or incomplete"),
        (break_settings, "adapter_config.json is damaged: it is not JSON"),
        (add_adapters_below, "more holds adapters that the run has not written"),
    ],
)
def test_a_run_does_not_resume_from_damaged_adapters(damage, words, recipe, finished, tmp_path):
    shutil.copytree(finished / "checkpoint-3", tmp_path / "checkpoint-3")
    damage(tmp_path / "checkpoint-3")
    with pytest.raises(ValueError, match=words):
        check_run(load_recipe(recipe, [f"output={tmp_path}"]), 1, None)


def test_adapters_of_a_tied_head_are_trained_and_merged(tmp_path):
    """They change the head and not the embedding: the merged model has the logits of PEFT's, and is untied."""
    path = recipe_in(tmp_path, "q_proj", "v_proj", "lm_head")
    tie(tmp_path / "start")
    train(load_recipe(path, [f"output={tmp_path / 'adapters'}"]))
    convert(tmp_path / "start", tmp_path / "merged", "--merge", tmp_path / "adapters")
    tied = CondenseForCausalLM.from_pretrained(tmp_path / "start")
    adapted = peft.PeftModel.from_pretrained(tied, tmp_path / "adapters").eval()
    ids, found = torch.randint(5, 50, (2, 90)), CondenseForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        torch.testing.assert_close(found(ids).logits, adapted(input_ids=ids).logits, atol=1e-4, rtol=1e-4)
    assert not found.config.tie_word_embeddings
    assert torch.equal(found.model.embed_tokens.weight, adapted.get_base_model().model.embed_tokens.weight)
    assert not torch.equal(found.lm_head.weight, found.model.embed_tokens.weight)


def test_adapters_of_another_model_and_folders_without_them(recipe, finished, tmp_path, monkeypatch, capsys):
    start = recipe.parent / "start"
    other = tmp_path / "other"
    shutil.copytree(start, other)
    config = CondenseForCausalLM.from_pretrained(start).config
    config.num_hidden_layers = 1
    CondenseForCausalLM(config).save_pretrained(other)
    for arguments, words in [
        (["convert", str(start), "unused", "--merge", str(start)], "it has no adapter_config.json"),
        (["convert", str(other), "unused", "--merge", str(finished)], "they were trained on"),
        (["convert", str(finished), "unused"], "holds no config.json: merge its adapters with condense convert"),
        (
            ["generate", "--model", str(finished), "--prompt", "A"],
            f"merge its adapters with condense convert {start} TARGET --merge {finished}",
        ),
        (["eval", "fold-cost", "--model", str(finished), "--output", "unused"], f"condense convert {start} TARGET"),
    ]:
        monkeypatch.setattr(sys, "argv", ["condense", *arguments])
        with pytest.raises(SystemExit):
            main()
        assert words in capsys.readouterr().err


def test_the_dry_run_counts_what_is_trained(recipe):
    plan, text = dry_run(load_recipe(recipe, ["output=o", "dtype=bfloat16"]), 2)
    model = add_adapters(
        CondenseForCausalLM.from_pretrained(recipe.parent / "start"),
        LoRA(rank=4, targets=["q_proj", "v_proj", "down_proj"]),
    )
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert plan["plan"]["trained_parameters"] == count and f"{count:,} of them trained" in text


@pytest.mark.slow
def test_two_ranks_of_zero_2_train_adapters_as_one_process(recipe, finished, tmp_path):
    losses, _ = run(recipe, tmp_path, launcher=True)
    assert losses == pytest.approx(logged(finished), abs=1e-4)
    one, other = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path, finished))
    for name, tensor in other.items():
        torch.testing.assert_close(one[name], tensor, atol=2e-4, rtol=1e-3)
