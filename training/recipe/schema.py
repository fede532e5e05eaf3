"""The keys of a recipe, their meanings, and the combinations that are refused."""

from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny, model_validator

from condense.configuration import ATTENTION_IMPLEMENTATIONS, WITHOUT_DROPOUT

from ..data.digits import NUM_HELD_OUT, NUM_PIXELS
from .data import Data, DocumentData, GeneratedData, SampleData, Source
from .models import MODELS, ModelKind
from .objectives import OBJECTIVES, NextToken, ObjectiveKind
from .section import MAY_CHANGE, MAY_CHANGE_FROM_HERE, Section, one_of


class Stage(Section):
    """A number of steps on texts of up to `total_length` tokens."""

    total_length: int = Field(ge=2, description="maximum tokens of a text")
    steps: int = Field(ge=1)


class Curriculum(Section):
    """Instead of stages: texts grow as the loss falls, and every batch has the same number of tokens."""

    steps: Annotated[int, MAY_CHANGE_FROM_HERE] = Field(ge=1)
    tokens_per_step: int = Field(ge=1, description="over all ranks")
    first_segments: int = Field(2, ge=1)
    last_segments: int = Field(16, ge=1)
    growth: float = Field(1.5, gt=1, description="factor from one length to the next")
    loss_below: float = Field(0.1, gt=0, description="mean loss below which texts grow; 100: always")
    patience: int = Field(30, ge=1, description="optimizer steps of the mean")
    review: float = Field(0.0, ge=0, lt=1, description="share of batches at earlier lengths once the last is reached")

    @property
    def lengths(self) -> list[int]:
        """Returns the lengths of texts in segments, in order."""
        lengths = [self.first_segments]
        while lengths[-1] < self.last_segments:
            lengths.append(min(max(lengths[-1] + 1, int(lengths[-1] * self.growth)), self.last_segments))
        return lengths

    def check_holds_longest(self, segment_length: int, ranks: int) -> None:
        """Raises `ValueError` if a step has no room for one of the longest texts on each rank."""
        needed = self.last_segments * segment_length * ranks
        if self.tokens_per_step < needed:
            raise ValueError(
                f"tokens_per_step={self.tokens_per_step} does not hold one text of {self.last_segments} segments of "
                f"{segment_length} tokens on each of {ranks} ranks: allow at least {needed}."
            )

    @model_validator(mode="after")
    def _ordered(self):
        if self.last_segments < self.first_segments:
            raise ValueError(f"last_segments={self.last_segments} is below first_segments={self.first_segments}")
        return self


