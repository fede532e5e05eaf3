"""The cases of a benchmark: a variant of a model and a workload of one size."""

from dataclasses import dataclass

import torch

WITHOUT_SEGMENTS = ("stock", "stock_chunked_loss")  # kinds of models
MODES = ("training", "prefill", "decoding")
SCHEDULES = ("sequential", "wavefront")  # on every device; CUDA also has "graph"


@dataclass(frozen=True, kw_only=True)
class ModelVariant:
    """How a model is run.

    `kind` is one of `models.MODEL_KINDS`. `segment_length` is None for stock models, and half the window for a
    sliding-window model. `schedule` is None if the model chooses or has no schedules. With `checkpointing`, a folded
    model recomputes `checkpoint_segments` at a time.
    """

    kind: str
    attention: str = "sdpa"
    segment_length: int | None = None
    schedule: str | None = None
    checkpointing: bool = False
    checkpoint_segments: int = 1
    fixed_decoding: bool = False


@dataclass(frozen=True, kw_only=True)
class BenchmarkCase(ModelVariant):
    """A variant with a workload. `mode` is one of `MODES`; `length` counts tokens of each of `batch` texts.

    With `optimizer`, a training step ends with AdamW's step, and its states stay in memory. `model` is the name of one
    of a profile's models.
    """

    model: str | None = None
    mode: str
    length: int
    batch: int = 1
    optimizer: bool = False


def device_and_dtype(dtype: str) -> tuple[str, str]:
    """Returns the device of this machine, and the number format for it."""
    on_cuda = torch.cuda.is_available()
    chosen = {"auto": "bfloat16" if on_cuda else "float32"}.get(dtype, dtype)
    return "cuda" if on_cuda else "cpu", chosen
