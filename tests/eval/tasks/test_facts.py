"""Answers are counted on what a model decodes: a hand-made one, a folded one and a stock one."""

import csv
import json

import numpy as np
import pytest

from condense.eval.models import EvaluatedModel, load_evaluated
from condense.eval.report import write_report
from condense.eval.runner import measure
from condense.eval.statistics import wilson
from condense.eval.tasks import evaluate
from condense.eval.tasks.facts import Facts, estimate_tracked
from condense.eval.tasks.options import FactsOptions
from condense.training.data.fact_kinds import KINDS, PLACES, all_texts, candidates, guess_accuracies, pick, tell
from condense.training.data.facts import FactsTask
from condense.training.data.generated import GeneratedExamples
from condense.training.data.passkey import FILLER
from condense.training.data.tasks import VALIDATION_SEED
from condense.training.facts_data import write_facts_llama
from condense.training.recipe import FactsData
from condense.training.small_llama import passkey_tokenizer, word_tokenizer

from ...facts_world import answer_to, plain
from ...refusals import assert_refused
from ..measuring import Writer, command, save_folded


class Says(Writer):
    """A model that always gives one answer, and keeps the texts and their lengths."""

    def __init__(self, tokenizer, word=None):
        super().__init__(tokenizer)
        self.word, self.texts = word, []

    def answer(self, ids):
        assert self.options["max_new_tokens"] == 1
        text = plain(self.tokenizer.decode(ids[1:]))
        self.texts.append((len(ids), text))
        return [self.said(text)]

    def said(self, text):
        return self.word


class SaysLastPlace(Says):
    """Says the last place of the text that the question does not name."""

    def said(self, text):
        facts, question = text.split("Question")
        return [word for word in facts.replace(".", " ").split() if word in PLACES and word not in question][-1]


class Reads(Says):
    """Says the right answer."""

    def said(self, text):
        return answer_to(text)


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer([*all_texts(), FILLER])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("facts")
    write_facts_llama(folder, width=16, layers=1)
    return folder


def cells_of(evaluated, **options):
    task = Facts(FactsOptions(models=[], **options), [evaluated])
    return task.summarise(measure(task))["cells"]


def test_a_model_that_always_says_the_same(tokenizer):
    model = Says(tokenizer, "cellar")
    cells = cells_of(EvaluatedModel("says", "", model, tokenizer), lengths=[100, 300], num_prompts=60, seed=3)
    assert [(cell["length"], cell["kind"]) for cell in cells] == [(n, kind) for n in (100, 300) for kind in KINDS]
    for number, cell in enumerate(cells):
        texts = model.texts[60 * number : 60 * number + 60]
        assert {length for length, _ in texts} == {cell["length"] - 1}
        right = sum(answer_to(text) == "cellar" for _, text in texts)
        assert (cell["correct"], cell["total"], cell["accuracy"]) == (right, 60, right / 60)
        assert (cell["low"], cell["high"]) == wilson(right, 60)
    by_kind = {cell["kind"]: cell["correct"] for cell in cells if cell["length"] == 300}
    assert by_kind["three_arguments"] == 0 < by_kind["one_fact"]  # a place was not given to anybody
    assert len({text for _, text in model.texts}) == 600


def results_of(model, tokenizer, **options):
    task = Facts(FactsOptions(models=[], **options), [EvaluatedModel("model", "", model, tokenizer)])
    return task.summarise(measure(task)) | {"models": [{"name": "model"}]}


def test_a_model_that_reads_tracks_all(tokenizer, monkeypatch):
    monkeypatch.setattr("condense.eval.models.TOKENS_PER_BATCH", 3000)  # cells of several batches
    results = results_of(Reads(tokenizer), tokenizer, num_facts=6, lengths=[150, 300], num_prompts=40)
    assert len(results["tracked"]) == 10
    for cell in results["tracked"]:
        assert cell["accuracy"] == 1 and cell["unguessed_correct"] == cell["unguessed_total"] < 40
        assert cell["others_said"] == 0
    table = Facts.tables(results)[1]
    assert table.title == "model: % of texts whose facts are tracked (95 % interval)"
    assert [row[0] for row in table.rows] == [kind.replace("_", " ") for kind in KINDS]
    assert all(cell.startswith("100.0 (") for row in table.rows for cell in row[1:])


