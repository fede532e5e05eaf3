"""The memory of a forward and a backward pass: the recipe's model makes one on the meta device.

Long texts are extrapolated from two shorter ones.
"""

import copy
import json
from collections.abc import Mapping
from functools import partial
from math import ceil, lcm
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, LlamaConfig

from condense import CondenseForCausalLM, to_stock
from condense.execution.cuda_graph import STATIC_IMPLEMENTATIONS
from condense.execution.stacking import is_stackable, stack_of
from condense.hub.loading import load_config
from condense.loss import BLOCK_TOKENS

from ..adapters import own_model, with_matrices
from ..distillation import Distillation, place
from ..recipe import Recipe
from ..recipe.models import CondenseModel, stock_class
from . import stack
from .allocations import CAPTURED, HOST, Allocations, on_device
from .passes import Pass, check_planned
from .stand_in import has_captured, standing_in_for

# Of the heap blocks that a CPU's process holds for tensors, this share comes on top for holes that later tensors do not
# fit into. Trainings of SmolLM2-135M: 0.46 (all weights) and 0.62 (adapters) at full lengths, with glibc 2.36.
HELD_HEAP = 0.45
SEGMENTS = 16  # of the shorter text, if not more are needed

PHASES = ("activations", "loss", "backward", "graphs", CAPTURED, "heap")
Parts = Mapping[str, int]  # bytes by the phase that makes them; weights are not counted


class Measured(NamedTuple):
    """The memory of a step: the most of each pass, and what is kept between them."""

    forward: Parts
    backward: Parts
    kept: Parts


def pass_memory(
    config: LlamaConfig,
    recipe: Recipe,
    a_pass: Pass,
    device: str,
    zero_stage: int = 0,
    frees_gradients: bool = False,
    captures: bool = True,
) -> tuple[Parts, Parts]:
    """Returns the most memory of the forward and of the backward pass on `device`, "cuda" or "cpu".

    `captures`: groups of segments become graphs if they can, and memory is left for them. `frees_gradients`: a weight's
    gradient does not stay in the pass when it is complete, because DeepSpeed reduces it or adds it to an earlier one.
    Raises `ValueError` for models and objectives that are not planned.
    """
    check_planned(recipe)
    stack.stack_of(config)  # which refuses what depends on the text
    settings = device, zero_stage, frees_gradients, captures
    lengths = _measured_lengths(config, recipe, a_pass)
    found = [_known_or_measured(config, recipe, Pass(a_pass.rows, segments), *settings) for segments in lengths]
    *_, kept = forward, backward, _ = found[-1]
    if len(found) > 1:  # what is kept grows by the same amount from each group of segments to the next
        shorter, longer = map(len, lengths)
        steps = (len(a_pass.segments) - longer) / (longer - shorter)
        grown = {name: round(steps * (size - found[0].kept[name])) for name, size in kept.items()}
        forward, backward = ({name: most[name] + grown[name] for name in most} for most in (forward, backward))
    return forward, backward


def _measured_lengths(config: LlamaConfig, recipe: Recipe, a_pass: Pass) -> list[list[int]]:
    """Returns the segments of the text or, if it is long, of two shorter ones with the same end."""
    segments, group = a_pass.segments, 1
    if isinstance(recipe.model, CondenseModel) and recipe.gradient_checkpointing:
        assert isinstance(recipe.model.checkpoint_segments, int), "see with_checkpoint_segments"
        group = recipe.model.checkpoint_segments
    # A block of the loss keeps gradients when it is complete, and so many tokens wait in graphs. A wave is as wide as
    # there are layers.
    block = ceil(BLOCK_TOKENS / (a_pass.rows * segments[0]))
    period = lcm(group, block)
    shortest = max(4 * group, block + 2, config.num_hidden_layers, SEGMENTS)
    shortest += (len(segments) - shortest) % period
    if len(segments) <= 2 * shortest + period:
        return [segments]
    return [segments[-number:] for number in (shortest, shortest + period)]


_known: dict[str, Measured] = {}  # numbers of ranks have passes in common


def _known_or_measured(config: LlamaConfig, recipe: Recipe, a_pass: Pass, *settings: Any) -> Measured:
    fields = {"model", "objective", "lora", "dtype", "attention", "attention_dropout", "gradient_checkpointing"}
    given = config.to_json_string(use_diff=False), recipe.model_dump_json(include=fields)
    key = json.dumps([*given, a_pass.rows, a_pass.segments, *settings])
    if key not in _known:
        _known[key] = _measure(config, recipe, a_pass, *settings)
    return _known[key]


