"""A user's DeepSpeed file: what the recipe decides is filled in, and what contradicts it is refused before anything."""

import json
from math import inf

import pytest

from condense import CondenseConfig
from condense.training.deepspeed_file import GATHER, deepspeed_settings
from condense.training.planning.memory import estimate
from condense.training.preflight import check_deepspeed
from condense.training.presets import DEEPSPEED_CONFIGS
from condense.training.recipe import Recipe, load_recipe

from .planning.shapes import SMALL
from .planning.shapes import recipe as small_recipe
from .recipes import write_recipe

pytestmark = pytest.mark.unit

BATCHES = ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"]


@pytest.fixture
def recipe_with(tmp_path):
    """Returns the recipe whose DeepSpeed file holds ZeRO-2 and some other keys."""

    def make(content, *overrides) -> Recipe:
        (tmp_path / "zero.json").write_text(content if isinstance(content, str) else json.dumps(STAGE_2 | content))
        path = write_recipe(tmp_path, "m", [(64, 20)], 8, deepspeed=str(tmp_path / "zero.json"), micro_batch=2)
        return load_recipe(path, overrides)

    return make


STAGE_2 = {"zero_optimization": {"stage": 2}}


def test_what_the_recipe_decides_is_filled_in(recipe_with):
    """A missing `gradient_clipping` means none to DeepSpeed, a missing accumulation one micro-batch."""
    settings = deepspeed_settings(recipe_with({}, "dtype=bfloat16"))
    assert settings == {
        **STAGE_2, **dict.fromkeys([*BATCHES, "gradient_clipping"], "auto"),
        "bf16": {"enabled": True}, "fp16": {"enabled": False},
    }  # fmt: skip
    assert deepspeed_settings(recipe_with({}, "dtype=float32"))["bf16"] == {"enabled": False}


def test_what_is_the_recipes_may_stand_in_the_file(recipe_with):
    own = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1}
    own |= {"zero_optimization": {"stage": 2, "offload_optimizer": None}, "optimizer": None}
    own |= {"bf16": {"enabled": False}, "fp16": {"enabled": "auto", "loss_scale": 0}, "steps_per_print": 5}
    settings = deepspeed_settings(recipe_with(own))
    assert all(settings[name] == "auto" for name in [*BATCHES, "gradient_clipping"])
    assert settings["zero_optimization"] == {"stage": 2} and "optimizer" not in settings
    assert settings["fp16"] == {"enabled": False, "loss_scale": 0} and settings["steps_per_print"] == 5
    old = deepspeed_settings(recipe_with({"bfloat16": {"enabled": True}}, "dtype=bfloat16"))
    assert old["bf16"] == {"enabled": True} and "bfloat16" not in old
    assert deepspeed_settings(recipe_with({"gradient_clipping": 0.0}, "optimizer.max_grad_norm=.inf"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "can't be read as JSON: "),
        ('{"zero_optimization": {"stage": 2}, "bf16": {}, "bf16": {}}', "the key 'bf16' occurs twice"),
        ("[]", "does not say zero_optimization.stage: write 0, 1, 2 or 3"),
        ({"zero_optimization": True}, "does not say zero_optimization.stage"),
        ({"zero_optimization": {}}, "does not say zero_optimization.stage"),
        ({"zero_optimization": {"stage": "3"}}, "has '3' as zero_optimization.stage: write 0, .* without quotes"),
        ({"zero_optimization": {"stage": 4}}, "has 4 as zero_optimization.stage"),
        ({"zero_optimization": {"stage": True}}, "has True as zero_optimization.stage"),
        ({"zero_optimization": {"stage": "auto"}}, "has 'auto' as zero_optimization.stage"),
        ({"optimizer": {"type": "AdamW"}}, "has 'optimizer': it would replace .* the recipe's optimizer\\.\\* instead"),
        ({"scheduler": {}}, "has 'scheduler'"),
        ({"tensor_parallel": {"autotp_size": 2}}, "has 'tensor_parallel': here each rank trains whole layers"),
        ({"sequence_parallel_size": 2}, "has 'sequence_parallel_size'"),
        ({"torch_autocast": {"enabled": True}}, "has 'torch_autocast': the recipe's dtype"),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, 'cpu_offload=True: .*"offload_optimizer"'),
        ({"zero_optimization": {"stage": 2, "compute_grad_norm": False}}, "compute_grad_norm=False: gradients are"),
        ({"bf16": {"check_grad_overflow": False}}, "has bf16.check_grad_overflow=False, .* by max_skipped_steps"),
        ({"train_batch_size": 64}, "has train_batch_size=64, which the recipe decides by global_batch: remove it, or"),
        ({"train_micro_batch_size_per_gpu": 1}, "has train_micro_batch_size_per_gpu=1, .* by micro_batch"),
        ({"train_micro_batch_size_per_gpu": "2"}, "has train_micro_batch_size_per_gpu='2', .* by micro_batch"),
        ({"gradient_accumulation_steps": 2}, "has gradient_accumulation_steps=2, .* and the number of ranks"),
        ({"gradient_clipping": 0.5}, "has gradient_clipping=0.5, .* by optimizer.max_grad_norm"),
        ({"gradient_clipping": 0}, "has gradient_clipping=0, .* by optimizer.max_grad_norm"),
        ({"gradient_clipping": True}, "has gradient_clipping=True, .* by optimizer.max_grad_norm"),
        ({"bf16": {"enabled": True}}, "has bf16.enabled=True, which the recipe decides by dtype=float32"),
        ({"bfloat16": {"enabled": True}}, "has bf16.enabled=True"),
        ({"bf16": True}, 'has bf16=True: write {"enabled": "auto"}, or remove it'),
        ({"fp16": {"enabled": True}}, "has fp16.enabled=True, which the recipe decides by dtype=float32"),
        ({"fp16": {"enabled": 1}}, "has fp16.enabled=1"),
    ],
)  # fmt: skip
def test_what_contradicts_the_recipe_is_refused(recipe_with, tmp_path, content, words):
    with pytest.raises(ValueError, match=f"deepspeed={tmp_path / 'zero.json'} .*{words}") as refused:
        deepspeed_settings(recipe_with(content))
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there():
    with pytest.raises(ValueError, match="no DeepSpeed configuration 'zero4'.*such as zero"):
        deepspeed_settings(load_recipe("passkey_quickstart", ["deepspeed=zero4"]))


