"""The options of the experiments on depth. The docstring is the help text of the command."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from ..options import Option, Options


@dataclass(frozen=True, kw_only=True)
class DepthOptions(Options):
    """The experiments on continuous depth: a flow with a control in the place of a GPT-2's middle layers."""

    # Results are stored under the tokens of the texts, not under the names of the files.
    text: Annotated[
        Path | None, Option("Text to train on; default WikiText-2's training text from the hub.", may_change=True)
    ] = None
    held_out: Annotated[
        Path | None, Option("Text to evaluate on; default WikiText-2's test text from the hub.", may_change=True)
    ] = None
    tokenizer: Annotated[
        Literal["gpt2", "text"],
        Option("gpt2 from the hub, or text: a byte-level BPE of at most 50,257 tokens trained on --text."),
    ] = "gpt2"
    # The experiment stores the fingerprint of the weights.
    model: Annotated[
        str | None,
        Option(
            "Llama whose layers the experiment swap replaces, folder or hub id; default HuggingFaceTB/SmolLM2-135M.",
            may_change=True,
        ),
    ] = None
    seeds: Annotated[int, Option("Models of each kind, with seeds from 0 on.", min=1, may_change=True)] = 3
    small: Annotated[
        bool,
        Option("A tiny model, a generated text and a few steps: seconds, without files or hub.", flags=("--small",)),
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.small and (self.text is not None or self.held_out is not None):
            raise ValueError("--small makes its own text: leave out --text and --held-out, or leave out --small.")
        if (self.text is None) != (self.held_out is None):
            raise ValueError("--text and --held-out belong together: pass both, or none for WikiText-2 of the hub.")
