"""Recipes are checked before anything runs."""

from pathlib import Path

import pytest

from condense.training.deepspeed_file import deepspeed_settings
from condense.training.recipe import Recipe, load_recipe

pytestmark = pytest.mark.unit

RECIPES = Path(__file__).resolve().parents[3] / "training" / "recipes"
BASE = "model: m\noutput: o\ndata: {task: passkey}\noptimizer: {warmup_steps: 10}\n"
GRAPH = ["model.schedule=graph"]
STAGES = BASE + "stages: [{total_length: 64, steps: 20}, {total_length: 128, steps: 40}]\nglobal_batch: 8\n"
CURRICULUM = BASE + "curriculum: {steps: 60, tokens_per_step: 4096}\n"


@pytest.fixture
def recipe(tmp_path):
    def write(text):
        (tmp_path / "recipe.yaml").write_text(text)
        return tmp_path / "recipe.yaml"

    return write


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_recipes_are_valid(path):
    assert isinstance(load_recipe(path), Recipe)


@pytest.mark.parametrize("text", [STAGES, CURRICULUM], ids=["stages", "curriculum"])
def test_the_recipe_that_a_run_writes_runs_again(recipe, text):
    read = load_recipe(recipe(text))
    assert load_recipe(recipe(read.model_dump_json(indent=2))) == read


TABLE_3 = {  # total lengths, steps, learning rates, smallest document, validation loss
    "passkey_pretrain_1b": ([4096], [6491], 6e-5, 2e-5, 4097, 2.323),
    "passkey_finetune_1b": ([2048, 4096, 8192, 16384], [500, 300, 1000, 1000], 6e-5, 6e-5, None, 0),
    "summarize_pretrain_3b": ([5120], [9426], 6e-5, 6e-6, 6145, 2.16),
    "summarize_finetune_a": ([3072], [3700], 6e-6, 6e-7, None, 1.33),
    "summarize_finetune_b": ([5632], [3855], 6e-6, 6e-7, None, 1.35),
    "summarize_llama_baseline": ([3072], [112], 6e-6, 6e-7, None, 1.29),
}


@pytest.mark.parametrize("name", TABLE_3)
def test_table_3(name):
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    lengths, steps, rate, floor, shortest, loss = TABLE_3[name]
    assert [stage.total_length for stage in recipe.stages] == lengths
    assert [stage.steps for stage in recipe.stages] == steps
    assert (recipe.optimizer.learning_rate, recipe.optimizer.final_learning_rate) == (rate, floor)
    assert (
        recipe.global_batch == 64
        and recipe.dtype == "bfloat16"
        and deepspeed_settings(recipe)["zero_optimization"]["stage"] == 2
    )
    assert recipe.decay_steps == sum(steps) - recipe.optimizer.warmup_steps  # cosine all the way
    if name == "summarize_llama_baseline":
        assert recipe.model.kind == "stock"
    else:
        assert recipe.model.kind == "condense" and recipe.model.segment_length == 512
    assert recipe.evaluation.reference_loss == loss
    assert shortest is None or recipe.data.min_tokens == shortest
    tiny = load_recipe(RECIPES / f"{name}_tiny.yaml")  # the same run, smaller
    assert (tiny.data.task, tiny.model.kind) == (recipe.data.task, recipe.model.kind)
    assert len(tiny.stages) == len(recipe.stages)
    assert tiny.gradient_checkpointing == recipe.gradient_checkpointing and tiny.dtype == recipe.dtype
    assert (tiny.evaluation is None) == (recipe.evaluation is None)


STARTS_FROM = {
    "passkey_finetune_1b": "passkey_pretrain_1b",
    "summarize_finetune_a": "summarize_pretrain_3b",
    "summarize_finetune_b": "summarize_finetune_a",
}


@pytest.mark.parametrize("ending", ["", "_tiny"])
@pytest.mark.parametrize("name", STARTS_FROM)
def test_each_finetuning_starts_from_the_stage_before_it(name, ending):
    former, recipe = (load_recipe(RECIPES / f"{stage}{ending}.yaml") for stage in (STARTS_FROM[name], name))
    assert recipe.model.source == str(former.output)


def test_overrides(recipe):
    changed = load_recipe(
        recipe(STAGES),
        ["stages.1.steps=70", "optimizer.learning_rate=1e-4", "data.num_keys=3", "dtype=float32", "evaluation.every=5"],
    )
    assert (changed.steps, changed.optimizer.learning_rate) == (90, 1e-4)
    assert (changed.data.num_keys, changed.dtype, changed.evaluation.every) == (3, "float32", 5)
    assert load_recipe(recipe(STAGES), ["steps=1e2"]).steps == 100


