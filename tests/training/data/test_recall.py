"""The recall data: a reader that fills a dictionary knows every answer; lengths are exact; refusals have names."""

import re
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from condense import CondenseForCausalLM
from condense.training.data.curriculum import CurriculumBatches, CurriculumState
from condense.training.data.generated import make_generated_task
from condense.training.data.passkey import FILLER
from condense.training.data.recall import FORMS, OWNERS, PLACES, PREAMBLE, RECALL_TEXTS, VALUES, RecallTask
from condense.training.recipe import RecallData, Recipe, load_recipe
from condense.training.small_llama import passkey_tokenizer, save_small_llama, word_tokenizer
from condense.training.train import train

from ..recipes import write_recipe
from ..runs import logged

TOKENIZER = word_tokenizer(RECALL_TEXTS)
SENTENCE = r"The (\w+ \w+) has (\w+) \. "
QUESTIONS = {
    "single": r"What does the (?P<key>\w+ \w+) have \? The (?P=key) has",
    "multi_value": r"What does the (?P<key>\w+ \w+) have , first to last \? The (?P=key) has",
    "overwritten": r"What does the (?P<key>\w+ \w+) have now \? The (?P=key) now has",
}


def values_in(said):
    """Returns {key: its values, in order} from the sentences of a text."""
    known = defaultdict(list)
    for key, value in re.findall(SENTENCE, said):
        known[key].append(value)
    return known


def read(form, ids):
    """Returns what a reader of a text knows: {key: its values, in order}, the key asked about, and all else."""
    text = re.fullmatch(
        rf"<s> Remember who has what \. A question follows \. (?P<said>.*?){QUESTIONS[form]}", TOKENIZER.decode(ids)
    )
    return values_in(text["said"]), text["key"], re.sub(SENTENCE, "", text["said"])


@pytest.mark.parametrize(
    ("form", "options", "sentences", "answer"),
    [("single", {}, 20, 1), ("multi_value", {"values": 3}, 60, 3), ("overwritten", {"overwritten": 0.3}, 26, 1)],
)
@pytest.mark.parametrize("room", [0, 1, 77, 1200])
def test_a_reader_knows_the_answer(form, options, sentences, answer, room):
    """The expected lengths are counted by hand: six tokens a sentence, and the frame."""
    task, rows = RecallTask(TOKENIZER, 20, form, **options), 8
    frame = 1 + 9 + {"single": 11, "multi_value": 15, "overwritten": 13}[form] + answer
    assert task.length(20) == frame + 6 * sentences
    total = frame + 6 * sentences + room
    questions = task.batch(rows, total, np.random.default_rng(room))
    assert questions.prompt_ids_BN.shape == (rows, total - answer) and questions.answer_ids_BA.shape == (rows, answer)
    filler = " ".join(TOKENIZER.tokenize(FILLER)).split() * (2 + room // 24)
    for prompt, ids, words, at in zip(*vars(questions).values(), strict=True):
        known, asked, rest = read(form, prompt)
        before, says, after = (TOKENIZER.decode(part) for part in prompt.split([at, 6, len(prompt) - at - 6]))
        assert says == f"The {asked} has {words[0]} ."
        assert f"The {asked} has" not in (before if form == "multi_value" else after.split("What does")[0])
        assert len(known) == 20 and TOKENIZER.decode(ids).split() == words
        assert rest.split() == filler[len(filler) - room :]
        counts = sorted(map(len, known.values()))
        if form == "multi_value":
            assert words == known[asked] and counts == [3] * 20
        else:
            assert words == known[asked][-1:] and counts == [1] * (40 - sentences) + [2] * (sentences - 20)
        assert all(len(set(values)) == len(values) for values in known.values())
        said = [key for key, _ in re.findall(SENTENCE, TOKENIZER.decode(prompt))]
        if sentences > 20:  # another value comes anywhere later, not at once
            assert sum(first == second for first, second in pairwise(said)) < (sentences - 20) / 2


def test_keys_values_and_places_are_drawn_evenly():
    task = RecallTask(TOKENIZER, 2)
    assert len(task.keys) == len(set(task.keys)) == 576 and len(VALUES) == len(set(VALUES)) == 32
    assert not set(PLACES) & set(OWNERS)
    questions = task.batch(1440, task.length(2) + 24, np.random.default_rng(0))
    gaps, firsts, words, keys = np.zeros((6, 6)), 0, defaultdict(int), set()
    has = TOKENIZER.convert_tokens_to_ids("has")
    for prompt, (word,) in zip(questions.prompt_ids_BN, questions.answers, strict=True):
        known, asked, _ = read("single", prompt)
        words[word] += 1
        keys |= set(known)
        firsts += next(iter(known)) == asked
        first, second = (prompt[10:] == has).nonzero()[:2, 0].tolist()
        gaps[[0, 5, 10, 15, 19, 24].index(first - 3), [0, 5, 10, 15, 19, 24].index(second - 3 - 6)] += 1
    assert len(words) == 32 and abs(np.array([*words.values()]) - 45).max() < 34  # five standard deviations
    assert len(keys) > 550 and abs(firsts - 720) < 95
    expected = 40 * (np.triu(np.ones((6, 6))) * 2 - np.eye(6))  # two independent gaps, in the order of the text
    assert (abs(gaps - expected) <= 5 * expected**0.5).all(), gaps


def test_texts_depend_on_the_generator_alone():
    first, same, other = (
        RecallTask(TOKENIZER, 9, "overwritten").training_batch(3, 200, 2, np.random.default_rng(seed))
        for seed in (0, 0, 1)
    )
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["input_ids"], other["input_ids"])


