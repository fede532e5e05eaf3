"""Trains a recipe's model; started by the `deepspeed` launcher, by `condense train`, or directly.

    deepspeed --num_gpus 8 training/train.py --recipe passkey_pretrain_1b [key=value ...]

If started again, it resumes from its last complete checkpoint. SIGUSR1 (and SIGTERM, unless DeepSpeed's launcher
started it) ends it after the current step with a checkpoint and exit code 75.
"""

import argparse
import atexit
import gc
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):  # the launcher runs this file by path, putting its folder first
    folder = Path(__file__).resolve().parent
    root = next(str(parent) for parent in folder.parents if (parent / "condense").is_dir())
    if sys.path and Path(sys.path[0]).resolve() == folder:
        del sys.path[0]
    if root not in sys.path:
        sys.path.insert(0, root)
    if __name__ == "__main__":  # not in processes it starts
        gc.disable()  # until all is imported: collecting takes a second and finds nothing
        getLogger("bitsandbytes.backends.cpu").setLevel(ERROR)  # as in condense.training, which is imported later

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import PrinterCallback, TrainerCallback, TrainingArguments, set_seed
from transformers.utils import logging

from condense.hub.adapters import RECIPE
from condense.hub.generation_settings import remove_ineffective
from condense.training import distributed
from condense.training.adapters import add_adapters
from condense.training.allocator import record_history, snapshot_when_full
from condense.training.callbacks import Evaluations, GrowCurriculum, LearningRate, Log, Progress
from condense.training.checkpoints.complete import CompleteCheckpoints, remove_incomplete, room_for_checkpoints
from condense.training.checkpoints.contents import contents
from condense.training.checkpoints.resume import (
    changes,
    describe_finished,
    find_checkpoint,
    former_stages,
    how_to_resume,
    make_universal,
    other_order,
)
from condense.training.data.batches import StageBatches, ValidationBatches
from condense.training.data.curriculum import CurriculumBatches, CurriculumState
from condense.training.data.examples import Examples
from condense.training.data.generated import make_generated_task
from condense.training.data.tasks import make_examples
from condense.training.deepspeed_file import deepspeed_settings
from condense.training.distributed import Process
from condense.training.gradient_order import GradientOrder
from condense.training.output_folder import check_output
from condense.training.output_lock import output_lock
from condense.training.planning.checkpoint_groups import with_checkpoint_segments
from condense.training.planning.operations import describe_uncounted
from condense.training.preflight import check_run
from condense.training.recipe import GeneratedData, Recipe, Stage, load_recipe
from condense.training.recipe.models import CondenseModel
from condense.training.stopping import StopOnSignal, Stopped
from condense.training.subprocesses import PLEASE_SAVE, STOPPED, end_with_parents
from condense.training.trainer import RecipeTrainer
from condense.training.wandb_run import wandb_run
from condense.utils.files import use_default_mode
from condense.utils.notices import without_notices

LAUNCHER_S = 5.0  # for the launcher to end the ranks after one has failed and said why
OPTIMIZERS = {"adamw": "adamw_torch_fused"}  # a recipe's name: Trainer's name


class Batches(NamedTuple):
    """The micro-batches of a run, and the state of its curriculum if it has one."""

    training: Dataset
    validation: ValidationBatches | None
    curriculum: CurriculumState | None


def train(recipe: Recipe, stop_on: Collection[signal.Signals] = (), checked: bool = False) -> None:
    """Runs a recipe as one rank; `checked` is true if `check_output` and `check_run` have passed.

    Raises `ValueError` before writing anything if the run can't begin. Raises `Stopped` if a signal of `stop_on` has
    ended it with a checkpoint, and `KeyboardInterrupt` that says how it resumes.
    """
    process = Process.from_environment()
    check_launch(recipe, process)
    deepspeed = deepspeed_settings(recipe) if process.launched else None
    if not checked:
        check_output(recipe.output)
        check_run(recipe, process.num_ranks, deepspeed)
    # Other ranks write only after joining the group, which needs the first rank.
    quietly = without_notices() if checked else nullcontext()  # `condense train` has said them
    with output_lock(recipe.output) if process.is_first else nullcontext(), quietly:
        try:
            run(recipe, process, deepspeed, stop_on)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"interrupted: {how_to_resume(recipe)}") from None


