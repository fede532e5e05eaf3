"""Answers against a reader that knows only the sentences; lengths, labels, and the text between the facts."""

import re

import numpy as np
import pytest
from transformers import AutoTokenizer

from condense.training.data.background import Background, sentences_of
from condense.training.data.fact_kinds import ANSWERS, KINDS, Question, Story, all_texts, guess, guess_accuracies, tell
from condense.training.data.facts import FactsTask
from condense.training.data.generated import GeneratedExamples, make_generated_task
from condense.training.data.passkey import FILLER
from condense.training.data.tasks import make_examples
from condense.training.recipe import FactsData, Recipe
from condense.training.small_llama import passkey_tokenizer, word_tokenizer

from ...facts_world import answer_to, facts_in, plain

SENTENCES = [f"w{n} v{n} u{n % 3}." for n in range(40)]
FACTS = {"one_fact": {"move"}, "two_facts": {"move", "take", "leave"}, "three_facts": {"move", "take", "leave"},
         "two_arguments": {"lies"}, "three_arguments": {"give"}}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer([*all_texts(), FILLER, *SENTENCES])


def recipe_of(lengths, **others):
    stages = [{"total_length": length, "steps": 100} for length in lengths]
    return Recipe(model="m", output="o", data={"task": "facts"}, stages=stages, global_batch=1, **others)


@pytest.fixture(scope="module")
def task(tokenizer):
    return FactsTask(tokenizer, sentences=SENTENCES)


def text_of(tokenizer, task, num_tokens, seed):
    """Returns a text to train on, without its first token."""
    return plain(
        tokenizer.decode(task.training_batch(1, num_tokens, 0, np.random.default_rng(seed))["input_ids"][0][1:])
    )


@pytest.mark.parametrize("kind", KINDS)
def test_answers(kind):
    generator, counts, answers, said = np.random.default_rng(1), set(), set(), set()
    for _ in range(500):
        story = tell(kind, 9, generator)
        facts = facts_in(" ".join(story.facts))
        assert len(facts) == len(story.facts)  # the reader knows all sentences
        for question in story.questions:
            assert answer_to(" ".join([*story.facts, f"Question: {question.text}"])) == question.answer
            assert question.answer in ANSWERS
        assert len({question.text for question in story.questions}) == len(story.questions) > 0
        counts.add(len(facts))
        answers.add(story.questions[0].answer)
        said |= {fact[0] for fact in facts}
    assert counts == set(range(KINDS[kind].least, 10)) and said == FACTS[kind] and len(answers) >= 8


@pytest.mark.parametrize("kind", KINDS)
def test_few_and_many_facts(kind):
    generator = np.random.default_rng(2)
    assert len(tell(kind, KINDS[kind].least, generator).facts) == KINDS[kind].least
    lengths = [len(tell(kind, 30, generator).facts) for _ in range(200)]
    assert max(lengths) <= (KINDS[kind].most or 30) and max(lengths) > 9