@pytest.mark.parametrize("form", FORMS)
def test_texts_to_train_on(form):
    """The answer, a background outside the sentences with keys, and 1 to `pairs` keys, or what there is room for."""
    task = RecallTask(TOKENIZER, 5, form)
    answer, room = 2 if form == "multi_value" else 1, task.length(3)
    for tokens, most in ((150, 5), (room, 3)):
        batch = task.training_batch(100, tokens, 4, np.random.default_rng(1))
        assert batch["input_ids"].shape == batch["labels"].shape == (100, tokens)
        numbers = []
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            known, asked, _ = read(form, ids[:-answer])
            numbers.append(len(known))
            assert TOKENIZER.decode(ids[-answer:]).split() == known[asked][-answer:]
            labelled = labels != -100
            assert labelled.sum() == 4 + answer and labelled[-answer:].all() and not labelled[0]
            assert torch.equal(labels[labelled], ids[labelled])
            for match in re.finditer(SENTENCE, text := TOKENIZER.decode(ids[:-answer])):
                first = len(text[: match.start()].split())
                assert not labelled[first : first + 6].any()
            question = len(text[: text.index("What does")].split())
            assert not labelled[question : question + 5].any()
        assert set(numbers) == set(range(1, most + 1))


@pytest.mark.parametrize("form", FORMS)
def test_several_questions_of_a_text(form):
    """Each about another key, and each answer has labels; texts with fewer keys ask about all of them."""
    task, counted = RecallTask(TOKENIZER, 5, form, questions=3), []
    question, answer = {"single": (11, 1), "multi_value": (15, 2), "overwritten": (13, 1)}[form]
    assert task.length(5, 3) == task.length(5) + 2 * (question + answer + 1)
    assert task.length(2, 3) == task.length(2) + question + answer + 1
    batch = task.training_batch(60, task.length(5, 3) + 9, 4, np.random.default_rng(2))
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        said, *asked = re.split(r"(?= What does the)", TOKENIZER.decode(ids))
        known, labelled, first, keys = values_in(said + " "), labels != -100, len(said.split()), []
        for number, text in enumerate(asked, 1):
            match = re.fullmatch(rf" {QUESTIONS[form]} (?P<words>[\w ]+?)(?P<stop> \.)?", text)
            keys.append(match["key"])
            assert match["words"].split() == known[match["key"]][-answer:]
            assert (match["stop"] is None) == (number == len(asked))
            assert labelled[first + question : first + question + answer].all()
            first += question + answer + 1
        assert len(set(keys)) == len(keys) == min(3, len(known))
        after = len(said.split()) + question
        assert labelled[:after].sum() == 4 and labelled[after:].sum() == len(keys) * answer
        assert torch.equal(labels[labelled], ids[labelled])
        counted.append(len(known))
    assert set(counted) == {1, 2, 3, 4, 5}
    asked_once = task.batch(2, task.length(5), np.random.default_rng(0))  # as the evaluation does
    assert all(TOKENIZER.decode(prompt).count("What does") == 1 for prompt in asked_once.prompt_ids_BN)
    example = task.example(task.length(5, 3) + 2, 0.5, 2, np.random.default_rng(0))
    assert TOKENIZER.decode(example.input_ids).count("What does") == 3
    short = [task.example(task.length(5), 0.5, 0, np.random.default_rng(seed)) for seed in range(60)]
    asked = [TOKENIZER.decode(example.input_ids).count("What does") for example in short]
    assert {*asked} == {1, 2}, "as many as there is room for"
    with pytest.raises(ValueError, match="pairs=5 of the form .* need"):
        task.example(task.length(5) - 1, 0.5, 0, np.random.default_rng(0))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("brief", [0.4, 1.0])
