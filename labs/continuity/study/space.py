"""The probes of embeddings between two words (tables 8 to 10, figures 4 and 5) and between two logical operators."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from condense.eval.results import Table

from .aggregation import (
    LEAST_MASS,
    SET,
    figure,
    if_answering,
    in_set,
    mass,
    mass_column,
    mean,
    percent,
    ratio,
    valid,
    with_global,
)
from .control import RIGHT, compare, with_other_labels
from .data import load
from .engine import Record
from .items import INTERPOLATIONS, SPACE_INTERPOLATIONS, Item, Watched
from .metrics import likeliest, normalised_max_derivative, outside_ends
from .options import ProbeOptions
from .probe import Probe
from .prompts import BOOLEAN_TEMPLATES, YES_OR_NO
from .runs import Figures

PAPER = {  # valid share (table 8), derivative (9), mean m_max and share of m_max >= 0.05 (10)
    "Llama 3 8b": (0.74, 4.959, 0.0434, 0.3243),
    "Llama 2 13b": (0.34, 9.005, 0.0639, 0.2353),
    "Gemma 1 7b": (0.84, 5.090, 0.0332, 0.2202),
    "Gemma 2 9b": (0.84, 5.402, 0.0178, 0.0952),
}
FAR_OUTSIDE = 0.05
DERIVATIVE = "normalised max. |derivative|"
FIGURES = {DERIVATIVE: "derivative", "mean m_max": "m_max", "m_max ≥ 0.05": "far_outside"}  # by title
# by kind of question, of the first and of the second object
ANSWERS = {"both": ("yes", "yes"), "neither": ("no", "no"), "first": ("yes", "no"), "second": ("no", "yes")}
NUM_PAIRS = 50  # as in the paper; its file has a few more
QUESTIONS = {
    ("apples", "bananas"): ("Are {} red?", "Are {} fruits?"),
    ("cats", "dogs"): ("Are {} animals?", "Do {} meow?"),
    ("water", "juice"): ("Does {} contain sugar?", "Is {} a drink?"),
}
SENTENCES = {
    ("apples", "bananas"): ("Alice bought some {} at the", "The most common colour for {} is", "Repeat the word {}."),
    ("cats", "dogs"): ("Alice saw some {} in the", "Repeat the word {}."),
    ("water", "juice"): ("We drank some {} in the", "Repeat the word {}."),
}
PUBLISHED_SENTENCES = {  # usage and repetition, as in the published code
    ("apples", "bananas"): ("Alice bought some {} at the", "The most common colour of {} is"),
    ("cats", "dogs"): ("We bought two {} at the", "{} are usually kept as", "Question: Repeat the word {}. Answer:"),
    ("forks", "spoons"): (
        "We used the {} to eat",
        "Typically, {} are made of",
        "Question: Repeat the word {}. Answer:",
    ),
    ("water", "juice"): ("We drank some {} in the", "Question: Repeat the word {}. Answer:"),
}
STORIES = {
    ("girl", "boy"): ("Once upon a time, there was a little {} named", "The {} was happy because"),
    ("cat", "dog"): ("Once upon a time, there was a big {}. It liked to", "The {} was sad because"),
}
OPERATORS = (("AND", "OR"), ("AND", "XOR"), ("AND", "NAND"), ("OR", "NOR"))


class Space(Probe):
    kind = "probe_space"
    about = (
        "A sentence with one word turns into the same sentence with another word. m_max is how far the probability of "
        "yes or no leaves the range between its two ends, as a distance: the paper's formula has a plus sign and means "
        "a minus."
    )
    varied = "interpolation factor"
    data_set = "objects"
    templates = ("sentence", "published")
    above_one = (DERIVATIVE,)
    can_be_timed = True

    @classmethod
    def prompts(cls, options: ProbeOptions) -> list[Item]:
        found = []
        prompts: Mapping[tuple[str, str], tuple[str, ...]]
        sentences = PUBLISHED_SENTENCES if options.template == "published" else SENTENCES
        for group, prompts in (("questions", QUESTIONS), ("sentences", sentences), ("stories", STORIES)):
            watched: Watched = "yes_no" if group == "questions" else "tokens"
            for (first, second), frames in prompts.items():
                for frame in frames:
                    sentence = YES_OR_NO.format(question=frame) if group == "questions" else frame
                    name = f"{frame.format('★')}, ★ from {first} to {second}"
                    texts = [sentence.replace("{}", word) for word in (first, second)]
                    found.append(_between(name, group, texts, INTERPOLATIONS, watched))
        for number, record in enumerate(load("objects", options.data)[: options.limit or NUM_PAIRS]):
            for kind, question in record["questions"].items():
                texts = [YES_OR_NO.format(question=question.replace("{}", word)) for word in record["options"]]
                found.append(_between(f"{number} {kind}", SET, texts, SPACE_INTERPOLATIONS, "yes_no"))
        return found

    @classmethod
    def summary(cls, records: Sequence[Record]) -> dict[str, Any]:
        posed = valid(in_set(records))
        derivatives, most = [], []
        for record in posed:
            found = [normalised_max_derivative(record["factors"], curve) for curve in record["curves"].values()]
            derivatives += [value for value in found if value is not None]
            most.append(max(outside_ends(curve) for curve in record["curves"].values()))
        return {
            "records": len(in_set(records)),
            "valid": len(posed),
            "mass": mass(posed),
            "derivative": mean(derivatives),
            "constant_curves": 2 * len(posed) - len(derivatives),
            "m_max": mean(most),
            "far_outside": mean([float(value >= FAR_OUTSIDE) for value in most]),
            "m_max_of_each": most,
            "control": compare(with_other_labels(posed, _kind, _scores)),
        }

    @classmethod
    def figures(cls, summary: dict[str, Any]) -> Figures:
        named = {name: summary[field] for name, field in FIGURES.items()}
        share = ratio(summary["valid"], summary["records"])
        return {"valid": share, **if_answering(summary, named), "mass of yes and no": summary["mass"]}

    @classmethod
    def summary_tables(cls, models: dict[str, dict[str, Any]]) -> list[Table]:
        models = with_global(models, list(FIGURES.values()))
        rows = []
        for name, found in models.items():
            share = percent(ratio(found["valid"], found["records"]))
            shown = _figures(*(found[field] for field in FIGURES.values()))
            rows.append([name, share, f"{found['valid']} of {found['records']}", *shown, percent(found["mass"])])
        for name, (of_paper, *figures) in PAPER.items():
            rows.append([f"{name} (paper)", percent(of_paper), "", *_figures(*figures), ""])
        rows.append(["all six models (paper)", "", "", "", "", "20 %", ""])  # appendix C.4.3
        columns = ["model", "valid", "records", *FIGURES, mass_column("yes and no")]
        return [Table("from one object to the other (tables 8, 9 and 10)", columns, rows)]


def _kind(record: Record) -> str:
    return record["name"].split()[-1]


def _scores(record: Record, kind: str) -> dict[str, float | None]:
    """Returns the share of the two ends whose likelier answer is the one of a kind of question."""
    ends = [likeliest(record["curves"], at) for at in (0, -1)]
    return {RIGHT: mean([float(said == wanted) for said, wanted in zip(ends, ANSWERS[kind], strict=True)])}


def _figures(derivative: float | None, m_max: float | None, far_outside: float | None) -> list[str]:
    return [figure(derivative, 3), figure(m_max), percent(far_outside)]


class Boolean(Probe):
    kind = "probe_boolean"
    about = "One logical operator turns into another. The truth values between them are measured."
    varied = "interpolation factor"
    templates = ("sentence", "published")

    @classmethod
    def prompts(cls, options: ProbeOptions) -> list[Item]:
        found = []
        for first, second in OPERATORS:
            for left, right in product((0, 1), repeat=2):
                template = BOOLEAN_TEMPLATES[options.template]
                texts = [template.format(left=left, operator=operator, right=right) for operator in (first, second)]
                name = f"{left} {first} to {second} {right}"
                found.append(_between(name, f"{first}-{second}", texts, INTERPOLATIONS, "bits"))
        return found

    @classmethod
    def summary(cls, records: Sequence[Record]) -> dict[str, Any]:
        """Returns for each prompt the share of 1 in the probability of 0 and 1, at both ends and half way."""
        found = {}
        for record in valid(records):
            both = list(zip(record["curves"]["1"], record["curves"]["0"], strict=True))
            truth = [one / (one + zero) if one + zero else 0.5 for one, zero in both]
            found[record["name"]] = {
                "first": truth[0],
                "half": truth[len(truth) // 2],
                "second": truth[-1],
                "outside": outside_ends(truth),
                "on_bits": mean([one + zero for one, zero in both]),
            }
        return {"records": len(records), "valid": len(found), "truth": found}

    @classmethod
    def figures(cls, summary: dict[str, Any]) -> Figures:
        return {
            f"{prompt}: most outside the ends": values["outside"] if values["on_bits"] >= LEAST_MASS else None
            for prompt, values in summary["truth"].items()
        }

    @classmethod
    def summary_tables(cls, models: dict[str, dict[str, Any]]) -> list[Table]:
        rows = []
        for name, found in models.items():
            for prompt, values in found["truth"].items():
                known = values if values["on_bits"] >= LEAST_MASS else {}
                truths = [figure(known.get(field), 3) for field in ("first", "half", "second", "outside")]
                rows.append([name, prompt, *truths, percent(values["on_bits"])])
        columns = ["model", "from operator to operator", "truth at the first", "half way", "at the second"]
        columns += ["most outside the ends", mass_column("0 and 1")]
        counts = [[name, f"{found['valid']} of {found['records']}"] for name, found in models.items()]
        return [
            Table("pairs of operators with equally many tokens", ["model", "prompts"], counts),
            Table("truth values between operators: the share of 1 in the probability of 0 and 1", columns, rows),
        ]


def _between(name: str, group: str, texts: list[str], factors: Sequence[float], watched: Watched) -> Item:
    return Item(name, group, texts[0], "interpolate", factors, watched, other=texts[1])