@pytest.mark.parametrize("num_tokens", [80, 81, 200, 3_333])
def test_texts_have_exact_lengths_and_facts_in_order_between_sentences(task, tokenizer, num_tokens):
    generator = np.random.default_rng(3)
    for number in range(40):
        kind = list(KINDS)[number % 5]
        prompt = task.prompt(kind, num_tokens, generator)
        assert len(prompt.input_ids) == num_tokens - 1 and prompt.input_ids[0] == tokenizer.bos_token_id
        text = plain(tokenizer.decode(prompt.input_ids[1:]))
        assert answer_to(text) == tokenizer.decode(prompt.answer)
        background = plain(tokenizer.decode(prompt.input_ids[prompt.is_background]))
        story, _, question = text.rpartition("Question: ")
        assert question.endswith("? Answer:")
        others = re.split(r"(?<=\.) ?", story)
        own = [sentence for sentence in others if sentence and re.match(r"[wvu]\d|\.", sentence)]
        assert " ".join(own) == background  # facts interrupt no sentence
        whole = " ".join(SENTENCES * (2 + num_tokens // 160))
        assert background in whole and (not background or background.endswith("."))


def test_facts_are_anywhere_in_the_text(task):
    """All gaps between sentences are equally likely."""
    starts = []
    generator = np.random.default_rng(4)
    for _ in range(600):
        prompt = task.prompt("one_fact", 2_000, generator)
        starts += np.flatnonzero(np.diff(prompt.is_background.astype(int)) == -1)[:-1].tolist()
    counts, _ = np.histogram(starts, bins=10, range=(0, 2_000))
    assert counts.min() > 0.75 * counts.mean() and counts.max() < 1.25 * counts.mean()


def test_background_against_a_plain_loop(tokenizer):
    background = Background(tokenizer, SENTENCES[:7])
    ids = [tokenizer(sentence)["input_ids"] for sentence in SENTENCES[:7]]
    for seed in range(60):
        num_tokens = seed * 3 % 97
        part, gaps = background.part(num_tokens, 50, np.random.default_rng(seed))
        ends = set()
        for last in range(7):
            row, bounds, number = [], [], last
            while len(row) < num_tokens:
                bounds.append(len(row))
                row, number = [*ids[number % 7], *row], number - 1
            if part.tolist() == row[len(row) - num_tokens :]:
                ends |= {frozenset(num_tokens - bound for bound in (*bounds, num_tokens))}
        assert any(set(gaps.tolist()) <= possible for possible in ends), (num_tokens, gaps, ends)
        assert gaps.tolist() == sorted(gaps)
        assert num_tokens > 20 or any(set(gaps.tolist()) == possible for possible in ends)  # all of them


def test_labels(task, tokenizer):
    batch = task.training_batch(50, 120, 3, np.random.default_rng(5))
    assert batch["input_ids"].shape == batch["labels"].shape == (50, 120)
    places = set()
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        text = plain(tokenizer.decode(ids[1:]))
        assert answer_to(text) == text.rpartition("Answer: ")[2]
        labelled = labels.ne(-100).nonzero()[:, 0].tolist()
        assert labelled[-1] == 119 and len(labelled) == 4 and (labels[labelled] == ids[labelled]).all()
        assert all(re.match(r"[wvu]\d|\.", tokenizer.decode(ids[place])) for place in labelled[:-1])
        places |= set(labelled)
    assert len(places) > 60
    unlabelled = task.training_batch(2, 120, 0, np.random.default_rng(5))["labels"]
    assert unlabelled.ne(-100).sum(dim=1).tolist() == [1, 1]


def test_several_questions_in_a_text_to_train_on(tokenizer):
    """Each answer has labels and follows from the facts, whatever stands between; a story with fewer asks all."""
    task = FactsTask(tokenizer, facts=5, sentences=SENTENCES, questions=3)
    assert FactsTask(tokenizer, facts=5, sentences=SENTENCES, questions=40).questions == 5  # one about each fact
    batch = task.training_batch(60, 140, 2, np.random.default_rng(4))
    counts = set()
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        text, *asked = plain(tokenizer.decode(ids[1:])).split("Question: ")
        questions, answers = zip(*(part.split(" Answer: ") for part in asked), strict=True)
        assert [answer_to(f"{text}Question: {question}") for question in questions] == [
            word.strip() for word in answers
        ]
        assert len(set(questions)) == len(questions)
        found = [tokenizer.decode(token) for token in labels[labels.ne(-100)]][2:]
        assert found == [word.strip() for word in answers] and labels.ne(-100).nonzero()[-1] == 139
        counts.add(len(questions))
    assert counts == {1, 2, 3}
    alone, prompt = (FactsTask(tokenizer, facts=5, sentences=SENTENCES, questions=most) for most in (1, 3))
    one, other = (each.prompt("one_fact", 140, np.random.default_rng(4)) for each in (alone, prompt))
    assert (one.input_ids == other.input_ids).all()  # an evaluation asks one


def test_a_text_has_as_many_questions_as_it_has_room_for(tokenizer):
    task, fewer = FactsTask(tokenizer, facts=5, sentences=SENTENCES, questions=5), 0
    for seed in range(100):
        texts = [
            tokenizer.decode(task.training_batch(1, length, 0, np.random.default_rng(seed))["input_ids"][0])
            for length in (75, 200)
        ]
        (said, *asked), (_, *all_asked) = (f"{text} ".split("Question : ") for text in texts)
        assert asked and asked == all_asked[: len(asked)]
        if len(asked) < len(all_asked):
            fewer += 1
            words = said.split()
            own = [
                word
                for before, word in zip(["", *words], words, strict=False)
                if not re.match(r"[wvu]\d", word) and not (word == "." and re.match(r"[wvu]\d|<s>", before))
            ]
            needed = len(own) + sum(2 + len(question.split()) for question in all_asked[: len(asked) + 1])
            assert needed > 75  # without any background
    assert fewer > 5


def test_brief_questions(tokenizer):
    """The answer directly follows the question's last word, and an evaluation asks none."""
    task, brief = (FactsTask(tokenizer, ["one_fact"], 4, SENTENCES, 2, share) for share in (0.3, 1.0))
    texts = [text_of(tokenizer, task, 120, seed) for seed in range(200)]
    asked = [match for text in texts for match in re.findall(r"(Question: )?Where is (\w+)(\? Answer:)? (\w+)", text)]
    assert all(bool(start) == bool(end) for start, _, end, _ in asked)
    assert 0.2 < sum(not start for start, *_ in asked) / len(asked) < 0.4
    for text in texts:
        facts = re.split(r"(?:Question: )?Where is", text)[0]
        for _, person, _, answer in re.findall(r"(Question: )?Where is (\w+)(\? Answer:)? (\w+)", text):
            assert answer_to(f"{facts}Question: Where is {person}?") == answer
    assert not any("Question" in text_of(tokenizer, brief, 120, seed) for seed in range(20))
    assert "Answer :" in tokenizer.decode(brief.prompt("one_fact", 120, np.random.default_rng(0)).input_ids)


TOLD = {  # what a question and its answer say together
    r"What lies directly (\w+) of the (\w+)\?": lambda answer, way, other: (answer, way, other),
    r"What does the (\w+) lie directly (\w+) of\?": lambda answer, place, way: (place, way, answer),
    r"Who gave the (\w+) to (\w+)\?": lambda answer, thing, receiver: (answer, thing, receiver),
    r"Who got the (\w+) from (\w+)\?": lambda answer, thing, person: (person, thing, answer),
    r"What did (\w+) give to (\w+)\?": lambda answer, person, receiver: (person, answer, receiver),
    r"(Where .*)": lambda answer, text: text,
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_question_tells_another_answer(kind):
    generator, several = np.random.default_rng(3), 0
    for _ in range(500):
        told = [
            tells(question.answer, *match.groups())
            for question in tell(kind, 8, generator).questions
            for pattern, tells in TOLD.items()
            if (match := re.fullmatch(pattern, question.text))
        ]
        assert 1 <= len(set(told)) == len(told) <= 8
        several += len(told) > 1
    assert several > 20


def test_sequences_by_number(tokenizer):
    data = FactsData(task="facts", facts=4, shortest=0.25)
    made, again = (GeneratedExamples(make_generated_task(data, tokenizer), data, seed=7) for _ in range(2))
    lengths = [len(made.sequence(number, 400)[0].input_ids) for number in range(200)]
    assert 100 <= min(lengths) < 120 and 380 < max(lengths) <= 400
    for number in (150, 3):
        (first,), (second,) = made.sequence(number, 400), again.sequence(number, 400)
        assert (first.input_ids == second.input_ids).all() and (first.labels == second.labels).all()


def test_machines_with_other_background_are_noticed(tokenizer):
    data, parts = FactsData(task="facts", facts=4), (SENTENCES, SENTENCES, SENTENCES[1:])
    found = [GeneratedExamples(FactsTask(tokenizer, sentences=part), data, 7).fingerprint() for part in parts]
    assert found[0] == found[1] != found[2]


def test_training_and_validation_have_other_texts(tokenizer):
    recipe = recipe_of([100], evaluation={"sequences": 200})
    examples = make_examples(recipe, tokenizer)
    texts = [{tuple(one.sequence(n, 100)[0].input_ids.tolist()) for n in range(200)} for one in examples]
    assert len(texts[0] & texts[1]) == 0 and len(texts[0]) == 200


def test_ten_million_tokens(task):
    prompt = task.prompt("two_facts", 10_000_000, np.random.default_rng(0))
    assert len(prompt.input_ids) == 9_999_999 and (~prompt.is_background).sum() < task.longest_frame + 1


def test_a_tokenizer_of_parts_of_words(stories):
    """Answers of unequal numbers of tokens, and prompts of equal ones."""
    tokenizer = AutoTokenizer.from_pretrained(stories)
    task = FactsTask(tokenizer, sentences=["Once upon a time there was a cat.", "It sat."])
    generator = np.random.default_rng(0)
    prompts = [task.prompt("one_fact", 300, generator) for _ in range(20)]
    assert {len(prompt.input_ids) for prompt in prompts} == {300 - task.longest_answer}
    assert len({len(prompt.answer) for prompt in prompts}) > 1
    for prompt in prompts:
        text = tokenizer.decode([*prompt.input_ids, *prompt.answer], skip_special_tokens=True)
        assert "  " not in text and text.rpartition("Answer: ")[2] == answer_to(text)
        whole = tokenizer(text)["input_ids"]  # the first sentence is cut, maybe within a word
        assert whole[-100:] == [*prompt.input_ids, *prompt.answer][-100:]  # as if the text had not been made of parts
    assert task.training_batch(4, 300, 2, generator)["input_ids"].shape == (4, 300)


def test_sentences():
    text = 'Mr. Bell sat\ndown. "Is it so?" he said. Yes\n\nCHAPTER II\n\nShe went (at 3.15 p.m.) away!'
    assert sentences_of(text) == [
        "Mr. Bell sat down.", '"Is it so?"', "he said.", "Yes", "CHAPTER II", "She went (at 3.15 p.m.)", "away!",
    ]  # fmt: skip
    assert sentences_of(" \n ") == []


def test_facts_between_sentences_of_a_novel(novel, tmp_path):
    """The text without its facts is the novel's, word by word; words that the tokenizer does not know do no harm."""
    part = tmp_path / "novel.txt"
    part.write_text(novel.read_text(encoding="utf-8")[100_000:300_000], encoding="utf-8")
    sentences = sentences_of(part.read_text(encoding="utf-8"))
    common = sorted(set(" ".join(sentences[:300]).split()), key=len)[:300]
    tokenizer = word_tokenizer([*all_texts(), " ".join(common)])
    data = FactsData(task="facts", kinds=["three_facts"], sources=[{"files": str(part)}], background=8)
    task = make_generated_task(data, tokenizer)
    assert len(task.background.ends) > 1_000
    prompt = task.prompt("three_facts", 2_000, np.random.default_rng(1))
    assert tokenizer.unk_token_id in prompt.input_ids and tokenizer.unk_token_id not in prompt.answer
    assert answer_to(plain(tokenizer.decode(prompt.input_ids))) == tokenizer.decode(prompt.answer)
    own = tokenizer(" ".join(sentences), add_special_tokens=False)["input_ids"]
    between = prompt.input_ids[prompt.is_background]
    windows = np.lib.stride_tricks.sliding_window_view(np.array(own), len(between))
    starts = np.flatnonzero(windows[:, 0] == between[0])
    assert sum((windows[start] == between).all() for start in starts) == 1
    assert task.training_batch(3, 300, 8, np.random.default_rng(2))["labels"].ne(-100).sum() == 27


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"kinds": ["one_fakt"]}, "kind='one_fakt' is not known"),
        ({"kinds": ["one_fact", "one_fact"]}, "names 'one_fact' twice"),
        ({"kinds": []}, "kinds is empty"),
        ({"facts": 2}, "facts=2, and the kind 'three_facts' needs 3"),
        ({"sources": [{"hub": "a/b"}]}, "comes from files"),
    ],
)
def test_keys_are_checked(data, message):
    with pytest.raises(ValueError, match=message):
        FactsData(task="facts", **data)