def _measure(
    config: LlamaConfig,
    recipe: Recipe,
    a_pass: Pass,
    device: str,
    zero_stage: int,
    frees_gradients: bool,
    captures: bool,
) -> Measured:
    model, teacher = _models(config, recipe, zero_stage)
    own, tokens, is_distilled = own_model(model), sum(a_pass.segments), isinstance(recipe.objective, Distillation)
    ids_BN = torch.zeros(a_pass.rows, tokens, dtype=torch.long, device="meta")
    reads_labels = recipe.model.has_segments and not is_distilled  # a folded model, on the host
    labels_BN = torch.zeros_like(ids_BN, device="cpu") if reads_labels else ids_BN
    allocations = Allocations(device, HELD_HEAP if device == "cpu" else 0.0)
    if not recipe.model.has_segments:  # all logits exist at once
        own.lm_head.register_forward_pre_hook(lambda *_: setattr(allocations, "phase", "loss"))
    for weight in model.parameters():
        if frees_gradients and weight.requires_grad:
            weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))

    def step(name: str) -> None:
        allocations.phase = "activations"
        allocations.begin(f"{name} forward")
        batch = {"input_ids": ids_BN, "labels": labels_BN}
        if is_distilled:
            loss = recipe.objective.losses_of_targets(own, teacher, batch)[0].sum()  # type: ignore[attr-defined]
        else:
            loss = model(**batch, num_items_in_batch=tokens, use_cache=False).loss
        allocations.phase = "backward"
        allocations.begin(f"{name} backward")
        loss.backward()
        model.zero_grad(set_to_none=True)

    captures = captures and recipe.attention in STATIC_IMPLEMENTATIONS
    with standing_in_for(device, allocations, captures, gathers=zero_stage == 3):
        if recipe.model.has_segments and is_stackable(own.model.layers):
            stack_of(own.model.layers)  # which moves the weights
        for one in filter(None, (model, teacher)):
            allocations.leave_out([*one.parameters(), *one.buffers()])
        with allocations:
            step("first")
            if recipe.model.has_segments and has_captured(own.model.layers):
                step("later")
    most, last = allocations.most, "later" if "later forward" in allocations.most else "first"
    first_total, last_total = (
        max(on_device(most[f"{name} {which}"]) for which in ("forward", "backward")) for name in ("first", last)
    )
    fixed = {"first_step": max(0, first_total - last_total), HOST: max(one[HOST] for one in most.values())}
    forward, backward = f"{last} forward", f"{last} backward"
    found = most[forward], most[backward], allocations.begun[backward]
    return Measured(*({**dict.fromkeys(PHASES, 0), **parts, **fixed} for parts in found))


def _models(config: LlamaConfig, recipe: Recipe, zero_stage: int) -> tuple[Any, Any]:
    """Returns the recipe's model and its teacher, or None, on the meta device."""
    model_class: Any = CondenseForCausalLM
    attentions: tuple[str, ...] = STATIC_IMPLEMENTATIONS
    config = copy.deepcopy(config)
    config.attention_dropout = recipe.attention_dropout
    if isinstance(recipe.model, CondenseModel):
        config.schedule = recipe.model.schedule.replace("graph", "auto")  # the same in training, if there is memory
    else:
        model_class, attentions = stock_class(config), ("eager",)
    config._attn_implementation = recipe.attention if recipe.attention in attentions else "sdpa"
    with torch.device("meta"):
        model = model_class(config)
        teacher = _teacher(model, recipe.objective)
        if recipe.lora is not None:
            model = with_matrices(model, recipe.lora)
    model = model.to(torch.bfloat16 if recipe.dtype == "bfloat16" else torch.float32).train()
    own = own_model(model)
    if isinstance(recipe.objective, Distillation):
        place(teacher, own, shares_weights=recipe.lora is not None and recipe.objective.teacher is None)
    if zero_stage == 3:  # which gathers weights by hooks, for each use
        for module in model.modules():
            module.register_forward_pre_hook(lambda *_: None)
        for weight in model.parameters():
            weight.ds_id = 0
    if recipe.gradient_checkpointing:
        options = {"use_reentrant": False, **recipe.model.checkpointing_options()}
        own._set_gradient_checkpointing(True, partial(checkpoint, **options))
    return model, teacher


def _teacher(model: Any, objective: Any) -> Any:
    if not isinstance(objective, Distillation):
        return None
    if objective.teacher is None:
        teacher = to_stock(model)
        for weight in teacher.parameters():
            weight.data = weight.data.clone()  # `place` shares them again if it can
    else:
        config = load_config(AutoConfig, objective.teacher)
        teacher = stock_class(config)(config)
    return teacher.eval().requires_grad_(False)
