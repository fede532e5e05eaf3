"""The options of `condense profile`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from ..options import NAMES, NUMBERS, Option, Options, Spelling

DEFAULT_KINDS = ("folded", "stock")
SWITCHES = {"off": False, "on": True}


def _switches(text: str) -> list[bool]:
    if wrong := [item for item in text.split(",") if item not in SWITCHES]:
        raise ValueError(f"{wrong}: write off, on, or off,on.")
    return [SWITCHES[item] for item in text.split(",")]


ON_OFF = Spelling(_switches, lambda values: ",".join("on" if value else "off" for value in values or ()))


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(Options):
    """Memory and speed against length, folded against stock, each case in its own process (table I, figures 5-7).

    With --schedules: compares a folded model's schedules, and shows which one "auto" picks. With --modules: the memory
    of a training step by module.
    """

    configs: Annotated[
        Sequence[str],
        Option(
            "Folder, hub id, GGUF file, or NAME=FOLDER, of any causal language model, to profile its shape with random "
            "weights; repeat it for several.",
            flags=("--config",),
        ),
    ] = ()
    models: Annotated[
        Sequence[str],
        Option("A checkpoint to profile with its weights, beside others; repeat it for several.", flags=("--model",)),
    ] = ()
    preset: Annotated[
        Literal["table1"] | None, Option("table1: the paper's shape, and its grid for every axis not given.")
    ] = None
    kinds: Annotated[
        Sequence[str] | None,
        Option(
            "For a Llama's shape: folded, stock, stock_chunked_loss, sliding_window, separated by commas. Default: the "
            "first two. Other models are stock.",
            spelling=NAMES,
        ),
    ] = None
    modes: Annotated[Sequence[str] | None, Option("training, prefill, decoding.", spelling=NAMES)] = None
    lengths: Annotated[Sequence[int] | None, Option("Tokens; k and m are 1,024 and 1,048,576.", spelling=NUMBERS)] = (
        None
    )
    batches: Annotated[Sequence[int] | None, Option("Texts in a batch.", spelling=NUMBERS)] = None
    segments: Annotated[
        Sequence[int] | None, Option("Tokens of a segment.", flags=("--segment-length",), spelling=NUMBERS)
    ] = None
    attentions: Annotated[
        Sequence[str] | None,
        Option(
            "Implementations: auto, sdpa, eager, blocked, flash_attention_2 ...", flags=("--attention",), spelling=NAMES
        ),
    ] = None
    checkpointing: Annotated[Sequence[bool], Option("Gradient checkpointing: off, on, or off,on.", spelling=ON_OFF)] = (
        False,
    )
    optimizer: Annotated[
        Sequence[bool] | None,
        Option(
            "AdamW's step and states in training: off, on, or off,on. Default off; both in table1.", spelling=ON_OFF
        ),
    ] = None
    vocab_size: Annotated[
        int | None, Option("Token types, instead of each shape's own.", flags=("--vocabulary",), min=2)
    ] = None
    dtype: Annotated[str, Option("bfloat16, float32; auto: bfloat16 on CUDA, else float32.")] = "auto"
    repeats: Annotated[int, Option("Measurements of each case.", min=1)] = 3
    snapshots: Annotated[bool, Option("Keep a torch.cuda.memory snapshot of each case.")] = False
    schedules: Annotated[
        bool, Option("Compare only a folded model's two schedules, and whether auto picks the faster one.")
    ] = False
    modules: Annotated[bool, Option("Measure only a training step's memory, by module and kind of tensor.")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.modules and (self.schedules or self.snapshots):
            raise ValueError("--modules is a separate measurement: leave out --schedules and --snapshots.")
        named = [*self.configs, *self.models]
        if (self.preset is None) == (not named):
            found = f"--preset {self.preset} beside {', '.join(named)}" if named else "nothing to profile"
            raise ValueError(f"{found}: pass either --preset, or models with --config or --model.")
        if self.vocab_size is not None and self.models:
            raise ValueError(f"--vocabulary {self.vocab_size}: a checkpoint has its own; leave out --model.")
        given = {
            "--optimizer": any(self.optimizer or ()),
            "--kinds": self.kinds,
            "--checkpointing": any(self.checkpointing),
            "--snapshots": self.snapshots,
        }
        if self.schedules and (self.models or len(self.configs) > 1):
            raise ValueError(f"--schedules compares a folded model with itself: pass one --config, not {named}.")
        if self.schedules and (wrong := [name for name, value in given.items() if value]):
            raise ValueError(f"--schedules compares a folded model with itself: leave out {', '.join(wrong)}.")
