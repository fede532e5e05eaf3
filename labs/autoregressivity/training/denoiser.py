"""A small denoiser of images: one UNet2DModel of diffusers, or several that share out the time steps.

Axes: B images.
"""

from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from condense.training.data.digits import MAX_VALUE, SIDE

Split = Literal["interval", "modulo"]
LONGEST = 1000  # steps; times given to a network are scaled to this number
GROUPS = 8  # of channels, in each normalisation and attention head
MAX_LEVELS = 4  # each after the first halves the image's side, from 8 pixels to 1


class DenoiserConfig(PreTrainedConfig):
    """The experts share out the `steps` of the diffusion: in intervals, or by the remainder modulo their number."""

    model_type = "condense_denoiser"
    channels: list[int] | tuple[int, ...] = (24, 48)
    layers: int = 1
    steps: int = LONGEST
    num_experts: int = 1
    split: str = "interval"
    vocab_size: int = MAX_VALUE + 1


class DenoiserModel(PreTrainedModel):
    """Predicts the noise in images."""

    config_class = DenoiserConfig
    main_input_name = "images"

    def __init__(self, config: DenoiserConfig):
        super().__init__(config)
        self.experts = nn.ModuleList(make_unet(config) for _ in range(config.num_experts))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Does nothing: diffusers has already initialised its modules."""

    def share_out(self, num_experts: int, split: Split) -> None:
        """Copies the only expert `num_experts` times, each copy with its own weights.

        Raises `ValueError` if the model already has a different number of experts.
        """
        present = len(self.experts)
        if present not in (1, num_experts) or (present > 1 and self.config.split != split):
            raise ValueError(
                f"the model has {present} experts by {self.config.split}, and the objective asks for {num_experts} by "
                f"{split}: start from a model with one, or leave model.source out."
            )
        weights = self.experts[0].state_dict()
        while len(self.experts) < num_experts:
            self.experts.append(make_unet(self.config))
            self.experts[-1].load_state_dict(weights)
        self.config.num_experts, self.config.split = num_experts, split

    def owners(self, times: torch.Tensor) -> torch.Tensor:
        """Returns the number of the expert for each time."""
        config = self.config
        if config.split == "modulo":
            return times % config.num_experts
        return times * config.num_experts // config.steps

    def forward(self, images: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """Returns the noise [B, 1, 8, 8] in `images` [B, 1, 8, 8] at `times` [B], which range from 0 to `steps` - 1.

        A network receives times rescaled to 1,000 steps, so the same noise has the same number at any T.
        """
        scaled = (times + 1) * (LONGEST // self.config.steps) - 1
        noise, images = torch.zeros_like(images, dtype=torch.float32), images.to(self.dtype)
        if len(self.experts) == 1:
            return self.experts[0](images, scaled).sample.float()
        owners = self.owners(times)
        for number, expert in enumerate(self.experts):
            rows = (owners == number).nonzero().flatten()
            # Ranks reduce gradients in one order only if each uses all weights: an idle expert reads an image too.
            share = 1.0 if len(rows) else 0.0
            rows = rows if len(rows) else rows.new_zeros(1)
            noise = noise.index_add(0, rows, share * expert(images[rows], scaled[rows]).sample.float())
        return noise


def make_unet(config: DenoiserConfig) -> Any:
    """Returns a `UNet2DModel` with weights from torch's random generator."""
    from diffusers import UNet2DModel  # slow to import

    levels = len(config.channels)
    return UNet2DModel(
        sample_size=SIDE,
        in_channels=1,
        out_channels=1,
        block_out_channels=tuple(config.channels),
        layers_per_block=config.layers,
        down_block_types=("DownBlock2D",) * levels,
        up_block_types=("UpBlock2D",) * levels,
        norm_num_groups=GROUPS,
        attention_head_dim=GROUPS,
    )
