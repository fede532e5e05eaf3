"""The frequencies of rotary positions, and the tables of cosines and sines made from them.

Axes: R rows of a chunk, T tokens of a chunk, E head dimension, e half of it.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .configuration import CondenseConfig
from .ops.kernels.rotary import RotaryTables
from .ops.transforms import is_transformed


class RotaryEmbedding(nn.Module):
    """A Llama's rotary embedding, whose frequencies never change in a call.

    In transformers, frequencies of `LENGTH_ROPE_TYPES` follow the longest position of a call, and remain for the next.
    Within `CondenseConfig.check`'s limit on the segment length both are equal; durations may reach beyond it.

    transformers computes the buffers again under these names after it has loaded a model.
    """

    def __init__(self, config: CondenseConfig):
        super().__init__()
        self.config = config
        self.rope_type = config.rope_parameters["rope_type"]
        inv_freq_e, self.attention_scaling = self._rope_parameters()
        self.inv_freq = nn.Buffer(inv_freq_e, persistent=False)
        self.original_inv_freq = nn.Buffer(inv_freq_e.clone(), persistent=False)

    def _rope_parameters(self) -> tuple[torch.Tensor, float]:
        if self.rope_type == "default":
            return self.compute_default_rope_parameters(self.config)
        return ROPE_INIT_FUNCTIONS[self.rope_type](self.config)

    @staticmethod
    def compute_default_rope_parameters(config: CondenseConfig) -> tuple[torch.Tensor, float]:
        """Returns theta^(-2i / E) for i = 0 ... E/2 - 1 in float32, and the factor of the tables."""
        return _default_frequencies(config, torch.float32), 1.0

    @torch.no_grad()
    def forward(self, like: torch.Tensor, position_RT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the cosines and sines [R, T, E] in the dtype and on the device of `like`, computed in float32 or, for
        a float64 model, in float64."""
        inv_freq_e = self._frequencies(like)
        angle_RTe = position_RT[..., None].to(inv_freq_e.dtype) * inv_freq_e
        angle_RTE = torch.cat((angle_RTe, angle_RTe), dim=-1)
        cos_RTE, sin_RTE = angle_RTE.cos() * self.attention_scaling, angle_RTE.sin() * self.attention_scaling
        return cos_RTE.to(like.dtype), sin_RTE.to(like.dtype)

    def _frequencies(self, like: torch.Tensor) -> torch.Tensor:
        """Returns the frequencies [e] at least in float32. The buffer is float32: a float64 model has accurate ones,
        except where the buffer was changed."""
        inv_freq_e = self.inv_freq.to(like.device, torch.promote_types(like.dtype, torch.float32))
        if like.dtype != torch.float64 or self.rope_type != "default":
            return inv_freq_e
        unchanged_e = inv_freq_e == self.original_inv_freq.to(like.device)
        return torch.where(unchanged_e, _default_frequencies(self.config, torch.float64).to(like.device), inv_freq_e)

    def kept_tables(self, first: int, width: int, like: torch.Tensor, make: Callable[[], RotaryTables]) -> RotaryTables:
        """Returns the tables of a segment's positions from `first` on. The first call that needs them runs `make`; they
        are kept while the frequencies stay the same."""
        if is_transformed() or is_in_torch_dispatch_mode():
            return make()
        frequencies = self.inv_freq
        key = first, width, like.dtype, like.device, torch.is_inference_mode_enabled()
        state = id(frequencies), None if frequencies.is_inference() else frequencies._version
        kept = self.__dict__.setdefault("_kept_tables", {})
        if kept.get("state") != state:
            kept.clear()
            kept["state"] = state
        if key not in kept:
            kept[key] = make()
        return kept[key]

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name != "_kept_tables"}

    def _apply(self, fn, recurse=True):
        """Moves only to other devices: in half precision a position of 1,000 would be off by a whole turn."""
        accurate = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in accurate.items():
            moved = getattr(self, name)
            if moved.dtype != buffer.dtype:
                setattr(self, name, buffer.to(moved.device))
        return self


def _default_frequencies(config: CondenseConfig, dtype: torch.dtype) -> torch.Tensor:
    exponents_e = torch.arange(0, config.head_dim, 2, dtype=dtype) / config.head_dim
    return 1.0 / config.rope_parameters["rope_theta"] ** exponents_e
