"""A run as one object: what is trained, on what, how long, and where it goes."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Curriculum(Section):
    """Text length grows as the loss falls."""

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


class Passkey(Section):
    """The passkey task."""

    background: int = Field(2, ge=0, description="tokens of each text, besides the answer, that are trained on")


class Optimizer(Section):
    """AdamW; the learning rate rises over the warm-up, stays, and falls over the decay as a cosine."""

    learning_rate: float = Field(1e-3, gt=0)
    warmup_steps: int = Field(50, ge=1)
    decay_steps: int = Field(0, ge=0)
    weight_decay: float = Field(0.01, ge=0)
    beta2: float = Field(0.95, gt=0, lt=1)
    max_grad_norm: float = Field(1.0, gt=0)


class Recipe(Section):
    """Everything a run depends on. Paths are relative to the folder where it is started."""

    model: Path
    output: Path
    steps: int = Field(ge=1)
    tokens_per_step: int = Field(ge=1, description="over all ranks")
    seed: int = 0
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    attention: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = "sdpa"
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    gradient_checkpointing: bool = False
    deepspeed: Path = Path("deepspeed_configs/zero2.json")
    save_every: int = Field(500, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    log_every: int = Field(10, ge=1)
    curriculum: Curriculum = Curriculum()
    passkey: Passkey = Passkey()
    optimizer: Optimizer = Optimizer()

    @model_validator(mode="after")
    def _consistent(self):
        optimizer = self.optimizer
        if optimizer.warmup_steps + optimizer.decay_steps > self.steps:
            raise ValueError(
                f"optimizer.warmup_steps={optimizer.warmup_steps} and optimizer.decay_steps={optimizer.decay_steps} "
                f"do not fit into steps={self.steps}"
            )
        # Losses are averaged between logged lines, and a resumed run begins a new average.
        for name, value in (("save_every", self.save_every), ("curriculum.patience", self.curriculum.patience)):
            if value % self.log_every:
                raise ValueError(f"{name}={value} is no multiple of log_every={self.log_every}")
        return self


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a YAML recipe and applies overrides such as `optimizer.learning_rate=1e-4`.

    Raises `ValueError` naming every unknown or impossible key, and the nearest key that exists.
    """
    try:
        fields = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except FileNotFoundError as error:
        raise ValueError(f"there is no recipe {str(path)!r}: pass the path of a YAML file.") from error
    for override in overrides:
        name, equals, value = override.partition("=")
        if not equals:
            raise ValueError(f"{override!r} is no override: write key=value.")
        *sections, last = name.split(".")
        section = fields
        for key in sections:
            section = section.setdefault(key, {}) if isinstance(section, dict) else None
        if not isinstance(section, dict):
            raise ValueError(f"{override!r}: {'.'.join(sections) or 'the recipe'} holds no keys.")
        section[last] = yaml.safe_load(value)
    try:
        return Recipe.model_validate(fields)
    except ValidationError as error:
        raise ValueError(f"recipe {path}:\n" + "\n".join(_explain(problem) for problem in error.errors())) from error


def _explain(problem: Mapping[str, Any]) -> str:
    *sections, name = problem["loc"] or ("recipe",)
    where = ".".join(map(str, problem["loc"]))
    if problem["type"] != "extra_forbidden":
        return f"  {where}={problem['input']!r}: {problem['msg']}"
    model: Any = Recipe
    for key in sections:
        model = model.model_fields[key].annotation
    nearest = difflib.get_close_matches(str(name), model.model_fields, n=1, cutoff=0)
    return f"  {where} is no key of a recipe; did you mean {nearest[0]!r}?"
