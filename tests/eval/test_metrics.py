"""Our metrics as the `evaluate` library loads them from the package, against the reference package."""

import evaluate
import numpy as np
import pytest

from condense.eval import metrics
from condense.eval.tasks.rouge import METRICS, SCORES

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory):
    """The library copies a metric into a package of its own, which is imported once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate.config, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("something is fetched"))


def load(name, folder):
    return evaluate.load(metrics.path(name), cache_dir=str(folder))


def test_rouge_is_that_of_rouge_score(tmp_path):
    from rouge_score.rouge_scorer import RougeScorer

    metric = load("rouge", tmp_path)
    references = ["The cats were running.\nThey stopped at 7.", "Nobody asked the farmers ."]
    predictions = ["They stopped at 7.\nThe cat runs.", "The farmers were asked."]
    metric.add_batch(predictions=predictions[:1], references=references[:1])  # batch by batch, as loops do
    metric.add_batch(predictions=predictions[1:], references=references[1:])
    found = metric.compute()
    assert found.keys() == SCORES.keys()
    for suffix, stems in (("", True), ("_unstemmed", False)):
        scorer = RougeScorer(list(METRICS), use_stemmer=stems)
        scores = [scorer.score(*pair) for pair in zip(references, predictions, strict=True)]
        for name in METRICS:
            assert found[f"{name}{suffix}"] == pytest.approx(np.mean([score[name].fmeasure for score in scores]))
    one_line = metric.compute(predictions=["They stopped at 7. The cat runs."], references=references[:1])
    scorer = RougeScorer(["rougeLsum"], use_stemmer=True)
    assert one_line["rougeLsum"] == scorer.score(references[0], predictions[0])["rougeLsum"].fmeasure


def test_passkey_counts_as_the_evaluation_does(tmp_path):
    answers = [" 9054. Remember", "9 0 5 4", "90541", "9055", "the key is 9054", "", "0054"]
    keys = ["9054"] * 6 + ["0054"]
    assert load("passkey", tmp_path).compute(predictions=answers, references=keys) == {"accuracy": 3 / 7}


def test_an_unknown_metric_is_refused():
    with pytest.raises(ValueError, match="there is no metric 'bleu': choose from rouge, passkey"):
        metrics.path("bleu")


@pytest.mark.parametrize("name", metrics.NAMES)
def test_options_are_refused_and_not_ignored(name, tmp_path):
    """One of another package's metric, and a misspelt one; what was added before is still scored, once."""
    metric = load(name, tmp_path)
    metric.add_batch(predictions=["5"], references=["7"])
    for option in ("use_stemmer", "prediction"):
        with pytest.raises(TypeError, match=f"takes predictions and references, and no options: leave {option} out"):
            metric.compute(**{option: False})
    assert set(metric.compute().values()) == {0}
    assert max(metric.compute(predictions=["7"], references=["7"]).values()) == 1


@pytest.mark.parametrize("name", metrics.NAMES)
def test_without_predictions_there_is_no_mean(name, tmp_path):
    metric, words = load(name, tmp_path), "has no predictions to score: pass at least one with its reference"
    with pytest.raises(ValueError, match=words):
        metric.compute(predictions=[], references=[])
    metric.add_batch(predictions=[], references=[])
    with pytest.raises(ValueError, match=words):
        metric.compute()
    assert max(metric.compute(predictions=["7"], references=["7"]).values()) == 1
