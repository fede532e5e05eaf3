"""Overrides of the command line."""

import re
from pathlib import Path

import pytest
from transformers import LlamaConfig

from condense import CondenseConfig
from condense.training.presets import recipe_names
from condense.training.recipe import load_recipe, models
from condense.training.recipe.schema import Checkpoints

pytestmark = pytest.mark.unit

FROM_FOLDED = (
    "depth_finetune_tiny", "facts", "passkey_finetune_1b", "passkey_finetune_1b_tiny", "passkey_quickstart",
    "recall", "summarize_finetune_a", "summarize_finetune_a_tiny", "summarize_finetune_b", "summarize_finetune_b_tiny",
)  # fmt: skip
RECIPE = """
model: {source: m, segment_length: 64}
output: o
data: {task: passkey}
stages: [{total_length: 64, steps: 20}]
global_batch: 8
optimizer: {warmup_steps: 10}
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def test_another_model_keeps_the_keys_beside_its_source(path):
    model = load_recipe(path, ["model=other", "model.schedule=sequential"]).model
    assert (model.kind, model.source, model.segment_length, model.schedule) == ("condense", "other", 64, "sequential")
    assert load_recipe(path, ["model={kind: stock, source: other}"]).model.model_dump() == {
        "kind": "stock",
        "source": "other",
    }


def test_a_text_stands_for_the_source(path):
    path.write_text(RECIPE.replace("{source: m, segment_length: 64}", "m"))
    assert load_recipe(path).model.source == "m"
    assert load_recipe(path, ["model.segment_length=32"]).model.segment_length == 32
    assert load_recipe(path, ["model.kind=stock"]).model.kind == "stock"


@pytest.mark.parametrize("name", ["BOOK.txt", "*.txt", "2024-11-28", "my: book.txt", "a=b.txt", "7"])
def test_the_name_of_a_file_stands_for_the_sources(path, name):
    data = load_recipe("heal", [f"data={name}", "data.min_tokens=9"]).data
    assert [source.files for source in data.sources] == [name] and data.sources[0].hub is None
    assert (data.task, data.fit, data.min_tokens) == ("text", "cut", 9)
    path.write_text(RECIPE.replace("{task: passkey}", "BOOK.txt"))
    assert (
        load_recipe(path).data.model_dump()
        == load_recipe(path, ["data={task: text, sources: [{files: BOOK.txt}]}"]).data.model_dump()
    )
    assert load_recipe(path, [f"data={name}"]).data.sources[0].files == name


def test_a_task_without_sources_takes_no_file(path):
    with pytest.raises(ValueError, match=r"data.sources is not a key of data.task=passkey"):
        load_recipe(path, ["data=BOOK.txt"])


def test_an_override_of_what_an_alias_repeats(path):
    """An anchor is a way to write the same twice; an override names one of the places."""
    repeated = "stages: [&stage {total_length: 64, steps: 20}, *stage]"
    path.write_text(RECIPE.replace("stages: [{total_length: 64, steps: 20}]", repeated))
    assert [stage.steps for stage in load_recipe(path, ["steps=50"]).stages] == [20, 30]
    assert [stage.steps for stage in load_recipe(path, ["stages.0.steps=15"]).stages] == [15, 20]


def test_a_key_that_is_there_twice(path):
    path.write_text(RECIPE + "optimizer: {learning_rate: 1.0e-4}\n")
    with pytest.raises(ValueError, match="the key 'optimizer' occurs twice in .*, line 8, column 1"):
        load_recipe(path)
    path.write_text(RECIPE.replace("{warmup_steps: 10}", "{<<: {warmup_steps: 5, beta1: 0.8}, warmup_steps: 10}"))
    optimizer = load_recipe(path).optimizer
    assert (optimizer.warmup_steps, optimizer.beta1) == (10, 0.8)  # a merge key's values may be replaced


def test_a_quoted_number_is_a_text(path):
    sources = "data={task: text, sources: [{hub: a/b}]}"
    assert load_recipe(path, [sources, 'data.sources.0.name="2024"']).data.sources[0].name == "2024"
    assert load_recipe(path, ["optimizer.learning_rate=1e-4"]).optimizer.learning_rate == 1e-4


@pytest.mark.parametrize(
    "text", ["2026-11-28", "12:30", "8080", "on", "off", "yes", "True", "010", "0o17", "1e3", "1_000", "3.10", ".inf"]
)
def test_a_field_of_text_takes_the_text_that_was_typed(path, text):
    """YAML alone makes dates, numbers in base 60 and 8, and booleans of them."""
    overrides = [f"output={text}", f"model={text}", f"lora.targets=[{text}, x]"]
    path.write_text(RECIPE + "lora: {}\n")
    recipe = load_recipe(path, overrides)
    assert (str(recipe.output), recipe.model.source, recipe.lora.targets) == (text, text, [text, "x"])
    sources = f"data: {{task: text, sources: [{{hub: a/b, name: {text}, at_least: {{{text}: 1}}}}]}}"
    path.write_text(RECIPE.replace("output: o", f"output: {text}").replace("data: {task: passkey}", sources))
    recipe = load_recipe(path)
    assert (str(recipe.output), recipe.data.sources[0].name) == (text, text)
    assert recipe.data.sources[0].at_least == {text: 1.0}


def test_an_override_has_no_comments(path):
    assert str(load_recipe(path, ["output=run #2"]).output) == "run #2"
    assert str(load_recipe(path, ["output=#2"]).output) == "#2"
    assert str(load_recipe(path, ['output="run #2"']).output) == "run #2"
    assert load_recipe(path, ["optimizer.decay_steps="]).optimizer.decay_steps is None


@pytest.mark.parametrize(("text", "number"), [("1e3", 1000), ("1000", 1000), ("01000", 1000), ("0x3e8", 1000)])
def test_a_number_is_the_same_in_a_file_and_in_an_override(path, text, number):
    assert load_recipe(path, [f"stages.0.steps={text}"]).steps == number
    assert load_recipe(path, [f"steps={text}"]).steps == number
    path.write_text(RECIPE.replace("steps: 20", f"steps: {text}"))
    assert load_recipe(path).steps == number
    path.write_text(RECIPE.replace("warmup_steps: 10", "warmup_steps: 1e1, learning_rate: 6e-5, max_grad_norm: .inf"))
    optimizer = load_recipe(path).optimizer
    assert (optimizer.warmup_steps, optimizer.learning_rate, optimizer.max_grad_norm) == (10, 6e-5, float("inf"))


@pytest.mark.parametrize("value", ["yes", "true", "on", "No", "False", "off"])
@pytest.mark.parametrize(
    "key", ["optimizer.learning_rate", "seed", "model.memory_share", "evaluation.reference_loss", "stages.0.steps"]
)
def test_a_boolean_is_no_number(path, key, value):
    with pytest.raises(ValueError, match=rf"{key}='{value}': Input should be a valid (number|integer)"):
        load_recipe(path, [f"{key}={value}"])
    assert load_recipe(path, [f"gradient_checkpointing={value}"]).gradient_checkpointing is (value in "yes true on")


def test_a_boolean_of_python_is_no_number_either():
    assert Checkpoints(keep=2).keep == 2
    with pytest.raises(ValueError, match="keep"):
        Checkpoints(keep=True)
    with pytest.raises(ValueError, match="memory_share"):
        models.CondenseModel.model_validate({"source": "m", "memory_share": [True, 0.5]})


def test_the_example_for_own_documents(tmp_path):
    """As docs/training.md has it."""
    page = (Path(__file__).parents[3] / "docs" / "training.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(example)
    recipe = load_recipe(tmp_path / "mine.yaml", ["steps=1500"])
    assert recipe.steps == 1500 and recipe.data.sources[0].files == "train.jsonl"


@pytest.mark.parametrize(("share", "shares"), [("0.2", (0.2,)), ("[1, 0]", (1.0, 0.0)), ("null", (0.5,))])
def test_the_share_of_a_memory(share, shares, tmp_path):
    layers = len(shares)
    CondenseConfig(segment_length=64, num_hidden_layers=layers, memory_share=0.5).save_pretrained(tmp_path / "folded")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    overrides = [f"model={tmp_path / 'folded'}", "model.segment_length=null", f"model.memory_share={share}"]
    assert load_recipe(tmp_path / "recipe.yaml", overrides).model.load_config().memory_shares == shares


@pytest.mark.parametrize(("share", "message"), [("2", "less than or equal to 1"), ("half", "memory_share")])
def test_a_share_that_is_none(share, message, tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    with pytest.raises(ValueError, match=message):
        load_recipe(tmp_path / "recipe.yaml", [f"model.memory_share={share}"])


def test_a_folded_model_whose_segments_the_recipe_would_change(tmp_path, said):
    """The recipe's length was written for its own model: with another one it has to be said again."""
    CondenseConfig(segment_length=16, num_hidden_layers=1).save_pretrained(tmp_path / "folded")
    path, folded = tmp_path / "recipe.yaml", tmp_path / "folded"
    path.write_text(RECIPE)
    for override in (f"model={folded}", f"model.source={folded}"):
        with pytest.raises(ValueError, match=r"segments of 16 tokens.* model.segment_length=64 for another model: add"):
            load_recipe(path, [override])
    assert load_recipe(path, [f"model={folded}", "model.segment_length=null"]).model.load_config().segment_length == 16
    assert not said()
    line = f"model.segment_length=64 replaces the 16 that the folded checkpoint {folded} has"
    for overrides in (
        [f"model={folded}", "model.segment_length=64"],
        [f"model={{source: {folded}, segment_length: 64}}"],
    ):
        said.clear()
        model = load_recipe(path, overrides).model
        assert model.load_config().segment_length == model.load_config().segment_length == 64
        assert len(said()) == 1 and line in said()[0]
    path.write_text(RECIPE.replace("source: m", f"source: {folded}"))  # written by the user
    said.clear()
    assert load_recipe(path).model.load_config().segment_length == 64 and line in said()[0]
    said.clear()
    path.write_text(RECIPE.replace("segment_length: 64", "segment_length: 16"))
    assert load_recipe(path, [f"model={folded}"]).model.load_config().segment_length == 16
    assert not said()