def test_a_model_that_says_the_last_word_tracks_nothing(tokenizer):
    options = {"kinds": ("one_fact", "two_facts", "three_facts"), "lengths": [120, 300], "num_prompts": 60}
    results = results_of(SaysLastPlace(tokenizer), tokenizer, num_facts=5, **options)
    assert len(results["tracked"]) == len(results["cells"]) == 6
    for cell, tracked_cell in zip(results["cells"], results["tracked"], strict=True):
        assert (tracked_cell["kind"], tracked_cell["length"]) == (cell["kind"], cell["length"])
        assert tracked_cell["accuracy"] == 0
        assert tracked_cell["unguessed_total"] == cell["total"] - cell["correct"] > 0


@pytest.mark.parametrize(("knows", "says_last"), [(0, 0.3), (0, 1), (0.4, 0.7), (0.8, 0.2)])
def test_a_model_that_knows_some_facts_and_guesses_the_others(knows, says_last):
    """The share is found again whatever the guesses are, from stories and another random reader."""
    generator, counts = np.random.default_rng(5), np.zeros(4, dtype=int)
    for _ in range(8000):
        story = tell("one_fact", 6, generator)
        answer, (last, *others) = story.questions[0].answer, candidates(story)
        if generator.random() < knows:
            said = answer
        elif generator.random() < says_last:
            said = last
        else:
            said = pick(generator, others) if others else None
        if last != answer:
            counts += [0, 0, said == answer, 1]
        elif others:
            counts += [said in others, 1, 0, 0]
    other = guess_accuracies("one_fact", 6)[1]
    fields = "others_said", "others_total", "unguessed_correct", "unguessed_total"
    share, low, high = estimate_tracked(**dict(zip(fields, counts.tolist(), strict=True)), other=other)
    assert share == pytest.approx(knows, abs=0.05) and low < share < high < low + 0.1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("preferred", [1, -1])
def test_a_reader_who_prefers_one_of_the_other_words_hardly_seems_to_track(kind, preferred):
    """The one said last before the last, or the first: what docs/evaluation.md says of such a reader."""
    for num_facts in (4, 6):
        generator = np.random.default_rng(7)
        found = [(candidates(story), story.questions[0].answer)
                 for story in (tell(kind, num_facts, generator) for _ in range(1500))]  # fmt: skip
        right = [words[preferred] == answer for words, answer in found if words[0] != answer]
        counts = {"unguessed_correct": sum(right), "unguessed_total": len(right)}
        share, _, _ = estimate_tracked(
            **counts, others_said=1, others_total=1, other=guess_accuracies(kind, num_facts)[1]
        )
        assert share < 0.16  # of c, which is 1 here


def test_no_second_table_and_picture_where_the_last_word_is_always_right(tokenizer, tmp_path):
    options = {"kinds": ("one_fact",), "num_facts": 1, "lengths": [60, 100], "num_prompts": 5}
    results = results_of(Says(tokenizer, "cellar"), tokenizer, **options)
    assert results["tracked"] == [] and results["others"] == {"one_fact": None}
    assert len(Facts.tables(results)) == 1
    Facts.draw(results, tmp_path / "facts")
    assert {path.name for path in tmp_path.glob("*.png")} == {"facts.png", "facts-length.png"}
    del results["tracked"], results["others"]  # as in older results
    assert len(Facts.tables(results)) == 1


