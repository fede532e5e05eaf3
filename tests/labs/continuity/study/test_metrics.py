"""Measures by hand and by loops; classes of next tokens; summaries of records."""

import re

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from condense.labs.continuity.study import memory, space
from condense.labs.continuity.study.aggregation import SET, mass
from condense.labs.continuity.study.classes import (
    DIGITS,
    class_curves,
    first_digit_classes,
    likely_tokens,
    watched_classes,
    word_classes,
)
from condense.labs.continuity.study.counts import Counting
from condense.labs.continuity.study.items import NotValid
from condense.labs.continuity.study.memory import Memory
from condense.labs.continuity.study.metrics import (
    likeliest,
    normalised_max_derivative,
    outside_ends,
    peak_frequencies,
    shrunk_labels,
    sum_properties,
    unique_peaks,
)
from condense.labs.continuity.study.space import Boolean, Space
from condense.labs.continuity.study.sums import Sums
from condense.labs.continuity.study.transformations import Density
from condense.training.small_llama import word_tokenizer

pytestmark = pytest.mark.unit


def digit_curves(*tops, rest=0.01, **others):
    """Returns curves of all digits: one has 0.5 at each factor, others `rest`; `d3=[...]` sets a curve of its own."""
    curves = {digit: [0.5 if digit == top else rest for top in tops] for digit in DIGITS}
    return curves | {name[1:]: curve for name, curve in others.items()}


# Peaks


def test_peaks_as_the_paper_counts_them():
    """The likeliest digits are 1, 2, 1 again, and 3."""
    assert unique_peaks(digit_curves("1", "2", "1", "3")) == {"1", "2", "3"}
    assert unique_peaks(digit_curves("4", "4", "4")) == {"4"}


def test_of_equals_all_are_peaks():
    assert unique_peaks({"1": [0.5, 0.1], "2": [0.5, 0.2], "3": [0.4, 0.2]}) == {"1", "2", "3"}
    assert unique_peaks({"1": [0.5, 0.3], "2": [0.5, 0.2], "3": [0.4, 0.2]}) == {"1", "2"}


def test_the_likeliest_class_at_a_factor():
    curves = digit_curves("1", "2", "7")
    assert (likeliest(curves), likeliest(curves, 0), likeliest(curves, 1)) == ("7", "1", "2")


def test_peak_frequencies_by_hand():
    """Four repetitions: 0, 1 and 4 are on top at some duration, and 0 is not expected."""
    few = {"0": [0.1, 0.6, 0.1, 0.1], "1": [0.5, 0.2, 0.5, 0.1], "3": [0.2, 0.1, 0.3, 0.3], "4": [0.0, 0.0, 0.0, 0.4]}
    expected = {"counterfactual": 0.25, "observed": 0.75, "observed_expected": 0.5, "ratio": 3, "ratio_expected": 2}
    for curves in (digit_curves("0", "1", "4", "4"), few):
        assert (found := peak_frequencies(curves, 4)) == expected
    assert found["ratio"] == found["observed"] / found["counterfactual"]
    beyond = peak_frequencies(digit_curves("3", "4", "5"), 3)
    assert (beyond["observed"], beyond["observed_expected"], beyond["ratio_expected"]) == (1.0, 1 / 3, 1.0)


# Sums


def test_shrunk_labels():
    assert shrunk_labels(24, 37) == {"2", "3"}  # 24 + 3 = 27, 24 + 7 = 31
    assert shrunk_labels(37, 24) == {"3", "4"}  # 39 and 41
    assert shrunk_labels(98, 25) == {"1"}  # 100 and 103
    assert shrunk_labels(24, 50) == {"2"}  # 29 and 24


PROPERTIES = ("valid", "P1", "P2", "P3")