class Optimizer(Section):
    """The learning rate rises during the warm-up, stays, and falls as a cosine during the decay."""

    name: Literal["adamw"] = "adamw"
    learning_rate: Annotated[float, MAY_CHANGE_FROM_HERE] = Field(1e-3, gt=0)
    final_learning_rate: Annotated[float, MAY_CHANGE_FROM_HERE] = Field(0.0, ge=0)
    warmup_steps: Annotated[int, MAY_CHANGE_FROM_HERE] = Field(50, ge=1)
    decay_steps: Annotated[int | None, MAY_CHANGE_FROM_HERE] = Field(
        None, ge=1, description="None: all steps after the warm-up"
    )
    weight_decay: float = Field(0.01, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, gt=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    max_grad_norm: float = Field(1.0, gt=0, allow_inf_nan=True)  # infinite: no clipping

    @model_validator(mode="after")
    def _falling(self):
        if self.final_learning_rate > self.learning_rate:
            raise ValueError(
                f"final_learning_rate={self.final_learning_rate} is above learning_rate={self.learning_rate}"
            )
        return self


class Evaluation(Section):
    """Loss on held-out sequences: before the first step, every `every` steps, and after each stage."""

    every: Annotated[int | None, MAY_CHANGE] = Field(
        None, ge=1, description="steps; None: only before the first step and after each stage"
    )
    sequences: int = Field(64, ge=1)
    sources: list[Source] = Field([], description="its documents; none: training documents are held out")
    reference_loss: Annotated[float | None, MAY_CHANGE] = Field(None, ge=0, description="the paper's, for comparison")


class Checkpoints(Section):
    every: int = Field(500, ge=1, description="steps; another is written at the end")
    keep: Annotated[int, MAY_CHANGE] = Field(2, ge=1)


class LoRA(Section):
    """Low-rank matrices beside frozen linear maps: W x + (alpha / rank) B A x."""

    rank: int = Field(16, ge=1)
    alpha: int = Field(32, ge=1)
    dropout: float = Field(0.0, ge=0, lt=1, description="of the adapters' input")
    targets: list[str] = Field(
        ["q_proj", "k_proj", "v_proj", "o_proj"], min_length=1, description="linear maps of each layer, or lm_head"
    )


class Recipe(Section):
    """Everything a run depends on. Paths are relative to the folder where it starts."""

    model: Annotated[SerializeAsAny[ModelKind], MODELS] = Field(description="a text stands for model.source")
    objective: Annotated[SerializeAsAny[ObjectiveKind], OBJECTIVES] = NextToken()
    output: Annotated[Path, MAY_CHANGE]
    data: Data = Field(description="in an override, the name of a file or a pattern replaces `data.sources`")
    stages: list[Stage] | None = Field(None, min_length=1)
    curriculum: Curriculum | None = None
    global_batch: int | None = Field(None, ge=1, description="sequences per optimizer step, over all ranks")
    micro_batch: Annotated[int, MAY_CHANGE] = Field(1, ge=1, description="sequences that a rank runs at once")
    optimizer: Optimizer = Optimizer()
    lora: LoRA | None = Field(None, description="adapters to train; None: all weights are trained")
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    attention: Annotated[str, one_of(ATTENTION_IMPLEMENTATIONS), MAY_CHANGE] = "auto"
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    gradient_checkpointing: Annotated[bool, MAY_CHANGE] = False
    deepspeed: Annotated[Path, MAY_CHANGE] = Path("zero2")
    evaluation: Evaluation | None = None
    checkpoints: Checkpoints = Checkpoints()
    resume: Annotated[Path | None, MAY_CHANGE] = Field(
        None, description="checkpoint of another output, used until this output has its own"
    )
    log_every: Annotated[int, MAY_CHANGE] = Field(10, ge=1)
    max_skipped_steps: Annotated[int, MAY_CHANGE] = Field(
        0, ge=0, description="steps with a gradient that is not finite; more end the run"
    )
    record_memory_history: Annotated[bool, MAY_CHANGE] = Field(
        False, description="snapshots of a GPU that ran out of memory include the lines that allocated it"
    )
    report_to: Annotated[Literal["tensorboard", "wandb", "trackio", "none"], MAY_CHANGE] = "tensorboard"
    seed: int = Field(0, ge=0, lt=2**32)

    @property
    def steps(self) -> int:
        return self.curriculum.steps if self.curriculum else sum(stage.steps for stage in self.stages or ())

    def longest_text(self, segment_length: int = 1) -> int:
        """Returns the tokens of the longest text; a curriculum counts in segments."""
        if self.curriculum:
            return self.curriculum.last_segments * segment_length
        return max(stage.total_length for stage in self.stages or ())

    def shorter(self, tokens: int, segment_length: int = 1) -> str:
        """Returns the overrides that make the texts at most `tokens` long; a curriculum counts in segments."""
        if self.curriculum:
            return f"curriculum.last_segments={tokens // segment_length}"
        stages = enumerate(self.stages or ())
        return " ".join(f"stages.{number}.total_length={tokens}" for number, one in stages if one.total_length > tokens)

    @property
    def num_held_out(self) -> int:
        return self.evaluation.sequences if self.evaluation else 0

    def num_samples(self) -> int:
        """Returns how many texts of the longest length the model samples from itself, to train and to validate."""
        if not isinstance(self.data, SampleData) or self.stages is None or self.global_batch is None:
            return 0
        tokens = sum(stage.steps * self.global_batch * stage.total_length for stage in self.stages)
        training = self.data.texts or -(-tokens // self.longest_text())
        return training + self.num_held_out

    @property
    def decay_steps(self) -> int:
        return self.optimizer.decay_steps or self.steps - self.optimizer.warmup_steps

    @property
    def stage_ends(self) -> list[int]:
        """Returns the number of steps done after each stage."""
        return list(accumulate(stage.steps for stage in self.stages or ()))

    def stage_at(self, step: int) -> int:
        """Returns the number of a step's stage; both count from 0."""
        return next(n for n, end in enumerate(self.stage_ends) if step < end)

    def accumulation(self, ranks: int) -> int:
        """Returns the micro-batches per rank and optimizer step. Raises `ValueError` if they do not divide."""
        if self.curriculum:
            return 1
        assert self.global_batch is not None
        at_once = self.micro_batch * ranks
        if self.global_batch % at_once:
            fitting = [n for n in range(1, self.micro_batch) if self.global_batch % (n * ranks) == 0]
            smaller = f"set micro_batch={fitting[-1]}, or " if fitting else ""
            raise ValueError(
                f"global_batch={self.global_batch} does not divide into micro_batch={self.micro_batch} x {ranks} "
                f"ranks: {smaller}make global_batch a multiple of {at_once}."
            )
        return self.global_batch // at_once

    @model_validator(mode="after")
    def _check_combinations(self):
        _check_length(self)
        _check_images(self)
        _check_model(self)
        _check_data(self)
        _check_resume(self)
        _check_steps(self)
        _check_objective(self)
        return self


def _check_length(recipe: Recipe) -> None:
    """Raises `ValueError` unless there are either stages or a curriculum, with its own keys."""
    if (recipe.stages is None) == (recipe.curriculum is None):
        raise ValueError("a recipe has either stages or a curriculum")
    if recipe.stages and recipe.global_batch is None:
        raise ValueError("stages need a global_batch")
    if not recipe.curriculum:
        return
    if recipe.global_batch is not None or recipe.micro_batch != 1:  # a written recipe has all keys
        raise ValueError("a curriculum has tokens_per_step: leave out global_batch and micro_batch")
    if not isinstance(recipe.data, GeneratedData):
        raise ValueError(
            f"a curriculum goes with generated texts (passkey, facts, recall), not with data.task={recipe.data.task!r}"
        )
    if recipe.evaluation:
        raise ValueError("a curriculum reads its own loss: leave out evaluation")
    if not recipe.model.has_segments:
        raise ValueError(f"a curriculum counts segments, and model.kind={recipe.model.kind!r} has none: write stages")


def _check_model(recipe: Recipe) -> None:
    recipe.model.check(recipe.attention, recipe.gradient_checkpointing)
    if recipe.attention in WITHOUT_DROPOUT and recipe.attention_dropout:
        raise ValueError(f"attention={recipe.attention} has no dropout: set attention_dropout=0, or attention=auto")
    if getattr(recipe.model, "schedule", None) == "graph" and recipe.attention_dropout:
        raise ValueError("model.schedule=graph has no dropout: set attention_dropout=0, or another schedule")


def _check_data(recipe: Recipe) -> None:
    data = recipe.data
    if recipe.evaluation and recipe.evaluation.sources and not isinstance(data, DocumentData):
        raise ValueError(f"evaluation.sources: data.task={data.task} has its own texts: leave the sources out")
    if recipe.objective.needs_places and isinstance(data, GeneratedData):
        raise ValueError(
            f"objective.kind={recipe.objective.kind!r} draws once for each place in the data, and the texts of "
            f"data.task={data.task} are generated anew: choose a task that reads documents"
        )
    if data.task == "text" and data.fit == "pack" and recipe.micro_batch > 1:
        raise ValueError(
            f"data.fit=pack goes with micro_batch=1, not {recipe.micro_batch}, because a packed sequence already has "
            "several rows: set micro_batch=1, or data.fit=cut"
        )
    if data.task == "summarization" and data.too_long == "cut":
        lengths = {stage.total_length for stage in recipe.stages or ()}
        if len(lengths) > 1:
            raise ValueError(f"data.too_long=cut cuts to one length, and the stages have {sorted(lengths)}")


def _check_images(recipe: Recipe) -> None:
    """Raises `ValueError` for only some of: images, a model of images, and an objective for them."""
    parts = {
        "data.task=digits": recipe.data.task == "digits",
        "model.kind=denoiser": recipe.model.is_of_images,
        "objective.kind=denoising": recipe.objective.is_of_images,
    }
    present = [name for name, found in parts.items() if found]
    if not present:
        return
    if absent := [name for name, found in parts.items() if not found]:
        raise ValueError(f"{' and '.join(present)} goes with {' and '.join(absent)}: set all three, or none")
    lengths = {stage.total_length for stage in recipe.stages or ()}
    if lengths != {NUM_PIXELS}:
        raise ValueError(f"an image has {NUM_PIXELS} pixels, and the stages have {sorted(lengths)}: set total_length")
    if recipe.evaluation and recipe.evaluation.sequences > NUM_HELD_OUT:
        raise ValueError(
            f"evaluation.sequences={recipe.evaluation.sequences}, and {NUM_HELD_OUT} images are held out: ask for fewer"
        )


def _check_resume(recipe: Recipe) -> None:
    if recipe.resume and recipe.resume.parent.resolve() == recipe.output.resolve():
        raise ValueError(
            f"resume={recipe.resume} lies in this run's own output, whose newest checkpoint is resumed anyway: leave "
            "it out, and to resume from an earlier one, delete the later ones"
        )


def _check_steps(recipe: Recipe) -> None:
    optimizer = recipe.optimizer
    warmup, steps = optimizer.warmup_steps, recipe.steps
    left, needed = max(0, steps - warmup), optimizer.decay_steps or 1
    if left < needed:
        wanted = "" if optimizer.decay_steps is None else f", fewer than optimizer.decay_steps={needed}"
        raise ValueError(
            f"optimizer.warmup_steps={warmup} leaves {left or 'none'} of {steps} steps for the learning rate to fall "
            f"in{wanted}: train for at least {warmup + needed} steps, or lower the number"
        )
    # Losses are averaged between logged lines, and a resumed run begins a new average.
    multiples = {"checkpoints.every": recipe.checkpoints.every}
    if recipe.curriculum:
        multiples["curriculum.patience"] = recipe.curriculum.patience
    for name, value in multiples.items():
        if value % recipe.log_every:
            raise ValueError(f"{name}={value} is not a multiple of log_every={recipe.log_every}: change one of them")


def _check_objective(recipe: Recipe) -> None:
    objective, model = recipe.objective, recipe.model
    if objective.needs_folded and model.kind != "condense":
        raise ValueError(
            f"objective.kind={objective.kind!r} needs a folded model, not model.kind={model.kind!r}: set "
            "model.kind=condense"
        )
    objective.check(recipe)
    if recipe.lora and not objective.takes_adapters:
        raise ValueError(
            f"lora does not go with objective.kind={objective.kind!r}: leave lora out, or choose next_token or distill"
        )
    schedule = getattr(model, "schedule", None)
    if recipe.lora and schedule in ("wavefront", "graph"):
        raise ValueError(
            f"model.schedule={schedule} runs the layers' own weights, without lora: set model.schedule=auto"
        )
