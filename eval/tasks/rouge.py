"""ROUGE F1 of a summary, by the `rouge-score` package and with its words as in the original ROUGE-1.5.5 -m.

Words are runs of a-z and 0-9 in lower case; those of more than three characters lose their endings (Porter's
stemmer). ROUGE-1 and ROUGE-2 count shared words and pairs of words. ROUGE-L is the longest common subsequence
of both texts as a whole: line breaks are spaces. ROUGE-Lsum compares sentence by sentence, and a sentence ends
at a line break and nowhere else, as in the highlights of CNN/DailyMail; on texts of one line both are equal.
"""

METRICS = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L", "rougeLsum": "ROUGE-Lsum"}


class Rouge:
    """Raises `ValueError` where the package is missing, so that no score is zero for that reason."""

    def __init__(self) -> None:
        try:
            from rouge_score.rouge_scorer import RougeScorer
            from rouge_score.tokenize import tokenize
        except ImportError as error:
            raise ValueError(
                f"summaries cannot be scored without the package rouge-score ({error}): "
                "pip install 'condense-llama[eval]'."
            ) from error
        self._scorer, self._tokenize = RougeScorer(list(METRICS), use_stemmer=True), tokenize

    def has_words(self, text: str) -> bool:
        """False for text without words for ROUGE, such as text in other scripts, on which any summary scores zero."""
        return bool(self._tokenize(text, None))

    def f1(self, reference: str, prediction: str) -> dict[str, float]:
        """By metric, from 0 to 1."""
        scores = self._scorer.score(reference, prediction)
        return {name: float(scores[name].fmeasure) for name in METRICS}