def test_stages_and_batches(recipe):
    stages = load_recipe(recipe(STAGES), ["micro_batch=2"])
    assert stages.steps == 60 and stages.stage_ends == [20, 60] and stages.decay_steps == 50
    assert [stages.stage_at(step) for step in (0, 19, 20, 59)] == [0, 0, 1, 1]
    assert [stages.accumulation(ranks) for ranks in (1, 2, 4)] == [4, 2, 1]
    with pytest.raises(
        ValueError, match="into micro_batch=2 x 8 ranks: set micro_batch=1, or make global_batch a mult"
    ):
        stages.accumulation(8)
    with pytest.raises(ValueError, match="global_batch=8 does not divide into micro_batch=2 x 3 ranks: make.* of 6"):
        stages.accumulation(3)
    curriculum = load_recipe(recipe(CURRICULUM))
    assert curriculum.steps == 60 and curriculum.accumulation(2) == 1 and curriculum.stage_ends == []


@pytest.mark.parametrize(
    ("lines", "overrides", "words"),
    [
        (CURRICULUM + "stepz: 3\n", [], "stepz is not a key.*did you mean"),
        (STAGES + "global_bach: 3\n", [], "global_bach is not a key.*'global_batch'"),
        (CURRICULUM, ["optimizer.learning_rat=1"], "optimizer.learning_rat is not a key.*'learning_rate'"),
        (
            CURRICULUM,
            ["data.backgroud=1"],
            "  data.backgroud is not a key of data.task=passkey, which has .*background",
        ),
        (STAGES, ["evaluation={sources: [{fils: x}]}"], "evaluation.sources.0.fils is not a key.*'files'"),
        (STAGES, ["stages.0.lenght=1"], "stages.0.lenght is not a key.*'total_length'"),
        (STAGES, ["evaluation={files: x}"], "evaluation.files is not a key.*'evaluation.sources.files'"),
        (CURRICULUM, ["seed=4294967296"], "seed=4294967296: .*less than 4294967296"),
        (CURRICULUM, ["data={task: samples, seed: 4294967296}"], "data.seed=4294967296: .*less than 4294967296"),
        (CURRICULUM, ["curriculum.steps=0"], "steps=0.*greater than or equal to 1"),
        (CURRICULUM, ["steps"], "'steps' is not an override: write key=value"),
        (CURRICULUM, ["dtype=float16"], "dtype='float16'.*'bfloat16' or 'float32'"),
        (CURRICULUM, ["data.task=poems"], "'poems'.*'text', 'summarization', 'questions', 'passkey'"),
        (CURRICULUM, ["data={task: text}"], "data.sources is missing"),
        (CURRICULUM, ["curriculum.last_segments=1"], "last_segments=1 is below first_segments=2"),
        ("seed: 3\n", [], "model is missing"),
        ("model: [\n", [], "is not YAML"),
        (CURRICULUM, ["model=[x"], "^the override's value '\\[x' is not YAML: [^\n]*$"),
        (CURRICULUM, ["data.task.x=1"], "'data.task.x=1': data.task holds no keys"),
        (STAGES, ["stages={total_length: 64, steps: 9}", "steps=8"], "steps=8 changes .* stages={.* is not a list"),
        (STAGES, ["stages=[{total_length: 64}, {total_length: 9}]", "steps=8"], "steps=8 changes .* with steps"),
        (STAGES, ["steps=many"], "steps=many: the stages before the last one have"),
        (STAGES, ["stages.5.steps=1"], "'stages.5.steps=1': stages.5 holds no keys"),
        ("- seed\n", ["seed=1"], "holds a list, not keys and values"),
        (
            CURRICULUM,
            ["optimizer.decay_steps=100"],
            "leaves 50 of 60 steps .*fewer than .*decay_steps=100: train for at",
        ),
        (CURRICULUM, ["optimizer.warmup_steps=60"], "  optimizer.warmup_steps=60 leaves none of 60 .* at least 61"),
        (CURRICULUM, ["optimizer.final_learning_rate=1"], "final_learning_rate=1.0? is above learning_rate=0.001"),
        (CURRICULUM, ["checkpoints.every=25"], "checkpoints.every=25 is not a multiple of log_every=10"),
        (CURRICULUM, ["curriculum.patience=15"], "curriculum.patience=15 is not a multiple of log_every=10"),
        # contradictions
        (BASE, [], "either stages or a curriculum"),
        (CURRICULUM, ["stages=[{total_length: 9, steps: 3}]"], "either stages or a curriculum"),
        (STAGES, ["global_batch=null"], "stages need a global_batch"),
        (CURRICULUM, ["global_batch=4"], "leave out global_batch"),
        (CURRICULUM, ["data={task: text, sources: [{files: x}]}"], "goes with generated texts"),
        (CURRICULUM, ["evaluation.every=4"], "leave out evaluation"),
        (
            STAGES,
            ["model.kind=stock", "model.segment_length=4"],
            "model.segment_length is not a key of model.kind=stock",
        ),
        (STAGES, ["data.fit=cut"], "data.fit is not a key of data.task=passkey, which has .*num_keys"),
        (STAGES, ["model.kind=stock", "model.schedule=wavefront"], "model.schedule is not a key of .*kind, source"),
        (STAGES, ["model.kind=stock", "attention=blocked"], "has no attention=blocked: choose one of auto, eager"),
        (CURRICULUM, ["model.kind=stock"], "a curriculum counts segments, and model.kind='stock' has none"),
        (STAGES, ["model.kind=gpt"], "model: .*kind='gpt' is unknown: choose one of 'condense', 'stock'"),
        (
            STAGES,
            ["model.segment_lenght=4"],
            "model.segment_lenght is not a key of model.kind=condense, which has .*length",
        ),
        (STAGES, ["optimizer.learning_rate=inf"], "optimizer.learning_rate=inf: .*finite"),
        (STAGES, ["model.segment_length=0"], "model.segment_length=0: .*greater than or equal to 1"),
        (STAGES, ["model.source=[]"], "model.source=.*string"),
        (STAGES, ["model={kind: stock}"], "model.source is missing"),
        (STAGES, ["model.kind=[stock]"], "model: .*kind=\\['stock'\\] is unknown: choose one of 'condense', 'stock'"),
        (STAGES, ["model.schedule=diagonal"], "model.schedule='diagonal': .*'auto', 'sequential', 'wavefront'"),
        (STAGES, [*GRAPH, "attention_dropout=0.1"], "model.schedule=graph has no dropout"),
        (STAGES, [*GRAPH, "attention=flex_attention"], "model.schedule=graph has no attention=flex_attention"),
        (STAGES, [*GRAPH, "lora={rank: 4}"], "model.schedule=graph runs the layers' own weights"),
        (STAGES, ["attention=flash"], "attention='flash': .*'auto', 'blocked', 'varlen', 'eager'"),
        (STAGES, ["objective.kind=diffusion"], "objective: .*kind='diffusion' is unknown: choose one of 'next_token'"),
        (STAGES, ["optimizer.name=sgd"], "optimizer.name='sgd': .*'adamw'"),
        # keys that recipes had before models had kinds
        (STAGES + "segment_length: 4\n", [], "segment_length is not a key.*'model.segment_length'"),
        (STAGES, ["schedule=wavefront"], "schedule is not a key.*'model.schedule'"),
        (STAGES, ["attention=blocked", "attention_dropout=0.1"], "attention=blocked has no dropout"),
        (STAGES, ["model.offload_memories=true"], "set gradient_checkpointing=true too"),
        (STAGES, ["model.checkpoint_segments=4"], "set gradient_checkpointing=true too"),
        (STAGES, ["model.checkpoint_segments=0", "gradient_checkpointing=true"], "checkpoint_segments.*=0"),
        (STAGES, ["model.checkpoint_segments=all", "gradient_checkpointing=true"], "'auto'"),
        (
            STAGES,
            ["model.schedule=wavefront", "gradient_checkpointing=true", "model.checkpoint_segments=1"],
            "set model.checkpoint_segments=8",
        ),
        (STAGES, ["evaluation.sources=[{files: x}]"], "data.task=passkey has its own texts"),
        (STAGES, ["evaluation.sources=[{files: x, hub: y}]"], "either files or hub"),
        (STAGES, ["evaluation.sources=[{files: x, split: y}]"], "belong to a source of the hub"),
        (STAGES, ["evaluation.sources=[{files: x, revision: y}]"], "belong to a source of the hub"),
        (STAGES, ["micro_batch=2", "data={task: text, sources: [{files: x}]}"], "fit=pack goes with micro_batch=1"),
        (STAGES, ["data={task: summarization, sources: [{files: x}], too_long: cut}"], "have \\[64, 128\\]"),
        (STAGES, ["resume=o/checkpoint-3"], "lies in this run's own output"),
    ],
)
def test_mistakes_are_named(recipe, lines, overrides, words):
    with pytest.raises(ValueError, match=f"(?s){words}"):
        load_recipe(recipe(lines), overrides)


