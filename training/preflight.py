"""Checks that take seconds and write nothing, before ranks start or documents are prepared."""

from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import ValidationError

from condense.checks import check_attention, check_full_attention
from condense.hub.loading import first_line
from condense.utils.files import check_output_folder
from condense.utils.notices import say_once

from .adapters import check_targets
from .checkpoints.resume import check_zero_stage, find_checkpoint
from .data.samples import check_writer, first_token
from .data.shards import source_files
from .presets import find_recipe, recipe_names
from .recipe import DocumentData, Recipe, SampleData


def check_run(recipe: Recipe, ranks: int, deepspeed: dict[str, Any] | None) -> None:
    """Raises `ValueError` with a one-sentence message if a run of `ranks` ranks could not begin.

    `deepspeed` has what `deepspeed_settings` returns, or is None without the launcher. Only names and shapes of the
    model's weights are read.
    """
    recipe.accumulation(ranks)
    check_attention(recipe.attention)
    recipe.model.check_machine()
    warn_if_slow(recipe.dtype)
    check_reporter(recipe.report_to)
    check_output_folder(recipe.output)
    check_former_recipe(recipe.model.source)
    check_prepared(recipe)
    config = recipe.model.load_config()
    zero_stage = deepspeed["zero_optimization"]["stage"] if deepspeed else None
    if deepspeed:
        check_deepspeed(recipe, deepspeed, ranks)
    if zero_stage == 3:
        check_zero_3(recipe, config.vocab_size)
    tokenizer = recipe.model.load_tokenizer(config)
    check_samples(recipe, config, tokenizer)
    recipe.objective.check_model(config, tokenizer, recipe)
    model = recipe.model.load(recipe.attention, recipe.attention_dropout, device_map="meta")
    if recipe.lora:
        check_targets(model, recipe.lora)
    if (checkpoint := find_checkpoint(recipe)) is not None:
        check_zero_stage(checkpoint, zero_stage)


def warn_if_slow(dtype: str) -> None:
    """Warns of bfloat16 on a CPU without instructions for it, where torch computes its products one by one."""
    if dtype != "bfloat16" or torch.cuda.is_available():
        return
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        say_once(
            "dtype=bfloat16: this CPU has no instructions for it, and trains ten times slower than in float32, or "
            "worse; set dtype=float32."
        )


def check_reporter(report_to: str) -> None:
    """Raises `ValueError` if the package that curves are reported to is missing."""
    if report_to != "none" and find_spec(report_to) is None:
        raise ValueError(f"report_to={report_to} needs a package: pip install {report_to}, or set report_to=none.")


def check_former_recipe(source: str) -> None:
    """Raises `ValueError` if `source` is a missing folder that another recipe of this package writes."""
    if Path(source).exists():
        return
    for name in recipe_names():
        written = yaml.safe_load(find_recipe(name).read_text(encoding="utf-8"))["output"]
        if Path(written) == Path(source):
            raise ValueError(
                f"there is no folder {source!r}, which the recipe {name} writes: run condense train {name} first, or "
                "set model=FOLDER."
            )


def check_prepared(recipe: Recipe) -> None:
    """Raises `ValueError` if documents do not exist, or if their folder can't keep them prepared."""
    named = getattr(recipe.data, "sources", [])  # some tasks have none
    for source in (*named, *(recipe.evaluation.sources if recipe.evaluation else ())):
        if source.files is not None:
            source_files(source)
    if isinstance(recipe.data, DocumentData | SampleData):
        check_output_folder(Path(recipe.data.prepared))


def check_deepspeed(recipe: Recipe, deepspeed: dict[str, Any], ranks: int) -> None:
    """Raises `ValueError` for settings that DeepSpeed's own parser refuses."""
    from deepspeed.runtime.config import DeepSpeedConfig

    accumulation = recipe.accumulation(ranks)
    numbers = {"gradient_accumulation_steps": accumulation, "gradient_clipping": recipe.optimizer.max_grad_norm}
    numbers |= {"train_micro_batch_size_per_gpu": 1, "train_batch_size": accumulation}  # DeepSpeed sees one rank here
    try:
        DeepSpeedConfig(deepcopy(deepspeed) | numbers)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ValueError(f"deepspeed={recipe.deepspeed}: {key}={first['input']!r}: {first['msg']}.") from error
    except Exception as error:  # whatever a parser stumbles over
        raise ValueError(f"deepspeed={recipe.deepspeed}: DeepSpeed refuses it: {first_line(error)}") from error


def check_samples(recipe: Recipe, config: Any, tokenizer: Any) -> None:
    """Raises `ValueError` for a model that can't write texts, or can't write texts this long."""
    if isinstance(recipe.data, SampleData):
        check_writer(config, recipe.model.source)
        first_token(tokenizer)
        reader = f"model={recipe.model.source!r} writes its texts and"
        check_full_attention(config, recipe.longest_text(), reader, recipe.shorter)


def check_zero_3(recipe: Recipe, vocab_size: int) -> None:
    """Raises `ValueError` if ranks would not all use the weights equally often."""
    if recipe.curriculum:
        obstacle: str | None = "a curriculum gives ranks texts of unequal lengths"
    elif recipe.lora:
        obstacle = "lora puts adapters beside whole weights"
    else:
        tokens = recipe.micro_batch * recipe.longest_text()
        equal_lengths = recipe.data.task == "text" and recipe.data.fit == "cut"
        obstacle = recipe.model.obstacle_to_zero_3(tokens, vocab_size, equal_lengths)
        obstacle = obstacle or recipe.objective.obstacle_to_zero_3()
    if obstacle is not None:
        raise ValueError(f"{obstacle}, and ZeRO-3 divides the weights among ranks: use ZeRO-2.")
