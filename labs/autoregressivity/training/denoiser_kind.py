"""The denoiser as a model kind for recipes."""

from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field

from condense.extras import check_installed
from condense.hub import loading
from condense.training.recipe.models import MODELS, ModelKind

from .denoiser import GROUPS, MAX_LEVELS, DenoiserConfig, DenoiserModel


def _channels(values: list[int]) -> list[int]:
    # With one channel in a group, the normalisation would remove what the time adds to a channel.
    if not 1 <= len(values) <= MAX_LEVELS or any(value < 2 * GROUPS or value % GROUPS for value in values):
        raise ValueError(f"give 1 to {MAX_LEVELS} multiples of {GROUPS} of at least {2 * GROUPS}, such as [24, 48]")
    return values


@MODELS.register
class DenoiserKind(ModelKind):
    """A denoiser with random weights drawn with the recipe's `seed`, or loaded from a checkpoint."""

    kind: Literal["denoiser"] = "denoiser"
    source: str = Field("", description="folder of a denoiser; empty: random weights")
    channels: Annotated[list[int], AfterValidator(_channels)] = Field([24, 48], description="at each resolution")
    layers: int = Field(1, ge=1, description="at each resolution")

    is_of_images = True
    attention_implementations = ("auto",)

    def load_config(self) -> DenoiserConfig:
        check_installed("model.kind=denoiser", "autoregressivity")
        if not self.source:
            return DenoiserConfig(channels=self.channels, layers=self.layers)
        config = loading.load_config(DenoiserConfig, self.source)
        for name in {"channels", "layers"} & self.model_fields_set:
            given, present = getattr(self, name), getattr(config, name)
            if given != present:
                raise ValueError(f"model.{name}={given}, and the model in {self.source!r} has {present}: leave it out.")
        return config

    def load(self, attention: str, attention_dropout: float, **options: Any) -> DenoiserModel:
        if attention_dropout:
            raise ValueError(f"attention_dropout={attention_dropout}: model.kind=denoiser has none; set it to 0.")
        if self.source:
            return loading.load_model(DenoiserModel, self.source, dtype=torch.float32, **options)
        with torch.device(options.get("device_map", "cpu")):
            return DenoiserModel(self.load_config())

    def load_tokenizer(self, config: Any) -> None:
        """Returns None: pixels are their own tokens."""

    def check(self, attention: str, gradient_checkpointing: bool) -> None:
        super().check(attention, gradient_checkpointing)
        if gradient_checkpointing:
            raise ValueError("gradient_checkpointing=true: model.kind='denoiser' has none; leave it out")

    def obstacle_to_zero_3(self, tokens: int, vocab_size: int, equal_lengths: bool) -> str:
        return "ranks run a denoiser unequally often"
