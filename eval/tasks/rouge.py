"""ROUGE F1 of a summary, using the `rouge-score` package on texts that `sentencex` splits into sentences.

Words are runs of a-z and 0-9 in lower case. Every score comes in two versions. The first drops the endings of words of
over three characters (Porter's stemmer, as in ROUGE-1.5.5 -m); `_unstemmed` keeps them. ROUGE-1 and ROUGE-2 count
shared words and pairs of words. ROUGE-L is the longest common subsequence of both whole texts. ROUGE-Lsum compares
sentence by sentence. A sentence ends where an English one ends or at a line break, as in the highlights of
CNN/DailyMail. So summaries do not need line breaks for it.
"""

from condense.extras import how_to_install

METRICS = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L", "rougeLsum": "ROUGE-Lsum"}
UNSTEMMED = {f"{name}_unstemmed": title.replace("ROUGE", "unstemmed") for name, title in METRICS.items()}
SCORES = METRICS | UNSTEMMED


class Rouge:
    """Raises `ValueError` if a package is missing, rather than scoring zero."""

    def __init__(self) -> None:
        try:
            from rouge_score.rouge_scorer import RougeScorer
            from rouge_score.tokenize import tokenize
            from sentencex import segment
        except ImportError as error:
            raise ValueError(
                f"summaries cannot be scored without the packages rouge-score and sentencex ({error}): "
                f"{how_to_install('eval')}."
            ) from error
        self._stemmed, self._unstemmed = (RougeScorer(list(METRICS), use_stemmer=stems) for stems in (True, False))
        self._tokenize, self._segment = tokenize, segment

    def has_words(self, text: str) -> bool:
        """Whether text has words for ROUGE. Without any, as in other scripts, every summary scores zero."""
        return bool(self._tokenize(text, None))

    def sentences(self, text: str) -> list[str]:
        found = (sentence.strip() for line in text.splitlines() for sentence in self._segment("en", line))
        return [sentence for sentence in found if sentence]

    def f1(self, reference: str, prediction: str) -> dict[str, float]:
        """Returns the scores from 0 to 1, by the names of `SCORES`."""
        # A line break is a space for all metrics except ROUGE-Lsum, which treats a line as a sentence.
        lines = ["\n".join(self.sentences(text)) for text in (reference, prediction)]
        stemmed, unstemmed = self._stemmed.score(*lines), self._unstemmed.score(*lines)
        scores = {name: float(stemmed[name].fmeasure) for name in METRICS}
        return scores | {f"{name}_unstemmed": float(unstemmed[name].fmeasure) for name in METRICS}
