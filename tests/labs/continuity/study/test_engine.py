"""Records against sentences made by hand from numbers only, and memory against its equations."""

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from condense import reference
from condense.labs.continuity.model import ContinuousLM, Sentence, find_spans
from condense.labs.continuity.study import memory, timing, transformations
from condense.labs.continuity.study.aggregation import SET
from condense.labs.continuity.study.classes import DIGITS
from condense.labs.continuity.study.engine import Reader
from condense.labs.continuity.study.items import Item, NotValid
from condense.labs.continuity.study.prompts import FILLER, counting_prompt
from condense.labs.continuity.study.questions import questions_tokenizer
from condense.training.data.passkey import PASSKEY_TEXTS, PasskeyTask
from condense.training.small_llama import word_tokenizer
from tests.condense.models import weights

from .models import folded_reader, gpt2_reader, stock_reader

TEXT = "the cat sat on 24 mats and the dog sat 7 times on 13"


@pytest.fixture(scope="module")
def words():
    return questions_tokenizer([TEXT, "yes no", "catdog", FILLER])


# Records


def plain_sentences(reader, item, ids):
    """Yields each factor's sentence, from numbers only."""
    num, table = len(ids), reader.lm.model.get_input_embeddings().weight.detach()
    for factor in item.factors:
        if item.vary == "shift":
            yield Sentence(ids, integration_start=factor)
        elif item.vary == "scale":
            yield Sentence(ids, durations=[factor] * num)
        elif item.vary == "shrink":
            tokens = reader.tokenizer.convert_ids_to_tokens(ids)
            yield Sentence(ids, durations=[factor if token in ("cat", "dog") else 1.0 for token in tokens])
        elif item.vary == "densify":
            copies = [token for token in ids for _ in range(factor)]
            positions = [n + 1 for n in range(num) for _ in range(factor)] if item.positions == "equal" else None
            yield Sentence(copies, durations=[1 / factor] * (num * factor), positions=positions)
        else:
            other = reader.tokenizer(item.other)["input_ids"]
            yield Sentence(embeddings=(1 - factor) * table[ids] + factor * table[other])


ITEMS = {
    "shrink": Item("n", "g", TEXT, "shrink", (0.1, 0.35, 1.0), "digits", ((4, 7), (31, 34)), one_token=True),
    "shift": Item("n", "g", TEXT, "shift", (0.0, 0.5, 3.7), "digits"),
    "scale": Item("n", "g", TEXT, "scale", (0.05, 1.0, 1.9), "yes_no"),
    "spread": Item("n", "g", TEXT, "densify", (1, 2, 3), "digits"),
    "equal": Item("n", "g", TEXT, "densify", (1, 2, 3), "bits", positions="equal"),
    "interpolate": Item("n", "g", TEXT, "interpolate", (0.0, 0.3, 1.0), "yes_no", other=TEXT.replace("mats", "times")),
    "tokens": Item("n", "g", TEXT, "scale", (0.5, 1.5), "tokens"),
}
CLASSES = {"digits": DIGITS, "yes_no": ["yes", "no"], "bits": ["1", "0"], "tokens": []}


