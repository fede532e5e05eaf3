"""The probe of wholes: are n words of duration m/n read as m whole words?

It needs no right answers: a sentence is read as the whole one whose next-token probabilities are nearest.

Axes: F factors, M amounts of whole words, N samples, V vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from condense.eval.results import Table, groups_of, picture

from ..model import Sentence
from .aggregation import figure, mean, percent, valid
from .control import compare, format_mean
from .data import load
from .engine import Reader, Record, check_item
from .items import Item, NotValid
from .options import ProbeOptions
from .probe import Probe
from .prompts import asked_word, counting_prompt
from .runs import Figures

MOST = 8  # words
AMOUNTS = range(1, MOST + 1)
NUM_WORDS = 20
CHANGES = ("durations", "only their weights", "only their positions")
SHARE, DISTANCE, DISCRETE = "read as its amount", "distance from its amount", f"read as {MOST} words"


class Wholes(Probe):
    kind = "probe_wholes"
    about = (
        f"{MOST} equal words of duration m / {MOST} are compared with m whole words: they are read as the whole "
        "sentence whose next-token probabilities are nearest (total variation). Durations change weights in "
        "attention and positions; both are also changed alone."
    )
    varied = "duration factor"
    data_set = "words"
    templates = ("sentence", "listed")

    @classmethod
    def prompts(cls, options: ProbeOptions) -> list[Item]:
        found = []
        for number, record in enumerate(load("words", options.data)[: options.limit or NUM_WORDS]):
            word, _, category, article = asked_word(record)
            text, char_spans = counting_prompt(word, MOST, category, article, options.template)
            factors = [amount / MOST for amount in AMOUNTS]
            for change in CHANGES:
                facts = {"changed": change, "prompt": [word, category, article, options.template]}
                found.append(
                    Item(f"{number} {word}, {change}", "amounts", text, "shrink", factors, "digits", char_spans,
                         one_token=True, facts=facts)
                )  # fmt: skip
        return found

    @classmethod
    def record(cls, reader: Reader, item: Item) -> Record:
        """Returns `distances`, total variations by factor and whole amount, `nearest`, the amount of the nearest whole
        sentence by factor, and `distance`, that to the factor's own amount."""
        return check_item(item, lambda: _compared_with_wholes(reader, item))

    @classmethod
    def summary(cls, records: Sequence[Record]) -> dict[str, Any]:
        groups = groups_of(valid(records), "changed")
        found: dict[str, Any] = {"records": len(records), "valid": len(valid(records)), "changes": {}}
        for change in CHANGES:
            mine = groups.get((change,), [])
            pairs = [_pairs(record["nearest"]) for record in mine]
            discrete = [float(amount == MOST) for record in mine for amount in record["nearest"][: MOST - 1]]
            found["changes"][change] = {
                "words": len(mine),
                "control": compare({name: [one[name] for one in pairs] for name in (SHARE, DISTANCE)}),
                "discrete": mean(discrete),
                "variation": mean([value for record in mine for value in record["distance"][: MOST - 1]]),
                "variation_discrete": mean([value for record in mine for value in record["distances"][-1][: MOST - 1]]),
                "nearest": [mean([record["nearest"][at] for record in mine]) for at in range(MOST)],
            }
        return found

    @classmethod
    def figures(cls, summary: dict[str, Any]) -> Figures:
        return {
            f"{change}: {name}": value
            for change, found in summary["changes"].items()
            for name, value in (
                (SHARE, found["control"][SHARE]["own"]["mean"]),
                (DISCRETE, found["discrete"]),
            )
        }

    @classmethod
    def summary_tables(cls, models: dict[str, dict[str, Any]]) -> list[Table]:
        rows = []
        for name, summary in models.items():
            for change, found in summary["changes"].items():
                cells = [
                    format_mean(found["control"][measured][part])
                    for measured in (SHARE, DISTANCE)
                    for part in ("own", "others")
                ]
                variations = [figure(found[field]) for field in ("variation", "variation_discrete")]
                rows.append([name, change, found["words"], *cells, percent(found["discrete"]), *variations])
        columns = ["model", "changed", "words", SHARE, "other amounts", DISTANCE, "from other amounts", DISCRETE]
        columns += ["total variation to its amount", f"of {MOST} whole words to it"]
        return [Table(f"{MOST} words of duration m / {MOST}, for m of 1 to {MOST - 1}, 95 % intervals", columns, rows)]

    @classmethod
    def draw(cls, results: dict[str, Any], path: Path) -> None:
        models = [model for model in results["models"] if model["summary"]["valid"]]
        if not models:
            return
        with picture(
            path.with_name(f"{path.name}-amounts"), 1, len(models), figsize=(4.2 * len(models), 3.4), squeeze=False
        ) as axes:
            for panel, model in zip(axes[0], models, strict=True):
                panel.plot(AMOUNTS, AMOUNTS, color="grey", lw=0.8, label="read as its amount")
                panel.plot(AMOUNTS, [MOST] * MOST, color="grey", lw=0.8, ls=":", label="each token counts as one")
                for change, found in model["summary"]["changes"].items():
                    if found["words"]:
                        panel.plot(AMOUNTS, found["nearest"], marker="o", ms=3, label=change)
                panel.set_title(model["name"], fontsize=9)
                panel.set(xlabel=f"amount: {MOST} words x duration", ylabel="nearest number of whole words, mean")
                panel.grid(alpha=0.3)
                panel.legend(fontsize=7)


