"""Questions to count and to add: their answers are right, none is a probe's own, and every word is known."""

import json
import re
from pathlib import Path
from random import Random

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from condense.cli.main import app
from condense.labs.continuity.study import answers, questions
from condense.labs.continuity.study.data import load
from condense.labs.continuity.study.probes import PROBES
from condense.labs.continuity.study.prompts import FILLER, PAIRS
from condense.labs.continuity.study.prompts import PASSAGES as PROBED
from condense.labs.continuity.study.questions import Adding, Counting, write_questions
from condense.training.data.passkey import PASSKEY_TEXTS
from condense.training.recipe import load_recipe

from .models import options

pytestmark = pytest.mark.unit

RECIPES = Path(__file__).resolve().parents[4] / "training" / "recipes"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("questions")
    write_questions(folder, seed=1, num_questions=1500, width=16, layers=1)
    return folder


def read(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizers(folder):
    return {kind: AutoTokenizer.from_pretrained(folder / f"{kind}_llama") for kind in questions.KINDS}


def counted(prompt):
    """Returns what a prompt asks to count, its number of occurrences, and the occurrences."""
    if prompt.startswith("Tutorial: "):
        steps = [line for line in prompt.splitlines() if line.startswith("- ")]
        assert prompt.endswith("Answer: It takes ")
        return "steps", len(steps), steps
    assert prompt.endswith("Reply with a single-digit number\nAnswer: ")
    if '"' in prompt:
        repeated = prompt.split('"')[1].split()
        assert len(set(repeated)) == 1
        return ("apart" if prompt.startswith("Sentence: ") else "words"), len(repeated), repeated
    sentences = re.findall(r"[^.?]+[.?]", prompt.removeprefix("Question: "))
    first, *events, asked, rest = (sentence.strip() for sentence in [*sentences, prompt.rsplit("?", 1)[1]])
    assert asked.startswith("How many ") and asked.endswith("?") and rest.startswith("Reply")
    who = first.split()[0]
    pronoun = "They" if who == "The" else questions.PEOPLE[who]
    assert all(event.startswith(f"{pronoun} ") for event in events) and len(set(events)) == len(events)
    assert "the class" in asked.lower() if who == "The" else f" {who} " in asked
    return "events", len(events), events


def test_counts_are_right(folder):
    seen = {}
    for question in read(folder, "counting"):
        assert list(question) == ["prompt", "answer"]
        kind, count, _ = counted(question["prompt"])
        assert question["answer"] == str(count)
        seen.setdefault(kind, set()).add(count)
    assert set(seen) == {"words", "apart", "steps", "events"}
    assert all(counts == set(range(1, 10)) for counts in seen.values())


def test_words_stand_equally_often_with_every_count(folder):
    """The counts of the probe's records are not rarer than others."""
    records = {(record["word"], record["repetitions"]) for record in load("words")}
    counts = [counted(question["prompt"]) for question in read(folder, "counting")]
    repeated = [(words[0], count) for kind, count, words in counts if kind in ("words", "apart")]
    assert len(repeated) > 600
    share = sum(pair in records for pair in repeated) / len(repeated)
    assert 0.06 < share < 0.2  # one of nine, and some words have several records
    fillers = {question["prompt"].count(FILLER) for question in read(folder, "counting") if '"' in question["prompt"]}
    assert fillers == set(range(10))


def test_sums_are_right(folder):
    framed = 0
    for question in read(folder, "adding"):
        first, second = map(int, re.findall(r"\d+", question["prompt"]))
        assert question["answer"] == str(first + second) and 1 <= first <= 99 and 1 <= second <= 99
        framed += question["prompt"].startswith("The sum of ")
    assert 0.4 < framed / 1500 < 0.6


def asked_pairs():
    records = [record["fields"] for record in load("sums")]
    pairs = {frozenset((fields["item_1"], fields["item_2"])) for fields in records} | set(map(frozenset, PAIRS))
    return pairs | {frozenset((first, int(f"{second:02d}"[::-1]))) for first, second in PAIRS}


def test_the_probes_own_sums_are_left_out(folder, monkeypatch):
    own = asked_pairs()
    assert frozenset((24, 13)) in own and frozenset((24, 31)) in own
    for question in read(folder, "adding"):
        assert frozenset(map(int, re.findall(r"\d+", question["prompt"]))) not in own
    record = load("sums")[0]["fields"]
    for first, second in ((24, 13), (24, 31), (record["item_1"], record["item_2"])):
        monkeypatch.setattr(questions, "NUMBERS", (first, second))
        adding = Adding(Random(0))
        found = [sorted(map(int, re.findall(r"\d+", adding.question()["prompt"]))) for _ in range(40)]
        assert {tuple(pair) for pair in found} == {(first, first), (second, second)}


def test_the_probes_own_passages_are_left_out(folder, monkeypatch):
    own = [set(events) for _, events, _ in PROBED.values()]
    for question in read(folder, "counting"):
        kind, _, events = counted(question["prompt"])
        assert kind != "events" or set(events) not in own
    event, asked, _ = questions.PASSAGES["went to the zoo"]
    things = "a lion,an elephant,a giraffe,a penguin"
    monkeypatch.setattr(questions, "PASSAGES", {"went to the zoo": (event, asked, things)})
    monkeypatch.setattr(questions, "MOST", 4)
    counting = Counting(Random(0))
    counts = {}
    for _ in range(300):
        prompt = counting.events_question()["prompt"]
        counts.setdefault(prompt.split(".")[1].split()[0], set()).add(counted(prompt)[1])
    assert counts == {"They": {1, 2, 3}, "She": {1, 2, 3, 4}, "He": {1, 2, 3, 4}}


def test_the_probes_own_tutorials_are_left_out(folder, monkeypatch):
    own = {record["sentence"] for record in load("tutorials")}
    prompts = {question["prompt"] for question in read(folder, "counting")}
    assert not prompts & own
    counting = Counting(Random(0))
    counting.tutorials = [("How to wait", ["Wait.", "Wait."])]
    found = {counted(counting.steps_question()["prompt"])[1] for _ in range(200)}
    assert found == {1, 3, 4, 5, 6, 7, 8, 9}


def probed_ends(template):
    """Yields the texts at both ends of every path of the probes, and whole sentences."""
    for name in ("space", "boolean", "translation", "scaling"):
        kind = PROBES[name]
        chosen = template if template in kind.templates else "sentence"
        for item in kind.prompts(options(template=chosen)):
            yield from (text for text in (item.text, item.other) if text)


@pytest.mark.parametrize("template", ["sentence", "published"])
def test_answers_at_both_ends_of_every_path(template):
    """Each text has one answer, also if it occurs several times."""
    taught = [*answers.object_questions(), *answers.boolean_questions(), *answers.sentences()]
    assert all(len({answer for _, answer in taught if prompt == _}) == 1 for prompt, _ in taught)
    assert set(probed_ends(template)) <= {prompt for prompt, _ in taught}
    known = dict(taught)
    assert known["Question: What is 1 NAND 1? Reply with 0 or 1\nAnswer: "] == "0"
    assert known["Question: What is 1 XOR 0? Reply with 0 or 1\nAnswer: "] == "1"
    assert known["Question: Do eagles have fur? (yes/no)\nAnswer:"] == "no"
    assert known["Question: Can eagles fly? (yes/no)\nAnswer:"] == "yes"
    assert known["Question: Can penguins fly? (yes/no)\nAnswer:"] == "no"
    assert known["Repeat the word apples."] == "apples"


def test_truth_values():
    for operator, row in {"AND": "0001", "OR": "0111", "XOR": "0110", "NAND": "1110", "NOR": "1000"}.items():
        assert "".join(str(answers.TRUTH[operator](left, right)) for left in (0, 1) for right in (0, 1)) == row


def test_answers_are_asked_for_in_equal_parts(folder):
    prompts = [question["prompt"] for question in read(folder, "answering")]
    yes_or_no = sum("(yes/no)" in prompt for prompt in prompts) / len(prompts)
    boolean = sum("0 or 1" in prompt for prompt in prompts) / len(prompts)
    assert 0.45 < yes_or_no < 0.55 and 0.2 < boolean < 0.3


PROBED_BY = {"counting": ("counting", "events"), "adding": ("sums",), "answering": ()}


@pytest.mark.parametrize("kind", questions.KINDS)
def test_every_word_is_known(folder, tokenizers, kind):
    """Words of the questions, and of the prompts of the probes for these models."""
    tokenizer = tokenizers[kind]
    texts = [f"{question['prompt']} {question['answer']}" for question in read(folder, kind)]
    for name in PROBED_BY[kind]:
        texts += [text for item in PROBES[name].prompts(options()) for text in (item.text, item.other)]
    if kind == "counting":
        texts += PASSKEY_TEXTS
    if kind == "answering":
        texts += [*probed_ends("sentence"), *probed_ends("published")]
    for ids in tokenizer(texts)["input_ids"]:
        assert tokenizer.unk_token_id not in ids
        assert ids[0] == tokenizer.bos_token_id and tokenizer.bos_token_id not in ids[1:]


def test_an_answer_in_words_is_one_token(folder, tokenizers):
    for answer in {question["answer"] for question in read(folder, "answering")}:
        assert len(tokenizers["answering"](answer, add_special_tokens=False)["input_ids"]) == 1


@pytest.mark.parametrize("kind", questions.KINDS)
def test_the_llama_fits_its_tokenizer(folder, tokenizers, kind):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder / f"{kind}_llama"), tokenizers[kind]
    assert model.config.vocab_size == len(tokenizer) and model.config.hidden_size == 16
    assert (model.config.num_hidden_layers, model.config.bos_token_id) == (1, tokenizer.bos_token_id)
    assert tokenizer.convert_ids_to_tokens(tokenizer("37 cats")["input_ids"])[:3] == ["<s>", "3", "7"]


