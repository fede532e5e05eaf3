"""The share of answers with the right passkey, counted as in `condense eval passkey`."""

import datasets
import evaluate

from condense.eval.metrics import checked
from condense.eval.tasks.passkey import first_number


class PasskeyAccuracy(checked.CheckedMetric):
    """`compute` returns `accuracy` from 0 to 1: an answer counts if it begins with exactly the key's digits."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="The share of decoded answers that begin with the passkey and with no other number.",
            citation="",
            inputs_description="predictions: the decoded answers; references: the keys, as text.",
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def score(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        pairs = zip(predictions, references, strict=True)
        return {"accuracy": sum(first_number(answer) == key for answer, key in pairs) / len(references)}
