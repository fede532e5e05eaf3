"""A run as one object: what is trained, on what, how long, and where it goes."""

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from condense.files import read_text

from .recipe_errors import explain


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Stage(Section):
    """So many steps on texts of up to so many tokens."""

    total_length: int = Field(ge=2, description="tokens of a sequence")
    steps: int = Field(ge=1)


class Curriculum(Section):
    """Instead of stages: text length grows as the loss falls, and batches hold equally many tokens."""

    steps: int = Field(ge=1)
    tokens_per_step: int = Field(ge=1, description="over all ranks")
    first_segments: int = Field(2, ge=1)
    last_segments: int = Field(16, ge=1)
    growth: float = Field(1.5, gt=1, description="factor from one length to the next")
    loss_below: float = Field(0.1, gt=0, description="mean loss at which the text grows")
    patience: int = Field(30, ge=1, description="optimizer steps that the mean is taken over")
    review: float = Field(
        0.0, ge=0, lt=1, description="share of batches at an earlier length once the last length is reached"
    )

    @property
    def lengths(self) -> list[int]:
        """Segments of the texts, from the first length to the last."""
        lengths = [self.first_segments]
        while lengths[-1] < self.last_segments:
            lengths.append(min(max(lengths[-1] + 1, int(lengths[-1] * self.growth)), self.last_segments))
        return lengths

    @model_validator(mode="after")
    def _ordered(self):
        if self.last_segments < self.first_segments:
            raise ValueError(f"last_segments={self.last_segments} is below first_segments={self.first_segments}")
        return self


class Source(Section):
    """Documents: local files by name or glob pattern (.txt, .jsonl, .parquet), or a data set of the hub."""

    files: str | None = None
    hub: str | None = Field(None, description="OWNER/NAME, streamed")
    name: str | None = Field(None, description="configuration of the hub's data set")
    split: str | None = Field(None, description="of the hub's data set; train where not given")
    revision: str | None = Field(None, description="branch, tag or commit of the hub's data set")
    text: str = Field("text", description="field that holds the document; a list is joined by spaces")
    summary: str = Field("summary", description="field that holds its summary; of a list, the first")

    @model_validator(mode="after")
    def _one_place(self):
        if (self.files is None) == (self.hub is None):
            raise ValueError("a source names either files or hub, one of the two")
        if self.files is not None and (self.name or self.split or self.revision):
            raise ValueError("name, split and revision belong to a source of the hub, not to files")
        return self


class DocumentData(Section):
    """What all data made of documents share."""

    sources: list[Source] = Field(min_length=1)
    bad_documents: Literal["skip", "refuse"] = Field("refuse", description="broken lines, missing fields, ...")
    prepared: Path = Field(Path("runs/prepared"), description="folder that keeps documents as tokens")
    max_documents: int | None = Field(
        None, ge=1, description="stop reading after so many that are kept; None: after as many as the steps need"
    )


class TextData(DocumentData):
    """Text to predict."""

    task: Literal["text"]
    min_tokens: int = Field(2, ge=2, description="shorter documents are dropped")
    fit: Literal["cut", "pack"] = Field(
        "pack", description="cut: whole pieces of the total length; pack: what remains fills sequences together"
    )


class SummarizationData(DocumentData):
    """Summaries to predict behind their documents."""

    task: Literal["summarization"]
    too_long: Literal["drop", "cut"] = Field("drop", description="cut: the document loses its end")


class QuestionData(DocumentData):
    """Answers to predict behind their prompts, which are taken as they stand."""

    task: Literal["questions"]


class PasskeyData(Section):
    """Numbers to find in irrelevant text."""

    task: Literal["passkey"]
    background: int = Field(2, ge=0, description="tokens of each text, besides the answer, that are trained on")
    shortest: float = Field(0.5, gt=0, le=1, description="texts have from this share of the total length up to all")
    num_keys: int = Field(1, ge=1, description="keys in a text, one of which is asked for")
    num_digits: int = Field(4, ge=1, description="of each key")


Data = Annotated[TextData | SummarizationData | QuestionData | PasskeyData, Field(discriminator="task")]


class Optimizer(Section):
    """AdamW; the learning rate rises over the warm-up, stays, and falls over the decay as a cosine."""

    learning_rate: float = Field(1e-3, gt=0)
    final_learning_rate: float = Field(0.0, ge=0)
    warmup_steps: int = Field(50, ge=1)
    decay_steps: int | None = Field(None, ge=1, description="None: all steps behind the warm-up")
    weight_decay: float = Field(0.01, ge=0)
    beta2: float = Field(0.95, gt=0, lt=1)
    max_grad_norm: float = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _falling(self):
        if self.final_learning_rate > self.learning_rate:
            raise ValueError(
                f"final_learning_rate={self.final_learning_rate} is above learning_rate={self.learning_rate}"
            )
        return self


