"""Counts of words and of events: does a shorter word or sentence count for less (tables 1 to 5)?"""

from collections.abc import Sequence
from typing import Any, ClassVar

from ..results import Table
from .aggregation import SET, figure, if_answering, in_set, mass, mass_column, mean, percent, valid, with_global
from .data import load
from .engine import Record
from .items import DURATIONS, EVENT_DURATIONS, Item
from .metrics import likeliest, peak_frequencies, proportion_error
from .options import ProbeOptions, Rule
from .probe import Probe
from .prompts import EVENTS_QUESTION, PASSAGES, CharSpan, char_spans_of, counting_prompt, step_char_spans
from .runs import Figures

NOT_PRINTED = (None, None, None)
# Valid share (table 1); counterfactual, observed and ratio, of all peaks (tables 2, 4) and of expected ones (3, 5).
PAPER: dict[str, dict[str, Any]] = {
    "counting": {
        "Llama 3 8b": (0.935, (0.2594, 0.8953, 3.57), (0.2594, 0.8914, 3.56)),
        "Llama 2 13b": (0.545, (0.2599, 0.9174, 3.60), (0.2599, 0.8263, 3.27)),
        "Gemma 1 7b": (1.0, (0.2610, 0.5127, 1.95), (0.2610, 0.3503, 1.34)),
        "Gemma 2 9b": (1.0, NOT_PRINTED, NOT_PRINTED),
        "all six models": (None, (None, None, 2.90), NOT_PRINTED),  # "190 % more", section 4.1
    },
    "events": {
        "Llama 3 8b": (None, (0.2186, 0.7564, 3.70), (0.2186, 0.6397, 3.26)),
        "Llama 2 13b": (None, (0.2186, 0.7274, 3.42), (0.2186, 0.4854, 2.54)),
        "Gemma 1 7b": (None, (0.2186, 0.6967, 3.46), (0.2186, 0.5984, 3.04)),
        "all six models": (None, (None, None, 3.05), NOT_PRINTED),  # "205 % more", section 4.2
    },
}
RULES: tuple[Rule, ...] = ("exact", "published")
OBSERVED = "observed"  # above 1 where there are more peaks than repetitions
RATIO, EXPECTED_RATIO = "average ratio", "average ratio, expected peaks only"
DISTANCE = "mean distance from repetitions x duration"
WORDS = (("apple", "fruit", "a fruit"), ("cat", "animal", "an animal"), ("rose", "flower", "a flower"))


def _item(
    name: str,
    group: str,
    text: str,
    char_spans: Sequence[CharSpan],
    repetitions: int,
    containing: tuple[str, str],
    words: bool,
) -> Item:
    factors = DURATIONS if words or group != SET else EVENT_DURATIONS
    return Item(
        name,
        group,
        text,
        "shrink",
        factors,
        "digits",
        char_spans,
        one_token=words,
        containing=containing,
        facts={"repetitions": repetitions},
    )