def test_mistakes_are_named(task, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"does not know \d+ words of the facts \('Odile', 'Bruno'"):
        FactsTask(passkey_tokenizer())
    with pytest.raises(ValueError, match="the background text has no sentences"):
        FactsTask(tokenizer, sentences=[])
    needed = task.longest_frame + 1
    with pytest.raises(ValueError, match=f"6 facts .* need up to {needed} tokens, and {needed - 1} are allowed"):
        task.prompt("one_fact", needed - 1, np.random.default_rng(0))
    with pytest.raises(ValueError, match=f"5 tokens of background need up to {needed + 5} tokens"):
        task.training_batch(1, needed + 4, 5, np.random.default_rng(0))
    with pytest.raises(ValueError, match="and 50 are allowed"):
        make_examples(recipe_of([200, 50]), tokenizer)
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ValueError, match="empty document"):
        make_generated_task(FactsData(task="facts", sources=[{"files": str(tmp_path / "empty.txt")}]), tokenizer)


def test_a_guess_is_the_last_word_of_the_right_sort():
    """By hand; and over many stories it is right far more often than one of nine places would be."""
    story = Story(["Odile walks to the attic.", "Bruno walks to the tower."], [Question("Where is Odile?", "attic")])
    assert guess(story) == "tower"
    question = Question("Where was it before the tower?", "attic")
    before = Story(["Odile walks to the attic.", "Odile walks to the tower."], [question])
    assert guess(before) == "attic"
    right, others = guess_accuracies("one_fact", 6)
    assert 0.4 < right < 0.65 and guess_accuracies("one_fact", 1) == (1, None)
    assert others is not None and 1 / 8 < others < 1