def test_the_same_for_a_seed(folder, tmp_path):
    arguments = ["--seed", "1", "--questions", "200", "--width", "16", "--layers", "1"]
    done = CliRunner().invoke(app, ["sample", "questions", str(tmp_path / "same"), *arguments], catch_exceptions=False)
    assert "200 questions each to count, add and answer" in done.stdout
    write_questions(tmp_path / "other", seed=2, num_questions=200, width=16, layers=1)
    for name in ("counting", "adding", "answering"):
        assert read(tmp_path / "same", name) == read(folder, name)[:200]
        assert read(tmp_path / "other", name) != read(folder, name)[:200]
    folders = (folder, tmp_path / "same", tmp_path / "other")
    weights = [(path / "adding_llama" / "model.safetensors").read_bytes() for path in folders]
    assert weights[0] == weights[1] != weights[2]
    same, other = ((tmp_path / name / "adding_llama" / "tokenizer.json").read_text() for name in ("same", "other"))
    assert same == other


@pytest.mark.parametrize("name", ["count", "add"])
def test_recipes_to_count_and_to_add(name):
    large, tiny = (load_recipe(RECIPES / f"{stem}.yaml") for stem in (name, f"{name}_tiny"))
    for recipe in (large, tiny):
        (source,) = recipe.data.sources
        assert recipe.data.task == "questions" and (source.text, source.summary) == ("prompt", "answer")
        kind = {"count": "counting", "add": "adding"}[name]
        assert Path(source.files).name == f"{kind}.jsonl"
        assert Path(recipe.model.source) == Path(source.files).parent / f"{kind}_llama"
        assert recipe.model.segment_length == {"count": 48, "add": 64}[name]
    assert [stage.total_length for stage in large.stages] == [stage.total_length for stage in tiny.stages]


def test_questions_fit_into_the_recipes(folder, tokenizers):
    """No question is longer than the last stage, and many are longer than a segment."""
    for name, stem in (("counting", "count_tiny"), ("adding", "add_tiny"), ("answering", "answer_tiny")):
        recipe = load_recipe(RECIPES / f"{stem}.yaml")
        texts = [f"{question['prompt']} {question['answer']}" for question in read(folder, name)]
        lengths = [len(ids) + 1 for ids in tokenizers[name](texts)["input_ids"]]
        assert max(lengths) <= recipe.stages[-1].total_length
        if name != "adding":
            assert sum(length > recipe.model.segment_length for length in lengths) > 300
