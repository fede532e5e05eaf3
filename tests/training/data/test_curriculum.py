"""Lengths grow when the loss says so, and batches do not depend on when they are asked for."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from condense.training.callbacks import GrowCurriculum
from condense.training.data.curriculum import CurriculumBatches, CurriculumState
from condense.training.data.passkey import PasskeyTask
from condense.training.recipe import Curriculum, Recipe
from condense.training.small_llama import passkey_tokenizer

pytestmark = pytest.mark.unit

CURRICULUM = Curriculum(
    steps=60, tokens_per_step=2048, first_segments=2, last_segments=9, growth=1.5, loss_below=0.1, patience=20
)


def recipe_with(**changes):
    return Recipe(model="m", output="o", data={"task": "passkey"}, curriculum=CURRICULUM.model_copy(update=changes))


def test_growth():
    state, lengths = CurriculumState(CURRICULUM), []
    for step, loss in zip(range(10, 130, 10), [0.5, 0.04, 0.15, 0.04, 0.01, 0.01] + [0.05] * 6, strict=True):
        state.observe(step, loss, 10)
        lengths.append(state.segments)
    # The mean of the last two falls under 0.1 at the third loss; after a growth two new losses are waited for.
    assert lengths == [2, 2, 3, 3, 4, 4, 6, 6, 9, 9, 9, 9]
    assert state.milestones == [(0, 2), (32, 3), (52, 4), (72, 6), (92, 9)]


def test_the_last_line_of_fewer_steps_is_no_loss_of_the_patience():
    """A run that is given more steps would grow too early."""
    state, arguments = CurriculumState(CURRICULUM), SimpleNamespace(logging_steps=10)
    for step in (10, 15):
        GrowCurriculum(state).on_log(arguments, SimpleNamespace(global_step=step), None, {"loss": 0.01})
    assert state.losses == [0.01] and state.segments == 2


def test_a_growth_takes_effect_two_steps_later():
    state = CurriculumState(CURRICULUM)
    state.observe(10, 0.01, 10)
    assert state.observe(20, 0.01, 10)
    generator = np.random.default_rng(0)
    assert [state.at(step, generator) for step in (20, 21, 22, 23)] == [2, 2, 3, 3]


def test_review_begins_at_the_last_length():
    state = CurriculumState(CURRICULUM.model_copy(update={"review": 0.5}))
    state.milestones = [(0, 2), (10, 3), (20, 9)]
    seen = [state.at(step, np.random.default_rng(step)) for step in range(1000)]
    assert set(seen[10:20]) == {3} and set(seen[20:]) == {2, 3, 9}
    assert 0.6 < np.mean(np.array(seen[20:]) == 9) < 0.75  # half, and a third of the other half


def test_state_round_trip(tmp_path):
    state, again = CurriculumState(CURRICULUM), CurriculumState(CURRICULUM)
    for step in (10, 20, 30):
        state.observe(step, 0.05, 10)
    state.save(tmp_path)
    again.load(tmp_path)
    assert (again.milestones, again.losses) == (state.milestones, state.losses)


def test_batches_are_the_same_in_any_order_and_differ_between_ranks():
    recipe = recipe_with()
    batches = CurriculumBatches(recipe, CurriculumState(CURRICULUM), PasskeyTask(passkey_tokenizer()), 40, 2)
    assert len(batches) == 120
    later, earlier, again = batches[7], batches[3], batches[7]
    assert torch.equal(later["input_ids"], again["input_ids"]) and torch.equal(later["labels"], again["labels"])
    assert not torch.equal(batches[6]["input_ids"], later["input_ids"])
    assert earlier["input_ids"].shape[0] == 2048 // (2 * 40 * 2)


def test_every_place_of_a_segment_comes_to_hold_the_question():
    """Prompts come in whole fillers of 24 tokens: only lengths further apart than a segment reach all phases."""
    recipe = recipe_with()
    state = CurriculumState(CURRICULUM)
    state.milestones = [(0, 2), (30, 9)]
    batches = CurriculumBatches(recipe, state, PasskeyTask(passkey_tokenizer()), 40, 1)
    assert {batches[step]["input_ids"].shape[1] for step in range(30)} == {70}
    lengths = {batches[step]["input_ids"].shape[1] for step in range(30, 60)}
    assert {length % 40 for length in lengths} == {6, 14, 22, 30, 38}
    assert min(lengths) > 6 * 40 - 24 and max(lengths) <= 9 * 40


def test_texts_that_do_not_fit_a_step_are_refused():
    recipe = recipe_with(tokens_per_step=700)
    with pytest.raises(ValueError, match="tokens_per_step=700.*at least 720"):
        CurriculumBatches(recipe, CurriculumState(CURRICULUM), PasskeyTask(passkey_tokenizer()), 40, 2)