def test_one_of_the_other_words_at_random(monkeypatch):
    """By hand: the last word is wrong in two of three stories, where one and two other words are left."""
    told = [
        Story([f"Odile walks to the {place}." for place in places], [Question("Where is Odile?", answer)])
        for places, answer in [
            (["attic", "tower"], "tower"),
            (["attic", "tower", "attic", "tower"], "attic"),
            (["attic", "stable", "tower"], "stable"),
        ]
    ]
    monkeypatch.setattr("condense.training.data.fact_kinds.tell", lambda *given: told.pop(0))
    right, others = guess_accuracies("one_fact", 3, stories=3)
    assert (right, others) == (pytest.approx(1 / 3), pytest.approx((1 + 1 / 2) / 2))


def test_early_questions_have_labels_and_no_answers_in_the_text(tokenizer):
    """Each asks about a fact before it; what follows is the text. Their places are random ones after the fact."""
    task = FactsTask(tokenizer, ["one_fact"], 1, SENTENCES, brief=0.5, early_questions=16)
    counts, places, forms = [], [], set()
    for seed in range(300):
        batch = task.training_batch(1, 700, 0, np.random.default_rng(seed))
        ids, labels = batch["input_ids"][0], batch["labels"][0]
        labelled = labels.ne(-100).nonzero()[:, 0].tolist()
        text = plain(tokenizer.decode(ids[1:]))
        (told,) = re.findall(r"(\w+) (?:walks to|hurries to|comes into) the (\w+)\.", text)
        assert {tokenizer.decode(labels[place]) for place in labelled} == {told[1]} and text.count(told[1]) == 2
        for place in labelled:
            asked = plain(tokenizer.decode(ids[:place]))
            assert asked.endswith((f"Where is {told[0]}", f"Question: Where is {told[0]}? Answer:"))
            forms.add(asked.endswith("Answer:"))
        assert labelled[-1] == 699 and text.count(f"Where is {told[0]}") == len(labelled)
        counts.append(len(labelled) - 1)
        places += [place / 700 for place in labelled[:-1]]
        assert text.index(told[1]) < text.index("Where is")
    assert forms == {True, False}
    # Of 17 places in any order, the fact's has 0 to 16 after it, each as often; those are at two thirds on average.
    assert set(counts) == set(range(17)) and abs(np.mean(counts) - 8) < 1 and abs(np.mean(places) - 2 / 3) < 0.03
    short = task.training_batch(20, 60, 0, np.random.default_rng(1))  # as many as there is room for
    assert short["input_ids"].shape == (20, 60) and 1 < int(short["labels"].ne(-100).sum(dim=1).max()) < 15
    one, other = (
        each.prompt("one_fact", 140, np.random.default_rng(4)) for each in (FactsTask(tokenizer, ["one_fact"], 1), task)
    )
    assert len(one.input_ids) == len(other.input_ids) and "Where is" in tokenizer.decode(other.input_ids[-8:])