class _Counts(Probe):
    """Both experiments count peaks: digits that are the likeliest of all digits at some duration."""

    varied = "duration factor"
    has_spans = True
    can_be_timed = True
    above_one = (OBSERVED, RATIO, EXPECTED_RATIO, DISTANCE)
    tables_of_the_paper: ClassVar[tuple[str, str, str]]

    @classmethod
    def summary(cls, records: Sequence[Record]) -> dict[str, Any]:
        counted = valid(in_set(records))
        frequencies = [peak_frequencies(record["curves"], record["repetitions"]) for record in counted]
        right = [float(likeliest(record["curves"]) == str(record["repetitions"])) for record in counted]
        errors = [proportion_error(one["curves"], one["factors"], one["repetitions"]) for one in counted]
        return {
            "records": len(in_set(records)),
            "valid": len(counted),
            "mass": mass(counted),
            **{f"allowed_{rule}": sum(record["allowed_by"][rule] for record in in_set(records)) for rule in RULES},
            "right_at_1": mean(right),
            "proportion_error": mean(errors),
            **{name: mean([one[name] for one in frequencies]) for name in peak_frequencies({"1": [1.0]}, 1)},
        }

    @classmethod
    def figures(cls, summary: dict[str, Any]) -> Figures:
        shares = {f"valid, {rule} spans": _share(summary[f"allowed_{rule}"], summary["records"]) for rule in RULES}
        named = {
            "right count at durations of 1": summary["right_at_1"],
            DISTANCE: summary["proportion_error"],
            "counterfactual": summary["counterfactual"],
            OBSERVED: summary["observed"],
            RATIO: summary["ratio"],
            "observed, expected peaks only": summary["observed_expected"],
            EXPECTED_RATIO: summary["ratio_expected"],
        }
        return {**shares, **if_answering(summary, named), "mass of digits": summary["mass"]}

    @classmethod
    def summary_tables(cls, models: dict[str, dict[str, Any]]) -> list[Table]:
        fields = ("right_at_1", "proportion_error", *peak_frequencies({"1": [1.0]}, 1))
        allowed = [f"allowed_{rule}" for rule in RULES]
        before = {
            name: {"allowed_exact": found["valid"], "allowed_published": None, "proportion_error": None}
            for name, found in models.items()
        }
        found_of = with_global(
            {name: before[name] | found for name, found in models.items()}, fields, ("records", "valid", *allowed)
        )
        valid_rows, every_rows, expected_rows = [], [], []
        for model, found in found_of.items():
            shares = [percent(_share(found[name], found["records"])) for name in allowed]
            mass_shown = percent(found["mass"])
            right, error = percent(found["right_at_1"]), figure(found["proportion_error"], 3)
            valid_rows.append([model, *shares, found["records"], right, error, mass_shown])
            every_rows.append([model, *_frequencies(found, "observed", "ratio"), mass_shown])
            expected_rows.append([model, *_frequencies(found, "observed_expected", "ratio_expected"), mass_shown])
        for model, (share, every, expected) in PAPER[cls.name()].items():
            name = f"{model} (paper, published spans and classes)"
            valid_rows += [[name, "", percent(share), "", "", "", ""]] if share is not None else []
            for rows, values in ((every_rows, every), (expected_rows, expected)):
                if any(value is not None for value in values):
                    rows.append([name, figure(values[0]), figure(values[1]), figure(values[2], 2), ""])
        valid_table, every_table, expected_table = cls.tables_of_the_paper
        of_digits = mass_column("digits")
        rules = [f"valid, {rule} spans" for rule in RULES]
        columns = ["model", "counterfactual", "observed", "average ratio", of_digits]
        valid_columns = ["model", *rules, "records", "right count at durations of 1", DISTANCE, of_digits]
        return [
            Table(f"valid records{valid_table}", valid_columns, valid_rows),
            Table(f"normalised peak frequency, all peaks ({every_table})", columns, every_rows),
            Table(f"normalised peak frequency, expected peaks only ({expected_table})", columns, expected_rows),
        ]


def _share(number: int | None, records: int) -> float | None:
    return number / records if number is not None and records else None


def _frequencies(found: dict[str, Any], observed: str, ratio: str) -> list[str]:
    return [figure(found["counterfactual"]), figure(found[observed]), figure(found[ratio], 2)]


class Counting(_Counts):
    kind = "probe_counting"
    about = (
        "A word stands several times in a sentence; all its tokens shrink. A peak is a digit that is the likeliest of "
        "all digits at some duration; frequencies are over the number of repetitions."
    )
    data_set = "words"
    templates = ("sentence", "listed")
    tables_of_the_paper = (" (table 1)", "table 2", "table 3")

    @classmethod
    def prompts(cls, options: ProbeOptions) -> list[Item]:
        records = load("words", options.data)[: options.limit]
        examples = [
            _item(
                word,
                "words",
                *counting_prompt(word, 4, category, article, options.template),
                repetitions=4,
                containing=(word, word),
                words=True,
            )
            for word, category, article in WORDS
        ]
        return examples + [
            _item(
                f"{number} {record['word']}",
                SET,
                *counting_prompt(
                    record["word"],
                    record["repetitions"],
                    record["category"],
                    record["category_with_article"],
                    options.template,
                ),
                repetitions=record["repetitions"],
                containing=(record["word"], record["word"]),
                words=True,
            )
            for number, record in enumerate(records)
        ]


class Events(_Counts):
    kind = "probe_events"
    about = "Whole sentences shrink: the steps of a tutorial, the events of a passage. Peaks as in counting."
    data_set = "tutorials"
    tables_of_the_paper = ("", "table 4", "table 5")

    @classmethod
    def prompts(cls, options: ProbeOptions) -> list[Item]:
        items = []
        for name, (beginning, events, question) in PASSAGES.items():
            text = EVENTS_QUESTION.format(passage=" ".join([beginning, *events]), question=question)
            char_spans = [char_span for event in events for char_span in char_spans_of(text, event)]
            subject = events[0].split()[0], "."
            items.append(_item(name, "passages", text, char_spans, len(events), subject, words=False))
        for number, record in enumerate(load("tutorials", options.data)[: options.limit]):
            text = record["sentence"]
            spans = step_char_spans(text)
            items.append(_item(str(number), SET, text, spans, record["num_sentences"], ("-", "."), words=False))
        return items
