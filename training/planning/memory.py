"""Memory of a rank by part: the weights and states that DeepSpeed keeps, and those that a pass adds.

A pass is measured on the meta device; DeepSpeed's buffers are counted. All sizes are in bytes. Not counted: the CUDA
context, what the allocator holds in fragments, and buffers of NCCL.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from transformers import AutoConfig, LlamaConfig

from condense.hub.loading import load_config

from ..distillation import Distillation
from ..recipe import Recipe
from .checkpoint_groups import with_checkpoint_segments
from .pass_memory import pass_memory
from .passes import FLOAT32, Weights, element_size, longest_passes, parameter_shapes, weights_of
from .stand_in import WORKSPACE

PROCESS = 595 * 2**20  # of torch, transformers and DeepSpeed, imported: resident on a CPU (Python 3.11, torch 2.13)

MEASURED = ("activations", "loss", "backward", "graphs", "first_step", "heap", "host")  # in a pass


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the fullest rank: all parts except `step` and `host` at the worst moment of a pass."""

    weights: int  # the weights that passes compute with, a teacher's too; under ZeRO-3 the rank's share of them
    gathered_weights: int  # ZeRO-3: the most weights of all shares that are present at a time
    master_weights: int  # the optimizer's own, float32
    moments: int  # Adam's two, float32
    gradients: int  # that the ZeRO stage keeps, and permanent buffers for them
    reduce_buckets: int  # buffers that reduce gradients over ranks
    activations: int  # what the layers made in the forward pass; memories are all of it under checkpointing
    loss: int  # logits and what is computed from them, gradients of the head and of the last layer's outputs included
    backward: int  # gradients, their float32 sums, and activations that checkpointing computes again
    graphs: int  # that captured graphs hold, and the sums and buffers that they write to
    first_step: int  # that is needed before all graphs are captured, beyond later steps
    heap: int  # that a CPU's process does not return when tensors are freed
    process: int  # a CPU's libraries, or the workspace of a GPU's products
    step: int  # the optimizer step's copies of the gradients; no pass is running then
    host: int  # in the CPU's memory, if DeepSpeed offloads to it, or checkpoints wait there

    @property
    def total(self) -> int:
        """The most bytes that the device holds at a time."""
        stays = self.weights + self.gathered_weights + self.master_weights + self.moments + self.gradients
        stays += self.graphs + self.first_step + self.heap + self.process
        return stays + max(self.in_pass, self.step)

    @property
    def in_pass(self) -> int:
        """The tensors of a pass."""
        return self.activations + self.loss + self.backward + self.reduce_buckets


def estimate(
    config: LlamaConfig,
    recipe: Recipe,
    deepspeed: dict[str, Any],
    ranks: int,
    device: str = "cuda",
    captures: bool = True,
) -> MemoryEstimate:
    """Returns the memory of a rank at the length that needs most; `deepspeed` is the content of its configuration file.

    `captures`: a GPU has memory left for graphs. Raises `ValueError` if the recipe's batch does not divide by the
    number of ranks.
    """
    accumulates = recipe.accumulation(ranks) > 1
    recipe = with_checkpoint_segments(config, recipe, ranks)
    weights, zero = weights_of(config, recipe), deepspeed["zero_optimization"]
    states = _kept_by_deepspeed(config, recipe, zero, ranks, weights, accumulates)
    states["weights"] += element_size(recipe) * _teacher_weights(config, recipe, weights)
    states["process"] = PROCESS if device == "cpu" else WORKSPACE
    frees_gradients = _frees_gradients(recipe, zero["stage"], accumulates)
    estimates = []
    for a_pass in longest_passes(config, recipe, ranks):
        found = pass_memory(config, recipe, a_pass, device, zero["stage"], frees_gradients, captures)
        for of_pass, buckets in zip(found, (0, states["reduce_buckets"]), strict=True):
            parts = {name: of_pass.get(name, 0) for name in MEASURED}
            parts["graphs"] += of_pass.get("captured", 0)
            parts["host"] += states["host"]
            estimates.append(MemoryEstimate(**(states | parts | {"reduce_buckets": buckets})))
    return max(estimates, key=lambda one: (one.total, one.in_pass))


def _frees_gradients(recipe: Recipe, stage: int, accumulates: bool) -> bool:
    """Returns whether the gradient of a weight leaves the pass when it is complete.

    ZeRO-2 waits for all gradients of a folded model (`training/gradient_order.py`).
    """
    return stage == 3 or (accumulates and stage < 2) or (stage == 2 and not recipe.model.has_segments)


