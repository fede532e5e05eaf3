"""A small denoiser of images: diffusers' UNet2DModel, or several of them, which divide the time steps.

Axes: B images.
"""

from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..data.digits import MAX_VALUE, SIDE

Split = Literal["interval", "modulo"]
LONGEST = 1000  # steps: the times that a network is given are on the scale of this number
GROUPS = 8  # of channels, in each normalisation and each head of attention
MAX_LEVELS = 4  # each after the first halves the side of an image, from 8 pixels to 1


class DenoiserConfig(PreTrainedConfig):
    """`steps` of the diffusion are divided among the experts in intervals, or by the rest of the division by k."""

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
        """Nothing: diffusers has initialised its modules."""

    def share_out(self, num_experts: int, split: Split) -> None:
        """Makes `num_experts` experts of the only one, with its weights each.

        Raises `ValueError` for a model with another number of experts already.
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
        """The number of the expert that each time belongs to."""
        config = self.config
        if config.split == "modulo":
            return times % config.num_experts
        return times * config.num_experts // config.steps

    def forward(self, images: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """The noise [B, 1, 8, 8] in `images` [B, 1, 8, 8] at `times` [B], from 0 to `steps` - 1, or between.

        A network is given the fraction of time as a step out of 1,000: at any T, the same number for the same noise.
        """
        scaled = (times + 1) * (LONGEST // self.config.steps) - 1
        noise, images = torch.zeros_like(images, dtype=torch.float32), images.to(self.dtype)
        if len(self.experts) == 1:
            return self.experts[0](images, scaled).sample.float()
        owners = self.owners(times)
        for number, expert in enumerate(self.experts):
            rows = (owners == number).nonzero().flatten()
            # Ranks reduce gradients in the same order only if each uses all weights: an idle expert reads an image too.
            share = 1.0 if len(rows) else 0.0
            rows = rows if len(rows) else rows.new_zeros(1)
            noise = noise.index_add(0, rows, share * expert(images[rows], scaled[rows]).sample.float())
        return noise


def make_unet(config: DenoiserConfig) -> Any:
    """A `UNet2DModel` with weights from torch's random generator."""
    from diffusers import UNet2DModel  # takes seconds

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
