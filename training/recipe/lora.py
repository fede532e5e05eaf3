"""The keys of adapters."""

from pydantic import Field

from .section import Section


class LoRA(Section):
    """Low-rank matrices beside linear maps, which are trained alone: W x + (alpha / rank) B A x."""

    rank: int = Field(16, ge=1)
    alpha: int = Field(32, ge=1)
    dropout: float = Field(0.0, ge=0, lt=1, description="of the input of the adapters")
    targets: list[str] = Field(
        ["q_proj", "k_proj", "v_proj", "o_proj"], min_length=1, description="linear maps of each layer, or lm_head"
    )