@pytest.mark.parametrize("kind", ["stock", "folded"])
@pytest.mark.parametrize("name", ITEMS)
def test_records_are_a_plain_loop(name, kind, words):
    reader, item = (stock_reader if kind == "stock" else folded_reader)(words), ITEMS[name]
    record = reader.record(item)
    if kind == "folded" and name == "equal":
        assert record["reason"] == "a folded model computes positions only from durations"
        return
    ids = words(TEXT)["input_ids"]
    assert ids[0] == 1
    rows = [reader.lm.logits(sentence)[-1] for sentence in plain_sentences(reader, item, ids)]
    probabilities_FV = torch.stack(rows).double().softmax(-1)
    assert list(record)[:3] == ["name", "group", "valid"] and record["valid"]
    assert record["factors"] == list(item.factors)
    assert list(record["curves"]) == CLASSES[item.watched]
    for label, curve in record["curves"].items():
        expected = probabilities_FV[:, words.convert_tokens_to_ids(label)]
        assert curve == pytest.approx(expected.tolist(), rel=2e-5)
    likely = {n for row in probabilities_FV.tolist() for n, value in enumerate(row) if value >= 0.05}
    assert likely and set(record["likely"]) == {words.decode([n]) for n in likely}
    for token in likely:
        assert record["likely"][words.decode([token])] == pytest.approx(probabilities_FV[:, token].tolist(), rel=2e-5)
    if item.vary == "interpolate":
        assert "distance" not in record and "same_top" not in record
        return
    plain_V = reader.lm.model(torch.tensor([ids])).logits[0, -1].detach().softmax(-1)
    assert record["distance"] == pytest.approx([float((row - plain_V).abs().sum()) / 2 for row in probabilities_FV],
                                               rel=1e-4, abs=1e-6)  # fmt: skip
    assert record["same_top"] == [bool(row.argmax() == plain_V.argmax()) for row in probabilities_FV]
    if name != "shift":
        assert max(record["distance"]) > 1e-3


def test_a_record_of_a_counting_prompt_is_a_plain_loop():
    reader = memory_reader(48)
    text, char_spans = counting_prompt("apple", 3, "fruit", "a fruit", "apart")
    record = reader.record(Item("a", "g", text, "shrink", (0.2, 0.7, 1.0), "digits", char_spans, one_token=True))
    tokens = [token for span in find_spans(reader.tokenizer, text, "apple") for token in span.tokens]
    for number, factor in enumerate(record["factors"]):
        probabilities_V = reader.lm.logits(reader.sentence(text).shrink(tokens, factor))[-1].double().softmax(-1)
        for digit, token in zip(DIGITS, reader.tokenizer.convert_tokens_to_ids(DIGITS), strict=True):
            assert record["curves"][digit][number] == pytest.approx(probabilities_V[token].item(), rel=1e-4)
    assert record["distance"][-1] == pytest.approx(0, abs=1e-6) and record["same_top"][-1]


def test_probabilities_are_in_double_precision(words):
    reader = stock_reader(words)
    probabilities_FV = reader.probabilities([Sentence([1, 5, 6]), Sentence([1, 7])])
    assert probabilities_FV.dtype == torch.float64
    torch.testing.assert_close(probabilities_FV.sum(1), torch.ones(2).double(), rtol=0, atol=1e-14)


def test_facts_go_along(words):
    item = Item("n", "g", TEXT, "scale", (1.0,), "digits", facts={"repetitions": 4})
    record = stock_reader(words).record(item)
    assert record["repetitions"] == 4 and (record["name"], record["group"]) == ("n", "g")


@pytest.mark.parametrize(
    ("text", "fields", "reason"),
    [
        ("the cat sat on 24 mats", {"char_spans": ((15, 17),)}, "'24' is 2 tokens, not one"),
        ("the cat sat on 24 mats", {"char_spans": ((4, 7), (8, 14))}, "'sat on' is 2 tokens, not one"),
        ("the catdog sat", {"char_spans": ((4, 7),)}, "'cat' shares a token with its neighbours"),
        ("the catdog sat", {"char_spans": ((7, 10),)}, "'dog' shares a token with its neighbours"),
        ("the zebra sat on a cat", {"char_spans": ((4, 9),)}, "the tokenizer does not know 'zebra'"),
        ("the cat", {"vary": "interpolate", "other": "the cat sat"}, "3 and 4 tokens: nothing lies between them"),
        ("the cat", {"vary": "interpolate", "other": "the zebra"}, "the tokenizer does not know 'zebra'"),
        ("the cat sat", {"vary": "interpolate", "other": "the cat"}, "4 and 3 tokens: nothing lies between them"),
        ("xylophonist cat", {"vary": "scale"}, "the tokenizer does not know 'xylophonist'"),
        ("the cat", {"char_spans": ((0, 7),)}, "'the cat' is 2 tokens, not one"),
    ],
)
def test_what_a_tokenizer_cannot_pose(text, fields, reason, words):
    fields = {"vary": "shrink", "factors": (1.0,), "watched": "digits", "one_token": True, **fields}
    item = Item("n", "g", text, **fields)
    assert stock_reader(words).record(item) == {"name": "n", "group": "g", "valid": False, "reason": reason}


