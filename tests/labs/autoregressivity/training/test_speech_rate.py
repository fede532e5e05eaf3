"""Durations by schedules against hand-worked values and token-by-token loops, and that none tells of later tokens."""

import copy
from math import pi, sin

import pytest
import torch

from condense.configuration import IGNORE_INDEX
from condense.labs.autoregressivity.training.speech_rate import (
    LEVELS,
    Difficulty,
    SpeechRate,
    SpeechRateObjective,
    cosine_durations,
)
from condense.state.cache_argument import cache_of
from condense.training.recipe.objectives import next_token_losses

from .models import ids_of, perturbed_model, small_model

LENGTH = 17  # three segments and a part
KINDS = [("cosine", False), ("cosine", True), ("hard_long", False), ("hard_short", False), ("hard_long", True)]


@pytest.fixture(scope="module")
def difficulty():
    return Difficulty.learn(small_model("condense").eval(), ids_of(12, LENGTH, seed=5))


@pytest.fixture(scope="module")
def model():
    return perturbed_model()


def rate_of(kind, difficulty):
    schedule, shuffled = kind
    return SpeechRate(schedule, LENGTH, None if schedule == "cosine" else difficulty, shuffled)


def test_the_cosine_schedule_by_hand():
    found = cosine_durations(4).tolist()
    expected = [4 * (sin((n + 1) * pi / 8) ** 2 - sin(n * pi / 8) ** 2) for n in range(4)]
    assert found == pytest.approx(expected) and sum(found) == pytest.approx(4)
    shuffled = SpeechRate("cosine", 64, shuffled=True).read(ids_of(2, 64))
    even = cosine_durations(64).float().expand(2, -1)
    assert torch.equal(shuffled.sort().values, even.sort().values) and not torch.equal(shuffled, even)


@torch.no_grad()
@pytest.mark.parametrize("schedule", ["hard_long", "hard_short"])
def test_difficulty_token_by_token(difficulty, schedule):
    """Each loss by a call of its own over the text so far, each quantile by counting known losses."""
    judge, ids = difficulty.judge, ids_of(2, LENGTH)

    def loss(logits, token):
        return -logits.float().log_softmax(-1)[token].item()

    calibration = ids_of(12, LENGTH, seed=5)
    outputs = [judge(text[None]).logits[0] for text in calibration]
    known = [
        loss(out[n - 1], text[n]) for text, out in zip(calibration, outputs, strict=True) for n in range(1, LENGTH)
    ]
    found = rate_of((schedule, False), difficulty).read(ids)
    for text, durations in zip(ids, found, strict=True):
        assert durations[0] == 1
        for n in range(1, LENGTH):
            own = loss(judge(text[None, :n]).logits[0, -1], text[n])
            easier = sum(one < own for one in known) / len(known)
            expected = 0.5 + easier if schedule == "hard_long" else 1.5 - easier
            assert durations[n].item() == pytest.approx(expected, abs=1.5 / LEVELS)
    assert rate_of((schedule, False), difficulty).read(calibration).mean().item() == pytest.approx(1, abs=0.01)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_parts_and_single_tokens_equal_the_whole(difficulty, model, kind):
    """The durations, and the losses of a model that reads with them, in one call and token by token."""
    ids = ids_of(3, LENGTH)
    whole, single = rate_of(kind, difficulty).read(ids), rate_of(kind, difficulty)
    logits, cache, durations = [], None, []
    for n in range(LENGTH):
        durations.append(single.read(ids[:, n : n + 1]))  # before the next token is known
        output = model(ids[:, n : n + 1], durations=durations[-1], cache=cache, use_cache=True)
        cache = cache_of(output)
        logits.append(output.logits)
    assert torch.equal(torch.cat(durations, dim=1), whole)
    losses = torch.nn.functional.cross_entropy(torch.cat(logits, dim=1)[:, :-1].mT, ids[:, 1:])
    assert losses.item() == pytest.approx(model(ids, labels=ids, durations=whole).loss.item(), rel=1e-9)
    with pytest.raises(ValueError, match=f"the text has {LENGTH + 1} tokens, and its schedule {LENGTH}"):
        single.read(ids[:, :1])


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_no_duration_tells_of_later_tokens(difficulty, kind):
    ids = ids_of(8, LENGTH)
    before = rate_of(kind, difficulty).read(ids)
    for n in range(1, LENGTH):
        changed = ids.clone()
        changed[:, n:] = (changed[:, n:] + 1 + ids_of(8, LENGTH - n, seed=n) % 12) % 13
        after = rate_of(kind, difficulty).read(changed)
        assert torch.equal(after[:, :n], before[:, :n])
        if kind[0] != "cosine" and not kind[1]:
            assert not torch.equal(after[:, n], before[:, n])  # the control: a token's own loss counts


