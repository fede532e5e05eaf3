"""An item of a probe: one prompt, what is varied in it, by which factors, and which next tokens are looked at."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Vary = Literal["shrink", "interpolate", "shift", "scale", "densify", "dial"]
Watched = Literal["digits", "first_digits", "yes_no", "bits", "tokens"]

DURATIONS = tuple(np.linspace(0.1, 1, 100).tolist())
EVENT_DURATIONS = tuple(np.linspace(0.1, 1, 40).tolist())
INTERPOLATIONS = tuple(np.linspace(0, 1, 100).tolist())
SPACE_INTERPOLATIONS = tuple(np.linspace(0, 1, 40).tolist())
SHIFTS = tuple(np.linspace(0, 10, 100).tolist())
SCALES = tuple(np.linspace(0.05, 2, 100).tolist())
DENSITIES = tuple(range(1, 11))


class NotValid(Exception):
    """An item that a model's tokenizer, or the model, can't pose; the message says why."""


@dataclass(frozen=True)
class Item:
    """`vary`: an operation of `Sentence`, or the memory's duration (`memory.dialled`).

    `places` are the characters of `text` whose tokens shrink, from and up to; `other` is what is interpolated to.

    `one_token`: each place has to be a single token. `group`: the records of one table or picture. `facts`: what the
    measures need to know. `positions`: see `Sentence.densify`.
    """

    name: str
    group: str
    text: str
    vary: Vary
    factors: Sequence[float]
    watched: Watched
    places: Sequence[tuple[int, int]] = ()
    other: str = ""
    one_token: bool = False
    positions: Literal["spread", "equal"] = "spread"
    facts: Mapping[str, Any] = field(default_factory=dict)