def run(
    recipe: Recipe, process: Process, deepspeed: dict[str, Any] | None, stop_on: Collection[signal.Signals]
) -> None:
    """Trains as one rank, from the newest checkpoint or the recipe's model, and saves the trained model."""
    zero_stage = deepspeed["zero_optimization"]["stage"] if deepspeed else None
    checkpoint = find_checkpoint(recipe)
    former = former_stages(checkpoint, recipe) if checkpoint else []
    # Data are prepared before joining the group, where ranks that wait would time out.
    tokenizer = recipe.model.load_tokenizer(recipe.model.load_config())
    examples, held_out = (None, None) if recipe.curriculum else make_examples(recipe, tokenizer, former=former)
    if checkpoint is not None and make_universal(checkpoint, process.num_ranks, zero_stage):
        assert deepspeed is not None
        deepspeed.setdefault("checkpoint", {})["load_universal"] = True
    if process.launched:
        distributed.join()
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(recipe.output / "tensorboard"))
    arguments = training_arguments(recipe, process.num_ranks, deepspeed)
    arguments.eval_on_start = recipe.evaluation is not None and checkpoint is None
    set_seed(recipe.seed)
    base = recipe.model.load(recipe.attention, recipe.attention_dropout)
    settings = getattr(base, "generation_config", None)
    without_effect = remove_ineffective(settings) if settings is not None else {}
    model = recipe.objective.prepare_model(base, recipe)
    if recipe.lora:
        model = add_adapters(model, recipe.lora)
    if examples is None:
        batches = curriculum_batches(recipe, tokenizer, base.config, process.num_ranks, checkpoint)
    else:
        batches = stage_batches(recipe, examples, held_out, process, equal_lengths=zero_stage == 3)
    if process.is_first:
        begin_output(recipe, checkpoint, arguments)
        if without_effect:
            named = ", ".join(f"{name}={value}" for name, value in without_effect.items())
            print(f"the saved model's generation_config.json leaves out what has no effect there: {named}", flush=True)
    if recipe.record_memory_history:
        record_history()
    snapshot = recipe.output / f"oom-rank-{process.rank}.pickle"
    reporting = wandb_run(recipe) if recipe.report_to == "wandb" and process.is_first else nullcontext()
    with (
        run_configuration(recipe, base.config, model.config),
        snapshot_when_full(snapshot, smaller_passes(recipe)),
        reporting,
    ):
        callbacks = make_callbacks(recipe, batches.curriculum, former)
        trainer = RecipeTrainer(
            recipe,
            batches.validation,
            model=model,
            args=arguments,
            train_dataset=batches.training,
            processing_class=tokenizer,
            callbacks=callbacks,
        )
        trainer.remove_callback(PrinterCallback)
        stop = StopOnSignal(stop_on, every=recipe.log_every if recipe.curriculum else 1)
        trainer.add_callback(stop)
        with room_for_checkpoints(recipe.output):
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if not stop.stopped:
        with room_for_checkpoints(recipe.output):
            trainer.save_model(str(recipe.output))  # all ranks take part
        if process.is_first:
            assert any(recipe.output.glob("*.safetensors")), f"no weights were written to {recipe.output}"
            use_default_mode(recipe.output)
            if batches.curriculum is not None:
                batches.curriculum.save(recipe.output)
            if line := validation_line(recipe, trainer.state.log_history):
                print(line, flush=True)
            trained = "adapters are" if recipe.lora else "model is"
            print(f"all {recipe.steps} steps are done: the {trained} in {recipe.output}", flush=True)
    if process.launched:
        distributed.leave()
    if stop.stopped:
        step = trainer.state.global_step
        raise Stopped(
            f"{stop.name} has stopped the run after step {step} of {recipe.steps}; the same command resumes it from "
            f"{recipe.output}/checkpoint-{step}"
        )


def check_launch(recipe: Recipe, process: Process) -> None:
    """Raises `ValueError` for one process on several GPUs; prints which keys are ignored without DeepSpeed."""
    if process.launched:
        return
    if torch.cuda.device_count() > 1:
        raise ValueError(
            f"this machine has {torch.cuda.device_count()} GPUs: start training/train.py with the deepspeed launcher, "
            "or show it one GPU with CUDA_VISIBLE_DEVICES."
        )
    unused = f"{recipe.deepspeed}" + (" and max_skipped_steps are" if recipe.max_skipped_steps else " is")
    print(f"started without the deepspeed launcher: one process, {unused} not used", flush=True)


