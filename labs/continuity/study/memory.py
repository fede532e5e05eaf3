"""The probe of durations in a folded model's memory: does half a word two segments ago still count as half?

The duration of the memory is also a dial: all keys in memory get one duration and keep their positions.

Axes: F factors, N samples, T samples of a segment, A answer tokens, L segment length, D hidden size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from condense.eval.results import Table, groups_of
from condense.state.cache import FoldedCache
from condense.training.data.passkey import PasskeyTask

from ..model import Sentence
from ..model.adapter import TOKENS_AT_ONCE
from .aggregation import answers, figure, if_answering, mass_column, percent, valid
from .counts import OBSERVED, WORDS, peak_figures
from .data import load
from .engine import Reader, Record, check_item
from .items import DURATIONS, Item, NotValid
from .options import ProbeOptions
from .probe import Probe
from .prompts import FILLER, asked_word, counting_prompt
from .runs import Figures

DISTANCES = (0, 1, 2, 3)  # segments from the words to the end of the question
DIALS = tuple(sorted({*np.geomspace(0.01, 100, 41).round(6).tolist(), 0.5, 2.0}))
SHOWN_DIALS = (0.01, 0.1, 0.5, 1.0, 2.0, 10.0, 100.0)
MEASURES = {
    "right at 1": "right_at_1",
    "counterfactual": "counterfactual",
    OBSERVED: "observed",
    "observed, expected": "observed_expected",
}
NUM_WORDS = 20  # items of each distance
NUM_PASSKEYS = 20
PASSKEY_SEGMENTS = 4


class Memory(Probe):
    kind = "probe_memory"
    about = (
        "For folded models only. Words shrink in earlier segments, of which only the memory holds a trace. And all "
        "keys in memory get one duration, at their own positions."
    )
    varied = "duration factor"
    data_set = "words"
    folded_only = True
    above_one = tuple(f"{segments} before: {OBSERVED}" for segments in DISTANCES)

    @classmethod
    def prompts(cls, options: ProbeOptions) -> list[Item]:
        """Returns items without texts, which depend on the model's segments: see `words_at_distance`."""
        records = load("words", options.data)[: NUM_WORDS if options.limit is None else options.limit]
        words = [(word, 4, category, article) for word, category, article in WORDS]
        words += map(asked_word, records)
        found = []
        for distance in DISTANCES:
            group = f"{distance} segments before"
            for number, prompt in enumerate(words):
                word, repetitions, *_ = prompt
                facts = {"repetitions": repetitions, "distance_in_segments": distance, "prompt": list(prompt)}
                name = f"{number} {word}, {group}"
                found.append(Item(name, group, "", "shrink", DURATIONS, "digits", one_token=True, facts=facts))
                if distance:
                    name = f"{number} {word}, dial, {group}"
                    found.append(replace(found[-1], name=name, group="dial, counting", vary="dial", factors=DIALS))
        found += [
            Item(f"passkey {number}", "dial, passkeys", "", "dial", DIALS, "tokens", facts={"seed": number})
            for number in range(min(options.limit or NUM_PASSKEYS, NUM_PASSKEYS))
        ]
        return found

    @classmethod
    def record(cls, reader: Reader, item: Item) -> Record:
        """Returns what `Reader.record` does, with the words at the item's distance from the end of the question."""
        return check_item(item, lambda: _measure(reader, item))

    @classmethod
    def summary(cls, records: Sequence[Record]) -> dict[str, Any]:
        groups = groups_of(valid(records), "group")
        distances = {distance: peak_figures(groups.get((f"{distance} segments before",), [])) for distance in DISTANCES}
        dials = {}
        for name in ("dial, counting", "dial, passkeys"):
            if group := groups.get((name,)):
                recall_F = np.mean([record["recall"] for record in group], axis=0)
                dials[name] = {"factors": group[0]["factors"], "recall": recall_F.tolist(), "valid": len(group)}
        return {"records": len(records), "valid": len(valid(records)), "distances": distances, "dials": dials}

    @classmethod
    def figures(cls, summary: dict[str, Any]) -> Figures:
        found: dict[str, float | None] = {}
        for distance, values in summary["distances"].items():
            named = {name: values[field] for name, field in MEASURES.items()}
            found |= {f"{distance} before: {name}": value for name, value in if_answering(values, named).items()}
        for what, values in summary["dials"].items():
            for dial in SHOWN_DIALS:
                found[f"{what} {dial:g}"] = values["recall"][values["factors"].index(dial)]
        return found

    @classmethod
    def summary_tables(cls, models: dict[str, dict[str, Any]]) -> list[Table]:
        rows, dials = [], []
        for name, found in models.items():
            for distance, values in found["distances"].items():
                seen = values if answers(values) else {}
                right, *measures = (seen.get(field) for field in MEASURES.values())
                shown = [percent(right), *map(figure, measures), percent(values.get("mass"))]
                rows.append([name, distance, values["valid"], *shown])
            for what, values in found["dials"].items():
                recalls = [values["recall"][values["factors"].index(dial)] for dial in SHOWN_DIALS]
                dials.append([name, what.removeprefix("dial, "), values["valid"], *map(percent, recalls)])
        columns = ["model", "segments before", "valid", *MEASURES, mass_column("digits")]
        dial_columns = ["model", "recall of", "prompts", *(f"dial {dial:g}" for dial in SHOWN_DIALS)]
        return [
            Table("words that shrink, by the number of segments before the end of the question", columns, rows),
            Table("mean probability of the right answer with all memory keys at one duration", dial_columns, dials),
        ]


