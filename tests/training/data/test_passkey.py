"""The passkey data: appendix C's text, the wanted lengths, keys anywhere."""

import re
import time

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from condense.training.data.generated import GeneratedExamples, make_generated_task
from condense.training.data.passkey import NAMES, PASSKEY_TEXTS, PasskeyTask
from condense.training.recipe import PasskeyData
from condense.training.small_llama import passkey_tokenizer, word_tokenizer


def words(tokenizer, ids):
    return tokenizer.decode(ids).replace("<s>", "").split()


def tokenizer_with_names(names=NAMES):
    return word_tokenizer([*PASSKEY_TEXTS, *names])


def examples(**data):
    data = PasskeyData(task="passkey", **data)
    return GeneratedExamples(make_generated_task(data, tokenizer_with_names()), data, seed=5)


def keys_by_name(tokenizer, ids):
    """Reads {name: key} and the requested name off the text."""
    text = re.sub(r"(?<=\d) (?=\d)", "", tokenizer.decode(ids))
    told = re.findall(
        r"The passkey of the (\w+) is (\d+) \. Remember it carefully \. (\d+) is the passkey of the (\w+)", text
    )
    assert all(name == again and key == key_again for name, key, key_again, again in told)
    (asked,) = re.findall(r"What is the passkey of the (\w+) \? The passkey of the \1 is", text)
    return {name: key for name, key, _, _ in told}, asked


def test_the_text_is_that_of_the_paper():
    tokenizer = passkey_tokenizer()
    passkeys = PasskeyTask(tokenizer).batch(1, 130, np.random.default_rng(0), depth=0.5)
    key = passkeys.keys[0]
    expected = f"""There is a critical piece of information hidden within a large amount of irrelevant text.
    Your task is
    to locate it and remember it carefully. I will test your ability to recall this information.
    The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.
    The passkey is {key}. Remember it carefully. {key} is the passkey.
    The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.
    What is the passkey? The passkey is"""
    assert words(tokenizer, passkeys.prompt_ids_BN[0]) == words(tokenizer, tokenizer(expected)["input_ids"])
    assert words(tokenizer, passkeys.answer_ids_BA[0]) == list(key)


@pytest.mark.parametrize("num_tokens", [80, 81, 103, 104, 640, 10_240])
def test_lengths_are_reached_and_never_exceeded(num_tokens):
    task = PasskeyTask(passkey_tokenizer())
    passkeys = task.batch(3, num_tokens, np.random.default_rng(0))
    total = passkeys.prompt_ids_BN.shape[1] + passkeys.answer_ids_BA.shape[1]
    assert num_tokens - len(task.filler) < total <= num_tokens


def test_too_short_is_named():
    with pytest.raises(ValueError, match="needs 70 tokens and 69 are allowed"):
        PasskeyTask(passkey_tokenizer()).batch(1, 69, np.random.default_rng(0))


@pytest.mark.parametrize("depth", [-0.1, 1.5, 50])
def test_depths_outside_are_named(depth):
    with pytest.raises(ValueError, match=f"depth={depth}"):
        PasskeyTask(passkey_tokenizer()).batch(1, 200, np.random.default_rng(0), depth)


