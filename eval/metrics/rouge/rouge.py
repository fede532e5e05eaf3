"""Mean ROUGE F1 over summaries, scored as in `condense eval summarization`."""

from statistics import fmean

import datasets
import evaluate

from condense.eval.metrics import checked
from condense.eval.tasks.rouge import SCORES, Rouge


class MeanRouge(checked.CheckedMetric):
    """`compute` returns a mean from 0 to 1 for each name of `condense.eval.tasks.rouge.SCORES`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="ROUGE-1, ROUGE-2, ROUGE-L, and ROUGE-Lsum on split sentences; F1, stemmed and unstemmed.",
            citation="",
            inputs_description="predictions: summaries; references: one reference summary each.",
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def score(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        rouge = Rouge()
        scores = [rouge.f1(*pair) for pair in zip(references, predictions, strict=True)]
        return {name: fmean(score[name] for score in scores) for name in SCORES}
