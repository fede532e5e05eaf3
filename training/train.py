"""Trains a folded model; started by the `deepspeed` launcher, by `training.launch`, or alone.

    deepspeed --num_gpus 8 training/train.py --recipe training/recipes/passkey_quickstart.yaml [key=value ...]

Started again, it goes on from its last complete checkpoint.
"""

import argparse
import json
import os
import sys
from pathlib import Path

if __package__ in (None, ""):  # the launcher runs this file by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.utils.data import SequentialSampler
from tqdm import tqdm
from transformers import AutoTokenizer, PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.utils import logging

from condense import CondenseForCausalLM
from condense.checks import check_tokenizer
from training.checkpoints import CompleteCheckpoints, newest_checkpoint
from training.curriculum import CurriculumBatches, CurriculumCallback, LengthSchedule
from training.data.passkey import PasskeyTask
from training.recipe import Recipe, load_recipe


class OrderedTrainer(Trainer):
    """Batches come in their own order: the data set decides what a step sees."""

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)


def _only_item(items: list[dict]) -> dict:
    (item,) = items
    return item


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
        if "loss" in logs:
            self.bar.set_postfix(loss=f"{logs['loss']:.4f}", segments=logs.get("segments"), refresh=False)

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()


class Log(TrainerCallback):
    """Appends every logged line to `log.jsonl`, and stops a run whose loss is not finite."""

    def __init__(self, path: Path):
        self.path = path

    def on_train_begin(self, args, state, control, **kwargs):
        """Drops what a killed run logged after its last checkpoint: those steps come again."""
        if state.is_world_process_zero and self.path.exists():
            lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= state.global_step]
            partial = self.path.with_suffix(".partial")
            partial.write_text("".join(kept), encoding="utf-8")
            partial.replace(self.path)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")
        loss = logs.get("loss")
        if loss is not None and not loss < float("inf"):
            raise FloatingPointError(
                f"the loss is {loss} within the {args.logging_steps} steps up to {state.global_step}."
            )


def train(recipe: Recipe) -> None:
    on_gpu = torch.cuda.is_available()
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if "LOCAL_RANK" not in os.environ and torch.cuda.device_count() > 1:
        raise ValueError(
            f"this machine has {torch.cuda.device_count()} GPUs: start training/train.py with the deepspeed launcher, "
            "or show it one GPU with CUDA_VISIBLE_DEVICES."
        )
    if "LOCAL_RANK" not in os.environ:
        print(f"started without the deepspeed launcher: one process, {recipe.deepspeed} is not used", flush=True)
    recipe.output.mkdir(parents=True, exist_ok=True)
    arguments = TrainingArguments(
        output_dir=str(recipe.output),
        max_steps=recipe.steps,
        per_device_train_batch_size=1,  # a data set item is a whole micro-batch
        learning_rate=recipe.optimizer.learning_rate,
        weight_decay=recipe.optimizer.weight_decay,
        adam_beta2=recipe.optimizer.beta2,
        max_grad_norm=recipe.optimizer.max_grad_norm,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": recipe.optimizer.decay_steps, "min_lr_ratio": 0.02},
        warmup_steps=recipe.optimizer.warmup_steps,
        bf16=recipe.dtype == "bfloat16",
        use_cpu=not on_gpu,
        deepspeed=str(recipe.deepspeed) if "LOCAL_RANK" in os.environ else None,
        gradient_checkpointing=recipe.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        logging_steps=recipe.log_every,
        logging_nan_inf_filter=False,
        save_steps=recipe.save_every,
        save_total_limit=None,  # CompleteCheckpoints prunes
        report_to="none",
        seed=recipe.seed,
        disable_tqdm=True,  # Progress has the bar
    )
    set_seed(recipe.seed)
    model = CondenseForCausalLM.from_pretrained(
        recipe.model,
        dtype=torch.float32,  # bfloat16 is DeepSpeed's or autocast's copy; the optimizer needs the originals
        attn_implementation=recipe.attention,
        attention_dropout=recipe.attention_dropout,
    )
    tokenizer = AutoTokenizer.from_pretrained(recipe.model)
    check_tokenizer(model.config, tokenizer)
    schedule = LengthSchedule(recipe.curriculum)
    trainer = OrderedTrainer(
        model=model,
        args=arguments,
        train_dataset=CurriculumBatches(
            recipe, schedule, PasskeyTask(tokenizer), model.config.segment_length, world_size
        ),
        data_collator=_only_item,
        processing_class=tokenizer,
        callbacks=[
            CurriculumCallback(schedule),
            CompleteCheckpoints(schedule.save, recipe.keep_checkpoints),
            Log(recipe.output / "log.jsonl"),
            Progress(),
        ],
    )
    trainer.remove_callback(PrinterCallback)
    checkpoint = newest_checkpoint(recipe.output)
    if checkpoint is not None:
        schedule.load(checkpoint)
        if trainer.is_world_process_zero():
            print(f"going on from {checkpoint}", flush=True)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    # Trainer switches the cache off, and dropout is the run's: neither belongs to the model.
    model.config.use_cache, model.config.attention_dropout = True, 0.0
    trainer.save_model(str(recipe.output))
    if trainer.is_world_process_zero():
        schedule.save(recipe.output)
    if dist.is_initialized():
        # A rank that exits with the group's threads alive may abort, and takes the others with it.
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    arguments = parser.parse_args()
    train(load_recipe(arguments.recipe, arguments.overrides))


if __name__ == "__main__":
    main()
