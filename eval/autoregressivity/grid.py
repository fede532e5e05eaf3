"""What is trained: for each property the values of its switch, for language models and for a diffusion model.

Every property is also halved: half as many steps, half of the sharing, half of the given states, half of the targets,
half of what a target says. Half of one has no common unit with half of another.
"""

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
CONTROL = "fresh"  # a variant with another choice of missing targets each time: fewer targets, but as many states


class Value(NamedTuple):
    """A value of a switch: `level` is k or a share, `variant` names a way to ablate; `objective` is the recipe's."""

    variant: str
    level: float
    objective: dict[str, Any]


class Cell(NamedTuple):
    """A model to train. `ablated` is the property, `NEUTRAL` for the unablated one, which all properties share."""

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


def _language(name: str) -> list[Value]:
    match name:
        case "task_subdivision":
            return [Value("", k, {"kind": "multi_token", "tokens": k}) for k in KS]
        case "weight_sharing":
            return [
                Value(split, k, {"kind": "position_experts", "experts": k, "split": split})
                for split in ("interval", "modulo")
                for k in KS
            ]
        case "teacher_forcing":
            free: dict[str, Any] = {"kind": "free_running"}
            sampled = [Value("sample", k, free | {"steps": k, "feedback": "sample"}) for k in KS]
            others = [
                Value(feedback, k, free | {"steps": k, "feedback": feedback})
                for feedback in ("argmax", "expected")
                for k in (2, 4)
            ]
            tree = {"feedback": "branch", "samples": 2, "width": 4}  # the costliest: one value of it
            return [*sampled, *others, Value("branch", 2, free | {"steps": 2} | tree)]
        case "frequent_supervision":
            return [
                *(
                    Value(unknown, rate, {"kind": "missing_targets", "rate": rate, "unknown": unknown})
                    for unknown, rates in (("ignore", SHARES), ("free_run", (0.5, 0.9)))
                    for rate in rates
                ),
                Value(CONTROL, 0.5, {"kind": "missing_targets", "rate": 0.5, "fixed": False}),
            ]
        case "complete_supervision":
            return [Value("", rate, {"kind": "partial_logits", "rate": rate}) for rate in SHARES]
    raise AssertionError(name)


def _images(name: str) -> list[Value]:
    denoising: dict[str, Any] = {"kind": "denoising"}
    match name:
        case "task_subdivision":
            return [Value("", k, denoising | {"steps": 1000 // k}) for k in KS]
        case "weight_sharing":
            return [
                Value(split, k, denoising | {"experts": k, "split": split})
                for split in ("interval", "modulo")
                for k in KS
            ]
        case "teacher_forcing":
            return [Value("", k, denoising | {"free_running": k}) for k in KS]
        case "frequent_supervision":
            return [
                *(
                    Value(unknown, rate, denoising | {"missing": rate, "unknown": unknown})
                    for unknown, rates in (("ignore", SHARES), ("free_run", (0.5, 0.9)))
                    for rate in rates
                ),
                Value(CONTROL, 0.5, denoising | {"missing": 0.5, "fixed": False}),
            ]
        case "complete_supervision":
            return [Value("", rate, denoising | {"mask": rate}) for rate in SHARES]
    raise AssertionError(name)


def values_of(name: str, model: str, small: bool = False) -> list[Value]:
    """The values of a property for a kind of model; of a small grid, the halved ones."""
    values = _images(name) if model in IMAGES else _language(name)
    return [value for value in values if is_halved(value.level)] if small else values


def is_halved(level: float) -> bool:
    return level in (2, 0.5)


def is_seen_by_loss(name: str, model: str) -> bool:
    """False for a diffusion model of fewer steps: its validation has the same noise levels at any number of steps, so
    only samples show what fewer evaluations cost."""
    return (name, model) != ("task_subdivision", "diffusion")


def neutral_objective(model: str) -> dict[str, Any]:
    return {"kind": "denoising"} if model in IMAGES else {"kind": "next_token"}


def objective_of(cell: Cell) -> dict[str, Any]:
    if cell.ablated == NEUTRAL:
        return neutral_objective(cell.model)
    values = values_of(cell.ablated, cell.model)
    return next(value.objective for value in values if (value.variant, value.level) == (cell.variant, cell.level))


def cells_of(name: str, seeds: range, small: bool = False) -> list[Cell]:
    """The models of one property, the unablated ones first."""
    found = []
    for model in MODELS:
        for seed in seeds:
            found.append(Cell(NEUTRAL, model, "", 0, seed))
            found += [Cell(name, model, value.variant, value.level, seed) for value in values_of(name, model, small)]
    return found