def test_a_place_of_several_tokens_shrinks_as_a_whole(words):
    item = Item("n", "g", "the cat sat on 24 mats", "shrink", (0.5,), "digits", ((15, 17), (4, 7)))
    (sentence,) = stock_reader(words).sentences(item)
    assert sentence.durations_N.tolist() == [1, 1, 0.5, 1, 1, 0.5, 0.5, 1]


def test_classes_that_a_vocabulary_lacks(monkeypatch):
    """They are found before the model runs."""
    reader = stock_reader(questions_tokenizer(["the cat"]))
    monkeypatch.setattr(Reader, "probabilities", lambda *given: pytest.fail("was run"))
    record = reader.record(Item("n", "g", "the cat", "scale", (1.0,), "yes_no"))
    assert not record["valid"] and record["reason"] == "the tokenizer has no token for yes, no"


def test_an_unknown_token_in_front_may_be_the_bos(words):
    tokenizer = questions_tokenizer([TEXT])
    tokenizer.unk_token = tokenizer.bos_token
    reader = stock_reader(tokenizer)
    assert reader.tokenizer.unk_token_id == 1 and len(reader.sentence("the cat")) == 3


def test_a_last_token_of_the_template_is_left_out():
    """The model must continue the prompt; after an ended text it would begin another one."""
    tokenizer = word_tokenizer([TEXT])
    special = [("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    sentence = stock_reader(tokenizer).sentence("the cat sat")
    assert sentence.ids_N.tolist() == tokenizer.convert_tokens_to_ids(["<s>", "the", "cat", "sat"])


def test_positions_that_were_never_learned(words):
    """GPT-2 with one position more than the sentence: it can shift by 1 only. A short first token has no position."""
    shift = Item("n", "g", TEXT, "shift", (0.0, 1.0, 1.5), "digits")
    reader = gpt2_reader(words, n_positions=len(words(TEXT)["input_ids"]) + 1)
    record = reader.record(shift)
    assert record["factors"] == [0.0, 1.0] and record["left_out"] == [1.5] and "has position" in record["because"]
    within = reader.record(Item("n", "g", TEXT, "shift", (0.0, 1.0), "digits"))
    assert within["valid"] and max(within["distance"]) > 1e-3 and "left_out" not in within
    for name in ("curves", "likely", "distance", "same_top"):
        assert record[name] == within[name]
    far = reader.record(Item("n", "g", TEXT, "shift", (1.5, 2.0), "digits"))
    assert not far["valid"] and "has position" in far["reason"]
    scale = Item("n", "g", TEXT, "scale", (0.5, 1.0), "digits")
    ends = gpt2_reader(words, position_anchor="end").record(scale)
    assert ends["factors"] == [1.0] and ends["left_out"] == [0.5] and "position_anchor='start'" in ends["because"]
    assert gpt2_reader(words).record(scale)["factors"] == [0.5, 1.0]


def test_a_sentence_that_is_too_long_by_itself_is_not_valid(words):
    """Shortened sentences would be within the table, but there is nothing to compare them with."""
    reader = gpt2_reader(words, n_positions=len(words(TEXT)["input_ids"]) - 1)
    record = reader.record(Item("n", "g", TEXT, "scale", (0.1, 0.5), "digits"))
    assert not record["valid"] and "has position" in record["reason"]


def test_rounding_keeps_the_order_of_small_probabilities(words):
    reader, size = stock_reader(words), len(words)
    digits = words.convert_tokens_to_ids(DIGITS)
    probabilities_FV = torch.zeros(2, size, dtype=torch.float64)
    probabilities_FV[0, digits] = torch.tensor([1.234561e-12 + n * 1e-17 for n in range(10)], dtype=torch.float64)
    probabilities_FV[1, digits] = torch.tensor([3.3333334e-30 * 0.5**n for n in range(10)], dtype=torch.float64)
    curves = reader.curves(probabilities_FV, "digits")
    firsts, seconds = zip(*curves.values(), strict=True)
    assert list(firsts) == sorted(set(firsts)) and list(seconds) == sorted(set(seconds), reverse=True)
    assert seconds[0] == 3.33333e-30 and firsts[9] == 1.23465e-12


# Straight lines between embeddings, with more and more samples


@pytest.mark.parametrize("kind", ["stock", "folded"])
@pytest.mark.parametrize("rule", ["rectangle", "trapezoid"])
def test_errors_against_the_densest(rule, kind, words, monkeypatch):
    monkeypatch.setattr(transformations, "DENSEST", 12)
    reader, text = (stock_reader if kind == "stock" else folded_reader)(words), "the cat sat on"
    item = Item("n", "g", text, "densify", (1, 4), "tokens", facts={"rule": rule})
    record = transformations.Density.record(reader, item)
    if (kind, rule) == ("folded", "trapezoid"):
        assert record["reason"] == "a folded model supports rectangles only"
        return
    corners_ND = reader.lm.model.get_input_embeddings().weight.detach()[words(text)["input_ids"]]

    def probabilities(density, rule):
        samples, before = [], corners_ND[0]
        for corner in corners_ND:
            samples += [before + (corner - before) * step / density for step in range(1, density + 1)]
            before = corner
        sentence = Sentence(embeddings=torch.stack(samples), durations=[1 / density] * len(samples))
        return ContinuousLM(reader.lm.model, rule=rule).logits(sentence)[-1].softmax(-1)

    densest_V = probabilities(12, "rectangle" if kind == "folded" else "trapezoid")
    expected = [float((probabilities(density, rule) - densest_V).abs().sum()) / 2 for density in (1, 4)]
    assert record["curves"]["distance"] == pytest.approx(expected, rel=1e-3) and min(expected) > 1e-4
    assert record["factors"] == [1, 4] and record["rule"] == rule


# Memory


def dialled_reference(model, ids_N, dial):
    """Returns logits [N, V]: every key in memory weighs `dial` and keeps its position."""
    decoder_layer = reference.decoder_layer

    def dialled(layer, config, x_TD, context_KD, positions_K, durations_K):
        weighed_K = torch.cat([torch.full_like(durations_K[: -len(x_TD)], dial), durations_K[-len(x_TD) :]])
        return decoder_layer(layer, config, x_TD, context_KD, positions_K, weighed_K)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "decoder_layer", dialled)
        return reference.reference_logits(weights(model), model.config, ids_N)


@pytest.mark.parametrize("memory_source", ["layer_output", "layer_input"])
@pytest.mark.parametrize("num_tokens", [10, 12, 13])
def test_the_dial_by_the_equations(num_tokens, memory_source, words):
    reader = folded_reader(words, memory_source=memory_source)
    ids_N = torch.randint(3, len(words), (num_tokens,), generator=torch.Generator().manual_seed(num_tokens))
    dials = (0.01, 0.5, 1.0, 40.0)
    found_FNV = memory.turn_dials(reader, Sentence(ids_N), dials, keep=num_tokens)
    assert found_FNV.dtype == torch.float64
    for dial, found_NV in zip(dials, found_FNV, strict=True):
        expected_NV = dialled_reference(reader.lm.model, ids_N, dial).softmax(-1)
        torch.testing.assert_close(found_NV, expected_NV, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(found_FNV[2], reader.lm.logits(Sentence(ids_N)).softmax(-1), rtol=1e-5, atol=1e-9)
    assert (found_FNV[0] - found_FNV[2])[4:].abs().amax(1).min() > 1e-4  # every sample after the first segment
    torch.testing.assert_close(found_FNV[0][:4], found_FNV[2][:4])  # that has no memory


@pytest.mark.parametrize("keep", [1, 2, 3, 5, 9])
def test_the_last_samples_of_all_dials(keep, words, monkeypatch):
    reader, ids_N = folded_reader(words), torch.arange(3, 13)
    whole_FNV = memory.turn_dials(reader, Sentence(ids_N), memory.DIALS[:7], keep=10)
    monkeypatch.setattr(memory, "TOKENS_AT_ONCE", 3 * 3 * 4)  # three dials at once
    rows, call = [], memory._turn_dials

    def noted(model, embedded_ND, dials, *rest):
        rows.append(len(dials))
        return call(model, embedded_ND, dials, *rest)

    monkeypatch.setattr(memory, "_turn_dials", noted)
    torch.testing.assert_close(memory.turn_dials(reader, Sentence(ids_N), memory.DIALS[:7], keep), whole_FNV[:, -keep:])
    assert rows == [3, 3, 1]


def memory_reader(segment_length):
    texts = [*PASSKEY_TEXTS, FILLER, "apple fruit a", counting_prompt("apple", 1, "fruit", "a fruit", "apart", 1).text]
    return folded_reader(questions_tokenizer(texts), segment_length)


def test_the_dial_at_one_is_the_model():
    reader = memory_reader(48)
    sentence = reader.sentence(counting_prompt("apple", 9, "fruit", "a fruit", "apart", 4)[0])
    assert len(sentence) > 2 * 48
    plain_NV = reader.lm.logits(sentence).double().softmax(-1)
    dialled_FNV = memory.turn_dials(reader, sentence, (1.0, 0.01), keep=60)
    torch.testing.assert_close(dialled_FNV[0], plain_NV[-60:], rtol=1e-4, atol=1e-9)
    assert (dialled_FNV[1] - plain_NV[-60:]).abs().max() > 1e-6
    alone_FNV = memory.turn_dials(reader, sentence, (0.01,), keep=1)
    torch.testing.assert_close(alone_FNV[0, 0], dialled_FNV[1, -1], rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("segment_length", [4, 7, 9, 16, 23, 48])  # with 7, a border is always between the words
def test_words_stand_so_many_segments_before_the_end(segment_length):
    """Against all numbers of fillers: a distance that none of them gives is not valid."""
    reader = memory_reader(segment_length)
    prompt = ["apple", 4, "fruit", "a fruit"]
    possible = set()
    for num_fillers in range(99):
        ids = reader.tokenizer(counting_prompt(*prompt, "apart", num_fillers).text)["input_ids"]
        positions = [n for n, token in enumerate(reader.tokenizer.convert_ids_to_tokens(ids)) if token == "apple"]
        segments = {position // segment_length for position in positions}
        if len(segments) == 1:
            possible.add((len(ids) - 1) // segment_length - min(segments))
    assert len(possible & set(range(24))) >= 3 if segment_length != 7 else not possible
    for distance in range(24):
        facts = {"repetitions": 4, "distance_in_segments": distance, "prompt": prompt}
        item = Item("n", "g", "", "shrink", (1.0,), "digits", one_token=True, facts=facts)
        if distance not in possible:
            with pytest.raises(NotValid, match=f"puts the words {distance} segments before the end"):
                memory.words_at_distance(reader, item)
            continue
        placed = memory.words_at_distance(reader, item)
        ids = reader.tokenizer(placed.text)["input_ids"]
        positions = [n for n, token in enumerate(reader.tokenizer.convert_ids_to_tokens(ids)) if token == "apple"]
        segment = (len(ids) - 1) // segment_length - distance
        assert len(positions) == 4 and {position // segment_length for position in positions} == {segment}
        assert reader.tokens(placed) == positions


def test_memory_items_one_by_one():
    reader = memory_reader(16)
    facts = {"repetitions": 4, "distance_in_segments": 3, "prompt": ["apple", 4, "fruit", "a fruit"]}
    shrinks = Item("s", "3 segments before", "", "shrink", (0.3, 1.0), "digits", one_token=True, facts=facts)
    turned = Item("d", "dial, counting", "", "dial", (0.1, 1.0, 2.0), "digits", one_token=True, facts=facts)
    placed = memory.words_at_distance(reader, shrinks)
    assert memory.Memory.record(reader, shrinks) == reader.record(placed)
    record = memory.Memory.record(reader, turned)
    expected_FV = memory.turn_dials(reader, reader.sentence(placed.text), (0.1, 1.0, 2.0), keep=1)[:, 0]
    four = reader.tokenizer.convert_tokens_to_ids("4")
    assert record["recall"] == pytest.approx(expected_FV[:, four].tolist(), rel=1e-5)
    assert record["recall"] == record["curves"]["4"] and list(record["curves"]) == DIGITS
    assert record["recall"][1] == pytest.approx(memory.Memory.record(reader, shrinks)["curves"]["4"][1], rel=1e-4)
    assert record["factors"] == [0.1, 1.0, 2.0] and record["valid"] and len(set(record["recall"])) == 3


@torch.no_grad()
def test_recall_of_a_passkey():
    """The joint probability of an answer's digits, at dial 1 the model's own; found if each digit is the likeliest."""
    reader = memory_reader(32)
    model, length = reader.lm.model, 32
    item = Item("p", "dial, passkeys", "", "dial", (1.0, 0.2), "tokens", facts={"seed": 5})
    passkeys = PasskeyTask(reader.tokenizer).batch(1, 4 * length, np.random.default_rng(5), depth=0.0)
    prompt, answer = passkeys.prompt_ids_BN[0], passkeys.answer_ids_BA[0]
    first = passkeys.sentence_at_B[0]
    assert first // length == 1 and (len(prompt) - 1) // length == 3

    def recall(head):
        model.lm_head.weight.copy_(head)
        logits_AV = model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
        probabilities = [float(row.softmax(-1)[token]) for row, token in zip(logits_AV, answer, strict=True)]
        record = memory.Memory.record(reader, item)
        assert record["recall"][0] == pytest.approx(np.prod(probabilities), rel=1e-4)
        assert record["recall"][1] != pytest.approx(record["recall"][0], rel=1e-3)
        assert record["found"][0] == (logits_AV.argmax(-1).tolist() == answer.tolist())
        return record["found"][0]

    head = model.lm_head.weight.clone()
    assert not recall(head)
    embeddings_ND = model.get_input_embeddings().weight[torch.cat([prompt, answer])]
    hidden_AD = reference.reference_hidden(weights(model), model.config, embeddings_ND)[len(prompt) - 1 : -1]
    one_by_one = torch.linalg.lstsq(hidden_AD, 30 * torch.eye(len(answer)).double()).solution.T
    made = torch.zeros_like(head)
    for n, token in enumerate(answer):
        made[token] += one_by_one[n]
    assert recall(made)
    made[answer[2]] = 0
    assert not recall(made)


def test_passkeys_that_cannot_be_asked(words):
    item = Item("p", "dial, passkeys", "", "dial", (1.0,), "tokens", facts={"seed": 0})
    unknown = memory.Memory.record(folded_reader(words, 48), item)
    assert not unknown["valid"] and unknown["reason"] == "the tokenizer does not know the words of a passkey prompt"
    short = memory.Memory.record(memory_reader(8), item)
    assert not short["valid"] and "a passkey prompt needs" in short["reason"]


# Timing


def test_one_pass_a_factor_and_all_together(words, monkeypatch):
    """One run of each sentence without a shared beginning is timed, and one call for all sentences."""
    reader, item = stock_reader(words), ITEMS["shrink"]
    item = Item(**{**vars(item), "group": SET})
    calls = []

    def noted(self, sentences, **options):
        calls.append((len(sentences), options))
        return torch.zeros(len(sentences), 2)

    monkeypatch.setattr(Reader, "probabilities", noted)
    other = Item(**{**vars(item), "group": "words"})
    invalid = Item(**{**vars(item), "group": SET, "text": "xylophonist"})
    found = timing.speed(reader, [other, invalid, item])
    assert found["items"] == 1
    assert calls == [(2, {}), *[(1, {"reuse_prefix": False})] * 3, (3, {})]
    calls.clear()
    assert timing.speed(reader, [item] * 5)["items"] == timing.NUM_TIMED == 3