@pytest.mark.parametrize(
    ("holding", "others"),
    [
        # 6 is right, 2 and 3 are shrunk labels; the unchanged sentence is the last of three factors.
        ((True, True, True, True), {"d6": [0.2, 0.4, 0.6], "d2": [0.5, 0.3, 0.1]}),
        # together only
        ((True, True, True, True), {"d6": [0.3, 0.4, 0.6], "d2": [0.2, 0.1, 0.1], "d3": [0.2, 0.1, 0.1]}),
        ((False, True, True, True), {"d6": [0.6, 0.2, 0.2], "d2": [0.2, 0.5, 0.3]}),
        # never above the right one, at most equal to it
        ((True, False, False, False), {"d6": [0.5, 0.5, 0.5], "d2": [0.25, 0.1, 0.1], "d3": [0.25, 0.1, 0.1]}),
        # above it only if 9 is above both
        ((True, True, False, False), {"d6": [0.2, 0.4, 0.6], "d2": [0.3, 0.1, 0.1], "d9": [0.4, 0.1, 0.1]}),
        # above the right one at the first factor, above 9 only at the second
        ((True, True, False, False), {"d6": [0.1, 0.5, 0.6], "d2": [0.3, 0.3, 0.1], "d9": [0.4, 0.1, 0.1]}),
        # above both at the first factor, and 9 is on top at another
        ((True, True, True, False), {"d6": [0.2, 0.1, 0.6], "d2": [0.5, 0.1, 0.1], "d9": [0.1, 0.4, 0.1]}),
        # 9 is on top as well as the right one
        ((True, True, True, False), {"d6": [0.2, 0.4, 0.6], "d2": [0.5, 0.1, 0.1], "d9": [0.1, 0.4, 0.1]}),
        # 9 is above each shrunk label and below both together: it is on top, so only P3 fails
        ((True, True, True, False), {"d6": [0.1, 0.4, 0.6], "d2": [0.25] * 3, "d3": [0.25] * 3, "d9": [0.3, 0, 0]}),
        # another digit is on top at the end: neither valid nor P3
        ((False, True, True, False), {"d6": [0.2, 0.4, 0.3], "d2": [0.5, 0.1, 0.1], "d9": [0.1, 0.1, 0.4]}),
    ],
)
def test_properties_of_sums_one_by_one(holding, others):
    found = sum_properties(digit_curves(*"...", **others), "6", {"2", "3"})
    assert tuple(found[name] for name in PROPERTIES) == holding


def test_a_label_that_is_right_and_shrunk_counts_as_right():
    """Only 2 is left of 2 and 6; of 6 nothing is left, so it is never above."""
    curves = digit_curves(*"..", d6=[0.4, 0.6], d2=[0.3, 0.1])
    assert not sum_properties(curves, "6", {"2", "6"})["P1"]
    assert sum_properties(curves | {"2": [0.5, 0.1]}, "6", {"2", "6"})["P3"]
    assert tuple(sum_properties(curves, "6", {"6"}).values()) == (True, False, False, False)


def naive_properties(curves, original, shrunk):
    shrunk = [label for label in shrunk if label != original]
    others = [label for label in curves if label != original and label not in shrunk]
    p1 = p2 = topped = False
    factors = range(len(curves["0"]))
    for n in factors:
        together = 0.0
        for label in shrunk:
            together += curves[label][n]
        if together > curves[original][n]:
            p1 = True
            if all(together > curves[label][n] for label in others):
                p2 = True
        if any(all(curves[label][n] >= curves[every][n] for every in curves) for label in others):
            topped = True
    first = max(curves[label][-1] for label in curves)
    return {"valid": curves[original][-1] == first, "P1": p1, "P2": p2, "P3": p2 and not topped}


def test_properties_of_sums_against_a_loop():
    random, seen = np.random.default_rng(0), set()
    for _ in range(400):
        values = random.dirichlet(np.full(10, 0.3), 3)
        favoured = random.choice(10, 3, replace=False)
        values[:, favoured] += random.random() * random.random((3, 3))
        curves = {digit: values[:, n].tolist() for n, digit in enumerate(DIGITS)}
        original, *shrunk = (str(digit) for digit in favoured)
        shrunk = set(shrunk) | ({original} if random.random() < 0.2 else set())
        found = sum_properties(curves, original, shrunk)
        assert found == naive_properties(curves, original, shrunk)
        seen.add(tuple(found[name] for name in PROPERTIES))
    assert len(seen) == 8  # P3 implies P2, and P2 implies P1


