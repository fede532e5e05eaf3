"""Documents of a run that is given more steps: none is read twice while others are left, and former ones stay."""

from collections import Counter

import pytest
import yaml

from condense.training.data import document_task
from condense.training.data.answers import AnswerExamples
from condense.training.data.continued import Lot, continue_run
from condense.training.data.tasks import make_examples
from condense.training.recipe import Stage, load_recipe
from condense.training.small_llama import word_tokenizer

from .conftest import WORDS
from .hub import stream_files
from .test_text import Documents

pytestmark = pytest.mark.unit


@pytest.fixture
def hub_recipe(recipe, tmp_path, monkeypatch):
    """The recipe's documents as a data set of the hub, of which a run has as few as its steps need."""
    monkeypatch.setattr(document_task, "LEAST_DOCUMENTS", 0)
    stream_files(monkeypatch, "json", tmp_path / "train.jsonl")
    fields = yaml.safe_load(recipe.read_text())
    fields["data"]["sources"] = [{"hub": "owner/name"}]
    recipe.write_text(yaml.safe_dump(fields))
    return recipe


PER_STEP, AVAILABLE = 4, 120  # sequences of 8 tokens, which are two of each document


def read(recipe, steps: int, former: list[int] = [], *overrides: str) -> list[tuple]:  # noqa: B006
    """Returns the places of the sequences of all steps, in order."""
    stages = [[Stage(total_length=8, steps=number)] for number in former]
    loaded = load_recipe(recipe, [f"steps={steps}", *overrides])
    examples, _ = make_examples(loaded, word_tokenizer([WORDS]), former=stages)
    places = [examples.sequence(number, 8)[0].place for number in range(steps * PER_STEP)]
    assert all(examples.source(number, 8) == 0 for number in range(steps * PER_STEP))
    tokens = Counter(place // 18 for place in places for _ in range(8))  # by document
    assert dict(enumerate(examples.tokens_read({8: steps * PER_STEP}))) == {n: tokens[n] for n in range(60)}
    return places


@pytest.mark.parametrize("overrides", [[], ["evaluation.sequences=6"]], ids=["all", "some held out"])
def test_further_steps_read_further_documents(hub_recipe, overrides):
    before = read(hub_recipe, 10, [], *overrides)
    after = read(hub_recipe, 20, [10], *overrides)
    assert after[:40] == before and len(set(after)) == 80
    assert read(hub_recipe, 25, [10, 20], *overrides)[:80] == after
    assert len(set(read(hub_recipe, 25, [10, 20], *overrides))) == 100


def test_fewer_steps_than_were_planned_keep_the_order(hub_recipe):
    assert read(hub_recipe, 12, [20]) == read(hub_recipe, 20)[:48]
    assert read(hub_recipe, 20, [20, 12]) == read(hub_recipe, 20)


def test_all_documents_are_read_again_where_there_are_too_few_others(hub_recipe):
    before = read(hub_recipe, 20)
    after = read(hub_recipe, 50, [20])
    assert after[:80] == before
    assert set(Counter(after[80:]).values()) == {1} and len(after[80:]) == AVAILABLE


def test_epochs_go_on_where_all_documents_have_been_read(hub_recipe):
    """The order is that of a run with all the steps from its beginning."""
    assert read(hub_recipe, 70, [40]) == read(hub_recipe, 70)
    assert read(hub_recipe, 70, [30, 40]) == read(hub_recipe, 70)


def test_the_limit_of_documents_holds(hub_recipe):
    limit = "data.max_documents=10"
    assert set(read(hub_recipe, 10, [5], limit)) == set(read(hub_recipe, 5, [], limit))


def test_packed_documents_and_ranks_that_compare_them(hub_recipe):
    tokenizer, former = word_tokenizer([WORDS]), [[Stage(total_length=12, steps=5)]]
    loaded = load_recipe(hub_recipe, ["data.fit=pack", "stages.0.total_length=12", "steps=10"])
    examples, _ = make_examples(loaded, tokenizer, former=former)
    rows = [row.place for number in range(40) for row in examples.sequence(number, 12)]
    assert len(set(rows)) == len(rows)
    assert examples.fingerprint() == make_examples(loaded, tokenizer, former=former)[0].fingerprint()
    assert examples.fingerprint() != make_examples(loaded, tokenizer)[0].fingerprint()


def test_of_files_all_documents_are_drawn_from(recipe):
    """So the order does not depend on the number of steps, and an epoch ends before the next begins."""
    longest = read(recipe, 70)
    assert read(recipe, 10) == longest[:40] and read(recipe, 50, [10, 20]) == longest[:200]
    assert len(set(longest[:AVAILABLE])) == len(set(longest[AVAILABLE : 2 * AVAILABLE])) == AVAILABLE
    assert max(longest[:40]) > 60 * 18 / 2 > min(longest[:40])


QUESTIONS = Documents([100] * 10 + [2000] * 4, given=2)


def numbers(lots, total_length):
    """Returns the documents of all sequences of a length that a run asks for."""
    examples = continue_run(lambda first, last: AnswerExamples(QUESTIONS, first, last, seed=3), 0, lots)
    asked = max(lot.asked[total_length] for lot in lots)
    return [int(examples.sequence(number, total_length)[0].input_ids[0]) // 100 for number in range(asked)]


SHORT, LONG = Lot({512: 8, 4096: 8}, 10), Lot({512: 8, 4096: 12}, 14)


def test_a_length_without_further_sequences_asks_no_new_documents():
    assert numbers([SHORT, LONG], 512) == numbers([SHORT], 512)
    assert numbers([SHORT, LONG], 4096)[:8] == numbers([SHORT], 4096)
    assert sorted(numbers([SHORT, LONG], 4096)[8:]) == [10, 11, 12, 13]


@pytest.mark.parametrize(
    "lots",
    [[SHORT, Lot({512: 12, 4096: 8}, 14)], [SHORT, LONG, Lot({512: 12, 4096: 12}, 14, is_enough=False)]],
    ids=["new documents", "no more documents"],
)
def test_further_sequences_that_no_document_fits_into_are_refused_at_once(lots):
    with pytest.raises(ValueError, match="no prompt with its answer fits into total_length=512"):
        continue_run(lambda first, last: AnswerExamples(QUESTIONS, first, last, seed=3), 0, lots)
