"""The options of the ablations. The docstring is the help text of the command."""

from dataclasses import dataclass
from typing import Annotated

from condense.eval.options import Option
from condense.eval.training_options import TrainingOptions


@dataclass(frozen=True, kw_only=True)
class AblationOptions(TrainingOptions):
    """The ablations of structured autoregressivity, on folded and stock Llamas and on a diffusion model of images."""

    # Results are stored under the weights of the reference.
    reference: Annotated[
        str | None,
        Option(
            "Llama with the same tokenizer that judges generated texts; by default, one is trained first.",
            may_change=True,
        ),
    ] = None
    ranks: Annotated[int, Option("Processes that share the models to train.", min=1, may_change=True)] = 1
