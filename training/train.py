"""Trains a folded model; started by the `deepspeed` launcher, by `condense train`, or alone.

    deepspeed --num_gpus 8 training/train.py --recipe training/recipes/passkey_pretrain_1b.yaml [key=value ...]

Started again, it goes on from its last complete checkpoint.
"""

import argparse
import atexit
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # the launcher runs this file by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import PrinterCallback, TrainerCallback, TrainingArguments, set_seed
from transformers.utils import logging

from condense.files import use_default_mode
from training import process_group
from training.batches import StageBatches, ValidationBatches
from training.checkpoints import CompleteCheckpoints, remove_incomplete
from training.curriculum import CurriculumBatches, CurriculumCallback, LengthSchedule
from training.data.examples import Examples
from training.data.passkey import PasskeyTask
from training.data.tasks import make_examples
from training.loop import Evaluations, FoldedTrainer, Log, Progress
from training.models import load_config, load_model, load_tokenizer
from training.output_lock import output_lock
from training.preflight import check_run
from training.recipe import PasskeyData, Recipe, load_recipe
from training.resume import adapt, find_checkpoint
from training.subprocesses import end_with_parents


def training_arguments(recipe: Recipe, ranks: int, deepspeed: dict[str, Any] | None) -> TrainingArguments:
    optimizer = recipe.optimizer
    return TrainingArguments(
        output_dir=str(recipe.output),
        max_steps=recipe.steps,
        per_device_train_batch_size=1,  # a data set item is a whole micro-batch
        gradient_accumulation_steps=recipe.accumulation(ranks),
        learning_rate=optimizer.learning_rate,
        weight_decay=optimizer.weight_decay,
        adam_beta2=optimizer.beta2,
        max_grad_norm=optimizer.max_grad_norm,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={
            "num_decay_steps": recipe.decay_steps,
            "min_lr_ratio": optimizer.final_learning_rate / optimizer.learning_rate,
        },
        warmup_steps=optimizer.warmup_steps,
        bf16=recipe.dtype == "bfloat16",
        use_cpu=not torch.cuda.is_available(),
        deepspeed=deepspeed,
        gradient_checkpointing=recipe.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False}
        | ({"offload_memories": True} if recipe.offload_memories else {}),
        logging_steps=recipe.log_every,
        logging_nan_inf_filter=False,
        save_steps=recipe.checkpoints.every,
        save_total_limit=None,  # CompleteCheckpoints prunes
        report_to=recipe.report_to,
        seed=recipe.seed,
        disable_tqdm=True,  # Progress has the bar
        remove_unused_columns=False,
    )


def check_same_documents(examples: Examples, ranks: int) -> None:
    """Raises `ValueError` where ranks have prepared different documents: a collective call."""
    fingerprints: list[Any] = [None] * ranks
    dist.all_gather_object(fingerprints, examples.fingerprint())
    if len(set(fingerprints)) > 1:
        raise ValueError(
            "the machines have prepared different documents: let data.prepared be a folder that all of them share, or "
            "give each the same files."
        )


