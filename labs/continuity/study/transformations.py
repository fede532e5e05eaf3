"""The probes of sentences that are moved, stretched or sampled more densely (figures 41 to 48; thesis, 3.6 to 3.9)."""

from collections.abc import Sequence
from typing import Any, ClassVar

from condense.eval.results import Table

from ..model.quadrature import RULES
from .aggregation import mean, percent, valid
from .engine import Reader, Record, check_item
from .items import DENSITIES, SCALES, SHIFTS, Item, NotValid
from .options import ProbeOptions
from .probe import Probe
from .runs import Figures

RESAMPLED = (1, 2, 4, 8, 16, 32)
DENSEST = 128
SENTENCES = {
    "France": "The capital of France is",
    "Gatsby": "The Great Gatsby is my favourite",
    "Romeo": "O Romeo, Romeo, wherefore art thou",
    "Lily": "Once upon a time, there was a little girl named",
}


class _Transformation(Probe):
    """Measures distances to the unchanged sentence. `title` names the table, `last` its column for the last factor."""

    title: ClassVar[str]
    last: ClassVar[str]

    @classmethod
    def summary(cls, records: Sequence[Record]) -> dict[str, Any]:
        """Returns the largest and the last distance to each unchanged sentence, and how often its likeliest token stays
        the likeliest."""
        found = {
            record["name"]: {
                "most": max(record["distance"]),
                "last": None if _ends_early(record) else record["distance"][-1],
                "same_top": sum(record["same_top"]) / len(record["same_top"]),
                "top": mean(record.get("top", [])),  # missing in earlier versions
            }
            for record in valid(records)
        }
        return {"records": len(records), "valid": len(found), "sentences": found}

    @classmethod
    def figures(cls, summary: dict[str, Any]) -> Figures:
        found: dict[str, float | None] = {}
        for name, values in summary["sentences"].items():
            found |= {f"{name}: most total variation": values["most"], f"{name}: mean probability": values["top"]}
        return found

    @classmethod
    def summary_tables(cls, models: dict[str, dict[str, Any]]) -> list[Table]:
        rows = []
        for name, found in models.items():
            for sentence, values in found["sentences"].items():
                last = "-" if values["last"] is None else f"{values['last']:.2g}"
                shares = (values["same_top"], values.get("top"))
                rows.append([name, sentence, f"{values['most']:.2g}", last, *map(percent, shares)])
        columns = ["model", "sentence", "most total variation", f"total variation {cls.last}", "same likeliest token"]
        columns.append("mean probability of the unchanged sentence's likeliest token")
        return [Table(cls.title, columns, rows)]


def _ends_early(record: Record) -> bool:
    """Whether the last factors are left out, see `Reader.record`."""
    return any(factor > record["factors"][-1] for factor in record.get("left_out", ()))


class Translation(_Transformation):
    kind = "probe_translation"
    about = (
        "All times are shifted, with the start of integration; a folded model sees only differences of times. Total "
        "variation is half the summed differences to the next token's probabilities after the unchanged sentence, 0 to "
        "1."
    )
    varied = "shift [units]"
    title, last = "shifted by 0 to 10 units", "at a shift of 10"

    @classmethod
    def prompts(cls, options: ProbeOptions) -> list[Item]:
        return [Item(name, "sentences", text, "shift", SHIFTS, "tokens") for name, text in SENTENCES.items()]


class Scaling(_Transformation):
    kind = "probe_scaling"
    about = "All durations are multiplied, by 0.01 to 1.5. Total variation as in translation."
    varied = "scale factor"
    title, last = "all durations scaled", "at the largest scale"

    @classmethod
    def prompts(cls, options: ProbeOptions) -> list[Item]:
        return [Item(name, "sentences", text, "scale", SCALES, "tokens") for name, text in SENTENCES.items()]


class Density(_Transformation):
    kind = "probe_density"
    about = (
        "Every token is sampled several times, and the samples share its duration. One attention layer does not notice "
        "copies at equal positions; in a stack of layers an early copy sees less of itself than a late one. Total "
        "variation as in translation."
    )
    varied = "samples per token"
    title, last = "1 to 10 samples a token", "at 10 samples"

    @classmethod
    def prompts(cls, options: ProbeOptions) -> list[Item]:
        return [*density_items(), *quadrature_items()]

    @classmethod
    def record(cls, reader: Reader, item: Item) -> Record:
        """Returns what `Reader.record` does; for an item with a quadrature rule, total variations to the densest.

        Its sentences run on straight lines between embeddings, with more and more samples. The densest sentence is
        measured by trapezoids if the model supports them.
        """
        if "rule" not in item.facts:
            return reader.record(item)
        return check_item(item, lambda: _distances_to_the_densest(reader, item))

    @classmethod
    def summary(cls, records: Sequence[Record]) -> dict[str, Any]:
        rules = [record for record in records if record["group"] in {f"{rule}s" for rule in RULES}]
        found = super().summary([record for record in records if record not in rules])
        return found | {"rules": {record["name"]: record["curves"]["distance"] for record in valid(rules)}}

    @classmethod
    def summary_tables(cls, models: dict[str, dict[str, Any]]) -> list[Table]:
        rows = [
            [name, sentence, *(f"{value:.2g}" for value in distances)]
            for name, found in models.items()
            for sentence, distances in found["rules"].items()
        ]
        columns = ["model", "sentence and rule", *(f"{density} a token" for density in RESAMPLED)]
        title = f"straight lines between embeddings: total variation to {DENSEST} samples a token"
        return [*super().summary_tables(models), Table(title, columns, rows)]


def _distances_to_the_densest(reader: Reader, item: Item) -> Record:
    rule = item.facts["rule"]
    if reader.lm.folded and rule == "trapezoid":
        raise NotValid("a folded model supports rectangles only")
    straight = reader.lm.embed(reader.sentence(item.text))
    sentences = [straight.densify(int(density), values="linear") for density in item.factors]
    probabilities_FV = reader._replace(lm=reader.lm.with_rule(rule)).probabilities(sentences)
    best = reader.lm if reader.lm.folded else reader.lm.with_rule("trapezoid")
    densest_V = reader._replace(lm=best).probabilities([straight.densify(DENSEST, values="linear")])[0]
    distances = ((probabilities_FV - densest_V).abs().sum(1) / 2).tolist()
    return {"factors": list(item.factors), "curves": {"distance": distances}, **item.facts}


def density_items() -> list[Item]:
    """Returns items whose copies lie in their own parts of a token's interval, and items whose copies all have the
    token's position."""
    return [
        Item(f"{name}, {positions} positions", positions, text, "densify", DENSITIES, "tokens", positions=positions)
        for positions in ("spread", "equal")
        for name, text in SENTENCES.items()
    ]


def quadrature_items() -> list[Item]:
    """Returns items of straight lines between embeddings, sampled more and more densely, for each quadrature rule."""
    return [
        Item(f"{name}, {rule}s", f"{rule}s", text, "densify", RESAMPLED, "tokens", facts={"rule": rule})
        for rule in RULES
        for name, text in SENTENCES.items()
    ]
