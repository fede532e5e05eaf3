"""Trainer on a recipe's objective, with losses by segment, validation, and a stop before damage.

Axes: S segments.
"""

import math
import resource
import time
from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerControl

from condense.ops.host_copy import HostCopy
from condense.segmentation import on_device
from condense.utils.progress import ProgressBar

from .allocator import cuda_memory
from .answer_accuracy import num_right
from .data.batches import ValidationBatches
from .planning.utilization import seconds_at_peak
from .recipe import GeneratedData, Recipe

UNTOUCHED = "The optimizer has not moved, and the last complete checkpoint is unchanged."


class SegmentLosses:
    """Sums of losses and numbers of targets by segment, over micro-batches and then over ranks."""

    def __init__(self, device: torch.device):
        self.sums_2S = torch.zeros(2, 0, dtype=torch.float64, device=device)

    def add(self, losses_S: torch.Tensor, targets_S: torch.Tensor) -> None:
        if targets_S.device != losses_S.device:  # counted on the host
            targets_S = on_device(targets_S, losses_S.device)
        own_2S = torch.stack([losses_S.to(self.sums_2S), targets_S.to(self.sums_2S)])
        longest = max(self.sums_2S.shape[1], own_2S.shape[1])
        self.sums_2S = _extend(self.sums_2S, longest) + _extend(own_2S, longest)

    def over_ranks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns losses and targets [S], summed over ranks: a collective call."""
        sums_2S = self.sums_2S
        if dist.is_initialized():
            longest = torch.tensor(sums_2S.shape[1], device=sums_2S.device)
            dist.all_reduce(longest, op=dist.ReduceOp.MAX)
            sums_2S = _extend(sums_2S, int(longest))
            dist.all_reduce(sums_2S)
        losses_S, targets_S = sums_2S.cpu()
        return losses_S, targets_S


def _extend(sums_2S: torch.Tensor, longest: int) -> torch.Tensor:
    return pad(sums_2S, (0, longest - sums_2S.shape[1]))


class PendingLosses:
    """Losses of micro-batches, copied to the host without waiting: the host first launches the backward pass."""

    def __init__(self) -> None:
        self.copies: list[tuple[str, HostCopy]] = []

    def add(self, where: str, loss: torch.Tensor) -> None:
        self.copies.append((where, HostCopy(loss)))

    def check(self) -> None:
        """Raises `FloatingPointError` if a loss is not finite."""
        copies, self.copies = self.copies, []
        for where, copy in copies:
            if not math.isfinite(loss := copy.values().item()):
                raise FloatingPointError(f"{where} is {loss}. {UNTOUCHED}")


def by_octave(losses_S: torch.Tensor, targets_S: torch.Tensor) -> dict[str, float]:
    """Returns the mean loss of segments 1, 2, 3-4, 5-8, ...: does the memory help later segments?"""
    means, num_segments = {}, len(losses_S)
    ends = [0, *(min(2**n, num_segments) for n in range((num_segments - 1).bit_length() + 1))]
    for first, last in pairwise(ends):
        targets = targets_S[first:last].sum().item()
        if targets:
            name = f"{last}" if last == first + 1 else f"{first + 1}-{last}"
            means[f"loss_segment_{name}"] = losses_S[first:last].sum().item() / targets
    return means


def peak_memory() -> dict[str, int]:
    """Returns the most memory that this process has used so far, by its kind."""
    if torch.cuda.is_available():
        return cuda_memory()
    return {"peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def with_lengths(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the one item, a whole micro-batch, with the `lengths` of its rows: no tensor, so they stay on the host
    when accelerate moves the batch."""
    (batch,) = items
    mask, (rows, length) = batch.get("attention_mask"), batch["input_ids"].shape
    return batch | {"lengths": [length] * rows if mask is None else mask.sum(dim=1).tolist()}


