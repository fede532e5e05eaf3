"""The options of `condense study ingredients`. The docstring is the help text of the command."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from condense.eval.options import NAMES, Option, Options, check_rate

BASE, FOLDED = "rotary", "folded"


class Ingredient(NamedTuple):
    """A model of the comparison: its title, its twin, and the one thing in which they differ."""

    title: str
    twin: str | None = BASE
    model: str = "stock"  # the model's kind in a recipe
    layers: int = 2
    learned_positions: bool = False  # for the kind without rotary ones
    steps: float = 1.0  # times the steps of the others
    jitter: float | None = None  # of durations in training


INGREDIENTS = {
    BASE: Ingredient("stock Llama: rotary positions", twin=None),
    "learned": Ingredient("learned positions", model="positions", learned_positions=True),
    "no_positions": Ingredient("no positions", model="positions"),
    "one_layer": Ingredient("one layer", layers=1),
    "four_layers": Ingredient("four layers", layers=4),
    "quarter": Ingredient("a quarter of the tokens", steps=0.25),
    "fourfold": Ingredient("four times the tokens", steps=4.0),
    FOLDED: Ingredient("folded", model="condense"),
    "jitter": Ingredient("folded, durations of 0.9 to 1.1 in training", FOLDED, model="condense", jitter=0.1),
}
TOTAL_LENGTH = 40  # tokens of a text, at most


@dataclass(frozen=True, kw_only=True)
class IngredientOptions(Options):
    """Twins that differ in one thing, trained alike to count and to add whole tokens: how do they read fractions?

    After training, each is tested by the probes of counting and of sums.
    """

    ingredients: Annotated[
        Sequence[str],
        Option(f"Any of {', '.join(INGREDIENTS)}.", spelling=NAMES, choices=tuple(INGREDIENTS), may_change=True),
    ] = tuple(INGREDIENTS)
    records: Annotated[int, Option("Records of each probe's data set, from the start.", min=1)] = 100
    questions: Annotated[int, Option("Texts to train on, half to count and half to add.", min=200)] = 200_000
    segment_length: Annotated[int, Option("Tokens of a segment of the folded models.", min=2)] = 16
    width: Annotated[int, Option("Hidden size.", min=8)] = 128
    batch: Annotated[int, Option("Texts per optimizer step.", min=1)] = 64
    steps: Annotated[int, Option("Optimizer steps, a multiple of four.", min=8)] = 1000
    learning_rate: Annotated[float, Option("Highest learning rate.", check=check_rate)] = 3e-3
    seeds: Annotated[int, Option("Models of each kind, with seeds from 0 on.", min=1, may_change=True)] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        for ingredient in self.ingredients:
            twin = INGREDIENTS[ingredient].twin
            if twin is not None and twin not in self.ingredients:
                raise ValueError(f"{ingredient} is compared with its twin {twin}: add {twin}.")
        if self.steps % 4:
            raise ValueError(f"steps={self.steps}: one model has a quarter of them; pass a multiple of four.")
        if self.segment_length > TOTAL_LENGTH // 2:
            raise ValueError(
                f"segment_length={self.segment_length}: a text has up to {TOTAL_LENGTH} tokens, and if it fits into a "
                f"segment it doesn't test the memory; pass {TOTAL_LENGTH // 2} or less."
            )
        if self.width % 8:
            raise ValueError(f"width={self.width}: four heads of an even size need a multiple of 8.")
