"""The options of `condense study healing`. The docstring is the help text of the command."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from condense.utils.memory_options import parse_share, parse_sink

from ..options import NAMES, NUMBERS, Option, Options, check_rate

AUTO = "auto"  # the sink that folding takes where none is given
TEACHER = "teacher"  # the untrained stock model, which is always measured
UNTRAINED = "transformer_xl"  # the stock model's weights, with memories of each layer's input
# The trained model and its objective.
METHODS = {
    "stock": "stock model, next tokens",
    "full": "folded model, next tokens",
    "distill": "folded model, distillation",
    "lora": "adapters of the folded model, distillation",
    UNTRAINED: "not trained, Transformer-XL's memory",
}


@dataclass(frozen=True, kw_only=True)
class HealingOptions(Options):
    """Loss against tokens while a folded model learns to use its memory, by method and segment length.

    Trains on texts that the model samples from itself, or on --text.
    """

    model: Annotated[str, Option("Stock model of a family that can be folded: folder, hub id or GGUF file.")]
    # Results are stored under the texts, not under the names of the files.
    text: Annotated[
        str | None, Option("File or glob pattern to train on; default the model's own samples.", may_change=True)
    ] = None
    held_out: Annotated[
        str | None, Option("File or glob pattern to evaluate on; default the model's own samples.", may_change=True)
    ] = None
    segment_lengths: Annotated[
        Sequence[int], Option("Tokens of a segment.", flags=("--segment-length",), spelling=NUMBERS, may_change=True)
    ] = (32, 64, 128)
    methods: Annotated[
        Sequence[str],
        Option(
            f"Any of {', '.join(METHODS)}; full also trains stock, its control.",
            spelling=NAMES,
            choices=tuple(METHODS),
            may_change=True,
        ),
    ] = tuple(METHODS)
    shares: Annotated[
        Sequence[str],
        Option(
            "Shares of a layer's output in its memory, for trained models: 1 is the fold, 0 Transformer-XL's memory, "
            "1:0:0:0:0 has one for each layer.",
            spelling=NAMES,
            may_change=True,
        ),
    ] = ("1",)
    sink_token_id: Annotated[
        str,
        Option(
            "Token of the attention sink of folded models: its id, none, or auto, the bos_token_id. Toys want none.",
            may_change=True,  # without a sink the settings are those of earlier versions
        ),
    ] = AUTO
    total_length: Annotated[int, Option("Tokens per text.", flags=("--length",), min=2)] = 512
    batch: Annotated[int, Option("Texts per optimizer step.", min=1)] = 16
    steps: Annotated[int, Option("Optimizer steps.", min=2)] = 256
    learning_rate: Annotated[float, Option("For training all weights.", check=check_rate)] = 1e-3
    lora_learning_rate: Annotated[float, Option("For training adapters.", check=check_rate)] = 3e-3
    rank: Annotated[int, Option("Rank of the adapters.", min=1)] = 16
    sequences: Annotated[int, Option("Held-out texts.", min=2)] = 64
    seeds: Annotated[int, Option("Runs of each kind, with seeds from 0 on.", min=1, may_change=True)] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.text is None) != (self.held_out is None):
            raise ValueError("--text and --held-out belong together: pass both, or none for the model's own samples.")
        if set(self.methods) <= {"stock", UNTRAINED}:
            raise ValueError(f"methods={list(self.methods)}: name one that trains a folded model.")
        if len({str(parse_share(share)) for share in self.shares}) < len(self.shares):
            raise ValueError(f"shares={list(self.shares)}: name each once.")
        if self.sink_token_id != AUTO:
            parse_sink(self.sink_token_id)
        if "1" not in self.shares:
            raise ValueError(f"shares={list(self.shares)}: add 1, the fold whose cost is to be won back.")
        if longest := [length for length in self.segment_lengths if 3 * length >= self.total_length]:
            raise ValueError(
                f"segments of {longest[0]} tokens: texts of {self.total_length} tokens have fewer than four of them, "
                "so memory beyond one segment can't be seen; use longer texts or shorter segments."
            )