def train(recipe: Recipe) -> None:
    """Runs a recipe as one rank. Raises `ValueError` for a run that can't begin, before it writes anything."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    launched = "LOCAL_RANK" in os.environ
    first = int(os.environ.get("RANK", 0)) == 0
    if not launched and torch.cuda.device_count() > 1:
        raise ValueError(
            f"this machine has {torch.cuda.device_count()} GPUs: start training/train.py with the deepspeed launcher, "
            "or show it one GPU with CUDA_VISIBLE_DEVICES."
        )
    if not launched:
        unused = f"{recipe.deepspeed}" + (" and max_skipped_steps are" if recipe.max_skipped_steps else " is")
        print(f"started without the deepspeed launcher: one process, {unused} not used", flush=True)
    settings = recipe.deepspeed_settings() if launched else None
    check_run(recipe, ranks, settings)
    # What other ranks write, they write after they have joined the group, which needs the first one.
    with output_lock(recipe.output) if first else nullcontext():
        _train(recipe, ranks, settings, launched, first)


def _train(recipe: Recipe, ranks: int, settings: dict[str, Any] | None, launched: bool, first: bool) -> None:
    zero_stage = settings["zero_optimization"]["stage"] if settings else None
    checkpoint = find_checkpoint(recipe)
    tokenizer = load_tokenizer(recipe, load_config(recipe))
    # Before any rank joins the group: ranks that wait there for one that prepares documents would time out.
    examples, held_out = (None, None) if recipe.curriculum else make_examples(recipe, tokenizer)
    if checkpoint is not None and adapt(checkpoint, ranks, zero_stage):
        assert settings is not None
        settings["checkpoint"] = {"load_universal": True}
    if launched:
        process_group.join()
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(recipe.output / "tensorboard"))
    arguments = training_arguments(recipe, ranks, settings)
    arguments.eval_on_start = recipe.evaluation is not None and checkpoint is None
    set_seed(recipe.seed)
    model = load_model(recipe)
    if first:
        if checkpoint is not None:
            print(f"going on from {checkpoint}", flush=True)
        remove_incomplete(recipe.output)
        (recipe.output / "recipe.json").write_text(recipe.model_dump_json(indent=2), encoding="utf-8")
    own_schedule = getattr(model.config, "schedule", None)
    if recipe.folded:
        model.config.schedule = recipe.schedule

    callbacks: list[TrainerCallback] = []
    schedule: LengthSchedule | None = None
    batches: Dataset
    if examples is None:
        assert recipe.curriculum is not None and isinstance(recipe.data, PasskeyData)
        schedule = LengthSchedule(recipe.curriculum)
        if checkpoint is not None:
            schedule.load(checkpoint)
        task = PasskeyTask(tokenizer, recipe.data.num_keys, recipe.data.num_digits)
        batches = CurriculumBatches(recipe, schedule, task, model.config.segment_length, ranks)
        callbacks += [CurriculumCallback(schedule)]
    else:
        if launched:
            check_same_documents(examples, ranks)
        batches = StageBatches(recipe, examples, ranks, equal_lengths=zero_stage == 3)
        callbacks += [Evaluations(recipe)] if recipe.evaluation else []
    trainer = FoldedTrainer(
        model=model,
        args=arguments,
        train_dataset=batches,
        validation=ValidationBatches(recipe, held_out, equal_lengths=zero_stage == 3) if held_out else None,
        max_skipped_steps=recipe.max_skipped_steps,
        data_collator=_only_item,
        processing_class=tokenizer,
        callbacks=[
            *callbacks,
            CompleteCheckpoints(
                schedule.save if schedule else None, recipe.checkpoints.keep, recipe.model_dump(mode="json")
            ),
            Log(recipe.output / "log.jsonl"),
            Progress(),
        ],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    # Trainer switches the cache off, dropout and schedule are the run's: none of them belongs to the model.
    model.config.use_cache, model.config.attention_dropout = True, 0.0
    if recipe.folded:
        model.config.schedule = own_schedule
    trainer.save_model(str(recipe.output))
    if first:
        use_default_mode(recipe.output)
    if first and schedule is not None:
        schedule.save(recipe.output)
    if launched:
        process_group.leave()


def _only_item(items: list[dict]) -> dict:
    (item,) = items
    return item


def main() -> None:
    logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    arguments = parser.parse_args()
    rank = os.environ.get("RANK")
    if rank is not None:
        end_with_parents()
    try:
        train(load_recipe(arguments.recipe, arguments.overrides))
    except (ValueError, OSError, FloatingPointError) as error:  # for the user: the message is the answer
        sys.exit(f"train{'' if rank in (None, '0') else f', rank {rank}'}: {error}")
    if "LOCAL_RANK" in os.environ:
        # Everything is written. DeepSpeed may still hold threads, whose destructors would abort the rank now and then.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