def test_prompts_are_those_of_no_training(tokenizer, monkeypatch):
    """Also with the same seeds; and they depend neither on the batches nor on the other kinds and lengths."""
    model = Says(tokenizer, "cellar")
    evaluated = EvaluatedModel("says", "", model, tokenizer)
    cells_of(evaluated, lengths=[100], num_prompts=20, kinds=("one_fact", "two_facts"))
    data = FactsData(task="facts", kinds=["one_fact"], shortest=1)
    task = FactsTask(tokenizer, data.kinds)
    examples = [GeneratedExamples(task, data, seed) for seed in (0, VALIDATION_SEED)]
    of_training = [one.sequence(n, 100)[0].input_ids for one in examples for n in range(100)]
    decoded = {plain(tokenizer.decode(ids[1:-1])) for ids in of_training}
    first, model.texts = model.texts, []
    assert len(decoded) == 200 and not decoded & {text for _, text in first}
    monkeypatch.setattr("condense.eval.models.TOKENS_PER_BATCH", 300)
    cells_of(evaluated, lengths=[90, 100], num_prompts=20, kinds=("two_facts",))
    assert model.texts[20:] == first[20:]


def test_command_on_a_folded_model(folder, tmp_path):
    (tmp_path / "text.txt").write_text("A dog ran by. Nobody knew whose it was! They sat down.")
    model = tmp_path / "model"
    save_folded(folder / "llama", model, 40)
    (model / "recipe.json").write_text(json.dumps({"stages": [{"total_length": 120}]}))
    arguments = ["--model", f"small={model}", "--lengths", "100,200", "--prompts", "3", "--kinds", "one_fact,two_facts"]
    arguments += ["--data", str(tmp_path / "*.txt"), "--facts", "4", "--output", str(tmp_path / "out")]
    shown = command("eval", "facts", *arguments)
    results = json.loads((tmp_path / "out" / "facts.json").read_text())
    assert len(results["cells"]) == 4 and results["longest_trained"] == {"small": 120}
    rows = list(csv.DictReader((tmp_path / "out" / "facts.csv").open()))
    expected = [(cell["kind"], cell["correct"]) for cell in results["cells"]]
    assert [(row["kind"], int(row["correct"])) for row in rows] == expected
    for name in ("facts.png", "facts.svg", "facts-tracked.png"):
        assert (tmp_path / "out" / name).stat().st_size > 5_000
    assert "small: % of right answers" in shown and "two facts" in shown
    held = {cell["length"]: cell["state_bytes"] for cell in results["cells"]}
    assert held[100] == held[200]
    assert "exactly its tokens" in write_report(tmp_path / "out").read_text()
    # Another text in the same files is another measurement.
    (tmp_path / "text.txt").write_text("A cat ran by.")
    assert_refused("comes from another measurement: text was", command, "eval", "facts", *arguments)


def test_a_stock_model_keeps_the_whole_text(folder):
    evaluated = load_evaluated(str(folder / "llama"))
    short, long = cells_of(evaluated, lengths=[80, 160], num_prompts=4, kinds=("two_arguments",))
    assert (short["total"], long["total"]) == (4, 4)
    assert short["state_bytes"] < long["state_bytes"] < 2.1 * short["state_bytes"]


def test_mistakes_are_named(tokenizer, tmp_path):
    model = Says(tokenizer, "cellar")
    evaluated = EvaluatedModel("says", "", model, tokenizer)
    assert_refused("6 facts .* and 50 are allowed", cells_of, evaluated, lengths=[200, 50])
    assert_refused("kind='tow_facts' is not known", FactsOptions, models=[], kinds=("tow_facts",))
    wrong = {"num_facts": 1, "kinds": ("three_facts",)}
    assert_refused("facts=1, and the kind 'three_facts' needs 3", FactsOptions, models=[], **wrong)
    assert_refused("names 100 twice", FactsOptions, models=[], lengths=(100, 100))
    assert_refused("names no file", cells_of, evaluated, lengths=[200], data=[str(tmp_path / "*.txt")])
    stranger = EvaluatedModel("says", "", model, passkey_tokenizer())
    assert_refused("does not know", cells_of, stranger, lengths=[200])
    assert model.texts == []  # before anything runs


@pytest.mark.slow
def test_two_processes_measure_what_one_does(folder, tmp_path):
    options = {"models": [str(folder / "llama")], "lengths": [90, 120], "num_prompts": 3}
    alone = evaluate("facts", tmp_path / "alone", **options)
    assert evaluate("facts", tmp_path / "both", ranks=2, **options)["cells"] == alone["cells"]