class Evaluation(Section):
    """Loss on sequences that are not trained on: before the first step, every so often, and after each stage."""

    every: int | None = Field(None, ge=1, description="steps; None: before the first one and after each stage")
    sequences: int = Field(64, ge=1)
    sources: list[Source] = Field([], description="documents for it; none: some of the training data are held out")


class Checkpoints(Section):
    every: int = Field(500, ge=1, description="steps; one more is written at the end")
    keep: int = Field(2, ge=1)


class Recipe(Section):
    """Everything a run depends on. Paths are relative to the folder where it is started."""

    model: str = Field(description="folder or hub id of a Llama or of a folded one")
    output: Path
    folded: bool = Field(True, description="false trains a stock Llama on the same path")
    segment_length: int | None = Field(None, ge=1, description="None: the model's own")
    bptt_segments: int | None = Field(None, ge=1, description="segments a gradient crosses; None: all")
    data: Data
    stages: list[Stage] | None = Field(None, min_length=1)
    curriculum: Curriculum | None = None
    global_batch: int | None = Field(None, ge=1, description="sequences per optimizer step, over all ranks")
    micro_batch: int = Field(1, ge=1, description="sequences that a rank runs at once")
    optimizer: Optimizer = Optimizer()
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    attention: Literal["auto", "sdpa", "blocked", "eager", "flash_attention_2", "flex_attention"] = "auto"
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    schedule: Literal["auto", "sequential", "wavefront"] = "auto"
    gradient_checkpointing: bool = False
    offload_memories: bool = Field(False, description="checkpoints wait for the backward pass in the host's memory")
    deepspeed: Path = Path("deepspeed_configs/zero2.json")
    evaluation: Evaluation | None = None
    checkpoints: Checkpoints = Checkpoints()
    resume: Path | None = Field(
        None, description="a checkpoint of another output; gone on from where this one has none of its own"
    )
    log_every: int = Field(10, ge=1)
    max_skipped_steps: int = Field(0, ge=0, description="steps with a gradient that is not finite; more end the run")
    report_to: Literal["tensorboard", "wandb", "trackio", "none"] = "tensorboard"
    seed: int = Field(0, ge=0)

    @property
    def steps(self) -> int:
        return self.curriculum.steps if self.curriculum else sum(stage.steps for stage in self.stages or ())

    @property
    def decay_steps(self) -> int:
        return self.optimizer.decay_steps or self.steps - self.optimizer.warmup_steps

    @property
    def stage_ends(self) -> list[int]:
        """The number of steps done after each stage."""
        return list(accumulate(stage.steps for stage in self.stages or ()))

    def stage_at(self, step: int) -> int:
        """Which stage a step belongs to; steps count from 0."""
        return next(n for n, end in enumerate(self.stage_ends) if step < end)

    def accumulation(self, ranks: int) -> int:
        """Micro-batches that each rank runs per optimizer step."""
        if self.curriculum:
            return 1
        assert self.global_batch is not None
        at_once = self.micro_batch * ranks
        if self.global_batch % at_once:
            raise ValueError(
                f"global_batch={self.global_batch} does not divide into micro_batch={self.micro_batch} x {ranks} "
                f"ranks: make it a multiple of {at_once}."
            )
        return self.global_batch // at_once

    def deepspeed_settings(self) -> dict[str, Any]:
        """What the DeepSpeed configuration says. Raises `ValueError` where it can't be read."""
        try:
            settings = json.loads(self.deepspeed.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"deepspeed={self.deepspeed} can't be read as JSON: {error}.") from error
        zero = settings.get("zero_optimization") if isinstance(settings, dict) else None
        if not isinstance(zero, dict) or "stage" not in zero:
            raise ValueError(f"deepspeed={self.deepspeed} does not say zero_optimization.stage: 0, 1, 2 or 3.")
        return settings

    @model_validator(mode="after")
    def _consistent(self):
        if (self.stages is None) == (self.curriculum is None):
            raise ValueError("a recipe has either stages or a curriculum")
        if self.stages and self.global_batch is None:
            raise ValueError("stages need a global_batch")
        if self.curriculum:
            if self.global_batch is not None or "micro_batch" in self.model_fields_set:
                raise ValueError("a curriculum has tokens_per_step: leave out global_batch and micro_batch")
            if self.data.task != "passkey":
                raise ValueError(f"a curriculum goes with the passkey task, not with data.task={self.data.task!r}")
            if self.evaluation:
                raise ValueError("a curriculum reads its own loss: leave out evaluation")
            if not self.folded:
                raise ValueError("a curriculum counts segments: leave out folded=false, or write stages")
        if not self.folded and (self.segment_length or self.bptt_segments):
            raise ValueError("folded=false is a stock Llama, which has no segment_length and no bptt_segments")
        if not self.folded and self.attention == "blocked":
            raise ValueError("folded=false is a stock Llama, which has no attention=blocked")
        if self.attention in ("blocked", "flex_attention") and self.attention_dropout:
            raise ValueError(f"attention={self.attention} has no dropout: set attention_dropout=0, or attention=auto")
        if not self.folded and (self.schedule != "auto" or self.offload_memories):
            raise ValueError("folded=false is a stock Llama, which has no schedule and no memories to offload")
        if self.offload_memories and not self.gradient_checkpointing:
            raise ValueError("offload_memories=true moves what checkpoints keep: set gradient_checkpointing=true too")
        if self.evaluation and self.evaluation.sources and self.data.task == "passkey":
            raise ValueError("evaluation.sources: passkeys are made, not read")
        if self.resume and self.resume.parent.resolve() == self.output.resolve():
            raise ValueError(
                f"resume={self.resume} lies in this run's own output, whose newest checkpoint is gone on from anyhow: "
                "leave resume out, and to go on from an earlier checkpoint delete the later ones"
            )
        if self.data.task == "text" and self.data.fit == "pack" and self.micro_batch > 1:
            raise ValueError(
                f"data.fit=pack goes with micro_batch=1, not {self.micro_batch}: a packed sequence already is several "
                "rows, and those of two sequences would be padded to each other; or choose data.fit=cut"
            )
        if self.data.task == "summarization" and self.data.too_long == "cut":
            lengths = {stage.total_length for stage in self.stages or ()}
            if len(lengths) > 1:
                raise ValueError(f"data.too_long=cut cuts to one length, and the stages have {sorted(lengths)}")
        optimizer = self.optimizer
        if optimizer.warmup_steps + max(1, self.decay_steps) > self.steps:
            raise ValueError(
                f"optimizer.warmup_steps={optimizer.warmup_steps} and "
                f"optimizer.decay_steps={optimizer.decay_steps} do not fit into {self.steps} steps"
            )
        # Losses are averaged between logged lines, and a resumed run begins a new average.
        multiples = {"checkpoints.every": self.checkpoints.every}
        if self.curriculum:
            multiples["curriculum.patience"] = self.curriculum.patience
        for name, value in multiples.items():
            if value % self.log_every:
                raise ValueError(f"{name}={value} is no multiple of log_every={self.log_every}")
        return self


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a YAML recipe and applies overrides such as `optimizer.learning_rate=1e-4` or `stages.0.steps=10`.

    Raises `ValueError` naming every unknown or impossible key, and the nearest key that exists.
    """
    if not Path(path).is_file():
        raise ValueError(f"there is no recipe {str(path)!r}: pass the path of a YAML file.")
    try:
        fields = yaml.safe_load(read_text(Path(path))) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"recipe {path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"recipe {path} holds a {type(fields).__name__}, not keys and values.")
    for override in overrides:
        _apply(fields, override)
    try:
        return Recipe.model_validate(fields)
    except ValidationError as error:
        problems = "\n".join(explain(problem, Recipe) for problem in error.errors())
        raise ValueError(f"recipe {path}:\n{problems}") from error


def _apply(fields: Any, override: str) -> None:
    name, equals, value = override.partition("=")
    if not equals:
        raise ValueError(f"{override!r} is no override: write key=value.")
    *sections, last = name.split(".")
    section = fields
    for key in sections:
        if isinstance(section, dict):
            if section.get(key) is None:
                section[key] = {}
            section = section[key]
        else:
            section = _item(section, key)
    if isinstance(section, list) and _item(section, last) is not None:
        section[int(last)] = _parse(value)
    elif isinstance(section, dict):
        section[last] = _parse(value)
    else:
        raise ValueError(f"{override!r}: {'.'.join(sections) or 'the recipe'} holds no keys.")


def _item(section: Any, key: str) -> Any:
    fits = isinstance(section, list) and key.isdecimal() and int(key) < len(section)
    return section[int(key)] if fits else None


def _parse(value: str) -> Any:
    """YAML's value, with 1e-4 a number as everywhere else."""
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ValueError(f"the override's value {value!r} is no YAML: {error}") from error
    if isinstance(parsed, str):
        try:
            return float(parsed)
        except ValueError:
            pass
    return parsed