OTHER_NAMES = ["gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"]


@pytest.mark.parametrize("given", [{}, *({name: True} for name in (GATHER, *OTHER_NAMES))])
def test_zero_3_gathers_the_weights_to_save_them(recipe_with, given):
    """By default DeepSpeed doesn't: such a run ended without weights."""
    settings = deepspeed_settings(recipe_with({"zero_optimization": {"stage": 3, **given}}))
    assert settings["zero_optimization"] == {"stage": 3, GATHER: True}


@pytest.mark.parametrize("name", [GATHER, *OTHER_NAMES])
def test_zero_3_that_would_not_is_refused(recipe_with, name):
    with pytest.raises(ValueError, match=f"turns off {name}, so the run would end without weights: set it to true"):
        deepspeed_settings(recipe_with({"zero_optimization": {"stage": 3, name: False}}))
    assert deepspeed_settings(recipe_with({"zero_optimization": {"stage": 2, name: False}}))  # which has them whole


@pytest.mark.parametrize("path", sorted(DEEPSPEED_CONFIGS.glob("*.json")), ids=lambda path: path.stem)
@pytest.mark.parametrize("norm", [1.0, inf])
def test_deepspeed_takes_those_of_the_package(path, norm):
    recipe = load_recipe("passkey_pretrain_1b", [f"deepspeed={path.stem}", f"optimizer.max_grad_norm={norm}"])
    check_deepspeed(recipe, deepspeed_settings(recipe), 8)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"zero_optimization": {"stage": 2, "bucket": 5}}, "bucket=5: Extra inputs are not permitted"),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": -3}}, "reduce_bucket_size=-3: .* greater than 0"),
        ({"zero_optimization": {"stage": 1, "mics_shard_size": 2}}, "DeepSpeed refuses it: .* has been removed"),
        ({"checkpoint": 3}, "DeepSpeed refuses it: AttributeError"),
    ],
)
def test_what_deepspeed_refuses_is_said_before_the_run(recipe_with, content, words):
    recipe = recipe_with(content)
    with pytest.raises(ValueError, match=f"deepspeed=.*zero.json: {words}"):
        check_deepspeed(recipe, deepspeed_settings(recipe), 2)


@pytest.mark.parametrize("name", ["reduce_bucket_size", "sub_group_size", "stage3_max_live_parameters"])
def test_an_estimate_reads_numbers_as_deepspeed_does(name):
    """Which takes "5e8" for a number, and drops "auto"."""

    def total(value) -> int:
        zero = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1000, name: value}}
        return estimate(CondenseConfig(**SMALL, segment_length=32), small_recipe(64), zero, 1).total

    assert total("1e3") == total(1000)
    assert name == "reduce_bucket_size" or total("auto") == total(1_000_000_000)
    with pytest.raises(ValueError, match=f"zero_optimization.{name}='many' is not a number of elements"):
        total("many")