def test_depths_and_uniform_places():
    task = PasskeyTask(passkey_tokenizer())
    start, filler = len(task.preamble), len(task.filler)
    length = 70 + 4 * filler
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        passkeys = task.batch(2, length, np.random.default_rng(0), depth)
        assert passkeys.sentence_at_B == [start + int(4 * depth) * filler] * 2
    passkeys = task.batch(5_000, length, np.random.default_rng(0))
    counts = np.bincount([(place - start) // filler for place in passkeys.sentence_at_B], minlength=5)
    assert len(counts) == 5 and abs(counts - 1000).max() < 150  # five standard deviations
    digits = "".join(passkeys.keys)
    assert abs(np.bincount([int(d) for d in digits], minlength=10) - 2000).max() < 220


def test_seeds():
    task = PasskeyTask(passkey_tokenizer())
    first, same, other = (task.batch(4, 300, np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert torch.equal(first.prompt_ids_BN, same.prompt_ids_BN) and first.keys != other.keys


@pytest.mark.parametrize(("num_keys", "depth"), [(1, 0.5), (1, None), (3, 0.5)])
def test_skipped_prompts_are_those_before(num_keys, depth):
    task = PasskeyTask(tokenizer_with_names(), num_keys)
    drawn = task.batch(7, 400, np.random.default_rng(0), depth)
    rest = task.batch(3, 400, np.random.default_rng(0), depth, skip=4)
    assert rest.keys == drawn.keys[4:] and rest.sentence_at_B == drawn.sentence_at_B[4:]
    assert torch.equal(rest.prompt_ids_BN, drawn.prompt_ids_BN[4:])


def test_labels_are_the_answer_and_a_predictable_background():
    tokenizer = passkey_tokenizer()
    task = PasskeyTask(tokenizer)
    batch = task.training_batch(200, 200, background=3, generator=np.random.default_rng(0))
    labelled = batch["labels"] != -100
    assert torch.equal(batch["labels"][labelled], batch["input_ids"][labelled])
    assert labelled[:, -4:].all() and (labelled.sum(1) == 4 + 3).all() and not labelled[:, 0].any()
    digits = torch.tensor(tokenizer.convert_tokens_to_ids(list("0123456789")))
    for ids, row in zip(batch["input_ids"], labelled, strict=True):
        first_mention = torch.isin(ids, digits).nonzero()[:4, 0]
        assert not row[first_mention].any()


def test_other_tokenizers(stories):
    """A tokenizer of real text: the frame is the paper's and the answer follows the question."""
    tokenizer = AutoTokenizer.from_pretrained(stories)
    passkeys = PasskeyTask(tokenizer).batch(3, 900, np.random.default_rng(0))
    for prompt, answer, key in zip(passkeys.prompt_ids_BN, passkeys.answer_ids_BA, passkeys.keys, strict=True):
        text = tokenizer.decode(torch.cat([prompt, answer]))
        assert text.count(key) == 3 and text.rstrip().endswith(key)
        whole = tokenizer(tokenizer.decode([*prompt, *answer], skip_special_tokens=True))["input_ids"]
        assert whole == [*prompt, *answer]  # as if the text had not been made of parts


def test_the_stream_of_one_key_is_that_of_earlier_versions():
    """Results were published with it: a key of four digits and its place, row by row, then the background."""
    task, generator = PasskeyTask(passkey_tokenizer()), np.random.default_rng(7)
    batch = task.training_batch(3, 300, 2, np.random.default_rng(7))
    keys, places = [], []
    for _ in range(3):
        keys.append(generator.integers(0, 10, 4).tolist())
        places.append(len(task.preamble) + len(task.filler) * int(generator.integers(0, (300 - 70) // 24 + 1)))
    passkeys = task.batch(3, 300, np.random.default_rng(7))
    assert passkeys.keys == ["".join(map(str, key)) for key in keys] and passkeys.sentence_at_B == places
    for row, place in enumerate(places):
        end = passkeys.prompt_ids_BN.shape[1]
        background = generator.choice(np.r_[1:place, place + 7 : end], 2, replace=False)
        assert set(np.flatnonzero(batch["labels"][row] != -100)) == {*background, *range(end, end + 4)}


def test_two_keys_by_hand():
    tokenizer = tokenizer_with_names()
    task = PasskeyTask(tokenizer, num_keys=2, num_digits=3)
    passkeys = task.batch(40, 150, np.random.default_rng(0), depth=1.0)
    found = 0
    for prompt, answer, key in zip(passkeys.prompt_ids_BN, passkeys.answer_ids_BA, passkeys.keys, strict=True):
        told, asked = keys_by_name(tokenizer, prompt)
        ((name, other),) = ((name, other) for name, other in told.items() if name != asked)
        filler = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
        first = f"The passkey of the {name} is {other}. Remember it carefully. {other} is the passkey of the {name}."
        expected = f"""There is a critical piece of information hidden within a large amount of irrelevant text.
        Your task is to locate it and remember it carefully. I will test your ability to recall this information.
        {first}
        {filler}
        The passkey of the {asked} is {key}. Remember it carefully. {key} is the passkey of the {asked}.
        What is the passkey of the {asked}? The passkey of the {asked} is"""
        assert told[asked] == key and words(tokenizer, answer) == list(key)
        found += words(tokenizer, prompt) == words(tokenizer, tokenizer(expected)["input_ids"])
    assert 5 < found < 35  # the distractor's other place is behind the filler


def test_the_key_asked_for_is_there_once():
    tokenizer = tokenizer_with_names()
    task = PasskeyTask(tokenizer, num_keys=len(NAMES), num_digits=2)
    passkeys = task.batch(50, 1_000, np.random.default_rng(0))
    all_asked = set()
    for prompt, key, at in zip(passkeys.prompt_ids_BN, passkeys.keys, passkeys.sentence_at_B, strict=True):
        told, asked = keys_by_name(tokenizer, prompt)
        assert len(set(told.values())) == len(told) == len(NAMES) and told[asked] == key
        assert words(tokenizer, prompt[at : at + 8]) == f"The passkey of the {asked} is {' '.join(key)}".split()
        all_asked.add(asked)
    assert len(all_asked) > 15


def places_of(task, passkeys):
    """Returns the gaps [B, 2] of the requested key and of the other one, by the fillers before them ("The grass")."""
    grass, remember = task._encode("grass")[0], task._encode("Remember")[0]
    fillers_BN = (passkeys.prompt_ids_BN == grass).cumsum(1)
    rows, at = (passkeys.prompt_ids_BN == remember).nonzero(as_tuple=True)
    assert (rows.bincount() == 2).all()
    gaps_B2, at_B2 = fillers_BN[rows, at].view(-1, 2), at.view(-1, 2)  # in the order of the text
    is_asked_B2 = (at_B2 >= torch.tensor(passkeys.sentence_at_B)[:, None]).cumsum(1) == 1
    assert (is_asked_B2.sum(1) == 1).all()
    return torch.stack([gaps_B2[is_asked_B2], gaps_B2[~is_asked_B2]], dim=1).numpy()


def test_several_places_are_uniform_and_independent():
    task = PasskeyTask(tokenizer_with_names(), num_keys=2)
    frame = len(task.preamble) + 2 * 26 + 14 + 4
    assert task.batch(1, frame, np.random.default_rng(0)).prompt_ids_BN.shape[1] == frame - 4
    places = places_of(task, task.batch(4_500, frame + 2 * len(task.filler), np.random.default_rng(0)))
    counts = np.bincount(places @ [3, 1], minlength=9)  # gap of the key asked for x gap of the other
    assert len(counts) == 9 and abs(counts - 500).max() < 110, counts  # five standard deviations
    places = places_of(task, task.batch(600, frame + 2 * len(task.filler), np.random.default_rng(0), depth=0.5))
    assert set(places[:, 0]) == {1}
    assert abs(np.bincount(places[:, 1], minlength=3) - 200).max() < 60


def test_keys_that_meet_in_one_gap_stand_in_any_order():
    task = PasskeyTask(tokenizer_with_names(), num_keys=2)
    frame = len(task.preamble) + 2 * 26 + 14 + 4
    passkeys = task.batch(400, frame, np.random.default_rng(0))
    assert set(passkeys.sentence_at_B) == {len(task.preamble), len(task.preamble) + 26}
    assert 150 < passkeys.sentence_at_B.count(len(task.preamble)) < 250


def test_surprises_are_not_trained_on():
    tokenizer = tokenizer_with_names()
    task = PasskeyTask(tokenizer, num_keys=2)
    frame = len(task.preamble) + 2 * 26 + 14 + 4
    predictable = len(task.preamble) - 1 + 2 * 16 + 14 - 7
    with pytest.raises(ValueError, match=f"background={predictable + 1} and the text has {predictable} tokens"):
        task.training_batch(1, frame, predictable + 1, np.random.default_rng(0))
    batch = task.training_batch(5, frame, predictable, np.random.default_rng(0))
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        asked_for = labels != -100
        assert torch.equal(labels[asked_for], ids[asked_for]) and asked_for[-4:].all() and not asked_for[0]
        text = " ".join(words(tokenizer, ids[~asked_for]))
        mention = r"The passkey of the \w+ is( \d){4} "
        assert re.fullmatch(mention * 2 + r"What is the passkey of the \w+", text)


def test_impossible_variants_are_named():
    with pytest.raises(ValueError, match="does not know 'river'"):
        PasskeyTask(passkey_tokenizer(), num_keys=2)
    with pytest.raises(ValueError, match=f"num_keys=25, .* for {len(NAMES)}"):
        PasskeyTask(tokenizer_with_names(), num_keys=25)
    with pytest.raises(ValueError, match="num_keys=11, num_digits=1"):
        PasskeyTask(tokenizer_with_names(), num_keys=11, num_digits=1)
    with pytest.raises(ValueError, match="num_digits=0"):
        PasskeyTask(passkey_tokenizer(), num_digits=0)


@pytest.mark.parametrize("num_keys", [1, 8])
def test_a_million_tokens(num_keys):
    start = time.perf_counter()
    (example,) = examples(num_keys=num_keys, shortest=1.0).sequence(0, 1_000_000)
    assert 999_976 < len(example.input_ids) <= 1_000_000
    assert time.perf_counter() - start < 5  # a fifth of a second where nothing else runs


@pytest.mark.parametrize("data", [{}, {"num_keys": 3, "num_digits": 6, "background": 5}])
def test_sequences(data):
    made, again = examples(**data), examples(**data)
    digits = data.get("num_digits", 4)
    lengths = []
    for number in range(200):
        (example,) = made.sequence(number, 1_000)
        lengths.append(len(example.input_ids))
        labelled = example.labels != -100
        assert not labelled[0] and labelled[-digits:].all()
        assert labelled.sum() == digits + data.get("background", 2)
        assert (example.labels[labelled] == example.input_ids[labelled]).all()
    assert 500 - 24 < min(lengths) < 530 and 950 < max(lengths) <= 1_000 and abs(np.mean(lengths) - 739) < 55
    for number in (150, 3):  # in any order, whatever was asked for before
        (first,), (second,) = made.sequence(number, 1_000), again.sequence(number, 1_000)
        assert (first.input_ids == second.input_ids).all() and (first.labels == second.labels).all()
    other = GeneratedExamples(made.task, made.data, seed=6).sequence(3, 1_000)[0]
    assert other.input_ids.tolist() != second.input_ids.tolist()


def test_sequences_need_room_for_the_frame():
    made = examples(shortest=0.1)
    assert len(made.sequence(0, 70)[0].input_ids) == 70
    assert {len(made.sequence(number, 117)[0].input_ids) for number in range(50)} == {70, 94}
    with pytest.raises(ValueError, match="needs 70 tokens and 69 are allowed"):
        made.sequence(0, 69)


@pytest.mark.parametrize("num_keys", [1, 3])
def test_sequences_need_room_for_the_background(num_keys):
    """No text of a run is too short for it, or else the first one is refused."""
    made = examples(num_keys=num_keys, shortest=0.01, background=100)
    rows = [made.sequence(number, 400)[0] for number in range(100)]
    assert {int((row.labels != -100).sum()) for row in rows} == {104}
    shortest, longest = (size(len(row.input_ids) for row in rows) for size in (min, max))
    assert shortest < 160 + 40 * num_keys and longest > 370
    assert len(made.sequence(0, shortest)[0].input_ids) == shortest
    with pytest.raises(ValueError, match="background=100 and the text has"):
        made.sequence(0, shortest - 1)


def test_several_keys_with_other_tokenizers(stories):
    """Real tokenizers give names different lengths: rows of a batch have names of the same length."""
    tokenizer = AutoTokenizer.from_pretrained(stories)
    passkeys = PasskeyTask(tokenizer, num_keys=3).batch(20, 1_200, np.random.default_rng(0))
    for prompt, key in zip(passkeys.prompt_ids_BN, passkeys.keys, strict=True):
        text = tokenizer.decode(prompt)
        (asked,) = re.findall(r"What is the passkey of the (\w+)\?", text)
        assert re.findall(rf"The passkey of the {asked} is (\d+)", text) == [key]


@pytest.mark.parametrize("num_keys", [1, 2])
def test_early_questions_have_a_digit_as_label_and_only_the_digits_before_it_in_the_text(num_keys):
    tokenizer = tokenizer_with_names()
    plain, task = (PasskeyTask(tokenizer, num_keys=num_keys, early_questions=number) for number in (0, 6))
    counts, said = [], []
    for seed in range(60):
        without = plain.training_batch(1, 420, 0, np.random.default_rng(seed))
        batch = task.training_batch(1, 420, 0, np.random.default_rng(seed))
        ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
        assert len(ids) == without["input_ids"].shape[1] and labels[-4:] == ids[-4:]
        text = " ".join(tokenizer.convert_ids_to_tokens(ids))
        key = text[-7:].replace(" ", "")
        early = [at for at, label in enumerate(labels[:-4]) if label != -100]
        counts.append(len(early))
        asked = text[:-8].split(" ? The passkey ")[-1]
        for at in early:
            before = " ".join(tokenizer.convert_ids_to_tokens(ids[:at]))
            given = before.split(" ? The passkey ")[-1].removeprefix(asked).replace(" ", "")
            assert key.startswith(given) and tokenizer.convert_ids_to_tokens(labels[at]) == key[len(given)]
            assert before.count("Remember it carefully") >= 1 and " ".join(key) in before  # behind its sentence
            assert tokenizer.convert_ids_to_tokens(ids[at]) not in "0123456789"  # the filler goes on
            said.append(len(given))
    assert set(counts) == set(range(7)) and set(said) == {0, 1, 2, 3}


def test_early_questions_leave_room_for_the_background():
    task = PasskeyTask(passkey_tokenizer(), early_questions=16)
    for seed in range(40):
        batch = task.training_batch(2, 140, 60, np.random.default_rng(seed))
        is_background = batch["labels"] == batch["input_ids"]
        assert (is_background[:, :-4].sum(1) == 60).all()


def test_early_questions_longer_than_the_filler_are_refused():
    task = PasskeyTask(passkey_tokenizer(), num_digits=20, early_questions=1)
    with pytest.raises(ValueError, match="early_questions=1: a question with its answer has 28 tokens, more than"):
        task.training_batch(1, 400, 0, np.random.default_rng(0))
