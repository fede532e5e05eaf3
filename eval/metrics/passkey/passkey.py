"""The share of answers that give the passkey, as `condense eval passkey` counts them."""

from typing import Any

import datasets
import evaluate

from condense.eval.tasks.passkey import first_number


class PasskeyAccuracy(evaluate.Metric):
    """`compute` returns `accuracy` from 0 to 1: an answer counts if it begins with the key, digit by digit."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="The share of decoded answers that begin with the passkey and with no other number.",
            citation="",
            inputs_description="predictions: the decoded answers; references: the keys, as text.",
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(self, predictions: list[str], references: list[str], **_: Any) -> dict[str, float]:
        pairs = zip(predictions, references, strict=True)
        return {"accuracy": sum(first_number(answer) == key for answer, key in pairs) / len(references)}
