"""The options of experiments that train their own models."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from .options import Option, Options


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(Options):
    """Texts, seeds and size. Raises `ValueError` for an invalid combination of texts."""

    # Results are stored under the texts, not under the names of the files.
    text: Annotated[
        Path | None, Option("Text to train on; default WikiText-2's training text from the hub.", may_change=True)
    ] = None
    held_out: Annotated[
        Path | None, Option("Text to evaluate on; default WikiText-2's test text from the hub.", may_change=True)
    ] = None
    seeds: Annotated[int, Option("Models of each kind, with seeds from 0 on.", min=1, may_change=True)] = 3
    small: Annotated[
        bool, Option("Tiny models, a generated text and a few steps, without files or hub.", flags=("--small",))
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.small and (self.text is not None or self.held_out is not None):
            raise ValueError("--small makes its own text: leave out --text and --held-out, or leave out --small.")
        if (self.text is None) != (self.held_out is None):
            raise ValueError("--text and --held-out belong together: pass both, or none for WikiText-2 of the hub.")
        if self.text is not None and self.held_out is not None and self.text.resolve() == self.held_out.resolve():
            raise ValueError(f"{self.text}: text to train on and to evaluate with; pass a different held-out text.")
