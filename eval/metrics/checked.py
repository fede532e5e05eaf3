"""The base of the metrics: `evaluate` itself passes any option on, and empty lists."""

from abc import abstractmethod
from typing import Any

import evaluate


class CheckedMetric(evaluate.Metric):
    """A metric without options, for at least one prediction."""

    @abstractmethod
    def score(self, predictions: list[str], references: list[str]) -> dict[str, float]: ...

    def compute(self, *, predictions: Any = None, references: Any = None, **options: Any) -> dict[str, float] | None:
        """Returns the scores. Raises `TypeError` for an option, and `ValueError` if there are no predictions."""
        if options:
            names = ", ".join(options)
            raise TypeError(
                f"{type(self).__name__} takes predictions and references, and no options: leave {names} out."
            )
        return super().compute(predictions=predictions, references=references)

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        if not references:
            raise ValueError(
                f"{type(self).__name__} has no predictions to score: pass at least one with its reference."
            )
        return self.score(predictions, references)
