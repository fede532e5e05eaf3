"""Whole sentences moved, stretched and sampled more densely (figures 41 to 48; the thesis's figures 3.6 to 3.9)."""

from collections.abc import Sequence
from typing import Any

from condense.continuity.adapter import OutsideTable
from condense.continuity.quadrature import RULES

from ..results import Table
from .engine import Reader, Record
from .experiment import Experiment, Options, percent, valid
from .items import DENSITIES, SCALES, SHIFTS, Item, NotValid

RESAMPLED = (1, 2, 4, 8, 16, 32)
DENSEST = 128
SENTENCES = {
    "France": "The capital of France is",
    "Gatsby": "The Great Gatsby is my favourite",
    "Romeo": "O Romeo, Romeo, wherefore art thou",
    "Lily": "Once upon a time, there was a little girl named",
}


def translation_items(options: Options) -> list[Item]:
    return [Item(name, "sentences", text, "shift", SHIFTS, "tokens") for name, text in SENTENCES.items()]


def scaling_items(options: Options) -> list[Item]:
    return [Item(name, "sentences", text, "scale", SCALES, "tokens") for name, text in SENTENCES.items()]


def density_items(options: Options) -> list[Item]:
    """Copies in their own parts of a token's interval, and copies that all sit where the token sat."""
    return [
        Item(f"{name}, {positions} positions", positions, text, "densify", DENSITIES, "tokens", positions=positions)
        for positions in ("spread", "equal")
        for name, text in SENTENCES.items()
    ]


def quadrature_items(options: Options) -> list[Item]:
    return [
        Item(f"{name}, {rule}s", f"{rule}s", text, "densify", RESAMPLED, "tokens", facts={"rule": rule})
        for rule in RULES
        for name, text in SENTENCES.items()
    ]


def density_record(reader: Reader, item: Item) -> Record:
    """Of items with a rule: sentences that run straight from embedding to embedding, sampled ever more densely, and
    their total variation to the densest, by trapezoids where the model knows them."""
    if "rule" not in item.facts:
        return reader.record(item)
    named = {"name": item.name, "group": item.group}
    rule = item.facts["rule"]
    try:
        if reader.lm.folded and rule == "trapezoid":
            raise NotValid("a folded model knows rectangles only")
        straight = reader.lm.embed(reader.sentence(item.text))
        sentences = [straight.densify(int(density), values="linear") for density in item.factors]
        probabilities_FV = reader._replace(lm=reader.lm.with_rule(rule)).probabilities(sentences)
        best = reader.lm if reader.lm.folded else reader.lm.with_rule("trapezoid")
        densest_V = reader._replace(lm=best).probabilities([straight.densify(DENSEST, values="linear")])[0]
    except (NotValid, OutsideTable) as reason:
        return named | {"valid": False, "reason": str(reason)}
    distances = ((probabilities_FV - densest_V).abs().sum(1) / 2).tolist()
    return named | {"valid": True, "factors": list(item.factors), "curves": {"distance": distances}, **item.facts}


def density_summary(records: Sequence[Record]) -> dict[str, Any]:
    rules = [record for record in records if record["group"] in {f"{rule}s" for rule in RULES}]
    found = summary([record for record in records if record not in rules])
    return found | {"rules": {record["name"]: record["curves"]["distance"] for record in valid(rules)}}


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """Distances to the unchanged sentence: the most, and that of the last factor; and how often its top token stays."""
    found = {
        record["name"]: {
            "most": max(record["distance"]),
            "last": record["distance"][-1],
            "same_top": sum(record["same_top"]) / len(record["same_top"]),
        }
        for record in valid(records)
    }
    return {"records": len(records), "valid": len(found), "sentences": found}


def _tables(title: str, last: str):
    def tables(models: dict[str, dict[str, Any]]) -> list[Table]:
        rows = [
            [name, sentence, f"{values['most']:.2g}", f"{values['last']:.2g}", percent(values["same_top"])]
            for name, found in models.items()
            for sentence, values in found["sentences"].items()
        ]
        columns = ["model", "sentence", "most total variation", f"total variation {last}", "same likeliest token"]
        return [Table(title, columns, rows)]

    return tables


TRANSLATION = Experiment(
    "All times, the integration start included, are shifted; a folded model sees differences of times alone. Total "
    "variation: half the summed differences to the next token's probabilities behind the unchanged sentence, 0 to 1.",
    translation_items,
    summary,
    _tables("shifted by 0 to 10 units", "at a shift of 10"),
    "shift [units]",
)
SCALING = Experiment(
    "All durations are multiplied. Total variation as in translation.",
    scaling_items,
    summary,
    _tables("durations scaled by 0.05 to 2", "at a scale of 2"),
    "scale factor",
)


def density_tables(models: dict[str, dict[str, Any]]) -> list[Table]:
    rows = [
        [name, sentence, *(f"{value:.2g}" for value in distances)]
        for name, found in models.items()
        for sentence, distances in found["rules"].items()
    ]
    columns = ["model", "sentence and rule", *(f"{density} a token" for density in RESAMPLED)]
    title = f"straight lines between embeddings: total variation to {DENSEST} samples a token"
    return [*_tables("1 to 10 samples a token", "at 10 samples")(models), Table(title, columns, rows)]


DENSITY = Experiment(
    "Every token is sampled several times, its duration shared. One attention layer does not notice copies at equal "
    "positions; through a stack of layers an early copy sees less of itself than a late one. Total variation as in "
    "translation.",
    lambda options: [*density_items(options), *quadrature_items(options)],
    density_summary,
    density_tables,
    "samples per token",
    density_record,
)
