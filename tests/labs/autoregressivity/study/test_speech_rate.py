"""Schedules of durations in training and in reading, from end to end."""

import json

import pytest
import torch

from condense.labs.autoregressivity.study.experiments import ablate
from condense.labs.autoregressivity.study.options import AblationOptions
from condense.labs.autoregressivity.study.speech_rate import EVEN, SPEECHES, Speech, SpeechRates, talk
from condense.labs.autoregressivity.training.speech_rate import Difficulty
from condense.state.cache_argument import cache_of

SMALL = AblationOptions(small=True, seeds=1)
CHOSEN = [EVEN, Speech("cosine"), Speech("hard_long"), Speech("hard_long", True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("speech_rate")


@pytest.fixture(scope="module")
def task(folder):
    return SpeechRates(SMALL, folder)


def test_measures_against_loops(task):
    """Losses of reading, and a text written token by token."""
    task.settings()
    difficulty = Difficulty.load(str(task._judge(0)))
    model, texts = difficulty.judge, task.setup.prompts
    for speech in CHOSEN:
        rate, losses, cache = task._rate(speech, difficulty), [], None
        for token, following in zip(texts.T[:-1], texts.T[1:], strict=True):
            durations = None if rate is None else rate.read(token[:, None])
            with torch.no_grad():
                output = model(token[:, None], durations=durations, cache=cache, use_cache=True)
            cache = cache_of(output)
            losses.append(torch.nn.functional.cross_entropy(output.logits[:, -1], following).item())
        found = task.loss(model, texts, speech, difficulty)
        assert found == pytest.approx(sum(losses) / len(losses), rel=1e-5)

    prompt, cosine = texts[:, :8], Speech("cosine")
    written = talk(model, task._rate(cosine, difficulty), prompt, 6, seed=1)
    generator = torch.Generator().manual_seed(1)
    for n in range(8, 14):  # each token after a call over the whole text so far
        durations = task._rate(cosine, difficulty).read(written[:, :n])
        logits = model(written[:, :n], durations=durations).logits[:, -1]
        assert torch.equal(torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0], written[:, n])
    assert torch.equal(talk(model, None, prompt, 1, seed=1)[:, :8], prompt)


def test_controls():
    assert Speech("cosine").control == Speech("cosine", True)
    assert Speech("hard_short").control == Speech("hard_long").control == Speech("hard_long", True)
    assert EVEN.control is None and Speech("cosine", True).control is None
    assert {speech.control for speech in SPEECHES} - {None} <= set(SPEECHES)


@pytest.mark.slow
def test_speech_rate_from_end_to_end(folder):
    results = ablate("speech_rate", folder, SMALL)
    records = {record["trained"]: record for record in results["records"]}
    assert list(records) == [speech.label for speech in SPEECHES]
    assert list(records["even"]["losses"]) == [speech.label for speech in SPEECHES]
    assert list(records["hard short"]["losses"]) == ["hard short", "even"]
    losses, quality = SpeechRates.tables(json.loads((folder / "ablation_speech_rate.json").read_text()))
    assert len(losses.rows) == 6 + 5 * 2 and len(quality.rows) == 7
    row = next(row for row in losses.rows if row[:2] == ["hard short", "hard short"])
    own, control = records["hard short"]["losses"]["hard short"], records["hard long, shuffled"]["losses"]
    assert float(row[3]) == pytest.approx(100 * (own / records["even"]["losses"]["even"] - 1), abs=0.006)
    assert float(row[4]) == pytest.approx(100 * (own / control["hard long, shuffled"] - 1), abs=0.006)
    assert (folder / "ablation_speech_rate.png").exists() and not list((folder / "runs").iterdir())
