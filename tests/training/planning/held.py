"""What a pass holds on the CPU: every storage is counted from its allocation to its end."""

import weakref
from contextlib import nullcontext
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from condense import CondenseForCausalLM
from condense.execution.stacking import is_stackable, stack_of
from condense.training.adapters import add_adapters, own_model
from condense.training.distillation import Distillation, place
from condense.training.recipe.models import CondenseModel, stock_class


class Held(TorchDispatchMode):
    """Bytes of all storages made within: how many are alive, and the most that were alive at a time."""

    def __init__(self, known=()):
        super().__init__()
        self.alive = self.peak = 0
        self.storages = {tensor.untyped_storage()._cdata: None for tensor in known}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.storages:
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage):
        key, size = storage._cdata, storage.nbytes()

        def free(_):
            self.alive -= size
            self.storages.pop(key, None)

        self.storages[key] = weakref.ref(storage, free)
        self.alive += size
        self.peak = max(self.peak, self.alive)


def held_by_pass(config, recipe, is_gathered=False) -> tuple[int, int]:
    """Runs the recipe's first length on the CPU; returns the peaks of the forward and of the backward pass.

    `is_gathered`: the weights are marked as ZeRO-3 marks those that it gathers.
    """
    if isinstance(recipe.model, CondenseModel):
        config.schedule = recipe.model.schedule
    model_class = CondenseForCausalLM if recipe.model.has_segments else stock_class(config)
    model = model_class._from_config(config, attn_implementation=recipe.attention)
    model = recipe.objective.prepare_model(model, recipe)
    if recipe.lora:
        model = add_adapters(model, recipe.lora)
    model = model.to(getattr(torch, recipe.dtype)).train()
    if recipe.gradient_checkpointing:
        options = {"use_reentrant": False, **recipe.model.checkpointing_options()}
        model._set_gradient_checkpointing(True, partial(checkpoint, **options))
    if is_gathered:
        for module in model.modules():
            module.register_forward_pre_hook(lambda *_: None)
        for weight in model.parameters():
            weight.ds_id = 0
    known = [*model.parameters(), *model.buffers()]
    if recipe.model.has_segments and is_stackable(layers := own_model(model).model.layers):
        known += [one.tensor_Mx for one in stack_of(layers).parameters.values()]  # which has moved them
        known += model.parameters()
    if isinstance(objective := recipe.objective, Distillation):
        place(objective._teacher, own_model(model), objective._shares_weights)
        objective._placed = True
        known += [*objective._teacher.parameters(), *objective._teacher.buffers()]
    ids = torch.zeros(recipe.micro_batch, recipe.stages[0].total_length, dtype=torch.long)
    with (
        Held([*known, ids]) as held,
        mock.patch.object(F, "linear", partial(F.linear)) if is_gathered else nullcontext(),
    ):
        loss = recipe.objective.losses(model, {"input_ids": ids, "labels": ids}, ids.numel()).loss
        forward, held.peak = held.peak, held.alive
        loss.backward()
    return forward, held.peak
