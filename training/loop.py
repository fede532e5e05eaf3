"""The loop around a step: Trainer's own, with losses by segment, validation, and a stop before damage.

Axes: S segments.
"""

import json
import math
import resource
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import SequentialSampler
from tqdm import tqdm
from transformers import Trainer, TrainerCallback, TrainerControl

from condense import CondenseForCausalLM

from .batches import ValidationBatches
from .data.examples import IGNORE_INDEX
from .recipe import Recipe

UNTOUCHED = "The optimizer has not moved, and the last complete checkpoint is as it was."


class SegmentLosses:
    """Sums of losses and of their numbers by segment, over micro-batches and then over ranks."""

    def __init__(self, device: torch.device):
        self.device = device
        self.sums_2S = torch.zeros(2, 0, dtype=torch.float64, device=device)

    def add(self, losses_S: torch.Tensor, targets_S: torch.Tensor) -> None:
        longest = max(self.sums_2S.shape[1], len(losses_S))
        sums_2S = self.sums_2S.new_zeros(2, longest)
        sums_2S[:, : self.sums_2S.shape[1]] += self.sums_2S
        sums_2S[0, : len(losses_S)] += losses_S
        sums_2S[1, : len(targets_S)] += targets_S.to(self.device)
        self.sums_2S = sums_2S

    def over_ranks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses and targets [S], summed over ranks: a collective call."""
        sums_2S = self.sums_2S
        if dist.is_initialized():
            longest = torch.tensor(sums_2S.shape[1], device=self.device)
            dist.all_reduce(longest, op=dist.ReduceOp.MAX)
            sums_2S = torch.nn.functional.pad(sums_2S, (0, int(longest) - sums_2S.shape[1]))
            dist.all_reduce(sums_2S)
        return sums_2S[0].cpu(), sums_2S[1].cpu()


def by_octave(losses_S: torch.Tensor, targets_S: torch.Tensor) -> dict[str, float]:
    """Mean loss of segment 1, 2, 3-4, 5-8, ...: does the memory help later segments?"""
    means, first = {}, 1
    while first <= len(losses_S):
        last = min(1 if first == 1 else 2 * (first - 1), len(losses_S))
        targets = targets_S[first - 1 : last].sum().item()
        if targets:
            name = f"{first}" if first == last else f"{first}-{last}"
            means[f"loss_segment_{name}"] = losses_S[first - 1 : last].sum().item() / targets
        first = last + 1
    return means


def peak_memory() -> dict[str, int]:
    """What the run has needed at most so far, named for what it is."""
    if torch.cuda.is_available():
        return {"peak_cuda_bytes": torch.cuda.max_memory_allocated()}
    return {"peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def num_tokens(inputs: dict[str, torch.Tensor]) -> int:
    mask = inputs.get("attention_mask")
    return inputs["input_ids"].numel() if mask is None else int(mask.sum())


def over_ranks(value: float, device: torch.device) -> float:
    """The sum over ranks: a collective call."""
    total = torch.tensor(value, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item()


class FoldedTrainer(Trainer):
    """Trainer on named micro-batches in their own order, which a loss or gradient that is not finite ends."""

    control: TrainerControl

    def __init__(self, *args, validation: ValidationBatches | None = None, max_skipped_steps: int = 0, **kwargs):
        super().__init__(*args, **kwargs)
        self.folded = isinstance(self.model, CondenseForCausalLM)
        self.validation, self.max_skipped_steps = validation, max_skipped_steps
        self.names: list[str] = []  # of the micro-batches of the current step
        self._start_window()

    def _start_window(self) -> None:
        """What is logged is taken over the steps since the last logged line."""
        self.window = SegmentLosses(self.args.device)
        self.window_tokens, self.window_start = 0, time.perf_counter()

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Trainer's loss; one that is not finite ends the run before its gradients are taken."""
        self.names.append(inputs.pop("name"))
        self.window_tokens += num_tokens(inputs)
        loss, output = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        if not math.isfinite(loss.item()):
            raise FloatingPointError(
                f"step {self.state.global_step + 1}, rank {self.args.process_index}: the loss of {self.names[-1]} is "
                f"{loss.item()}. {UNTOUCHED}"
            )
        if getattr(output, "segment_losses", None) is not None:
            self.window.add(output.segment_losses, output.segment_targets)
        return (loss, output) if return_outputs else loss

    def _get_grad_norm(self, model, grad_norm=None):
        """Trainer's gradient norm; one that is not finite ends the run, or is counted as the recipe allows.

        Without DeepSpeed this is before the optimizer's step; with it, DeepSpeed has left the step out.
        """
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        names, self.names = self.names, []
        what = (
            f"step {self.state.global_step + 1}, rank {self.args.process_index}: the gradient, summed over all ranks, "
            f"is not finite; this rank's part came from {', '.join(names)}."
        )
        if not self.is_deepspeed_enabled:
            if norm is not None and not math.isfinite(norm):
                raise FloatingPointError(f"{what} {UNTOUCHED}")
        elif not self.model_wrapped.was_step_applied():
            skipped = f"DeepSpeed has skipped {self.model_wrapped.skipped_steps} steps"
            if self.model_wrapped.skipped_steps > self.max_skipped_steps:
                raise FloatingPointError(f"{what} {skipped}; max_skipped_steps={self.max_skipped_steps}. {UNTOUCHED}")
            print(f"WARNING: {what} {skipped}.", flush=True)
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds to a training line the loss by segment, speed, memory and skipped steps: a collective call."""
        if "loss" in logs:
            logs |= by_octave(*self.window.over_ranks())
            seconds = time.perf_counter() - self.window_start
            logs["tokens_per_second"] = over_ranks(self.window_tokens, self.args.device) / seconds
            logs |= peak_memory()
            if self.is_deepspeed_enabled:
                logs["skipped_steps"] = self.model_wrapped.skipped_steps
            self._start_window()
        super().log(logs, start_time)

    @torch.no_grad()
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval") -> dict[str, float]:
        """The mean loss over all targets of the validation sequences, which are divided among the ranks."""
        assert self.validation is not None
        start, model = time.perf_counter(), self.model_wrapped
        model.eval()
        losses = SegmentLosses(self.args.device)
        ranks, rank = self.args.world_size, self.args.process_index
        numbers = range(rank, len(self.validation), ranks)
        most = -(-len(self.validation) // ranks)
        for n in tqdm(range(most), desc="validation", unit="sequence", leave=False, disable=rank > 0):
            # Parameters that are spread over the ranks need all ranks in every pass, also one whose share has ended.
            batch = self._prepare_inputs(self.validation[numbers[n] if n < len(numbers) else 0])
            with self.compute_loss_context_manager():
                output = model(**batch, num_items_in_batch=1, use_cache=False)
            if n >= len(numbers):
                continue
            if getattr(output, "segment_losses", None) is not None:
                losses.add(output.segment_losses, output.segment_targets)
            else:
                losses.add(output.loss[None], (batch["labels"][:, 1:] != IGNORE_INDEX).sum()[None])
        model.train()
        losses_S, targets_S = losses.over_ranks()
        metrics = {"loss": (losses_S.sum() / targets_S.sum()).item()}
        if self.folded:
            metrics |= by_octave(losses_S, targets_S)
        metrics["seconds"] = time.perf_counter() - start
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.window_start += time.perf_counter() - start  # training's speed is without it
        return metrics


class Evaluations(TrainerCallback):
    """Asks for validation every so many steps and after each stage."""

    def __init__(self, recipe: Recipe):
        assert recipe.evaluation is not None
        self.every, self.ends = recipe.evaluation.every, set(recipe.stage_ends)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in self.ends or (self.every and state.global_step % self.every == 0):
            control.should_evaluate = True


class Progress(TrainerCallback):
    """One bar over the steps, with the last logged loss and length."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.bar = tqdm(
            total=state.max_steps,
            initial=state.global_step,
            desc="training",
            unit="step",
            dynamic_ncols=True,
            mininterval=1,
            disable=not state.is_world_process_zero,
        )

    def on_step_end(self, args, state, control, **kwargs):
        self.bar.update(1)

    def on_log(self, args, state, control, logs=None, **kwargs):
        shown = {name: logs[name] for name in ("loss", "eval_loss", "segments") if name in logs}
        if shown:
            self.shown = getattr(self, "shown", {}) | shown
            self.bar.set_postfix(self.shown, refresh=False)

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()


class Log(TrainerCallback):
    """Appends every logged line to `log.jsonl`."""

    def __init__(self, path: Path):
        self.path = path

    def on_train_begin(self, args, state, control, **kwargs):
        """Drops what a killed run logged after its last checkpoint, or before its first: those steps come again."""
        if state.is_world_process_zero and self.path.exists():
            lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            done = state.global_step or -1
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= done]
            partial = self.path.with_suffix(".partial")
            partial.write_text("".join(kept), encoding="utf-8")
            partial.replace(self.path)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")
