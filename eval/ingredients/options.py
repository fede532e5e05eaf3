"""The options of `condense eval ingredients`. The docstring is the help text of the command."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from ..options import NAMES, Option, Options, check_rate

BASE, FOLDED = "rotary", "folded"
# How a model differs from its twin, and the twin.
INGREDIENTS = {
    BASE: ("stock Llama: rotary positions", None),
    "learned": ("learned positions", BASE),
    "no_positions": ("no positions", BASE),
    "one_layer": ("one layer", BASE),
    "four_layers": ("four layers", BASE),
    "quarter": ("a quarter of the tokens", BASE),
    "fourfold": ("four times the tokens", BASE),
    FOLDED: ("folded", BASE),
    "jitter": ("folded, durations of 0.9 to 1.1 in training", FOLDED),
}
LAYERS = {"one_layer": 1, "four_layers": 4}  # of the others: 2
STEPS = {"quarter": 0.25, "fourfold": 4}  # times those of the others
JITTER = 0.1
TOTAL_LENGTH = 40  # tokens of a text, at most


@dataclass(frozen=True, kw_only=True)
class IngredientOptions(Options):
    """Twins that differ in one thing, trained alike to count and to add whole tokens: how do they read fractions?

    After training each is asked by the probes of counting and of sums.
    """

    ingredients: Annotated[
        Sequence[str],
        Option(f"Of {', '.join(INGREDIENTS)}.", spelling=NAMES, choices=tuple(INGREDIENTS), may_change=True),
    ] = tuple(INGREDIENTS)
    records: Annotated[int, Option("Of each probe's data set, from the start.", min=1)] = 100
    questions: Annotated[int, Option("Texts to train on, half to count and half to add.", min=200)] = 200_000
    segment_length: Annotated[int, Option("Tokens of a segment of the folded models.", flags=("--segment",), min=2)] = (
        16
    )
    width: Annotated[int, Option("Hidden size.", min=8)] = 128
    batch: Annotated[int, Option("Texts of an optimizer step.", min=1)] = 64
    steps: Annotated[int, Option("Optimizer steps, a multiple of four.", min=8)] = 1000
    learning_rate: Annotated[float, Option("At its highest.", check=check_rate)] = 3e-3
    seeds: Annotated[int, Option("Models of each kind, with seeds from 0 on.", min=1, may_change=True)] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        for ingredient in self.ingredients:
            _, twin = INGREDIENTS[ingredient]
            if twin is not None and twin not in self.ingredients:
                raise ValueError(f"{ingredient} is compared with its twin {twin}: name {twin}, too.")
        if self.steps % 4:
            raise ValueError(f"steps={self.steps}: one model has a quarter of them; pass a multiple of four.")
        if self.segment_length > TOTAL_LENGTH // 2:
            raise ValueError(
                f"segment_length={self.segment_length}: a text has up to {TOTAL_LENGTH} tokens, and one that fits into "
                f"a segment says nothing of the memory; pass {TOTAL_LENGTH // 2} or less."
            )
        if self.width % 8:
            raise ValueError(f"width={self.width}: four heads of an even size need a multiple of 8.")
