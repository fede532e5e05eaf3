"""The options of `condense study memory`. The docstring is the help text of the command."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from condense.utils.memory_options import parse_share

from ..options import NAMES, Option, Options, check_rate

# What a token sees of the text before its segment.
MEMORIES = {
    "folded": "folded: the layer's output, all segments",
    "folded_1": "folded, gradients within a segment",
    "folded_2": "folded, gradients across 2 segments",
    "folded_4": "folded, gradients across 4 segments",
    "transformer_xl": "Transformer-XL: the layer's input",
    "sliding_window": "sliding window of two segments",
    "full_attention": "full attention",
    "no_memory": "no memory",
}


SHARE = "share "  # prefix of a memory's name with shares of the layers' outputs


def label(memory: str) -> str:
    return MEMORIES.get(memory, f"folded, {memory}")


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(Options):
    """Models of equal size that differ only in their memory, trained alike: loss by text before.

    They begin with the same random weights or, with --first-steps, with one model trained without memory.

    Measures the loss of the same segments of the held-out text with 0, 1, 2 ... segments before them.
    """

    # Results are stored under the texts, not under the names of the files.
    text: Annotated[
        Sequence[str], Option("Files or glob patterns to train on; repeat it for several.", may_change=True)
    ]
    held_out: Annotated[Sequence[str], Option("Files or glob patterns to evaluate on.", may_change=True)]
    memories: Annotated[
        Sequence[str],
        Option(f"Any of {', '.join(MEMORIES)}.", spelling=NAMES, choices=tuple(MEMORIES), may_change=True),
    ] = tuple(MEMORIES)
    shares: Annotated[
        Sequence[str],
        Option(
            "Further folded models, by the share of a layer's output in its memory: 0.2, or 1:0:0:0 for each layer.",
            spelling=NAMES,
            may_change=True,
        ),
    ] = ()
    segment_length: Annotated[int, Option("Tokens of a segment.", min=2)] = 64
    total_length: Annotated[int, Option("Tokens per text in training.", flags=("--length",), min=4)] = 1024
    segments_before: Annotated[int, Option("Segments before a segment in the evaluation, at most.", min=2)] = 63
    segments_held_out: Annotated[int, Option("Segments of held-out text, these included.", min=4)] = 512
    width: Annotated[int, Option("Hidden size.", min=8)] = 128
    layers: Annotated[int, Option(min=1)] = 4
    vocab_size: Annotated[
        int, Option("Tokens of a BPE that is trained on the text.", flags=("--vocabulary",), min=260)
    ] = 2048
    batch: Annotated[int, Option("Texts per optimizer step.", min=1)] = 16
    steps: Annotated[int, Option("Optimizer steps.", min=2)] = 400
    first_steps: Annotated[
        int, Option("Optimizer steps of a stock model on single segments, from which all models start.", min=0)
    ] = 0
    learning_rate: Annotated[float, Option("Highest learning rate.", check=check_rate)] = 3e-3
    seeds: Annotated[int, Option("Models of each kind, with seeds from 0 on.", min=1, may_change=True)] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        for share in self.shares:
            found = parse_share(share)
            if isinstance(found, list) and len(found) != self.layers:
                raise ValueError(
                    f"the memory share {share!r} has {len(found)} values for {self.layers} layers: pass one per layer."
                )
        if len({str(parse_share(share)) for share in self.shares}) < len(self.shares):
            raise ValueError(f"shares={list(self.shares)}: name each once.")
        if self.segments_held_out <= self.segments_before:
            raise ValueError(
                f"segments_held_out={self.segments_held_out}: no segment has segments_before={self.segments_before} "
                "before it; use more of the held-out text."
            )
        if self.total_length % self.segment_length or self.segments < 2:
            raise ValueError(
                f"total_length={self.total_length}: pass a multiple of segment_length={self.segment_length}, at least "
                "twice as much."
            )
        if self.width % 32:
            raise ValueError(f"width={self.width}: heads are 32 wide; use a multiple of 32.")

    @property
    def compared(self) -> tuple[str, ...]:
        """Returns the names of all memories."""
        return (*self.memories, *(f"{SHARE}{share}" for share in self.shares))

    @property
    def segments(self) -> int:
        """Returns the number of segments of a text in training."""
        return self.total_length // self.segment_length