def _teacher_weights(config: LlamaConfig, recipe: Recipe, weights: Weights) -> int:
    """Returns the number of a teacher's weights; 0 if it shares the model's."""
    if not isinstance(recipe.objective, Distillation):
        return 0
    if recipe.objective.teacher is not None:
        return sum(shape.numel() for shape in parameter_shapes(load_config(AutoConfig, recipe.objective.teacher)))
    return weights.num_trained if recipe.lora is None else 0


def _kept_by_deepspeed(
    config: LlamaConfig, recipe: Recipe, zero: dict[str, Any], ranks: int, weights: Weights, accumulates: bool
) -> dict[str, int]:
    """Returns the parts that deepspeed/runtime/zero/stage_1_and_2.py and stage3.py allocate."""
    stage, size = zero["stage"], element_size(recipe)
    shapes = weights.trained
    numels, frozen = [shape.numel() for shape in shapes], weights.num_frozen
    count, largest = sum(numels), max(numels)
    bucket = _elements(zero, "reduce_bucket_size", 500_000_000, auto=config.hidden_size**2)
    offloads, offloads_weights = (
        (zero.get(name) or {}).get("device", "none") != "none" for name in ("offload_optimizer", "offload_param")
    )
    parts = dict.fromkeys(("weights", "gathered_weights", "gradients", "reduce_buckets", "host"), 0)
    if stage == 3:
        share = sum(ceil(numel / ranks) for numel in numels)
        parts["host" if offloads_weights else "weights"] += size * (share + ceil(frozen / ranks))
        parts["gathered_weights"] = size * min(
            count + frozen, _elements(zero, "stage3_max_live_parameters", 1_000_000_000)
        )
        parts["host" if offloads else "gradients"] += size * share
        parts["gradients"] += size * bucket
        at_once = min(share, _elements(zero, "sub_group_size", 1_000_000_000))
    else:
        share, owned = (count, 0) if stage == 0 else _fullest_partition(shapes, ranks)
        at_once = share
        parts["weights"] = size * (count + frozen)
        if stage < 2 and accumulates:
            parts["gradients"] = size * count
        if stage > 0 and not offloads:  # another micro-batch is reduced beside the previous ones
            parts["gradients"] += size * owned * (2 if stage == 2 and accumulates else 1)
        if stage > 0 and zero.get("contiguous_gradients", True):
            parts["reduce_buckets"] = size * bucket * (2 if zero.get("overlap_comm") else 1)
        if offloads:  # buffers for one gradient, the new weights, and gradients of the previous micro-batches
            parts["gradients"] += size * largest
            parts["host"] += size * (largest + share + (owned if stage == 2 and accumulates else 0))
    has_master = size < FLOAT32 or stage > 0  # ZeRO copies float32 weights too
    master, moments = FLOAT32 * share * has_master, 2 * FLOAT32 * share
    if offloads:
        parts["host"] += master + moments + FLOAT32 * share  # and float32 gradients
        return {**parts, "master_weights": 0, "moments": 0, "step": 0}
    step = (FLOAT32 + (size if size < FLOAT32 else 0)) * at_once * has_master
    if stage == 0 and not accumulates:
        step += size * count
    return {**parts, "master_weights": master, "moments": moments, "step": step}


def _elements(zero: dict[str, Any], name: str, default: int, auto: int | None = None) -> int:
    """Returns a number of elements, which may be a text; `auto` is what Trainer fills in for "auto", if it does."""
    value = zero.get(name, default)
    if value == "auto":
        return default if auto is None else auto
    try:
        return int(float(value))
    except (TypeError, ValueError):
        raise ValueError(f"zero_optimization.{name}={value!r} is not a number of elements.") from None


def _fullest_partition(shapes: list[torch.Size], ranks: int) -> tuple[int, int]:
    """Returns the elements of a rank's partition under ZeRO-1 and 2, and of the weights in the fullest rank's.

    The gradients of these weights are kept whole.
    """
    share, owned = 0, [0] * ranks
    for decays in (True, False):  # DeepSpeed divides each of Trainer's two groups separately
        numels = [shape.numel() for shape in shapes if (len(shape) > 1) == decays]
        partition = 2 * ceil(sum(numels) / (2 * ranks))
        share += partition
        start = 0
        for numel in numels:
            for rank in range(start // partition, (start + numel - 1) // partition + 1):
                owned[rank] += numel
            start += numel
    return share, max(owned)
