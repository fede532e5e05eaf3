"""Trains a folded model; started by the `deepspeed` launcher, by `condense train`, or alone.

    deepspeed --num_gpus 8 training/train.py --recipe training/recipes/passkey_pretrain_1b.yaml [key=value ...]

Started again, it goes on from its last complete checkpoint.
"""

import argparse
import atexit
import os
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # the launcher runs this file by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoTokenizer,
    LlamaForCausalLM,
    PrinterCallback,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

from condense import CondenseForCausalLM
from condense.checks import check_tokenizer
from training import process_group
from training.batches import StageBatches, ValidationBatches, check_zero_3
from training.checkpoints import CompleteCheckpoints, remove_incomplete
from training.curriculum import CurriculumBatches, CurriculumCallback, LengthSchedule
from training.data.examples import Examples
from training.data.passkey import PasskeyTask
from training.data.tasks import make_examples
from training.loop import Evaluations, FoldedTrainer, Log, Progress
from training.recipe import PasskeyData, Recipe, load_recipe
from training.resume import adapt, find_checkpoint


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


def load_model(recipe: Recipe):
    given = {"segment_length": recipe.segment_length, "bptt_segments": recipe.bptt_segments}
    return (CondenseForCausalLM if recipe.folded else LlamaForCausalLM).from_pretrained(
        recipe.model,
        dtype=torch.float32,  # bfloat16 is DeepSpeed's or autocast's copy; the optimizer needs the originals
        attn_implementation=None if recipe.attention == "auto" else recipe.attention,
        attention_dropout=recipe.attention_dropout,
        **{name: value for name, value in given.items() if value is not None},
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
    # What can be refused is refused before documents are prepared.
    recipe.accumulation(ranks)
    settings = recipe.deepspeed_settings() if launched else None
    zero_stage = settings["zero_optimization"]["stage"] if settings else None
    if zero_stage == 3:
        check_zero_3(recipe, AutoConfig.from_pretrained(recipe.model).vocab_size)
    checkpoint = find_checkpoint(recipe)
    recipe.output.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(recipe.model)
    # Before any rank joins the group: ranks that wait there for one that prepares documents would time out.
    examples, held_out = (None, None) if recipe.curriculum else make_examples(recipe, tokenizer)
    if checkpoint is not None and adapt(checkpoint, ranks, zero_stage):
        assert settings is not None
        settings["checkpoint"] = {"load_universal": True}
    if first:
        if checkpoint is not None:
            print(f"going on from {checkpoint}", flush=True)
        remove_incomplete(recipe.output)
        (recipe.output / "recipe.json").write_text(recipe.model_dump_json(indent=2), encoding="utf-8")
    if launched:
        process_group.join()
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(recipe.output / "tensorboard"))
    arguments = training_arguments(recipe, ranks, settings)
    arguments.eval_on_start = recipe.evaluation is not None and checkpoint is None
    set_seed(recipe.seed)
    model = load_model(recipe)
    own_schedule = getattr(model.config, "schedule", None)
    if recipe.folded:
        model.config.schedule = recipe.schedule
    check_tokenizer(model.config, tokenizer)

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
    try:
        recipe = load_recipe(arguments.recipe, arguments.overrides)
    except ValueError as error:  # for the user: the message is the answer
        sys.exit(f"train: {error}")
    train(recipe)
    if "LOCAL_RANK" in os.environ:
        # Everything is written. DeepSpeed may still hold threads, whose destructors would abort the rank now and then.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
