"""Measures one item on one model: its sentences, one per factor, and the probabilities of the next token.

Axes: F factors, V vocabulary.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from condense.utils.text import template_tokens

from ..model import ContinuousLM, Sentence, interpolate
from ..model.adapter import OutsideTable
from ..model.spans import containing_span, encode_with_offsets, span_between
from .classes import class_curves, likely_tokens, round_values, watched_classes
from .items import Item, NotValid, Watched
from .options import Rule

Record = dict[str, Any]


class Reader(NamedTuple):
    """A model with continuous inputs and its tokenizer. `spans` is the rule for the tokens that shrink, and `classes`
    the rule for the classes of next tokens."""

    lm: ContinuousLM
    tokenizer: Any
    spans: Rule = "exact"
    classes: Rule = "exact"

    def sentences(self, item: Item) -> list[Sentence]:
        """Returns the sentences of an item, one per factor. Raises `NotValid`."""
        plain = self.lm.embed(self.sentence(item.text))
        if item.vary == "shift":
            return [plain.shift(factor) for factor in item.factors]
        if item.vary == "scale":
            return [plain.scale(factor) for factor in item.factors]
        if item.vary == "densify":
            if self.lm.folded and item.positions == "equal":
                raise NotValid("a folded model computes positions only from durations")
            return [plain.densify(int(factor), positions=item.positions) for factor in item.factors]
        if item.vary == "shrink":
            tokens = self.tokens(item)
            return [plain.shrink(tokens, factor) for factor in item.factors]
        assert item.vary == "interpolate", item.vary
        other = self.sentence(item.other)
        if len(plain) != len(other):
            raise NotValid(f"{len(plain)} and {len(other)} tokens: nothing lies between them")
        other = self.lm.embed(other)
        return [interpolate(plain, other, factor) for factor in item.factors]

    def sentence(self, text: str) -> Sentence:
        """Returns a text's tokens, without those that the tokenizer's template adds at the end: the model continues it.

        Raises `NotValid` for a word that the tokenizer does not know.
        """
        ids, char_spans = encode_with_offsets(self.tokenizer, text)
        num_tokens = len(ids) - len(template_tokens(self.tokenizer)[1])
        ids, char_spans = ids[:num_tokens], char_spans[:num_tokens]
        for token, (start, end) in zip(ids, char_spans, strict=True):
            if token == self.tokenizer.unk_token_id and start < end:  # the first one may be the bos token
                raise NotValid(f"the tokenizer does not know {text[start:end]!r}")
        return Sentence(ids)

    def tokens(self, item: Item, rule: Rule | None = None) -> list[int]:
        """Returns the tokens that shrink, by the reader's rule or another one. Raises `NotValid`.

        The exact rule takes the tokens of the text's parts. The published rule takes one span, if the item has one.
        """
        if (rule or self.spans) == "published" and item.containing:
            try:
                return list(containing_span(self.tokenizer, item.text, *item.containing))  # type: ignore[arg-type]
            except ValueError as reason:
                raise NotValid(str(reason)) from reason
        spans = [span_between(self.tokenizer, item.text, *char_span) for char_span in item.char_spans]
        for char_span, span in zip(item.char_spans, spans, strict=True):
            part = item.text[slice(*char_span)]
            if not span.exact:
                raise NotValid(f"{part!r} shares a token with its neighbours")
            if item.one_token and not span.is_one_token:
                raise NotValid(f"{part!r} is {span.end - span.first} tokens, not one")
        return [token for span in spans for token in span.tokens]

    def probabilities(self, sentences: list[Sentence], **options: Any) -> torch.Tensor:
        """Returns the probabilities [F, V] of the next token, in float64. `options` are those of `next_logits`."""
        logits_FV = self.lm.next_logits(sentences, **options).double()
        if logits_FV.isnan().any():
            raise ValueError("the model's logits are not numbers (NaN): use another dtype or checkpoint.")
        return logits_FV.softmax(-1)

    def curves(self, probabilities_FV: torch.Tensor, watched: Watched) -> dict[str, list[float]]:
        """Returns the curves of the watched classes; none for `tokens`. Raises `NotValid`."""
        return class_curves(probabilities_FV, watched_classes(self.tokenizer, watched, self.classes))

    def rules_that_allow(self, item: Item) -> dict[str, bool]:
        """Returns for each rule whether it finds the tokens that shrink; nothing if the item has only one rule."""
        allowed: dict[str, bool] = {}
        rules: tuple[Rule, ...] = ("exact", "published") if item.containing else ()
        for rule in rules:
            try:
                self.sentence(item.text)
                allowed[rule] = bool(self.tokens(item, rule))
            except NotValid:
                allowed[rule] = False
        return allowed

    def record(self, item: Item) -> Record:
        """Returns an item's curves; for an item that is not valid, the reason.

        - `likely`: the curves of tokens that reach 5 %; `unwatched` names those in no watched class.
        - `distance`, `same_top`: half the summed differences of probabilities to the unchanged sentence, and whether
          the likeliest token is the same.
        - `top`: the probability of the unchanged sentence's likeliest token.
        - `left_out`, `because`: factors with a position outside the table of learned positions, and the first reason.
        """
        return check_item(item, lambda: self.curves_of(item), self.rules_that_allow(item))

    def _readable(self, item: Item) -> tuple[dict[float, Sentence], Record]:
        """Returns the sentences within the model's positions by factor, and what is left out.

        Raises `OutsideTable` if all sentences are outside.
        """
        kept, outside = dict[float, Sentence](), dict[float, OutsideTable]()
        for factor, sentence in zip(item.factors, self.sentences(item), strict=True):
            try:
                self.lm.check_positions(sentence)
                kept[factor] = sentence
            except OutsideTable as reason:
                outside[factor] = reason
        if not outside:
            return kept, {}
        because = next(iter(outside.values()))
        if not kept:
            raise because
        return kept, {"left_out": round_values(outside), "because": str(because)}

    def curves_of(self, item: Item) -> Record:
        """Returns the fields of a valid item's record. Raises `NotValid` and `OutsideTable`."""
        sentences, left_out = self._readable(item)
        facts = dict(item.facts) | left_out
        watched = watched_classes(self.tokenizer, item.watched, self.classes)
        plain = [] if item.vary == "interpolate" else [self.sentence(item.text)]
        probabilities_FV = self.probabilities([*sentences.values(), *plain])
        if plain:
            probabilities_FV, plain_V = probabilities_FV[:-1], probabilities_FV[-1]
            facts |= {
                "distance": round_values(((probabilities_FV - plain_V).abs().sum(1) / 2).tolist()),
                "same_top": (probabilities_FV.argmax(1) == plain_V.argmax()).tolist(),
                "top": round_values(probabilities_FV[:, plain_V.argmax()].tolist()),
            }
        likely = likely_tokens(probabilities_FV, self.tokenizer)
        counted = {token for tokens in watched.values() for token in tokens}
        return {
            "factors": round_values(sentences),
            "curves": class_curves(probabilities_FV, watched),
            "likely": class_curves(probabilities_FV, likely),
            "unwatched": [name for name, tokens in likely.items() if not counted.intersection(tokens)],
            **facts,
        }


def check_item(item: Item, measure: Callable[[], Record], allowed: Mapping[str, bool] | None = None) -> Record:
    """Returns what `measure` finds, or the reason why the item is not valid. `allowed`: see `rules_that_allow`."""
    named: Record = {"name": item.name, "group": item.group} | ({"allowed_by": allowed} if allowed else {})
    try:
        return named | {"valid": True} | measure()
    except (NotValid, OutsideTable) as reason:
        return named | {"valid": False, "reason": str(reason)}