def test_brief_questions(form, brief):
    """They end at the key. All texts keep their length, and have room for more questions."""
    task, answer = RecallTask(TOKENIZER, 20, form, questions=4, brief=brief), 2 if form == "multi_value" else 1
    saved = {"single": 6, "multi_value": 10, "overwritten": 8}[form]
    room = task.length(5) + 1
    asked, numbers = [], defaultdict(set)
    for tokens, background in ((room, 0), (400, 20)):
        batch = task.training_batch(100, tokens, background, np.random.default_rng(3))
        assert batch["input_ids"].shape == (100, tokens)
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            said, *questions = re.split(r"(?= What does the)", TOKENIZER.decode(ids))
            known, first = values_in(said + " "), len(said.split())
            for text in questions:
                short = re.fullmatch(r" What does the (?P<key>\w+ \w+) (?P<words>[\w ]+?)( \.)?", text)
                match = short or re.fullmatch(rf" {QUESTIONS[form]} (?P<words>[\w ]+?)( \.)?", text)
                assert match["words"].split() == known[match["key"]][-answer:]
                asked.append((short is not None, tokens))
                answered = first + len(text.split()) - answer - text.endswith(" .")
                assert (labels[answered : answered + answer] == ids[answered : answered + answer]).all()
                assert (labels[first : first + 5] == -100).all(), "what can't be known"
                first += len(text.split())
            numbers[tokens, len(known)].add(len(questions))
            assert (labels != -100).sum() == background + len(questions) * answer
    assert {known for tokens, known in numbers if tokens == room} == {1, 2, 3, 4, 5}
    assert all(found == {min(4, known)} for (tokens, known), found in numbers.items() if tokens == 400)
    assert max(numbers[room, 5]) == (1 if saved + 1 < 5 + answer + 1 else 2), (
        "what one question leaves when it is brief"
    )
    brief_ones = [short for short, tokens in asked if tokens == 400]
    assert all(brief_ones) if brief == 1 else abs(np.mean(brief_ones) - 0.4) < 0.1
    one = RecallTask(TOKENIZER, 1, form, brief=brief)
    for seed in range(20):
        example = one.example(one.length(1) + 9, 0.5, 15, np.random.default_rng(seed))
        assert (example.labels != -100).sum() == 15 + answer, "with a brief question, less of a text can be known"
    prompt = task.batch(1, 700, np.random.default_rng(0)).prompt_ids_BN[0]
    assert re.search(QUESTIONS[form] + "$", TOKENIZER.decode(prompt)), "the evaluation asks no brief question"


def test_a_text_by_its_total_length():
    task, lengths = RecallTask(TOKENIZER, 8), []
    for seed in range(150):
        example = task.example(300, 0.5, 3, np.random.default_rng(seed))
        known, asked, _ = read("single", example.input_ids[:-1])
        assert [TOKENIZER.decode(example.input_ids[-1:])] == known[asked] and len(known) <= 8
        assert (example.labels != -100).sum() == 4
        lengths.append(len(example.input_ids))
    assert 150 <= min(lengths) < 160 and 290 < max(lengths) <= 300


def test_what_does_not_fit_is_named():
    task, generator = RecallTask(TOKENIZER, 30), np.random.default_rng(0)
    with pytest.raises(ValueError, match="pairs=30 of the form single need 202 tokens and 201 are allowed.*pairs=29"):
        task.batch(1, 201, generator)
    with pytest.raises(ValueError, match="pairs=30 .* need 202 tokens and 201"):
        task.example(201, 0.5, 2, generator)
    with pytest.raises(ValueError, match="need 202 tokens and 27 are allowed: allow more"):
        task.training_batch(1, 27, 2, generator)
    assert task.training_batch(1, 28, 2, generator)["input_ids"].shape == (1, 28)
    one = RecallTask(TOKENIZER, 1)  # 15 tokens of a text without filler can be predicted
    assert one.training_batch(1, 28, 15, generator)["labels"].ne(-100).sum() == 16
    with pytest.raises(ValueError, match="pairs=1 of the form single with background=16 need 30 tokens and 29"):
        one.training_batch(1, 29, 16, generator)
    for seed in range(30):
        batch = one.training_batch(1, 30, 16, np.random.default_rng(seed))
        assert batch["labels"].ne(-100).sum() == 17


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairs": 577}, "pairs=577: pass 1 to 576"),
        ({"pairs": 0}, "pairs=0: pass 1"),
        ({"pairs": 1, "form": "two"}, "form='two' is not known"),
        ({"pairs": 1, "form": "multi_value", "values": 33}, "values=33: pass 1 to 32"),
        ({"pairs": 1, "form": "overwritten", "overwritten": 2}, "overwritten=2: pass 0 to 1"),
    ],
)
def test_impossible_tasks_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        RecallTask(TOKENIZER, **options)


