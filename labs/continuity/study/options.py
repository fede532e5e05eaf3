"""The options of the continuity probes. The docstring is the help text of the command."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from condense.eval.options import Dtype, Models, Option, Options

Rule = Literal["exact", "published"]


@dataclass(frozen=True, kw_only=True)
class ProbeOptions(Options):
    """The continuity experiments: fractions of tokens, and inputs between two tokens."""

    models: Models
    data: Annotated[
        Path | None, Option("File of records in the form of the probe's own data set, which is the default.")
    ] = None
    limit: Annotated[int | None, Option("Take this many records from the start; default all.", min=1)] = None
    template: Annotated[
        str,
        Option(
            "Form of the prompts: sentence; or listed (counting), for models that need it; spaced (sums), digits apart "
            "for tokenizers that join them; published (space, boolean), the prompts of the paper's code."
        ),
    ] = "sentence"
    spans: Annotated[
        Rule,
        Option(
            "Tokens that shrink in counting, events and sums: exact, only the words' own; or published, all from the "
            "first token that contains the word to the last."
        ),
    ] = "exact"
    classes: Annotated[
        Rule,
        Option("Tokens that count as an answer: exact, the answer itself; or published, all that contain it."),
    ] = "exact"
    position_anchor: Annotated[
        str | None,
        Option(
            "Place of a token in its interval, end or start; default end, but start for learned positions, and a "
            "folded model's own.",
            may_change=True,
        ),
    ] = None
    dtype: Dtype = "float32"
    attention: Annotated[str, Option("eager, sdpa, or auto: the model's own choice.", may_change=True)] = "auto"
    timed: Annotated[
        bool,
        Option("Also measure the time saved by running all factors together.", flags=("--speed",), may_change=True),
    ] = False
