"""ROUGE against counting, and against the examples of the reference package."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from condense.eval.tasks.rouge import METRICS, SCORES, Rouge

pytestmark = pytest.mark.unit


def naive_rouge(reference, prediction):
    """Counts n-grams, and all subsequences of the shorter text. Words of at most three letters have no stem."""
    reference, prediction = reference.split(), prediction.split()

    def f1(shared, total_reference, total_prediction):
        return 2 * shared / (total_reference + total_prediction) if shared else 0.0

    def grams(words, n):
        return Counter(zip(*(words[i:] for i in range(n)), strict=False))

    def is_within(words, text):
        rest = iter(text)
        return all(word in rest for word in words)

    scores = {}
    for n in (1, 2):
        ours, theirs = grams(reference, n), grams(prediction, n)
        scores[f"rouge{n}"] = f1((ours & theirs).total(), ours.total(), theirs.total())
    longest = max(
        n
        for n in range(len(prediction) + 1)
        if any(is_within(chosen, reference) for chosen in combinations(prediction, n))
    )
    return scores | {"rougeL": f1(longest, len(reference), len(prediction))}


def test_rouge_against_counting():
    generator = np.random.default_rng(0)
    for _ in range(60):
        reference, prediction = (" ".join(generator.choice(list("abcd"), generator.integers(1, 10))) for _ in "12")
        expected = naive_rouge(reference, prediction)
        found = Rouge().f1(reference, prediction)
        expected |= {"rougeLsum": expected["rougeL"]}  # one sentence: both are the same
        assert {name: found[name] for name in METRICS} == pytest.approx(expected)
        assert {name: found[f"{name}_unstemmed"] for name in METRICS} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("reference", "prediction", "expected"),
    [
        # The rouge-score package's own examples, from its tests.
        ("testing one two", "testing", {"rouge1": 1 / 2}),
        ("testing one two", "testing one", {"rouge2": 2 / 3, "rougeL": 4 / 5}),
        ("testing one two", "testing two", {"rougeL": 4 / 5}),
        ("testing one two", "", dict.fromkeys(SCORES, 0.0)),
        ("w1 w2 w3 w4 w5", "/", dict.fromkeys(SCORES, 0.0)),
        ("w1 w2 w3 w4 w5", "w1 w2 w6 w7 w8\nw1 w3 w8 w9 w5", {"rougeLsum": 2 * 0.8 * 0.4 / 1.2}),
        ("First sentence.\nSecond Sentence.", "Second sentence.\nFirst Sentence.", {"rougeLsum": 1.0, "rougeL": 1 / 2}),
        ("First sentence. Second Sentence.", "Second sentence. First Sentence.", {"rougeLsum": 1.0, "rougeL": 1 / 2}),
        # Without stems two of three words differ.
        ("The cats were running", "the cat runs", {"rouge1_unstemmed": 2 / 7, "rougeLsum_unstemmed": 2 / 7}),
        # the cat were run | the cat run: three words, all of the prediction, three quarters of the reference
        ("The cats were running", "the cat runs", {"rouge1": 6 / 7, "rouge2": 2 / 5, "rougeL": 6 / 7}),
        # Case and punctuation don't count, a hyphen parts words, digits do count.
        ("A well-known 7% rise!", "well known: 7 rise", {"rouge1": 8 / 9}),
    ],
)
def test_rouge_worked_by_hand(reference, prediction, expected):
    found = Rouge().f1(reference, prediction)
    assert {name: found[name] for name in expected} == pytest.approx(expected)


# Sentences on one line, as models write them, and the same split by hand.
REFERENCE = (
    "Dr. Smith visited 3.5 million farms on Jan. 5. The farmers were waiting! Did they agree ?\nNobody was asked .",
    "Dr. Smith visited 3.5 million farms on Jan. 5.\nThe farmers were waiting!\nDid they agree ?\nNobody was asked .",
)
PREDICTION = (
    "Nobody asked the farmers, who waited. Mr. Smith visits farms, e.g. in the U.S. and elsewhere. They agreed!",
    "Nobody asked the farmers, who waited.\nMr. Smith visits farms, e.g. in the U.S. and elsewhere.\nThey agreed!",
)


@pytest.mark.parametrize("stems", [True, False])
def test_scores_are_the_reference_packages_on_sentences_split_by_hand(stems):
    from rouge_score.rouge_scorer import RougeScorer

    expected = RougeScorer(list(METRICS), use_stemmer=stems).score(REFERENCE[1], PREDICTION[1])
    found = Rouge().f1(REFERENCE[0], PREDICTION[0])
    for name in METRICS:
        assert found[name if stems else f"{name}_unstemmed"] == expected[name].fmeasure
    whole = RougeScorer(list(METRICS), use_stemmer=stems).score(REFERENCE[0], PREDICTION[0])
    assert whole["rougeL"].fmeasure == expected["rougeL"].fmeasure
    assert whole["rougeLsum"].fmeasure < expected["rougeLsum"].fmeasure  # what only line breaks would give
