"""The models to train: for each property the values of its switch, for language models and for a diffusion model.

Every property is also halved: half of the steps, of the sharing, of the given states, of the targets, or of what a
target says. These halves have no common unit.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

PROPERTIES = {
    "task_subdivision": "tokens or denoising steps: k times fewer steps",
    "weight_sharing": "k models divide the steps",
    "teacher_forcing": "one of k states is given, the others are the model's own",
    "frequent_supervision": "a share of the states has no target",
    "complete_supervision": "a share of each target is masked",
}
LANGUAGE, IMAGES = ("folded", "stock"), ("diffusion",)
MODELS = LANGUAGE + IMAGES
NEUTRAL = "none"
CONTROL = "fresh"  # a variant whose missing targets are chosen anew each time: fewer targets, but as many states


class Value(NamedTuple):
    """A value of a switch: `level` is k or a share, `variant` is a way to ablate, `objective` is that of the recipe."""

    variant: str
    level: float
    objective: dict[str, Any]


class Cell(NamedTuple):
    """A model to train. `ablated` is the property, or `NEUTRAL` for the unablated model, which all properties share."""

    ablated: str
    model: str
    variant: str
    level: float
    seed: int

    @property
    def folder(self) -> str:
        parts = [self.ablated, self.model, self.variant, f"{self.level:g}", str(self.seed)]
        return "-".join(part for part in parts if part)


KS, SHARES = (2, 4, 8), (0.25, 0.5, 0.75, 0.9)
# For each property: the objective of language models, its field for the level, and the field of `denoising`.
OBJECTIVES = {
    "task_subdivision": ("multi_token", "tokens", "steps"),
    "weight_sharing": ("position_experts", "experts", "experts"),
    "teacher_forcing": ("free_running", "steps", "free_running"),
    "frequent_supervision": ("missing_targets", "rate", "missing"),
    "complete_supervision": ("partial_logits", "rate", "mask"),
}
Variants = list[tuple[str, Sequence[float], dict[str, Any]]]  # names, levels and further fields of the objective
ONE_WAY: Variants = [("", KS, {})]
VARIANTS: dict[str, Variants] = {
    "task_subdivision": ONE_WAY,
    "weight_sharing": [(split, KS, {"split": split}) for split in ("interval", "modulo")],
    "teacher_forcing": [
        *(
            (name, levels, {"feedback": name})
            for name, levels in (("sample", KS), ("argmax", (2, 4)), ("expected", (2, 4)))
        ),
        ("branch", (2,), {"feedback": "branch", "samples": 2, "width": 4}),  # a single value, as it costs the most
    ],
    "frequent_supervision": [
        ("ignore", SHARES, {"unknown": "ignore"}),
        ("free_run", (0.5, 0.9), {"unknown": "free_run"}),
        (CONTROL, (0.5,), {"fixed": False}),
    ],
    "complete_supervision": [("", SHARES, {})],
}


def values_of(name: str, model: str, small: bool = False) -> list[Value]:
    """Returns the values of a property for a kind of model; in a small grid, only halved ones."""
    kind, field, field_of_images = OBJECTIVES[name]
    is_image, variants = model in IMAGES, VARIANTS[name]
    if is_image:
        kind, field = "denoising", field_of_images
        variants = ONE_WAY if name == "teacher_forcing" else variants
    values = []
    for variant, levels, more in variants:
        for level in levels:
            given = 1000 // level if is_image and name == "task_subdivision" else level
            values.append(Value(variant, level, {"kind": kind, field: given, **more}))
    return [value for value in values if is_halved(value.level)] if small else values


def is_halved(level: float) -> bool:
    return level in (2, 0.5)


def is_seen_by_loss(name: str, model: str) -> bool:
    """Whether the validation loss shows what a property costs. For a diffusion model with fewer steps it does not: the
    noise levels are the same at any number of steps, so only samples show the cost."""
    return (name, model) != ("task_subdivision", "diffusion")


def objective_of(cell: Cell) -> dict[str, Any]:
    if cell.ablated == NEUTRAL:
        return {"kind": "denoising" if cell.model in IMAGES else "next_token"}
    values = values_of(cell.ablated, cell.model)
    return next(value.objective for value in values if (value.variant, value.level) == (cell.variant, cell.level))


def cells_of(name: str, seeds: range, small: bool = False) -> list[Cell]:
    """Returns the models of one property; for each kind and seed, the unablated model comes first."""
    found = []
    for model in MODELS:
        for seed in seeds:
            found.append(Cell(NEUTRAL, model, "", 0, seed))
            found += [Cell(name, model, value.variant, value.level, seed) for value in values_of(name, model, small)]
    return found
