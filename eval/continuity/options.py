"""The options of the continuity probes. The docstring is the help text of the command."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from ..options import Dtype, Models, Option, Options

Rule = Literal["exact", "published"]


@dataclass(frozen=True, kw_only=True)
class ProbeOptions(Options):
    """The continuity experiments: fractions of tokens, and inputs between two tokens."""

    models: Models
    data: Annotated[Path | None, Option("Records in the form of the probe's own data set; default that data set.")] = (
        None
    )
    limit: Annotated[int | None, Option("Take this many records from the start; default all.", min=1)] = None
    template: Annotated[
        str,
        Option(
            "Prompts: sentence; or listed in counting, for models that need it; spaced in sums, digits apart for "
            "tokenizers that join them; published in space and boolean, those of the paper's code."
        ),
    ] = "sentence"
    spans: Annotated[
        Rule,
        Option(
            "Tokens that shrink in counting, events and sums: exact, those of the words alone; or published, from the "
            "first token that contains the word to the last one."
        ),
    ] = "exact"
    classes: Annotated[
        Rule,
        Option("Tokens that count as an answer: exact, those that are it; or published, those that contain it."),
    ] = "exact"
    position_anchor: Annotated[
        str | None,
        Option(
            "end or start of a token's interval; default end, start for learned positions, or the folded model's own.",
            may_change=True,
        ),
    ] = None
    dtype: Dtype = "float32"
    attention: Annotated[str, Option("eager, sdpa, or auto: the model's own choice.", may_change=True)] = "auto"
    timed: Annotated[
        bool,
        Option("Measure also the time that running the factors together saves.", flags=("--speed",), may_change=True),
    ] = False
