"""Defines the settings of a depth block, which the model's configuration stores under `depth`."""

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Any

FIXED_SOLVERS = ("euler", "midpoint", "rk4")
ADAPTIVE_SOLVERS = ("dopri5", "adaptive_heun")
FIELDS = ("mlp", "mlp_tau", "layer")
GRADIENTS = ("direct", "adjoint")


@dataclass(frozen=True, kw_only=True)
class DepthSettings:
    """The block is member `position` of the decoder stack and stands for `num_replaced` layers.

    field: the vector field, `"mlp"`, `"mlp_tau"` or `"layer"`; `field_size` is the width of an MLP's hidden layer; None
        gives it as many weights as the replaced layers have.
    control_size: components of the control u; 0 for a block without one.
    alpha: the scale of the field at the start of training; `learn_alpha=False` keeps it.
    solver: `"euler"`, `"midpoint"` and `"rk4"` (the 3/8 rule) take `steps` steps of equal length. `"dopri5"` and
        `"adaptive_heun"` choose the steps of each token by the tolerances `rtol` and `atol`, with at most
        `max_evaluations` evaluations of the field.
    gradient: `"direct"` through the solver, or `"adjoint"`, for fixed steps: the gradient of the continuous problem,
        whose memory does not grow with the steps.

    Raises `ValueError` for other values and combinations.
    """

    position: int
    num_replaced: int
    field: str = "mlp"
    field_size: int | None = None
    control_size: int = 1
    alpha: float = 0.1
    learn_alpha: bool = True
    solver: str = "euler"
    steps: int = 4
    rtol: float = 1e-3
    atol: float = 1e-4
    max_evaluations: int = 1000
    gradient: str = "direct"

    def __post_init__(self) -> None:
        _check_name("field", self.field, FIELDS)
        _check_name("solver", self.solver, FIXED_SOLVERS + ADAPTIVE_SOLVERS)
        _check_name("gradient", self.gradient, GRADIENTS)
        if not isinstance(self.learn_alpha, bool):
            raise ValueError(f"depth: learn_alpha={self.learn_alpha!r}: pass True or False.")
        if self.field == "layer" and self.field_size is not None:
            raise ValueError(f"depth: field_size={self.field_size!r}: the field 'layer' has the width of a layer.")
        lowest = {"position": 0, "num_replaced": 1, "control_size": 0, "steps": 1, "max_evaluations": 1}
        lowest |= {} if self.field_size is None else {"field_size": 1}
        for name, low in lowest.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"depth: {name}={value!r}: pass a whole number of at least {low}.")
        for name, value, fits in (
            ("rtol", self.rtol, lambda number: 0 < number < 1),
            ("atol", self.atol, lambda number: 0 < number < 1),
            ("alpha", self.alpha, isfinite),
        ):
            if not (isinstance(value, int | float) and fits(value)):
                raise ValueError(f"depth: {name}={value!r}: pass a number, as a tolerance one above 0 and below 1.")
        if self.field == "layer" and self.is_adaptive:
            raise ValueError(
                f"depth: solver={self.solver!r} gives each token its own steps, and the field 'layer' attends to "
                f"other tokens at the same depth: choose one of {', '.join(FIXED_SOLVERS)}, or field='mlp'."
            )
        if self.field == "layer" and self.gradient == "adjoint":
            raise ValueError(
                "depth: gradient='adjoint' integrates a token's state backwards, and the field 'layer' depends on the "
                "other tokens and on the memory: choose gradient='direct', with gradient checkpointing to save memory."
            )
        # torchdiffeq's adjoint uses common steps for all tokens; torchode's keeps a gradient of all weights per token.
        if self.is_adaptive and self.gradient == "adjoint":
            raise ValueError(
                f"depth: gradient='adjoint' needs the same steps for all tokens, and solver={self.solver!r} chooses "
                f"them by token: choose one of {', '.join(FIXED_SOLVERS)}, or gradient='direct'."
            )

    @property
    def is_adaptive(self) -> bool:
        return self.solver in ADAPTIVE_SOLVERS

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "DepthSettings":
        """Inverts `to_dict`. Raises `ValueError` for unknown names."""
        names = [field.name for field in fields(cls)]
        for name in given:
            _check_name("setting", name, names)
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _check_name(what: str, name: Any, known: tuple[str, ...] | list[str]) -> None:
    if name not in known:
        (nearest,) = difflib.get_close_matches(str(name), known, n=1, cutoff=0)
        raise ValueError(f"depth: {what}={name!r} is not known: did you mean {nearest!r}? Known: {', '.join(known)}.")
