"""The probe of sums of two-digit numbers: is a shorter number read as one of fewer digits (tables 6 and 7, figure 3a)?

It also has the thesis's eight pairs, under all five of its changes.
"""

from collections.abc import Sequence
from typing import Any

from condense.eval.results import Table

from .aggregation import SET, answers, if_answering, in_set, mass, mass_column, mean, percent, ratio, valid, with_global
from .control import RIGHT, compare, with_other_labels
from .data import load
from .engine import Record
from .items import DENSITIES, DURATIONS, INTERPOLATIONS, Item
from .metrics import published_other_labels, published_sum_properties, shrunk_labels, sum_properties
from .options import ProbeOptions
from .probe import Probe
from .prompts import PAIRS, SUM, sum_prompt
from .runs import Figures

PAPER = {  # valid share (table 6); P1, P2 and P3 (table 7), all by the published rule
    "Llama 3 8b": (0.60, 0.2917, 0.2583, 0.2583),
    "Llama 2 13b": (0.195, 0.9231, 0.8718, 0.7692),
    "Gemma 1 7b": (0.945, 0.9788, 0.9735, 0.9048),
    "Gemma 2 9b": (0.95, 0.9579, 0.9579, 0.8947),
}
PROPERTIES = ("P1", "P2", "P3")
VARIED = {
    "embedding": "interpolation factor",
    "translation": "shift [units]",
    "scaling": "scale factor",
    "density": "samples per token",
}
SMALL_SCALES = tuple(0.05 + 0.95 * step / 99 for step in range(100))


class Sums(Probe):
    kind = "probe_sums"
    about = (
        "One of two numbers shrinks. The shrunk labels are the first digits of the sums with only one of its digits. "
        "P1: at some duration they are together likelier than the right digit. P2: at some such duration they are also "
        "likelier than any other digit. P3: P2 holds, and no other digit is ever the likeliest."
    )
    varied = "duration factor"
    data_set = "sums"
    has_spans = True
    templates = ("sentence", "spaced")
    can_be_timed = True

    @classmethod
    def prompts(cls, options: ProbeOptions) -> list[Item]:
        found = []
        for first, second in PAIRS:
            apart = " " if options.template == "spaced" else ""
            pair: dict[str, object] = {"first": apart.join(str(first)), "second": apart.join(str(second))}
            text, char_spans = sum_prompt(SUM, pair, "second")
            other = SUM.format(**pair | {"second": apart.join(str(second)[::-1])})
            name = f"{first} + {second}"
            found += [
                Item(name, "duration", text, "shrink", DURATIONS, "first_digits", char_spans),
                Item(name, "embedding", text, "interpolate", INTERPOLATIONS, "first_digits", other=other),
                Item(name, "translation", text, "shift", INTERPOLATIONS, "first_digits"),
                Item(name, "scaling", text, "scale", SMALL_SCALES, "first_digits"),
                Item(name, "density", text, "densify", DENSITIES, "first_digits"),
            ]
        for number, record in enumerate(load("sums", options.data)[: options.limit]):
            name, rest = ("item_1", "item_2") if record["shrink_1"] else ("item_2", "item_1")
            shrunk, other_number = int(record["fields"][name]), int(record["fields"][rest])
            text, char_spans = sum_prompt(record["template"], record["fields"], name)
            facts = {
                "original": str(shrunk + other_number)[0],
                "shrunk": sorted(shrunk_labels(other_number, shrunk)),
                "published_other": sorted(published_other_labels(other_number, shrunk)),
            }
            where = (None, "and") if record["shrink_1"] else ("and", ".")
            fields: dict[str, Any] = {"containing": (str(shrunk)[0], str(shrunk)[-1], *where), "facts": facts}
            found.append(Item(str(number), SET, text, "shrink", DURATIONS, "first_digits", char_spans, **fields))
        return found

    @classmethod
    def varied_in(cls, group: str) -> str:
        return VARIED.get(group, cls.varied)

    @classmethod
    def summary(cls, records: Sequence[Record]) -> dict[str, Any]:
        posed = valid(in_set(records))
        asked = [(record["curves"], record["original"], set(record["shrunk"])) for record in posed]
        ours = [sum_properties(*one) for one in asked]
        others = [set(record["published_other"]) for record in posed]
        published = [published_sum_properties(*one, other) for one, other in zip(asked, others, strict=True)]
        shared = {"records": len(in_set(records)), "posed": len(posed), "mass": mass(in_set(records))}
        pairs = with_other_labels(posed, _label, _scores)
        return shared | _shares(ours) | {"published": shared | _shares(published), "control": compare(pairs)}

    @classmethod
    def figures(cls, summary: dict[str, Any]) -> Figures:
        found: dict[str, float | None] = {}
        for rule, of_rule in (("", summary), (", published rule", summary["published"])):
            named = {"valid": ratio(of_rule["valid"], of_rule["records"])} | {
                name: of_rule[name] for name in PROPERTIES
            }
            found |= {f"{name}{rule}": value for name, value in if_answering(summary, named).items()}
        return found | {"mass of digits": summary["mass"]}

    @classmethod
    def summary_tables(cls, models: dict[str, dict[str, Any]]) -> list[Table]:
        ours = with_global(models, PROPERTIES)
        unknown = {"records": 0, "valid": 0}  # earlier versions had no published rule
        published = with_global({name: found.get("published", unknown) for name, found in models.items()}, PROPERTIES)
        rates, rows = [], []
        for name, found in ours.items():
            both, mass_shown = (found, published[name]), percent(found["mass"])
            rates.append([name, *_rate(found), *_rate(published[name]), mass_shown])
            rows.append([name, *(percent(one[field]) for one in both for field in PROPERTIES), mass_shown])
        for name, (share, *properties) in PAPER.items():
            rates.append([f"{name} (paper)", "", "", percent(share), "", ""])
            rows.append([f"{name} (paper)", "", "", "", *map(percent, properties), ""])
        of_digits = mass_column("digits")
        columns = ["model", "valid", "records", "valid, published rule", "records, published rule", of_digits]
        named = [*PROPERTIES, *(f"{name}, published rule" for name in PROPERTIES)]
        return [
            Table("valid records: the unchanged sum is right (table 6)", columns, rates),
            Table("of these, how many have each property (table 7)", ["model", *named, of_digits], rows),
        ]


def _label(record: Record) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    return record["original"], tuple(record["shrunk"]), tuple(record["published_other"])


def _scores(record: Record, label: tuple[str, tuple[str, ...], tuple[str, ...]]) -> dict[str, float | None]:
    """Returns the figures of a record as if it asked for another sum. P1 to P3 are None if its sum is wrong."""
    original, shrunk, other = label
    asked = (record["curves"], original, set(shrunk))
    ours, published = sum_properties(*asked), published_sum_properties(*asked, set(other))
    scores: dict[str, float | None] = {RIGHT: float(ours["valid"])}
    for rule, found in (("", ours), (", published rule", published)):
        scores |= {f"{name}{rule}": float(found[name]) if found["valid"] else None for name in PROPERTIES}
    return scores


def _shares(properties: Sequence[dict[str, bool]]) -> dict[str, Any]:
    right = [one for one in properties if one["valid"]]
    return {"valid": len(right), **{name: mean([float(one[name]) for one in right]) for name in PROPERTIES}}


def _rate(found: dict[str, Any]) -> tuple[str, str]:
    """Returns the share of right answers as text; dashes for a model that does not answer."""
    if not found["records"] or not answers(found):
        return "-", "-"
    return percent(found["valid"] / found["records"]), f"{found['valid']} of {found['records']}"