@pytest.mark.parametrize(
    ("fields", "given", "line"),
    [
        ({"memory_share": [1, 0]}, "memory_share=0.2", "memory_share=0.2 replaces the [1, 0] that the folded"),
        ({"memory_share": [1, 0]}, "memory_share=[1.0, 0.0]", None),
        ({"memory_share": [1, 0]}, "memory_share=null", None),
        ({"sink_token_id": 3}, "sink_token_id=null", "sink_token_id=none replaces the 3 that the folded"),
        ({"sink_token_id": 3}, "sink_token_id=none", "sink_token_id=none replaces the 3 that the folded"),
        ({"sink_token_id": 3}, "sink_token_id=4", "sink_token_id=4 replaces the 3 that the folded"),
        ({"sink_token_id": 3}, "sink_token_id=3", None),
        ({"sink_token_id": 3}, "sink_token_id=auto", None),
        ({}, "sink_token_id=4", None),
    ],
)
def test_a_memory_that_replaces_a_folded_models_own_is_said(tmp_path, said, fields, given, line):
    CondenseConfig(segment_length=64, num_hidden_layers=2, **fields).save_pretrained(tmp_path / "folded")
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    load_recipe(path, [f"model={tmp_path / 'folded'}", f"model.{given}"]).model.load_config()
    assert [line for line in said() if "replaces" in line] == said() and len(said()) == (line is not None)
    assert line is None or line in said()[0]


