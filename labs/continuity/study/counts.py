"""The probes that count words and events: does a shorter word or sentence count for less (tables 1 to 5)?"""

from collections.abc import Sequence
from typing import Any, ClassVar

from condense.eval.results import Table

from .aggregation import SET, figure, if_answering, in_set, mass, mass_column, mean, percent, ratio, valid, with_global
from .control import RIGHT, compare, with_other_labels
from .data import load
from .engine import Record
from .items import DURATIONS, EVENT_DURATIONS, Item
from .metrics import FREQUENCIES, likeliest, peak_frequencies, proportion_error
from .options import ProbeOptions, Rule
from .probe import Probe
from .prompts import EVENTS_QUESTION, PASSAGES, asked_word, char_spans_of, counting_prompt, step_char_spans
from .runs import Figures

NOT_PRINTED = (None, None, None)
# The valid share (table 1); then counterfactual, observed and ratio, of all peaks (tables 2 and 4) and of the expected
# ones (tables 3 and 5).
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
OBSERVED = "observed"  # above 1 if there are more peaks than repetitions
RATIO, EXPECTED_RATIO = "average ratio", "average ratio, expected peaks only"
DISTANCE = "mean distance from repetitions x duration"
WORDS = (("apple", "fruit", "a fruit"), ("cat", "animal", "an animal"), ("rose", "flower", "a flower"))


def _scores(record: Record, repetitions: int) -> dict[str, float | None]:
    """Returns the figures of a record as if its word occurred as often as given."""
    found = peak_frequencies(record["curves"], repetitions)
    return {
        RIGHT: float(likeliest(record["curves"]) == str(repetitions)),
        OBSERVED: found["observed"],
        "observed, expected peaks only": found["observed_expected"],
        "distance from repetitions x duration": proportion_error(record["curves"], record["factors"], repetitions),
    }


def peak_figures(counted: Sequence[Record]) -> dict[str, Any]:
    """Returns the mass, the share of right answers at durations of 1, and the frequencies of peaks."""
    found = [peak_frequencies(record["curves"], record["repetitions"]) for record in counted]
    right = [float(likeliest(record["curves"]) == str(record["repetitions"])) for record in counted]
    figures = {"valid": len(counted), "mass": mass(counted), "right_at_1": mean(right)}
    return figures | {name: mean([one[name] for one in found]) for name in FREQUENCIES}


class _Counts(Probe):
    """Counts peaks: digits that are the likeliest of all digits at some duration."""

    varied = "duration factor"
    has_spans = True
    can_be_timed = True
    above_one = (OBSERVED, RATIO, EXPECTED_RATIO, DISTANCE)
    tables_of_the_paper: ClassVar[tuple[str, str, str]]

    @classmethod
    def summary(cls, records: Sequence[Record]) -> dict[str, Any]:
        posed = in_set(records)
        errors = [proportion_error(one["curves"], one["factors"], one["repetitions"]) for one in valid(posed)]
        allowed = {f"allowed_{rule}": sum(record["allowed_by"][rule] for record in posed) for rule in RULES}
        figures = {"records": len(posed), **peak_figures(valid(posed)), **allowed, "proportion_error": mean(errors)}
        pairs = with_other_labels(valid(posed), lambda record: record["repetitions"], _scores)
        return figures | {"control": compare(pairs)}

    @classmethod
    def figures(cls, summary: dict[str, Any]) -> Figures:
        shares = {f"valid, {rule} spans": ratio(summary[f"allowed_{rule}"], summary["records"]) for rule in RULES}
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
        fields = ("right_at_1", "proportion_error", *FREQUENCIES)
        allowed = [f"allowed_{rule}" for rule in RULES]
        before = {"allowed_published": None, "proportion_error": None}  # missing in earlier versions
        known = {name: before | {"allowed_exact": found["valid"]} | found for name, found in models.items()}
        found_of = with_global(known, fields, ("records", "valid", *allowed))
        valid_rows, every_rows, expected_rows = [], [], []
        for model, found in found_of.items():
            shares = [percent(ratio(found[name], found["records"])) for name in allowed]
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


def _frequencies(found: dict[str, Any], observed: str, ratio: str) -> list[str]:
    return [figure(found["counterfactual"]), figure(found[observed]), figure(found[ratio], 2)]


class Counting(_Counts):
    kind = "probe_counting"
    about = (
        "A word is repeated in a sentence, and all its tokens shrink. A peak is a digit that is the likeliest of all "
        "digits at some duration. Frequencies are divided by the number of repetitions."
    )
    data_set = "words"
    templates = ("sentence", "listed")
    tables_of_the_paper = (" (table 1)", "table 2", "table 3")

    @classmethod
    def prompts(cls, options: ProbeOptions) -> list[Item]:
        records = load("words", options.data)[: options.limit]
        asked = [(word, "words", word, 4, category, article) for word, category, article in WORDS]
        asked += [(f"{number} {record['word']}", SET, *asked_word(record)) for number, record in enumerate(records)]
        items = []
        for name, group, word, repetitions, category, article in asked:
            text, char_spans = counting_prompt(word, repetitions, category, article, options.template)
            fields: dict[str, Any] = {"containing": (word, word), "facts": {"repetitions": repetitions}}
            items.append(Item(name, group, text, "shrink", DURATIONS, "digits", char_spans, one_token=True, **fields))
        return items


class Events(_Counts):
    kind = "probe_events"
    about = "Whole sentences shrink: the steps of a tutorial, or the events of a passage. Peaks are those of counting."
    data_set = "tutorials"
    tables_of_the_paper = ("", "table 4", "table 5")

    @classmethod
    def prompts(cls, options: ProbeOptions) -> list[Item]:
        asked = []
        for name, (beginning, events, question) in PASSAGES.items():
            text = EVENTS_QUESTION.format(passage=" ".join([beginning, *events]), question=question)
            char_spans = [char_span for event in events for char_span in char_spans_of(text, event)]
            asked.append((name, "passages", text, DURATIONS, char_spans, len(events), events[0].split()[0]))
        for number, record in enumerate(load("tutorials", options.data)[: options.limit]):
            text, steps = record["sentence"], record["num_sentences"]
            asked.append((str(number), SET, text, EVENT_DURATIONS, step_char_spans(text), steps, "-"))
        return [
            Item(name, group, text, "shrink", factors, "digits", char_spans, containing=(subject, "."),
                 facts={"repetitions": repetitions})
            for name, group, text, factors, char_spans, repetitions, subject in asked
        ]  # fmt: skip
