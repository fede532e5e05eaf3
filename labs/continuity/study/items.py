"""An item of a probe: a prompt, the change to it with its factors, and the next tokens whose probabilities count."""

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
SCALES = tuple(np.linspace(0.01, 1.5, 100).tolist())
DENSITIES = tuple(range(1, 11))


class NotValid(Exception):
    """Raised if a model or its tokenizer does not allow an item; the message says why."""


@dataclass(frozen=True)
class Item:
    """A prompt and a change to it. The names of the fields are part of the settings of stored measurements.

    - `group`: the table or picture that the record belongs to.
    - `vary`: an operation of `Sentence`, or `dial`, which sets the duration of the memory (`memory.turn_dials`).
    - `watched`: the name of the classes of next tokens.
    - `char_spans`: spans of characters of `text` whose tokens shrink. With `one_token`, each must be a single token.
    - `containing`: arguments of `containing_span`, for the published rule.
    - `other`: the text that `text` is interpolated to.
    - `positions`: see `Sentence.densify`.
    - `facts`: further fields of the record.
    """

    name: str
    group: str
    text: str
    vary: Vary
    factors: Sequence[float]
    watched: Watched
    char_spans: Sequence[tuple[int, int]] = ()
    other: str = ""
    one_token: bool = False
    positions: Literal["spread", "equal"] = "spread"
    containing: tuple[str | None, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