def training_arguments(recipe: Recipe, ranks: int, deepspeed: dict[str, Any] | None) -> TrainingArguments:
    optimizer = recipe.optimizer
    return TrainingArguments(
        output_dir=str(recipe.output),
        max_steps=recipe.steps,
        per_device_train_batch_size=1,  # a data set item is a whole micro-batch
        gradient_accumulation_steps=recipe.accumulation(ranks),
        optim=OPTIMIZERS[optimizer.name],
        learning_rate=optimizer.learning_rate,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_epsilon=optimizer.eps,
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
        gradient_checkpointing_kwargs={"use_reentrant": False} | checkpointing_options(recipe, ranks),
        logging_steps=recipe.log_every,
        logging_nan_inf_filter=False,
        save_steps=recipe.checkpoints.every,
        save_total_limit=None,  # CompleteCheckpoints deletes older ones
        report_to=recipe.report_to,
        seed=recipe.seed,
        disable_tqdm=True,  # Progress has the bar
        log_level_replica="error",  # otherwise each rank would repeat the notices
        remove_unused_columns=False,
    )


def checkpointing_options(recipe: Recipe, ranks: int) -> dict[str, Any]:
    """Returns further arguments of the model's `gradient_checkpointing_enable`."""
    if not recipe.gradient_checkpointing:
        return {}
    if isinstance(recipe.model, CondenseModel) and not isinstance(recipe.model.checkpoint_segments, int):
        recipe = with_checkpoint_segments(recipe.model.load_config(), recipe, ranks)
    return recipe.model.checkpointing_options()


def begin_output(recipe: Recipe, checkpoint: Path | None, arguments: TrainingArguments) -> None:
    """Says how the run begins, cleans up after a killed one, and writes the recipe."""
    if (segments := (arguments.gradient_checkpointing_kwargs or {}).get("checkpoint_segments")) is not None:
        print(f"gradient checkpointing by groups of {segments} segments", flush=True)
    if checkpoint is not None:
        kept = "The optimizer's state is kept, and the learning rate follows the new recipe."
        followed = "; ".join(changes(checkpoint, recipe).followed)
        print(
            f"resuming from {checkpoint}" + (f" with another recipe: {followed}. {kept}" if followed else ""),
            flush=True,
        )
        if (other := other_order(checkpoint, recipe)) is not None:
            print(other, flush=True)
    if torch.cuda.is_available() and (not_counted := describe_uncounted(recipe)) is not None:
        print(f"{not_counted}, so no MFU is logged", flush=True)
    remove_incomplete(recipe.output)
    (recipe.output / RECIPE).write_text(recipe.model_dump_json(indent=2), encoding="utf-8")


def smaller_passes(recipe: Recipe) -> str:
    """Says what to change if a run's GPUs are too small."""
    changes = [f"micro_batch below {recipe.micro_batch}"] if recipe.micro_batch > 1 else []
    changes += [] if recipe.gradient_checkpointing else ["gradient_checkpointing=true"]
    changes += ["deepspeed=zero3"] if not changes else []
    return f"set {' or '.join(changes)} (condense train RECIPE --dry-run --gpu-memory GIB says what fits)"


@contextmanager
def run_configuration(recipe: Recipe, *configs: Any) -> Iterator[None]:
    """Gives the models' configurations the values of this run; afterwards, the values to save."""
    values, own = recipe.model.run_configuration(), []
    for config in configs:
        changed = {name: value for name, value in values.items() if hasattr(config, name)}
        # Trainer switches the cache off, and dropout applies only to the run.
        own.append({name: getattr(config, name) for name in changed} | {"use_cache": True, "attention_dropout": 0.0})
        config.update(changed)
    yield
    for config, saved in zip(reversed(configs), reversed(own), strict=True):
        config.update(saved)


def stage_batches(
    recipe: Recipe, examples: Examples, held_out: Examples | None, process: Process, equal_lengths: bool
) -> Batches:
    """Returns the batches of stages. For ZeRO-3, `equal_lengths` extends a row of each to the full length."""
    if process.launched:
        check_same_documents(examples, process.num_ranks)
    validation = ValidationBatches(recipe, held_out, equal_lengths) if held_out else None
    return Batches(StageBatches(recipe, examples, process.num_ranks, equal_lengths), validation, None)


def curriculum_batches(recipe: Recipe, tokenizer: Any, config: Any, ranks: int, checkpoint: Path | None) -> Batches:
    assert recipe.curriculum is not None and isinstance(recipe.data, GeneratedData)
    state = CurriculumState(recipe.curriculum)
    if checkpoint is not None:
        state.load(checkpoint)
    task = make_generated_task(recipe.data, tokenizer)
    segment_length = recipe.model.tokens_per_segment(config)
    assert segment_length is not None
    return Batches(CurriculumBatches(recipe, state, task, segment_length, ranks), None, state)