def test_a_tokenizer_without_the_words_is_named():
    with pytest.raises(ValueError, match=r"does not know \d+ of \d+ words of the recall task, such as"):
        RecallTask(passkey_tokenizer(), 1)


def test_other_tokenizers(stories):
    """A tokenizer of real text: all words have the same length, so lengths stay exact."""
    tokenizer = AutoTokenizer.from_pretrained(stories)
    task = RecallTask(tokenizer, 6)
    questions = task.batch(5, 700, np.random.default_rng(0))
    for prompt, ids, (word,), at in zip(*vars(questions).values(), strict=True):
        assert len(prompt) + len(ids) == 700
        text = tokenizer.decode(prompt)
        assert PREAMBLE in text and tokenizer.decode(ids).strip() == word
        key = re.search(r"What does the (\w+ \w+) have\?", text)[1]
        assert re.findall(rf"The {key} has (\w+)\.", text) == [word]
        assert tokenizer.decode(prompt[at:]).strip().startswith(f"The {key} has {word}.")
        whole = tokenizer(tokenizer.decode([*prompt, *ids], skip_special_tokens=True))["input_ids"]
        assert whole == [*prompt, *ids]  # as if the text had not been made of parts


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A small folded model that knows the words."""
    folder = tmp_path_factory.mktemp("start")
    save_small_llama(folder, task="recall")
    CondenseForCausalLM.from_pretrained(folder, segment_length=32).save_pretrained(folder)
    return folder


def test_the_model_is_made_for_lookups(start):
    """The standard deviation of its first weights, and the base of its rotary frequencies."""
    model = CondenseForCausalLM.from_pretrained(start)
    assert abs(model.model.layers[0].mlp.up_proj.weight.std().item() - 0.1) < 0.005
    assert model.config.rope_parameters["rope_theta"] == 10.0


def test_a_recipe_trains_on_it(start, tmp_path):
    """In the real Trainer: the loss falls to what a guess among the values costs."""
    data = {"task": "recall", "pairs": 3, "form": "overwritten", "overwritten": 1.0, "background": 0}
    fields = {"data": data, "optimizer": {"learning_rate": 5e-3, "warmup_steps": 3}, "attention": "eager"}
    fields |= {"evaluation": {"sequences": 10}, "log_every": 5, "checkpoints": {"every": 60}}
    path = write_recipe(tmp_path, str(start), [(80, 60)], global_batch=16, micro_batch=16, **fields)
    train(load_recipe(path))
    losses = logged(tmp_path / "output")
    assert losses[0] > np.log(80) and losses[-1] < np.log(32) + 0.4
    accuracies = logged(tmp_path / "output", "eval_recall_accuracy")
    assert len(accuracies) == 2  # before and after training


def test_a_curriculum_grows_lengths_and_pairs(start):
    data = {"task": "recall", "pairs": 30}
    curriculum = {"steps": 60, "tokens_per_step": 1024, "first_segments": 2, "last_segments": 7}
    recipe = Recipe(model=str(start), output="o", data=data, curriculum=curriculum)
    task, state = make_generated_task(recipe.data, TOKENIZER), CurriculumState(recipe.curriculum)
    state.milestones = [(0, 2), (30, 7)]
    batches = CurriculumBatches(recipe, state, task, 32, 1)
    most = [max(len(read("single", ids[:-1])[0]) for ids in batches[step]["input_ids"]) for step in range(60)]
    assert max(most[:30]) == 7 and 25 <= max(most[30:]) <= 30  # of 64 tokens, 22 are the frame
    assert {batches[step]["input_ids"].shape[1] for step in range(30)} == {64}
    with pytest.raises(ValueError, match="pairs=40 of the form single need 262 tokens and 224 are allowed"):
        CurriculumBatches(recipe, state, RecallTask(TOKENIZER, 40), 32, 1)


def test_keys_of_another_form_are_refused():
    with pytest.raises(ValueError, match="values goes with form=multi_value, not with form=single"):
        RecallData(task="recall", values=3)
    data = RecallData(task="recall", pairs=3, form="multi_value", values=4, questions=2, brief=0.5)
    assert RecallData(**data.model_dump()) == data
    task = make_generated_task(data, TOKENIZER)
    assert (task.pairs, task.form, task.num_values, task.num_questions, task.brief) == (3, "multi_value", 4, 2, 0.5)