def test_the_background_has_its_labels_beside_early_questions(tokenizer):
    """Also where a token is both; an early question's answer is no token of the text, unlike the other labels."""
    task = FactsTask(tokenizer, ["one_fact"], 1, SENTENCES, early_questions=8)
    batch = task.training_batch(100, 160, 20, np.random.default_rng(0))
    own = batch["labels"] == batch["input_ids"]
    assert own.sum(dim=1).tolist() == [20 + 1] * 100 and batch["labels"][~own].ne(-100).sum() > 100


def test_distractors_are_sentences_of_the_background_at_random_places(tokenizer):
    """They name a place without a fact; answers and labels stay those of the facts, of early questions, too."""
    named = ["w1 stable v2.", "w2 tower v1 u1."]
    task = FactsTask(tokenizer, ["one_fact"], 2, [*SENTENCES * 8, *named], brief=0.5, early_questions=6, distractors=4)
    assert [plain(tokenizer.decode(sentence)) for sentence in task.distractors] == named
    counts, places = [], []
    for seed in range(200):
        batch = task.training_batch(1, 400, 0, np.random.default_rng(seed))
        ids, labels = batch["input_ids"][0], batch["labels"][0]
        assert len(ids) == 400
        for place in labels.ne(-100).nonzero()[:, 0].tolist():
            before = plain(tokenizer.decode(ids[1:place]))
            person = re.search(r"Where is (\w+)(?:\? Answer:)?$", before)[1]
            told = re.findall(rf"{person} (?:walks to|hurries to|comes into) the (\w+)\.", before)
            assert told[-1] == tokenizer.decode(labels[place])
        text = plain(tokenizer.decode(ids[1:]))
        found = [place.start() / len(text) for sentence in named for place in re.finditer(re.escape(sentence), text)]
        counts.append(len(found))
        places += found
    background = FactsTask(tokenizer, ["one_fact"], 2, [*SENTENCES * 8, *named], brief=0.5, early_questions=6)
    texts = [text_of(tokenizer, background, 400, seed) for seed in range(200)]
    without = np.mean([sum(text.count(sentence) for sentence in named) for text in texts])
    assert abs(np.mean(counts) - without - 2) < 0.5  # 0 to 4, each as often, more than the background has by itself
    assert min(places) < 0.2 and max(places) > 0.7
    short = task.training_batch(20, 40, 0, np.random.default_rng(1))  # where there is no room, there are fewer
    assert short["input_ids"].shape == (20, 40)
    with pytest.raises(ValueError, match="distractors=4: no sentence of the background"):
        FactsTask(tokenizer, ["one_fact"], 2, SENTENCES, distractors=4)