# Curves between two words


def naive_derivative(factors, curve):
    slopes = []
    for n in range(len(curve)):
        before, after = max(n - 1, 0), min(n + 1, len(curve) - 1)
        slopes.append(abs((curve[after] - curve[before]) / (factors[after] - factors[before])))
    return max(slopes) / (max(curve) - min(curve))


def test_derivative_against_a_loop():
    factors = np.linspace(0, 1, 40)
    for seed in range(20):
        curve = np.random.default_rng(seed).random(40)
        assert normalised_max_derivative(factors, curve) == pytest.approx(naive_derivative(factors, curve))


def test_derivative_by_hand():
    assert normalised_max_derivative([0, 1, 2], [0, 4, 6]) == pytest.approx(4 / 6)  # 4 at the end, 3 inside, 2
    assert normalised_max_derivative([0, 0.5, 1, 1.5], [0.2, 0.2, 0.1, 0.1]) == pytest.approx(1.0)  # falling counts
    assert normalised_max_derivative([0, 1], [2, 3]) == 1
    # Between neighbours 0.5 / 1, then (0.9 - 0) / 2 and at the end 0.4 / 1, over an amplitude of 0.9.
    assert normalised_max_derivative([0, 1, 2], [0.0, 0.5, 0.9]) == pytest.approx(0.5 / 0.9)
    for factors in ([0, 0.5, 1], [0, 1, 2]):
        assert normalised_max_derivative(factors, [0.3, 0.3, 0.3]) is None


@pytest.mark.parametrize("turned", [False, True])
def test_distance_to_the_range_between_the_ends(turned):
    def outside(*curve):
        return outside_ends(curve[::-1] if turned else curve)

    assert outside(0.2, 0.9, 0.5, 0.6) == pytest.approx(0.3)
    assert outside(0.2, 0.05, 0.3, 0.6) == pytest.approx(0.15)
    assert outside(0.2, 0.05, 0.7, 0.6) == pytest.approx(0.15)  # below by more than above
    assert outside(0.2, 0.3, 0.5, 0.6) == 0
    assert outside(0.4, 0.4) == 0
    assert outside(0.2, 0.5, 0.3, 0.1, 0.4) == pytest.approx(0.1)
    assert outside(0.4, 0.3, 0.2) == 0 and outside(0.4, 0.45, 0.2) == pytest.approx(0.05)


def test_the_formula_as_printed_means_something_else():
    curve = [0.2, 0.61, 0.6]
    printed = max(abs(value + 0.6) for value in curve if value > 0.6)
    assert printed == pytest.approx(1.21) and outside_ends(curve) == pytest.approx(0.01)


# Classes


