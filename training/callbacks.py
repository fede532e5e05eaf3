"""Callbacks of a run: validation, the log file, the progress bar, and the growth of a curriculum."""

import json
from pathlib import Path

from transformers import TrainerCallback

from condense.utils.progress import ProgressBar

from .data.curriculum import CurriculumState
from .recipe import Recipe


class Evaluations(TrainerCallback):
    """Requests validation every `evaluation.every` steps and after each stage."""

    def __init__(self, recipe: Recipe):
        assert recipe.evaluation is not None
        self.every, self.ends = recipe.evaluation.every, set(recipe.stage_ends)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in self.ends or (self.every and state.global_step % self.every == 0):
            control.should_evaluate = True


class LearningRate(TrainerCallback):
    """Keeps the recipe's learning rate in a resumed run; a checkpoint holds the rate of the previous recipe."""

    def __init__(self, learning_rate: float):
        self.learning_rate = learning_rate

    def on_train_begin(self, args, state, control, optimizer=None, lr_scheduler=None, **kwargs):
        schedule = getattr(lr_scheduler, "scheduler", lr_scheduler)  # accelerate wraps it under DeepSpeed
        schedule.base_lrs = [self.learning_rate] * len(schedule.base_lrs)
        rates = [self.learning_rate * factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
        for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
            group["initial_lr"], group["lr"] = self.learning_rate, rate
        schedule._last_lr = rates


class GrowCurriculum(TrainerCallback):
    """Lets the texts grow as the logged loss falls, and logs their length."""

    def __init__(self, curriculum: CurriculumState):
        self.curriculum = curriculum

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            logs["segments"] = self.curriculum.segments
            if state.global_step % args.logging_steps == 0:  # the last line can be of fewer steps
                self.curriculum.observe(state.global_step, logs["loss"], args.logging_steps)


class Progress(TrainerCallback):
    """Shows one bar over the steps, with the last logged loss and length."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.shown: dict[str, float] = {}
        self.bar = ProgressBar(
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
        self.shown |= {name: logs[name] for name in ("loss", "eval_loss", "segments") if name in logs}
        self.bar.set_postfix(self.shown, refresh=False)

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()


class Log(TrainerCallback):
    """Appends every logged line to `log.jsonl`; so is the last step of a whole run, whatever `log_every` is."""

    def __init__(self, path: Path):
        self.path = path

    def on_train_begin(self, args, state, control, **kwargs):
        """Deletes lines that a killed run logged after its last checkpoint: those steps run again."""
        state.logging_steps = args.logging_steps  # Trainer takes the checkpoint's
        if state.is_world_process_zero and self.path.exists():
            lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            done = state.global_step or -1
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= done]
            partial = self.path.with_suffix(".partial")
            partial.write_text("".join(kept), encoding="utf-8")
            partial.replace(self.path)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == state.max_steps:
            control.should_log = True

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")