@pytest.mark.parametrize(
    ("value", "sink", "shown"),
    [("null", None, "none"), ("none", None, "none"), ("0", 0, 0), ("7", 7, 7), ("auto", 5, "auto")],
)
def test_the_sink_of_a_stock_model(path, tmp_path, value, sink, shown):
    """`shown` is what a resolved recipe and the file of a run say."""
    LlamaConfig(vocab_size=61, bos_token_id=5, pad_token_id=0).save_pretrained(tmp_path / "llama")
    model = load_recipe(path, [f"model={tmp_path / 'llama'}", f"model.sink_token_id={value}"]).model
    assert model.load_config().sink_token_id == sink and model.model_dump()["sink_token_id"] == shown
    assert load_recipe(path, [f"model={tmp_path / 'llama'}"]).model.load_config().sink_token_id == 5


@pytest.mark.parametrize("value", ["-1", "1.5", "true", "bos"])
def test_a_sink_that_is_none(path, value):
    with pytest.raises(
        ValueError, match=rf"recipe {path}:\n  model.sink_token_id=.*: pass the id of a token, null for"
    ):
        load_recipe(path, [f"model.sink_token_id={value}"])


def test_a_sink_outside_the_vocabulary(path, tmp_path):
    LlamaConfig(vocab_size=61, pad_token_id=0).save_pretrained(tmp_path / "llama")
    model = load_recipe(path, [f"model={tmp_path / 'llama'}", "model.sink_token_id=61"]).model
    with pytest.raises(
        ValueError, match=r"^model\.sink_token_id=61 is not a token of the vocabulary of 61 that model="
    ):
        model.load_config()


def test_which_recipes_have_the_papers_memory():
    """All but those that fold a checkpoint of the user's, and those that start from a folded one."""
    for name in recipe_names():
        model = load_recipe(name).model
        if model.kind != "condense":
            continue
        of_source = name in FROM_FOLDED or name.endswith("_smollm2") or name in ("heal", "heal_tiny", "text")
        assert (model.memory_share, model.sink_token_id) == ((None, "auto") if of_source else (1.0, "none")), name
