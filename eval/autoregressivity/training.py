"""Trains one model of the grid, and measures its curve, its costs and its samples."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

import condense.autoregressivity  # noqa: F401  registers its models
from condense.training.autoregressivity.denoiser import DenoiserModel
from condense.training.autoregressivity.diffusion import sample, to_values
from condense.training.data.batches import StageBatches
from condense.training.data.tasks import make_examples
from condense.training.recipe import Recipe

from ..results_store import Record
from .digit_quality import digit_quality
from .grid import IMAGES, Cell, objective_of
from .setup import Setup, train_alone
from .text_quality import generate, text_quality

COUNTED_BATCHES = 2  # the operations of a step are a mean over these


def trained_cell(cell: Cell, setup: Setup) -> Record:
    """What was measured of a model of the grid; trained now where the output folder does not have it.

    The record holds the validation loss by step (`curve`), operations of a step, seconds, parameters and `quality`.
    Raises `ValueError` where the folder has that of other texts or sizes.
    """
    path = setup.output / "cells" / f"{cell.folder}.json"
    if path.exists():
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["described"] != setup.described():
            raise ValueError(f"{path} is of other texts or sizes: pass another --output, or delete it.")
        return stored["record"]
    record = _train(cell, setup)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"described": setup.described(), "record": record}), encoding="utf-8")
    partial.replace(path)
    return record


def _train(cell: Cell, setup: Setup) -> Record:
    output, objective = setup.output / "runs" / cell.folder, objective_of(cell)
    is_image = cell.model in IMAGES
    recipe = (
        setup.image_recipe(objective, cell.seed, output)
        if is_image
        else setup.language_recipe(cell.model, objective, cell.seed, output)
    )
    operations, parameters = count_operations(recipe)
    start = time.perf_counter()
    train_alone(recipe)
    seconds = time.perf_counter() - start
    curve = read_curve(output)
    quality = _image_quality(output, cell.seed, setup) if is_image else _text_quality(output, cell.seed, setup)
    shutil.rmtree(output)  # the weights of a whole grid would fill a disk
    return {
        "curve": curve,
        "loss": curve[-1]["loss"],
        "operations_per_step": operations,
        "parameters": parameters,
        "seconds": seconds,
        "quality": quality,
    }


def count_operations(recipe: Recipe) -> tuple[float, int]:
    """Multiplications and additions of a training step, forward and backward, as torch counts them; the parameters."""
    torch.manual_seed(recipe.seed)
    config = recipe.model.load_config()
    model = recipe.objective.prepare_model(recipe.model.load("auto", 0.0), recipe).train()
    examples, _ = make_examples(recipe, recipe.model.load_tokenizer(config))
    batches = StageBatches(recipe, examples, ranks=1)
    with FlopCounterMode(display=False) as counter:
        for number in range(COUNTED_BATCHES):
            batch = batches[number]
            del batch["name"]
            recipe.objective.losses(model, batch, recipe.objective.num_targets(batch)).loss.backward()
    return counter.get_total_flops() / COUNTED_BATCHES, sum(parameter.numel() for parameter in model.parameters())


def read_curve(output: Path) -> list[dict[str, float]]:
    """The validation losses by step, as training has logged them."""
    lines = map(json.loads, (output / "log.jsonl").read_text(encoding="utf-8").splitlines())
    found = {
        line["step"]: {
            name.removeprefix("eval_"): value for name, value in line.items() if name.startswith("eval_loss")
        }
        for line in lines
        if "eval_loss" in line
    }
    return [{"step": step, **{n: v for n, v in losses.items() if "segment" not in n}} for step, losses in found.items()]


def loss_at(curve: list[dict[str, float]], step: float) -> float:
    """The validation loss at a step between two validations."""
    return float(np.interp(step, [point["step"] for point in curve], [point["loss"] for point in curve]))


def _text_quality(output: Path, seed: int, setup: Setup) -> dict[str, float]:
    prompt_length = setup.size.prompt_length
    model = AutoModelForCausalLM.from_pretrained(output)
    text_BN = generate(model, setup.prompts[:, :prompt_length], setup.size.length - prompt_length, seed)
    return text_quality(setup.reference(), text_BN, prompt_length)


def _image_quality(output: Path, seed: int, setup: Setup) -> dict[str, float]:
    model: Any = DenoiserModel.from_pretrained(output).eval()
    generator = torch.Generator().manual_seed(seed)
    images = sample(model, setup.size.images, setup.size.sampling_steps, "ddim", generator)
    return digit_quality(to_values(images).numpy())
