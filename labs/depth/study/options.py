"""The options of the experiments on depth. The docstring is the help text of the command."""

from dataclasses import dataclass
from typing import Annotated, Literal

from condense.eval.options import Option
from condense.eval.training_options import TrainingOptions


@dataclass(frozen=True, kw_only=True)
class DepthOptions(TrainingOptions):
    """The experiments on continuous depth: a flow with a control in place of a GPT-2's middle layers."""

    tokenizer: Annotated[
        Literal["gpt2", "text"],
        Option("gpt2 from the hub, or text: a byte-level BPE of at most 50,257 tokens trained on --text."),
    ] = "gpt2"
    # The experiment stores the fingerprint of the weights.
    model: Annotated[
        str | None,
        Option(
            "Llama for the experiment swap, folder, hub id or GGUF file; default HuggingFaceTB/SmolLM2-135M.",
            may_change=True,
        ),
    ] = None
