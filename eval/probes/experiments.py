"""The experiments by name, and the data set of those that have one."""

from .counts import COUNTING, EVENTS
from .experiment import Experiment
from .memory import MEMORY
from .space import BOOLEAN_PROBE, SPACE
from .sums import SUMS
from .transformations import DENSITY, SCALING, TRANSLATION

EXPERIMENTS: dict[str, Experiment] = {
    "counting": COUNTING,
    "events": EVENTS,
    "sums": SUMS,
    "space": SPACE,
    "boolean": BOOLEAN_PROBE,
    "translation": TRANSLATION,
    "scaling": SCALING,
    "density": DENSITY,
    "memory": MEMORY,
}
WITH_DATA = {"counting": "words", "events": "tutorials", "sums": "sums", "space": "objects", "memory": "words"}