def check_same_documents(examples: Examples, ranks: int) -> None:
    """Raises `ValueError` if ranks have prepared different documents: a collective call."""
    fingerprints: list[Any] = [None] * ranks
    dist.all_gather_object(fingerprints, examples.fingerprint())
    if len(set(fingerprints)) > 1:
        raise ValueError(
            "the machines have prepared different documents: let data.prepared be a folder that all of them share, or "
            "give each the same files."
        )


def make_callbacks(
    recipe: Recipe, curriculum: CurriculumState | None, former: Sequence[Sequence[Stage]]
) -> list[TrainerCallback]:
    """Returns callbacks in running order: a curriculum grows before the checkpoint records it and before the log."""
    complete = CompleteCheckpoints(
        curriculum.save if curriculum else None,
        recipe.checkpoints.keep,
        recipe.model_dump(mode="json"),
        digests=contents(recipe),
        former_stages=[[stage.model_dump() for stage in stages] for stages in former],
    )
    return [
        LearningRate(recipe.optimizer.learning_rate),
        *([GradientOrder()] if recipe.model.has_segments else []),
        *([GrowCurriculum(curriculum)] if curriculum else []),
        *([Evaluations(recipe)] if recipe.evaluation else []),
        complete,
        Log(recipe.output / "log.jsonl"),
        Progress(),
    ]


def validation_line(recipe: Recipe, logged: list[dict[str, float]]) -> str | None:
    """Describes a run's last validation, beside the loss to compare it with."""
    last = next((line for line in reversed(logged) if "eval_loss" in line), None)
    if recipe.evaluation is None or last is None:
        return None
    reference = recipe.evaluation.reference_loss
    loss = f"validation loss {last['eval_loss']:.3f}" + ("" if reference is None else f" (the paper's: {reference:g})")
    accuracy = last.get(f"eval_{recipe.data.task}_accuracy")
    return loss if accuracy is None else f"{loss}, {recipe.data.task} accuracy {accuracy:.1%}"


def quiet_libraries() -> None:
    """Hides other progress bars, and accelerate's notice that it takes the accumulation from DeepSpeed."""
    logging.disable_progress_bar()
    accelerate = getLogger("accelerate.accelerator")
    accelerate.addFilter(lambda record: "Gradient accumulation steps mismatch" not in record.getMessage())


def main() -> None:
    gc.freeze()  # later collections skip what was imported
    gc.enable()
    quiet_libraries()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", required=True, help="the name of a recipe in this package, or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--checked", action="store_true", help="set by condense train, which has checked the run")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    arguments = parser.parse_args()
    rank, code = os.environ.get("RANK"), 0
    if rank is not None:
        end_with_parents()
    # DeepSpeed's launcher ends ranks with SIGTERM, also after one of them has failed.
    by_deepspeed = arguments.local_rank >= 0
    try:
        recipe = load_recipe(arguments.recipe, arguments.overrides)
        if (said := describe_finished(recipe)) is None:
            stop_on = [*PLEASE_SAVE.values()] if by_deepspeed else [*PLEASE_SAVE.values(), signal.SIGTERM]
            train(recipe, stop_on, arguments.checked)
        elif rank in (None, "0"):
            print(said, flush=True)
    except Stopped as stopped:
        code = STOPPED
        if rank in (None, "0"):
            print(stopped, flush=True)
    except KeyboardInterrupt as interrupt:
        code = 128 + signal.SIGINT
        if rank in (None, "0"):
            print(f"\n{interrupt}", flush=True)
    except (
        ValueError,
        OSError,
        FloatingPointError,
        torch.OutOfMemoryError,
    ) as error:  # the user needs only the message
        sys.exit(f"train{'' if rank in (None, '0') else f', rank {rank}'}: {error}")
    except RuntimeError as error:
        if not distributed.is_connection_error(error):
            raise
        time.sleep(LAUNCHER_S)
        said = str(error).splitlines()[0]
        sys.exit(
            f"train, rank {rank}: the other ranks can't be reached ({said}). If one has ended, its message says why."
        )
    if "LOCAL_RANK" in os.environ:
        # Everything is written. Destructors of threads that DeepSpeed still holds sometimes abort the rank.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