def over_ranks(values: list[float], device: torch.device) -> list[float]:
    """Returns the sum of each value over ranks: a collective call."""
    totals = torch.tensor(values, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(totals)
    return totals.tolist()


def counted_answers(recipe: Recipe) -> GeneratedData | None:
    """Returns the data whose answers validation counts; None unless the model predicts next tokens."""
    if isinstance(recipe.data, GeneratedData) and recipe.objective.predicts_next_tokens:
        return recipe.data
    return None


class RecipeTrainer(Trainer):
    """Trainer on named micro-batches in their own order; a loss or gradient that is not finite ends the run."""

    control: TrainerControl
    loss_is_scaled_for_ga = True  # the objective divides by the targets of all micro-batches

    def __init__(self, recipe: Recipe, validation: ValidationBatches | None, **kwargs):
        super().__init__(data_collator=with_lengths, **kwargs)
        self.model_accepts_loss_kwargs = True  # Trainer then counts targets for the objective
        self.objective, self.by_segment = recipe.objective, recipe.model.has_segments
        self.validation, self.max_skipped_steps = validation, recipe.max_skipped_steps
        self.answers = counted_answers(recipe)
        self.seconds_at_peak = seconds_at_peak(recipe, self.model.config) or (lambda tokens: math.nan)
        self.names: list[str] = []  # of the micro-batches of the current step
        self.pending_losses = PendingLosses()
        self._start_window()

    def _start_window(self) -> None:
        """Begins the window of steps that the next logged line describes."""
        self.window = SegmentLosses(self.args.device)
        self.window_tokens, self.window_at_peak, self.window_start = 0, 0.0, time.perf_counter()

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor | None:
        """Returns a step's targets over all ranks, as the objective counts them: a collective call."""
        if not batch_samples:
            return None
        own = torch.stack([self.objective.num_targets(batch) for batch in batch_samples]).sum()
        return self.accelerator.gather(own.to(device)).sum()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Returns the objective's loss; one that is not finite ends the run before the optimizer moves."""
        assert not return_outputs and num_items_in_batch is not None
        self.names.append(inputs.pop("name"))
        lengths = inputs.pop("lengths")
        if "attention_mask" in inputs:  # read back from the device, it would wait for the last backward pass
            columns_N = torch.arange(inputs["input_ids"].shape[1])
            inputs["attention_mask"] = columns_N < torch.tensor(lengths)[:, None]  # padding is on the right
        self.window_tokens += sum(lengths)
        self.window_at_peak += sum(map(self.seconds_at_peak, lengths))
        losses = self.objective.losses(model, inputs, num_items_in_batch)
        loss = losses.loss * self.accelerator.num_processes  # gradients are averaged over ranks, targets are summed
        step, rank = self.state.global_step + 1, self.args.process_index
        self.pending_losses.add(f"step {step}, rank {rank}: the loss of {self.names[-1]}", loss)
        if self.by_segment:
            self.window.add(losses.sums_S, losses.targets_S)
        return loss

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        """Returns Trainer's optimizer, made to check losses before it moves: DeepSpeed's engine calls `step` itself."""
        is_new, optimizer = self.optimizer is None, super().create_optimizer(model)
        if is_new:
            optimizer.register_step_pre_hook(lambda *_: self.pending_losses.check())
        return optimizer

    def _get_grad_norm(self, model, grad_norm=None):
        """Returns Trainer's gradient norm; one that is not finite ends the run, or is counted as the recipe allows.

        Runs before the optimizer's step, or with DeepSpeed after a step that it has skipped.
        """
        self.pending_losses.check()  # of a step that DeepSpeed has skipped
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        names, self.names = self.names, []
        message = (
            f"step {self.state.global_step + 1}, rank {self.args.process_index}: the gradient, summed over all ranks, "
            f"is not finite; this rank's part came from {', '.join(names)}."
        )
        if not self.is_deepspeed_enabled:
            if norm is not None and not math.isfinite(norm):
                raise FloatingPointError(f"{message} {UNTOUCHED}")
        elif not self.model_wrapped.was_step_applied():
            skipped = f"DeepSpeed has skipped {self.model_wrapped.skipped_steps} steps"
            if self.model_wrapped.skipped_steps > self.max_skipped_steps:
                raise FloatingPointError(
                    f"{message} {skipped}; max_skipped_steps={self.max_skipped_steps}. {UNTOUCHED}"
                )
            print(f"WARNING: {message} {skipped}.", flush=True)
        return norm

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Saves like Trainer, but writes DeepSpeed's copies of a weight with several names, as of a tied head, once."""
        if state_dict is not None:
            once = {name for name, _ in self.model.named_parameters()}
            every = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
            state_dict = {name: tensor for name, tensor in state_dict.items() if name not in every - once}
        super()._save(output_dir, state_dict)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds loss by segment, speed, MFU, memory and skipped steps to a training line: a collective call."""
        if "loss" in logs:
            logs |= by_octave(*self.window.over_ranks())
            seconds = time.perf_counter() - self.window_start
            # All ranks take part, even if their device is unknown: the sum is then NaN.
            tokens, at_peak = over_ranks([self.window_tokens, self.window_at_peak / seconds], self.args.device)
            logs |= {"tokens_per_second": tokens / seconds, "ranks": self.args.world_size}
            if math.isfinite(at_peak):
                logs["mfu"] = at_peak / self.args.world_size
            logs |= peak_memory()
            if self.is_deepspeed_enabled:
                logs["skipped_steps"] = self.model_wrapped.skipped_steps
            self._start_window()
        logs.pop("train_samples_per_second", None)  # Trainer counts micro-batches as samples
        super().log(logs, start_time)

    @torch.no_grad()
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval") -> dict[str, float]:
        """Returns the mean loss over all targets of the validation sequences, which are divided among the ranks.

        Adds the mean of each source if there are several, the objective's further losses, and for generated texts the
        accuracy: the share of answers that the model gets right in full.
        """
        assert self.validation is not None
        start, model = time.perf_counter(), self.model_wrapped
        model.eval()
        sums: dict[str, SegmentLosses] = defaultdict(lambda: SegmentLosses(self.args.device))  # by loss name
        names, right = [f"loss_{name}" for name in self.validation.source_names], [0.0, 0.0]
        by_source = [SegmentLosses(self.args.device) for _ in names]
        ranks, rank = self.args.world_size, self.args.process_index
        most = -(-len(self.validation) // ranks)
        for n in ProgressBar(range(most), desc="validation", unit="micro-batch", leave=False, disable=rank > 0):
            # Parameters divided among ranks need all ranks in every pass, even those with no micro-batches left.
            is_own = n * ranks + rank < len(self.validation)
            number = n * ranks + rank if is_own else 0
            batch: dict[str, Any] = self._prepare_inputs(self.validation[number])
            with self.compute_loss_context_manager():
                output = self.objective.evaluation_losses(model, batch)
                now = num_right(model, batch, self.answers.background) if self.answers else (0, 0)
            parts = [(sums["loss"], output), *((sums[f"loss_{name}"], one) for name, one in output.further.items())]
            parts += [(by_source[self.validation.source(number)], output)] if names else []
            for total, found in parts:
                if is_own:
                    total.add(found.sums_S, found.targets_S)
                else:  # as long on all ranks, to be summed over them
                    total.add(torch.zeros_like(found.sums_S), torch.zeros_like(found.targets_S))
            right = [total + is_own * one for total, one in zip(right, now, strict=True)]
        model.train()
        totals = {name: one.over_ranks() for name, one in (*sums.items(), *zip(names, by_source, strict=True))}
        metrics = {
            name: (losses_S.sum() / targets_S.sum()).item()
            for name, (losses_S, targets_S) in totals.items()
            if name not in names or targets_S.any()
        }
        if self.by_segment:
            metrics |= by_octave(*totals["loss"])
        if self.answers:
            given, asked = over_ranks(right, self.args.device)
            metrics[f"{self.answers.task}_accuracy"] = given / asked
        metrics["seconds"] = time.perf_counter() - start
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.window_start += time.perf_counter() - start  # the speed of training excludes it
        return metrics