def test_shuffled_durations_are_those_of_earlier_tokens(difficulty):
    ids = ids_of(8, LENGTH)
    own, shuffled = (rate_of(("hard_long", flag), difficulty).read(ids) for flag in (False, True))
    for row, others in zip(own, shuffled, strict=True):
        assert all(others[n] in row[: n + 1] for n in range(LENGTH))
    assert (own != shuffled).float().mean() > 0.5


@pytest.mark.parametrize("schedule", ["even", "cosine", "hard_long"])
def test_the_objective(difficulty, model, schedule, tmp_path):
    """Losses and gradients are those of a call with the durations; `even` is next-token prediction to the bit."""
    fields = {"schedule": schedule}
    if schedule == "hard_long":
        difficulty.save(tmp_path)
        fields["judge"] = str(tmp_path)
    objective, ids = SpeechRateObjective(**fields), ids_of(2, LENGTH)
    batch = {"input_ids": ids, "labels": ids}
    found = objective.losses(model, batch, 32)
    if schedule != "even":
        saved = Difficulty.load(str(tmp_path)) if schedule == "hard_long" else None
        batch = batch | {"durations": rate_of((schedule, False), saved).read(ids)}
    expected = next_token_losses(model, batch, 32)
    assert torch.equal(found.loss, expected.loss)
    weight = model.lm_head.weight
    pairs = [torch.autograd.grad(one.loss, weight)[0] for one in (found, expected)]
    assert torch.equal(*pairs)


@pytest.mark.parametrize("shuffled", [False, True])
def test_texts_of_unequal_length_have_schedules_of_their_own(model, shuffled):
    objective, ids = SpeechRateObjective(schedule="cosine", shuffled=shuffled), ids_of(2, LENGTH)
    mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [9]])
    batch = {"input_ids": ids, "labels": ids.masked_fill(~mask, IGNORE_INDEX), "attention_mask": mask.long()}
    texts = [ids[:1], ids[1:, :9]]
    alone = [objective.losses(model, {"input_ids": text, "labels": text}, 24).loss.item() for text in texts]
    assert objective.losses(model, batch, 24).loss.item() == pytest.approx(sum(alone), rel=1e-6)


def test_a_judge_with_another_vocabulary_is_refused(difficulty, model, tmp_path):
    difficulty.save(tmp_path)
    objective, config = SpeechRateObjective(schedule="hard_long", judge=str(tmp_path)), copy.copy(model.config)
    objective.check_model(config, None, None)
    config.vocab_size = 14
    with pytest.raises(ValueError, match="knows 13 tokens, and the model has 14"):
        objective.check_model(config, None, None)


def test_refusals(tmp_path):
    for fields, message in [
        ({"schedule": "hard_long"}, "judge=None with schedule=hard_long"),
        ({"schedule": "hard_short", "judge": str(tmp_path)}, "need a folder with difficulty.json"),
        ({"schedule": "cosine", "judge": "x"}, "judge='x' with schedule=cosine"),
    ]:
        with pytest.raises(ValueError, match=message):
            SpeechRateObjective(**fields)