def _compared_with_wholes(reader: Reader, item: Item) -> Record:
    word, category, article, template = item.facts["prompt"]
    fractions = [_only(one, item.facts["changed"], reader) for one in reader.sentences(item)]
    texts = [counting_prompt(word, amount, category, article, template).text for amount in AMOUNTS]
    wholes = [reader.lm.embed(reader.sentence(text)) for text in texts]
    if [len(one) for one in wholes] != list(range(len(wholes[0]), len(wholes[0]) + MOST)):
        raise NotValid(f"another {word!r} is not another token")
    fraction_FV, whole_MV = reader.probabilities([*fractions, *wholes]).split([len(fractions), MOST])
    distances_FM = (fraction_FV[:, None] - whole_MV).abs().sum(-1) / 2
    return {
        "factors": list(item.factors),
        "distances": [[float(f"{value:.6g}") for value in row] for row in distances_FM.tolist()],
        "nearest": (distances_FM.argmin(1) + 1).tolist(),
        "distance": distances_FM.diagonal().tolist(),
        **item.facts,
    }


def _only(sentence: Sentence, changed: str, reader: Reader) -> Sentence:
    """Returns the sentence with its durations, or only their weights or positions; the rest is a whole token's."""
    if changed == "durations":
        return sentence
    if reader.lm.folded or reader.lm.position_anchor != "end":
        raise NotValid("weights and positions change apart only in stock models with the anchor 'end'")
    ones_N = torch.ones(len(sentence))
    weights = changed == "only their weights"
    return Sentence(
        embeddings=sentence.embeddings_ND,
        durations=sentence.durations_N if weights else ones_N,
        positions=ones_N.cumsum(0) if weights else sentence.time_steps_N,
    )


def _pairs(nearest: Sequence[int]) -> dict[str, tuple[float, float]]:
    """Returns a word's figures over the amounts below `MOST`: with their own amounts, and with all other amounts."""
    read_F = np.asarray(nearest)[: MOST - 1]
    is_FM = read_F[:, None] == np.asarray(AMOUNTS)
    off_FM = np.abs(read_F[:, None] - np.asarray(AMOUNTS))
    own_FM = np.eye(MOST, dtype=bool)[: MOST - 1]
    values = ((SHARE, is_FM), (DISTANCE, off_FM))
    return {name: (float(one_FM[own_FM].mean()), float(one_FM[~own_FM].mean())) for name, one_FM in values}
