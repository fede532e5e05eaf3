"""One item on one model: its sentences, one per factor, and the probabilities of the next token.

Axes: F factors, V vocabulary.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from condense.continuity import ContinuousLM, Sentence, interpolate
from condense.continuity.adapter import OutsideTable
from condense.continuity.spans import containing_span, encode_with_offsets, span_between
from condense.text import template_tokens

from .classes import Classes, class_curves, likely_tokens, watched_classes
from .items import Item, NotValid, Watched
from .options import Rule

Record = dict[str, Any]


class Reader(NamedTuple):
    """A model with continuous inputs, and its tokenizer; the rules for the tokens that shrink, and for classes."""

    lm: ContinuousLM
    tokenizer: Any
    spans: Rule = "exact"
    classes: Rule = "exact"

    def sentences(self, item: Item) -> list[Sentence]:
        """The sentences of an item, one per factor. Raises `NotValid`."""
        plain = self.lm.embed(self.sentence(item.text))  # once for all factors
        if item.vary == "shift":
            return [plain.shift(factor) for factor in item.factors]
        if item.vary == "scale":
            return [plain.scale(factor) for factor in item.factors]
        if item.vary == "densify":
            if self.lm.folded and item.positions == "equal":
                raise NotValid("a folded model knows no positions but those that durations give")
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
        """The tokens of a text, without those that the tokenizer's template puts after it: the model continues it."""
        ids, char_spans = encode_with_offsets(self.tokenizer, text)
        num_tokens = len(ids) - len(template_tokens(self.tokenizer)[1])
        ids, char_spans = ids[:num_tokens], char_spans[:num_tokens]
        for token, (start, end) in zip(ids, char_spans, strict=True):
            if token == self.tokenizer.unk_token_id and start < end:  # the first one may be the bos token
                raise NotValid(f"the tokenizer does not know {text[start:end]!r}")
        return Sentence(ids)

    def tokens(self, item: Item) -> list[int]:
        """The tokens that shrink. Raises `NotValid`."""
        return self.tokens_by(self.spans, item)

    def tokens_by(self, rule: Rule, item: Item) -> list[int]:
        """The tokens of the parts of the text; or of one span by the published rule, for an item that has it."""
        if rule == "published" and item.containing:
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
        """The probabilities [F, V] of the next token, in float64."""
        logits_FV = self.lm.next_logits(sentences, **options).double()
        if logits_FV.isnan().any():
            raise ValueError("the model's logits are not numbers (NaN): take another dtype or checkpoint.")
        return logits_FV.softmax(-1)

    def curves(self, probabilities_FV: torch.Tensor, watched: Watched) -> dict[str, list[float]]:
        """The curves of the watched classes; none for `tokens`. Raises `NotValid`."""
        return _short_curves(probabilities_FV, watched_classes(self.tokenizer, watched, self.classes))

    def rules_that_allow(self, item: Item) -> dict[str, bool]:
        """Whether each rule for spans finds the tokens of an item that shrinks; nothing where there is one rule."""
        allowed: dict[str, bool] = {}
        rules: tuple[Rule, ...] = ("exact", "published") if item.containing else ()
        for rule in rules:
            try:
                self.sentence(item.text)
                allowed[rule] = bool(self.tokens_by(rule, item))
            except NotValid:
                allowed[rule] = False
        return allowed

    def record(self, item: Item) -> Record:
        """The curves of an item; for an item that is not valid, the reason.

        `likely`: the tokens that reach 5 %, and `unwatched` those of them that are in no watched class. `distance` and
        `same_top` compare with the unchanged sentence: half the summed differences of probabilities, and whether the
        likeliest token is the same; `top` is the probability of the unchanged sentence's likeliest.
        `left_out`: the factors at which a position lies outside the table of learned ones, and `because`, the first
        reason.
        """
        return checked(item, lambda: self.curves_of(item), self.rules_that_allow(item))

    def _readable(self, item: Item) -> tuple[list[float], list[Sentence], Record]:
        """The factors that the model has positions for, their sentences, what is left out. Raises `OutsideTable`."""
        kept: list[tuple[float, Sentence]] = []
        outside: list[tuple[float, OutsideTable]] = []
        for factor, sentence in zip(item.factors, self.sentences(item), strict=True):
            try:
                self.lm.check_positions(sentence)
                kept.append((factor, sentence))
            except OutsideTable as reason:
                outside.append((factor, reason))
        if not kept:
            raise outside[0][1]
        lost = {"left_out": [_short(factor) for factor, _ in outside], "because": str(outside[0][1])} if outside else {}
        return [factor for factor, _ in kept], [sentence for _, sentence in kept], lost

    def curves_of(self, item: Item) -> Record:
        """The fields of the record of a valid item. Raises `NotValid` and `OutsideTable`."""
        factors, sentences, left_out = self._readable(item)
        facts = dict(item.facts) | left_out
        watched = watched_classes(self.tokenizer, item.watched, self.classes)
        plain = [] if item.vary == "interpolate" else [self.sentence(item.text)]
        probabilities_FV = self.probabilities([*sentences, *plain])
        if plain:
            probabilities_FV, plain_V = probabilities_FV[:-1], probabilities_FV[-1]
            facts |= {
                "distance": [_short(value) for value in ((probabilities_FV - plain_V).abs().sum(1) / 2).tolist()],
                "same_top": (probabilities_FV.argmax(1) == plain_V.argmax()).tolist(),
                "top": [_short(value) for value in probabilities_FV[:, plain_V.argmax()].tolist()],
            }
        likely = likely_tokens(probabilities_FV, self.tokenizer)
        counted = {token for tokens in watched.values() for token in tokens}
        return {
            "factors": [_short(factor) for factor in factors],
            "curves": self.curves(probabilities_FV, item.watched),
            "likely": _short_curves(probabilities_FV, likely),
            "unwatched": [name for name, tokens in likely.items() if not counted.intersection(tokens)],
            **facts,
        }


def checked(item: Item, measure: Callable[[], Record], allowed: Mapping[str, bool] | None = None) -> Record:
    """The record of an item; for one that is not valid, the reason. `allowed`: by the rules for spans."""
    named: Record = {"name": item.name, "group": item.group} | ({"allowed_by": allowed} if allowed else {})
    try:
        return named | {"valid": True} | measure()
    except (NotValid, OutsideTable) as reason:
        return named | {"valid": False, "reason": str(reason)}


def _short_curves(probabilities_FV: torch.Tensor, classes: Classes) -> dict[str, list[float]]:
    curves = class_curves(probabilities_FV, classes)
    return {name: [_short(value) for value in curve] for name, curve in curves.items()}


def _short(value: float) -> float:
    """The value to six significant digits, so that small probabilities keep their order."""
    return float(f"{value:.6g}")