def tokens_as(texts, **special):
    """Returns a tokenizer with exactly these tokens, which splits a text from the left, the longest tokens first."""
    tokenizer = Tokenizer(models.WordLevel({text: n for n, text in enumerate(texts)}, unk_token=special.get("unk")))
    longest = sorted((text for text in texts if text.strip()), key=len, reverse=True)
    pattern = Regex("|".join(map(re.escape, longest)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{f"{key}_token": one for key, one in special.items()})


def test_classes_of_digits():
    texts = ["a", *DIGITS, " 3", "37", "3.", "x3", "٣", "³", " 45 ", "3٣"]
    tokenizer = tokens_as(texts)
    found = word_classes(tokenizer, DIGITS)
    assert list(found) == DIGITS
    assert found["3"] == [4, 11] and found["4"] == [5]
    found = first_digit_classes(tokenizer)
    assert found["3"] == [4, 11, 12] and found["4"] == [5, 17] and found["7"] == [8]


def test_classes_of_words():
    texts = ["Yes", " yes", "YES", "yesterday", "no", "No ", "know", "y"]
    found = word_classes(tokens_as(texts), ("yes", "no"))
    assert found == {"yes": [0, 1, 2], "no": [4, 5]}


def test_a_word_without_a_token_is_known_by_its_beginning():
    tokenizer = tokens_as(["Y", "y", "e", "s", "n", "o", "N", "t"])
    assert word_classes(tokenizer, ("yes", "no")) == {"yes": [0, 1], "no": [4, 6]}
    assert watched_classes(tokenizer, "yes_no") == {"yes": [0, 1], "no": [4, 6]}
    with pytest.raises(NotValid, match="yes, yet begin with the same token"):
        word_classes(tokenizer, ("yes", "yet"))


def test_words_that_nothing_stands_for():
    with pytest.raises(NotValid, match=r"no token for 0, 1, 2, .*9"):
        word_classes(tokens_as(["a", "b", "?"], unk="?"), DIGITS)
    with pytest.raises(NotValid, match="no token for 7$"):
        first_digit_classes(tokens_as([digit for digit in DIGITS if digit != "7"]))
    tokenizer = tokens_as(["yes", "?"], unk="?")
    with pytest.raises(NotValid, match="no token for no$"):
        word_classes(tokenizer, ("yes", "no"))


def test_classes_of_a_real_vocabulary_of_pieces(stories):
    tokenizer = AutoTokenizer.from_pretrained(stories)
    classes = watched_classes(tokenizer, "yes_no")
    found = {name: set(tokenizer.convert_ids_to_tokens(ids)) for name, ids in classes.items()}
    assert {"Y", "y"} < found["yes"] < {"Y", "y", "▁Y", "▁y", "<0x59>", "<0x79>"}
    assert {"N", "n"} < found["no"] < {"N", "n", "▁N", "▁n", "<0x4E>", "<0x6E>"}
    for digit, ids in word_classes(tokenizer, DIGITS).items():
        assert tokenizer.convert_ids_to_tokens(ids) == [f"<0x3{digit}>", digit]


def test_what_is_watched():
    tokenizer = word_tokenizer(["Yes no"])
    bits = watched_classes(tokenizer, "bits")
    members_of = {name: tokenizer.convert_ids_to_tokens(members) for name, members in bits.items()}
    assert members_of == {"0": ["0"], "1": ["1"]}
    assert watched_classes(tokenizer, "tokens") == {}
    digits, first_digits = (watched_classes(tokenizer, watched) for watched in ("digits", "first_digits"))
    assert digits == first_digits == word_classes(tokenizer, DIGITS)


def test_likely_tokens_of_the_same_text_are_one():
    tokenizer = tokens_as(["cat", " cat", "dog", "cow", " ", "  "])
    probabilities_FV = torch.tensor(
        [[0.50, 0.06, 0.049, 0.0, 0.0, 0.05, 0.05], [0.80, 0.00, 0.04, 0.05, 0.06, 0.0, 0.0]], dtype=torch.float64
    )
    found = likely_tokens(probabilities_FV, tokenizer)
    assert found == {"cat": [0, 1], "cow": [3], "␣": [4], "␣␣": [5], "(no text)": [6]}  # the last has no text: padding
    pieces = tokens_as(["cat"])
    pieces.convert_ids_to_tokens = lambda token: "▁"  # tokenizers of pieces decode a single space to nothing
    pieces.decode = lambda tokens, **_: "cat" if tokens == [0] else ""
    assert list(likely_tokens(probabilities_FV[:, [0, 6]], pieces)) == ["cat", "␣"]
    curves = class_curves(probabilities_FV, found)
    assert curves["cat"] == pytest.approx([0.56, 0.80]) and curves["cow"] == [0.0, 0.05]


# Summaries


def record_of(group=SET, valid=True, **fields):
    allowed = {"exact": valid, "published": valid}
    return {"name": "x", "group": group, "valid": valid, "factors": [0.5, 1.0], "allowed_by": allowed, **fields}


def test_summary_of_counts():
    """Figures of the whole set and of its valid items: means over records, not over peaks."""
    quarters = {"factors": [0.25, 0.5, 1.0]}
    records = [
        record_of(curves=digit_curves("1", "2", "4"), repetitions=4) | quarters,
        record_of(curves=digit_curves("0", "3", "3"), repetitions=2) | quarters,
        record_of(curves=digit_curves("9", "9", "9"), repetitions=9, group="words") | quarters,
        record_of(valid=False, reason="no"),
    ]
    expected = {"records": 3, "valid": 2, "allowed_exact": 2, "allowed_published": 2, "mass": pytest.approx(0.59)}
    expected |= {"right_at_1": 0.5, "proportion_error": (0 + (0.5 + 2 + 1) / 3) / 2}
    expected |= {"counterfactual": (1 / 4 + 1 / 2) / 2, "observed": (3 / 4 + 2 / 2) / 2}
    expected |= {"observed_expected": (3 / 4 + 0) / 2, "ratio": (3 + 2) / 2, "ratio_expected": (3 + 0) / 2}
    found = Counting.summary(records)
    assert found.pop("control")["right with whole tokens"]["own"]["mean"] == 0.5
    assert found == expected
    nothing = Counting.summary([record_of(valid=False, reason="no")])
    assert (nothing["records"], nothing["valid"], nothing["ratio"], nothing["right_at_1"]) == (1, 0, None, None)


def test_summary_of_sums():
    """Properties are shares of the records that are right at durations of one."""
    good = digit_curves(*"..", d6=[0.2, 0.6], d2=[0.5, 0.1])
    plain = digit_curves(*"..", d6=[0.6, 0.6])
    third = digit_curves(*"..", d6=[0.2, 0.6], d2=[0.3, 0.1], d9=[0.4, 0.1])
    wrong = digit_curves(*"..", d6=[0.2, 0.2], d2=[0.5, 0.5])
    labels = {"original": "6", "shrunk": ["2", "3"], "published_other": []}
    records = [record_of(curves=curves, **labels) for curves in (good, plain, third, wrong)]
    records += [record_of(valid=False, reason="no"), record_of(group="duration", curves=wrong)]
    found = Sums.summary(records)
    assert {name: found[name] for name in ("records", "posed", "valid")} == {"records": 5, "posed": 4, "valid": 3}
    assert [found[name] for name in ("P1", "P2", "P3")] == [2 / 3, 1 / 3, 1 / 3]
    assert [found["published"][name] for name in ("valid", "P1", "P2", "P3")] == [3, 2 / 3, 2 / 3, 2 / 3]
    assert found["mass"] == found["published"]["mass"] == pytest.approx((1.04 * 2 + 1.07 + 0.78) / 4, abs=0.2)


def test_summary_of_space():
    records = [
        record_of(factors=[0, 0.5, 1], curves={"yes": [0.2, 0.5, 0.4], "no": [0.6, 0.6, 0.6]}),  # 0.1 above
        record_of(factors=[0, 0.5, 1], curves={"yes": [0.2, 0.21, 0.2], "no": [0.2, 0.15, 0.3]}),  # 0.05 below
        record_of(factors=[0, 0.5, 1], curves={"yes": [0.0, 0.5, 1.0], "no": [0.7, 0.65, 0.6]}),
        record_of(group="questions", factors=[0, 1], curves={"yes": [0, 1], "no": [0, 1]}),
        record_of(valid=False, reason="no"),
    ]
    found = Space.summary([record | {"name": "0 both"} for record in records])
    assert (found["records"], found["valid"], found["constant_curves"]) == (4, 3, 1)
    assert found["m_max_of_each"] == pytest.approx([0.1, 0.05, 0]) and found["m_max"] == pytest.approx(0.05)
    slopes = [0.6 / 0.3, 0.02 / 0.01, 0.3 / 0.15, 1, 1]
    assert found["derivative"] == pytest.approx(np.mean(slopes))
    assert space.FAR_OUTSIDE == 0.05
    edge = [record_of(factors=[0, 0.5, 1], curves={"yes": [0, value, 0], "no": [0, 0, 0]}) for value in (0.05, 0.0499)]
    assert Space.summary([record | {"name": "0 both"} for record in edge])["far_outside"] == 0.5


def test_summary_of_boolean():
    curves = {"1": [0.2, 0.4, 0.6, 0.5, 0.6], "0": [0.2, 0.4, 0.2, 0.5, 0.4]}
    found = Boolean.summary([record_of(curves=curves), record_of(valid=False, reason="no")])
    truth = found["truth"].pop("x")
    assert found == {"records": 2, "valid": 1, "truth": {}}
    assert truth == pytest.approx({"first": 0.5, "half": 0.75, "second": 0.6, "outside": 0.15, "on_bits": 4.0 / 5})


def test_summary_of_transformations():
    records = [
        record_of(group="spread", distance=[0.1, 0.4, 0.2], same_top=[True, False, True], top=[0.3, 0.2, 0.7]),
        record_of(group="trapezoids", curves={"distance": [0.3, 0.1]}) | {"name": "rule"},
        record_of(valid=False, reason="no") | {"name": "not"},
    ]
    found = Density.summary(records)
    sentences = {"x": {"most": 0.4, "last": 0.2, "same_top": 2 / 3, "top": pytest.approx(0.4)}}
    assert found == {"records": 2, "valid": 1, "sentences": sentences, "rules": {"rule": [0.3, 0.1]}}


def test_summary_of_memory():
    records = [
        record_of("1 segments before", curves=digit_curves("2", "3"), repetitions=3),
        record_of("1 segments before", curves=digit_curves("0", "1"), repetitions=2),
        record_of("3 segments before", curves=digit_curves("4", "4"), repetitions=4),
        record_of("3 segments before", valid=False, reason="no"),
        record_of("dial, counting", recall=[0.2, 0.4]),
        record_of("dial, counting", recall=[0.4, 0.8]),
    ]
    found = Memory.summary(records)
    assert (found["records"], found["valid"]) == (6, 5)
    one = found["distances"][1]
    assert (one["valid"], one["right_at_1"], one["observed"]) == (2, 0.5, (2 / 3 + 2 / 2) / 2)
    assert (one["observed_expected"], one["counterfactual"]) == ((2 / 3 + 1 / 2) / 2, (1 / 3 + 1 / 2) / 2)
    assert found["distances"][0]["valid"] == 0 and found["distances"][0]["observed"] is None
    assert found["distances"][3]["right_at_1"] == 1
    assert list(found["dials"]) == ["dial, counting"]
    assert found["dials"]["dial, counting"]["recall"] == pytest.approx([0.3, 0.6])
    assert (found["distances"][0]["mass"], one["mass"]) == (None, mass(records[:2]))
    assert found["dials"]["dial, counting"]["valid"] == 2 and set(memory.SHOWN_DIALS) <= set(memory.DIALS)


@pytest.mark.parametrize(
    ("six", "two", "three", "nine", "expected"),
    [
        ([0.5, 0.9], [0.3, 0.0], [0.3, 0.0], [0.0, 0.0], (True, True, True, True)),
        ([0.5, 0.9], [0.3, 0.0], [0.3, 0.0], [0.55, 0.0], (True, True, True, False)),  # another digit is once on top
        ([0.5, 0.9], [0.3, 0.0], [0.3, 0.0], [0.7, 0.0], (True, True, False, False)),
        ([0.7, 0.9], [0.3, 0.0], [0.3, 0.0], [0.0, 0.0], (True, False, False, False)),
        ([0.5, 0.3], [0.3, 0.4], [0.3, 0.0], [0.0, 0.0], (False, True, True, True)),
    ],
)
def test_sums_by_hand(six, two, three, nine, expected):
    """24 + 37 = 61; 24 + 3 and 24 + 7 begin with 2 and 3."""
    assert shrunk_labels(24, 37) == {"2", "3"}
    found = sum_properties({"6": six, "2": two, "3": three, "9": nine}, "6", {"2", "3", "6"})
    assert tuple(found[name] for name in ("valid", "P1", "P2", "P3")) == expected
