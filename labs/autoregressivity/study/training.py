"""Trains a model of the grid, and measures its curve, its costs and its samples."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import AutoModelForCausalLM

import condense.labs.autoregressivity.model  # noqa: F401  registers its models
from condense.eval.results import MAKE_ROOM
from condense.eval.results_store import Record
from condense.eval.study.training import read_curve
from condense.training.data.batches import StageBatches
from condense.training.data.tasks import make_examples
from condense.training.recipe import Recipe
from condense.utils.files import atomic_file

from ..training.denoiser import LONGEST, DenoiserModel
from ..training.diffusion import sample, to_values
from .digit_quality import digit_quality
from .grid import IMAGES, Cell, objective_of
from .setup import Setup, trained_folder

COUNTED_BATCHES = 2  # the operations of a step are a mean over these


def trained_cell(cell: Cell, setup: Setup) -> Record:
    """Returns the measurements of a model of the grid, and trains it if the output folder does not have them.

    The record holds the validation loss by step (`curve`), operations of a step, parameters and `quality`. Two commands
    may share the folder: one waits for a model that the other trains. Raises `ValueError` if the folder's measurements
    have other texts, sizes or another reference model.
    """
    path = setup.output / "cells" / f"{cell.folder}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if path.exists():
            stored = json.loads(path.read_text(encoding="utf-8"))
            if stored["described"] != setup.described_with_judge():
                raise ValueError(
                    f"{path} comes from other texts or sizes, or was judged by another reference model: pass another "
                    "--output, or delete it."
                )
            return stored["record"]
        record = _train(cell, setup)
        with atomic_file(path, MAKE_ROOM) as file:
            file.write_text(json.dumps({"described": setup.described_with_judge(), "record": record}), encoding="utf-8")
    return record


def _train(cell: Cell, setup: Setup) -> Record:
    output, objective = setup.runs / cell.folder, objective_of(cell)
    is_image = cell.model in IMAGES
    recipe = (
        setup.image_recipe(objective, cell.seed, output)
        if is_image
        else setup.language_recipe(cell.model, objective, cell.seed, output)
    )
    operations, parameters = count_operations(recipe)
    with trained_folder(recipe):
        curve = read_curve(output)
        if is_image:
            quality = _image_quality(output, cell.seed, setup)
        else:
            quality = setup.generated_quality(AutoModelForCausalLM.from_pretrained(output), cell.seed)
    return {
        "curve": curve,
        "loss": curve[-1]["loss"],
        "operations_per_step": operations,
        "parameters": parameters,
        "quality": quality,
    }


class OperationCounter(TorchDispatchMode):
    """Counts the operations of matrix products and convolutions in a forward pass and its backward pass.

    A product with gradients counts three times, since its backward pass is two products of its size. A product without
    gradients, as in decoding, counts once. Recomputation in a backward pass does not count for any model: the values
    could as well be stored. A folded model's loss has a backward pass within the forward pass, which counts with the
    products that it belongs to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        count = flop_registry.get(func._overloadpacket)
        if count is None and func is not torch.ops.prim.device.default:
            with self:
                if (out := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return out
        out = func(*args, **kwargs)
        if count is not None:
            is_backward = torch._C._current_graph_task_id() != -1
            times = 0 if is_backward else 3 if torch.is_grad_enabled() else 1
            self.total += count(*args, **kwargs, out_val=out) * times
        return out


def count_operations(recipe: Recipe) -> tuple[float, int]:
    """Returns the multiplications and additions of a training step, forward and backward, and the parameters."""
    torch.manual_seed(recipe.seed)
    config = recipe.model.load_config()
    model = recipe.objective.prepare_model(recipe.model.load("auto", 0.0), recipe).train()
    examples, _ = make_examples(recipe, recipe.model.load_tokenizer(config))
    batches = StageBatches(recipe, examples, ranks=1)
    with sdpa_kernel(SDPBackend.MATH), OperationCounter() as counter:  # torch can't count the CPU's fused kernel
        for number in range(COUNTED_BATCHES):
            batch = batches[number]
            del batch["name"]
            recipe.objective.losses(model, batch, recipe.objective.num_targets(batch))
    return counter.total / COUNTED_BATCHES, sum(parameter.numel() for parameter in model.parameters())


def compared_loss(curve: list[dict[str, float]]) -> str:
    """Returns the name of the loss of a model that writes as it is trained to: all k heads, not only head 1."""
    return "loss_as_generated" if "loss_as_generated" in curve[-1] else "loss"


def loss_at(curve: list[dict[str, float]], step: float, name: str = "loss") -> float:
    """Returns the validation loss at a step between two validations, interpolated as a power law of the step.

    No power law holds before the first validation after the start: there it is a power law of the step + 1.
    """
    shift = 0 if step >= curve[1]["step"] else 1
    points = curve if shift else curve[1:]
    steps, losses = zip(*((np.log(point["step"] + shift), np.log(point[name])) for point in points), strict=True)
    return float(np.exp(np.interp(np.log(step + shift), steps, losses)))


def _image_quality(output: Path, seed: int, setup: Setup) -> dict[str, float]:
    model: Any = DenoiserModel.from_pretrained(output).eval()
    generator = torch.Generator().manual_seed(seed)
    # At equal distances for any number of steps.
    evaluations = setup.size.sampling_steps * model.config.steps // LONGEST
    images = sample(model, setup.size.images, evaluations, "ddim", generator)
    return {"evaluations": evaluations} | digit_quality(to_values(images).numpy())