def test_a_missing_recipe_is_named():
    with pytest.raises(ValueError, match=r"nowhere\.yaml"):
        load_recipe(Path("nowhere.yaml"))
    with pytest.raises(ValueError, match="no recipe 'passkey_pretain_1b'.*such as passkey_pretrain_1b "):
        load_recipe("passkey_pretain_1b")


def test_recipes_of_the_package_are_found_by_name_from_any_folder(tmp_path, monkeypatch):
    by_path = load_recipe(RECIPES / "passkey_pretrain_1b.yaml")
    monkeypatch.chdir(tmp_path)
    assert load_recipe("passkey_pretrain_1b") == by_path
    assert deepspeed_settings(by_path)["zero_optimization"]["stage"] == 2


def test_a_deepspeed_configuration_is_found_beside_the_recipe(recipe, tmp_path, monkeypatch):
    """From any folder; an override names a file as the shell does."""
    path = recipe(STAGES + "\ndeepspeed: mine.json\n")
    (path.parent / "mine.json").write_text('{"zero_optimization": {"stage": 1}}')
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.json").write_text('{"zero_optimization": {"stage": 0}}')
    monkeypatch.chdir(elsewhere)
    assert deepspeed_settings(load_recipe(path))["zero_optimization"]["stage"] == 1
    assert deepspeed_settings(load_recipe(path, ["deepspeed=mine.json"]))["zero_optimization"]["stage"] == 0