def _measure(reader: Reader, item: Item) -> Record:
    if item.group == "dial, passkeys":
        return _dial_passkey(reader, item)
    moved = words_at_distance(reader, item)
    return _dial_counting(reader, moved) if item.group == "dial, counting" else reader.curves_of(moved)


def words_at_distance(reader: Reader, item: Item) -> Item:
    """Returns the item with a text that has as many fillers between words and question as its distance needs.

    Raises `NotValid` if no number of fillers gives the distance.
    """
    length, wanted = reader.lm.model.config.segment_length, item.facts["distance_in_segments"]
    room = len(reader.sentence(FILLER))
    for num_fillers in range(max(0, (wanted - 1) * length // room - 2), (wanted + 1) * length // room + 2):
        text, char_spans = counting_prompt(*item.facts["prompt"], template="apart", num_fillers=num_fillers)
        moved = replace(item, text=text, char_spans=tuple(char_spans))
        segments = [token // length for token in reader.tokens(moved)]
        if len(set(segments)) == 1 and (len(reader.sentence(text)) - 1) // length - segments[0] == wanted:
            return moved
    raise NotValid(f"no number of fillers puts the words {wanted} segments before the end, all in one segment")


def _dial_counting(reader: Reader, item: Item) -> Record:
    probabilities_FV = turn_dials(reader, reader.sentence(item.text), item.factors, keep=1)[:, 0]
    curves = reader.curves(probabilities_FV, item.watched)
    recall = curves[str(item.facts["repetitions"])]
    return {"factors": list(item.factors), "curves": curves, "recall": recall, **item.facts}


def _dial_passkey(reader: Reader, item: Item) -> Record:
    """Returns the joint probability of the key's tokens, and whether each of them is the likeliest."""
    length = reader.lm.model.config.segment_length
    try:
        task = PasskeyTask(reader.tokenizer)
        passkeys = task.batch(1, PASSKEY_SEGMENTS * length, np.random.default_rng(item.facts["seed"]), depth=0.0)
    except ValueError as reason:
        raise NotValid(str(reason)) from reason
    answer_A = passkeys.answer_ids_BA[0]
    ids_N = torch.cat([passkeys.prompt_ids_BN[0], answer_A])
    unknown = reader.tokenizer.unk_token_id
    if unknown is not None and unknown in ids_N[1:]:  # the first one may be the bos token
        raise NotValid("the tokenizer does not know the words of a passkey prompt")
    probabilities_FAV = turn_dials(reader, Sentence(ids_N[:-1]), item.factors, keep=len(answer_A))
    recall_F = probabilities_FAV[:, torch.arange(len(answer_A)), answer_A].prod(1)
    found_F = (probabilities_FAV.argmax(-1) == answer_A).all(1)
    return {"factors": list(item.factors), "recall": recall_F.tolist(), "found": found_F.tolist(), **item.facts}


@torch.no_grad()
def turn_dials(reader: Reader, sentence: Sentence, dials: Sequence[float], keep: int) -> torch.Tensor:
    """Returns probabilities [F, keep, V] after the last samples, in float64, with all keys in memory at one duration.

    Positions and the current segment's durations stay, so only the weight of the memory changes.
    """
    lm = reader.lm
    length = lm.model.config.segment_length
    embedded_ND = lm.embed(sentence).embeddings_ND
    assert embedded_ND is not None
    at_once = max(1, TOKENS_AT_ONCE // (3 * length))
    return torch.cat(
        [
            _turn_dials(lm.model, embedded_ND, dials[n : n + at_once], length, keep)
            for n in range(0, len(dials), at_once)
        ]
    )


def _turn_dials(model: Any, embedded_ND: torch.Tensor, dials: Sequence[float], length: int, keep: int) -> torch.Tensor:
    cache, parts, after = FoldedCache(model.config), [], len(embedded_ND)
    for part_TD in embedded_ND.split(length):
        after -= len(part_TD)
        output = model(
            inputs_embeds=part_TD.expand(len(dials), -1, -1),
            durations=torch.ones(len(dials), len(part_TD)),
            cache=cache,
            use_cache=True,
            logits_to_keep=min(len(part_TD), max(1, keep - after)),
        )
        assert cache.timeline is not None
        cache.timeline.memory_BL = torch.tensor(dials, dtype=torch.float64)[:, None].expand(-1, length).clone()
        if after < keep:
            parts.append(output.logits.float().cpu().double().softmax(-1))
    return torch.cat(parts, dim=1)
