"""ROUGE F1 of a summary, by the `rouge-score` package on texts that `sentencex` splits into sentences.

Words are runs of a-z and 0-9 in lower case. Every score is there twice: with words of more than three characters
without their endings (Porter's stemmer, as in ROUGE-1.5.5 -m), and `_unstemmed` with the words as they are. ROUGE-1 and
ROUGE-2 count shared words and pairs of words. ROUGE-L is the longest common subsequence of both texts as a whole.
ROUGE-Lsum compares sentence by sentence: a sentence ends where an English one ends, and at a line break, as in the
highlights of CNN/DailyMail. So a summary does not need line breaks to be compared in this way.
"""

METRICS = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L", "rougeLsum": "ROUGE-Lsum"}
UNSTEMMED = {f"{name}_unstemmed": title.replace("ROUGE", "unstemmed") for name, title in METRICS.items()}
SCORES = METRICS | UNSTEMMED


class Rouge:
    """Raises `ValueError` where a package is missing, so that no score is zero for that reason."""

    def __init__(self) -> None:
        try:
            from rouge_score.rouge_scorer import RougeScorer
            from rouge_score.tokenize import tokenize
            from sentencex import segment
        except ImportError as error:
            raise ValueError(
                f"summaries cannot be scored without the packages rouge-score and sentencex ({error}): "
                "pip install 'condense-llama[eval]'."
            ) from error
        self._stemmed, self._unstemmed = (RougeScorer(list(METRICS), use_stemmer=stems) for stems in (True, False))
        self._tokenize, self._segment = tokenize, segment

    def has_words(self, text: str) -> bool:
        """False for text without words for ROUGE, such as text in other scripts, on which any summary scores zero."""
        return bool(self._tokenize(text, None))

    def sentences(self, text: str) -> list[str]:
        found = (sentence.strip() for line in text.splitlines() for sentence in self._segment("en", line))
        return [sentence for sentence in found if sentence]

    def f1(self, reference: str, prediction: str) -> dict[str, float]:
        """By the names of `SCORES`, from 0 to 1."""
        # A line break is a space to all metrics but ROUGE-Lsum, for which a line is a sentence.
        lines = ["\n".join(self.sentences(text)) for text in (reference, prediction)]
        stemmed, unstemmed = self._stemmed.score(*lines), self._unstemmed.score(*lines)
        scores = {name: float(stemmed[name].fmeasure) for name in METRICS}
        return scores | {f"{name}_unstemmed": float(unstemmed[name].fmeasure) for name in METRICS}
