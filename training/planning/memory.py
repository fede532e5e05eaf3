"""Memory of a rank by part: the weights and states that DeepSpeed keeps, and those that a pass adds. Nothing is run.

All sizes are in bytes. Not counted: the CUDA context, the allocator's fragmentation, buffers of NCCL, and tensors that
live within a single operation.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from transformers import AutoConfig, LlamaConfig

from condense.loading import load_config

from ..distillation import Distillation
from ..recipe import Recipe
from .activations import kept_by_autograd, summed_gradients
from .checkpoint_groups import with_checkpoint_segments
from .passes import FLOAT32, Weights, element_size, parameter_shapes, passes, weights_of


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the fullest rank: all parts except `step` and `host` at the worst moment of a pass."""

    weights: int  # the weights that passes compute with, a teacher's too; under ZeRO-3 the rank's share of them
    gathered_weights: int  # ZeRO-3: the most weights of all shares that are present at a time
    master_weights: int  # the optimizer's own, float32
    moments: int  # Adam's two, float32
    gradients: int  # that the ZeRO stage keeps, and permanent buffers for them
    reduce_buckets: int  # buffers that reduce gradients over ranks, after the logits are freed
    summed_gradients: int  # that autograd still sums up, less the activations that are freed by then
    memories: int  # keys and values that each segment reads from the segment before
    activations: int  # all else that autograd keeps
    loss: int  # logits that exist at a time, with their gradients
    step: int  # the optimizer step's copies of the gradients; no pass is running then
    host: int  # in the CPU's memory, if DeepSpeed offloads to it
    hidden_gradients: int = 0  # of the last layer's outputs, which a folded model computes together with the loss

    @property
    def total(self) -> int:
        """The most bytes that the device holds at a time."""
        stays = self.weights + self.gathered_weights + self.master_weights + self.moments + self.gradients
        in_pass = self.summed_gradients + self.memories + self.activations + self.hidden_gradients
        in_pass += max(self.loss, self.reduce_buckets)
        return stays + max(in_pass, self.step)


def estimate(config: LlamaConfig, recipe: Recipe, deepspeed: dict[str, Any], ranks: int) -> MemoryEstimate:
    """Returns the memory of a rank at the length that needs most; `deepspeed` is the content of its configuration file.

    Raises `ValueError` if the recipe's batch does not divide by the number of ranks.
    """
    accumulates = recipe.accumulation(ranks) > 1
    recipe = with_checkpoint_segments(config, recipe, ranks)
    weights, zero = weights_of(config, recipe), deepspeed["zero_optimization"]
    states = _kept_by_deepspeed(config, recipe, zero, ranks, weights, accumulates)
    states["weights"] += element_size(recipe) * _teacher_weights(config, recipe, weights)
    estimates = []
    for a_pass in passes(config, recipe, ranks):
        stage, buckets = zero["stage"], states["reduce_buckets"]
        kept = kept_by_autograd(config, recipe, a_pass, stage)
        freed_at_once = stage >= 2 or accumulates
        summed = summed_gradients(config, recipe, a_pass, weights, freed_at_once, kept, buckets, stage)
        estimates.append(MemoryEstimate(**states, **kept, summed_gradients=summed))
    return max(estimates, key=lambda one: one.total)


def _teacher_weights(config: LlamaConfig, recipe: Recipe, weights: Weights) -> int:
    """Returns the number of a teacher's weights; 0 if it shares the model's."""
    if not isinstance(recipe.objective, Distillation):
        return 0
    if recipe.objective.teacher is not None:
        return sum(shape.numel() for shape in parameter_shapes(load_config(AutoConfig, recipe.objective.teacher)))
    if recipe.lora is None:
        return weights.num_trained
    return weights.num_frozen if element_size(recipe) < FLOAT32 else 0  # each has its own bfloat16 copy


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
