"""Continuous inputs for unchanged causal language models, folded or from transformers.

A stock model receives embeddings, fractional positions, and an attention mask with the log weights of the samples (see
`quadrature`). A folded model receives the durations themselves and applies them to its memory too.

Axes: B sentences of a batch, N samples of a sentence, T samples of a forward pass (queries), D hidden size, V
vocabulary.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from condense.configuration import POSITION_ANCHORS
from condense.state.cache_argument import CACHE, cache_of
from condense.utils.choices import check_choice

from .quadrature import RULES, Rule, quadrature_weights
from .sentence import Sentence

TOKENS_AT_ONCE = 8192


class OutsideTable(ValueError):
    """Raised for a sample with a position outside the table of learned positions."""


class ContinuousLM:
    """A causal language model that reads `Sentence`s.

    model: a `CondenseForCausalLM`, or a transformers model such as Llama, Mistral, Phi-3, Gemma, Gemma-2 or GPT-2, in
    evaluation mode; its weights and its code do not change.

    position_anchor: "end" puts a sample at the end of its interval, "start" at its beginning. Both are shifted so that
    tokens of one unit have the positions 0, 1, 2 ... A folded model has its own anchor (`config.position_anchor`).
    Learned positions are interpolated linearly between neighbours, and the default for them is "start": with "end" a
    first token of less than one unit has a position below 0, before the table. The default for other models is "end".

    rule: "rectangle" or "trapezoid", see `quadrature`. A folded model supports the rectangle rule only.

    Raises `ValueError` if unit durations change the model's logits, or other durations do not.
    """

    def __init__(self, model: Any, position_anchor: str | None = None, rule: Rule = "rectangle"):
        self.model = model
        self.folded = model.config.model_type == "condense_llama"
        self.table = None if self.folded else _learned_positions(model)
        own_anchor = model.config.position_anchor if self.folded else "end" if self.table is None else "start"
        self.position_anchor = position_anchor or own_anchor
        self.rule = rule
        check_choice("position_anchor", self.position_anchor, POSITION_ANCHORS)
        self._check_rule(rule)
        if self.folded and self.position_anchor != own_anchor:
            raise ValueError(
                f"position_anchor={position_anchor!r} does not fit, the folded model's is {own_anchor!r}: set "
                "position_anchor in the config of the model."
            )
        if model.training:
            raise ValueError(
                "the model is in training mode, in which dropout adds noise to the logits: call model.eval()."
            )
        attention = model.config._attn_implementation
        if "flash" in attention and not self.folded:
            raise ValueError(
                f"attn_implementation={attention!r} can't use a mask of weights: load the model with sdpa or eager."
            )
        if not self.folded:
            self._check_architecture()

    def _check_rule(self, rule: str) -> None:
        check_choice("rule", rule, RULES)
        if self.folded and rule != "rectangle":
            raise ValueError(
                "a folded model supports rule='rectangle' only: in a trapezoid, a sample's weight depends on the query."
            )

    def with_rule(self, rule: Rule) -> "ContinuousLM":
        """Returns the same model with another quadrature rule."""
        self._check_rule(rule)
        other = copy.copy(self)
        other.rule = rule
        return other

    # Embeddings and logits

    @torch.no_grad()
    def embed(self, sentence: Sentence) -> Sentence:
        """Returns the sentence with embeddings in place of ids; keeps embeddings that it already has."""
        if sentence.embeddings_ND is not None:
            return self._on_device(sentence, sentence.embeddings_ND)
        assert sentence.ids_N is not None
        size = self.model.get_input_embeddings().num_embeddings
        if not bool(((sentence.ids_N >= 0) & (sentence.ids_N < size)).all()):
            raise ValueError(
                f"the sentence has ids outside the vocabulary of {size} tokens, as from another tokenizer: encode the "
                "text with the tokenizer of this model."
            )
        return sentence.with_embeddings(self.model.get_input_embeddings()(sentence.ids_N.to(self.model.device)))

    def _on_device(self, sentence: Sentence, embeddings_ND: torch.Tensor) -> Sentence:
        """Moves the sentence to the model's device. Raises `ValueError` for embeddings of the wrong width or dtype."""
        weight_VD = self.model.get_input_embeddings().weight
        if embeddings_ND.shape[1] != weight_VD.shape[1] or embeddings_ND.dtype != weight_VD.dtype:
            raise ValueError(
                f"embeddings of width {embeddings_ND.shape[1]} and {embeddings_ND.dtype} do not fit the model, whose "
                f"width is {weight_VD.shape[1]} and dtype {weight_VD.dtype}: compute them with embed, or convert them."
            )
        if embeddings_ND.device == weight_VD.device:
            return sentence
        return sentence.with_embeddings(embeddings_ND.to(weight_VD.device))

    @torch.no_grad()
    def logits(self, sentence: Sentence) -> torch.Tensor:
        """Returns logits [N, V], which predict the token after each sample."""
        return self._run([self.embed(sentence)], first=0, state=None, last_only=False)[0][0]

    @torch.no_grad()
    def next_logits(
        self,
        sentences: Sequence[Sentence],
        reuse_prefix: bool = True,
        tokens_at_once: int = TOKENS_AT_ONCE,
        progress: Callable[[int], object] | None = None,
    ) -> torch.Tensor:
        """Returns logits [B, V] after the last sample of each sentence, in float32 on the host.

        With `reuse_prefix`, sentences of equal length share one pass over their common prefix. A batch holds at most
        `tokens_at_once` samples, the common prefix included, but at least one sentence. `progress` is called with the
        number of sentences completed since its last call.
        """
        sentences = [self.embed(sentence) for sentence in sentences]
        rows: dict[int, torch.Tensor] = {}
        for length in sorted({len(sentence) for sentence in sentences}):
            numbers = [n for n, sentence in enumerate(sentences) if len(sentence) == length]
            shared = _shared_prefix([sentences[n] for n in numbers]) if reuse_prefix and len(numbers) > 1 else 0
            prefix = None
            if shared:
                prefix = self._run([sentences[numbers[0]]], 0, None, last_only=True, samples=shared)[1]
            # Each row gets a copy of the prefix's state. The state of a folded model has the size of three segments.
            size = max(length, 3 * self.model.config.segment_length) if self.folded else length
            at_once = max(1, tokens_at_once // size)
            for start in range(0, len(numbers), at_once):
                batch = numbers[start : start + at_once]
                state = None
                if prefix is not None:
                    state = copy.deepcopy(prefix)
                    state.batch_repeat_interleave(len(batch))
                logits_BTV, _ = self._run([sentences[n] for n in batch], shared, state, last_only=True)
                rows |= dict(zip(batch, logits_BTV[:, -1].float().cpu(), strict=True))
                if progress is not None:
                    progress(len(batch))
        return torch.stack([rows[n] for n in range(len(sentences))])

    # Forward pass

    def _run(
        self, sentences: list[Sentence], first: int, state: Any, last_only: bool, samples: int | None = None
    ) -> tuple[torch.Tensor, Any]:
        """Runs samples `first` to `samples - 1` (None: to the last) after `state`; returns logits and the new state."""
        last = len(sentences[0]) if samples is None else samples
        embeddings = [sentence.embeddings_ND for sentence in sentences]
        inputs: dict[str, Any] = {
            "inputs_embeds": torch.stack([values[first:last] for values in embeddings if values is not None]),
            CACHE: state,
            "use_cache": True,
        }
        if last_only:
            inputs["logits_to_keep"] = 1
        run = self._run_folded if self.folded else self._run_stock
        output = run(sentences, first, last, inputs)
        return output.logits, cache_of(output)

    def _run_folded(self, sentences: list[Sentence], first: int, last: int, inputs: dict[str, Any]) -> Any:
        if any(sentence.positions_N is not None for sentence in sentences):
            raise ValueError("a folded model computes positions only from durations: leave out positions='equal'.")
        durations_BT = torch.stack([sentence.durations_N[first:last] for sentence in sentences])
        return self.model(durations=durations_BT, **inputs)

    def _run_stock(self, sentences: list[Sentence], first: int, last: int, inputs: dict[str, Any]) -> Any:
        if inputs[CACHE] is None:
            inputs[CACHE] = DynamicCache()  # without a config: no layer drops keys that left its window
        positions_BT = torch.stack([self._positions(sentence)[first:last] for sentence in sentences])
        self._check_lengths(sentences)
        inputs["attention_mask"] = self._masks([self._log_weights(s, first, last) for s in sentences], inputs)
        if self.table is None:
            inputs["position_ids"] = positions_BT.to(self.model.device, torch.float32)
            return self.model(**inputs)
        with _at_positions(self.table, positions_BT, first):
            return self.model(**inputs, position_ids=torch.zeros_like(positions_BT, dtype=torch.long))

    def _positions(self, sentence: Sentence) -> torch.Tensor:
        if sentence.positions_N is not None:
            return sentence.positions_N - 1
        offset = 1.0 if self.position_anchor == "end" else sentence.durations_N
        return sentence.time_steps_N - offset

    def check_positions(self, sentence: Sentence) -> None:
        """Raises `OutsideTable` for a sentence with a position outside the table of learned positions."""
        if self.table is not None:
            _check_inside(self.table, self._positions(sentence)[None], 0)

    def _check_lengths(self, sentences: list[Sentence]) -> None:
        """Raises `ValueError` if rotary frequencies depend on the longest text of a batch: rows must not interact."""
        config = self.model.config
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type") not in ("dynamic", "longrope"):
            return
        limit = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        longest = max(float(sentence.time_steps_N[-1]) for sentence in sentences)
        if longest > limit:
            raise ValueError(
                f"a sentence lasts {longest:g} units, and above {limit} this model's rotary frequencies depend on the "
                "longest text of the batch: pass shorter sentences."
            )

    def _log_weights(self, sentence: Sentence, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns log weights [T, last] of samples before `last` for queries from `first` on, and distances in time."""
        log_weights = quadrature_weights(sentence.durations_N[:last], self.rule, first).log()
        times_N = sentence.time_steps_N[:last] if sentence.positions_N is None else sentence.positions_N[:last]
        return log_weights, times_N[first:, None] - times_N[None]

    def _masks(self, weights: list[tuple[torch.Tensor, torch.Tensor]], inputs: dict[str, Any]) -> Any:
        """Returns the model's `attention_mask`: one mask for all layers, or a mask for each type of layer.

        A sliding window of w tokens becomes a window of w units of time.
        """
        config, like = self.model.config, inputs["inputs_embeds"]
        log_weights_B1TN = torch.stack([log_weights for log_weights, _ in weights])[:, None]
        full = log_weights_B1TN.to(like.device, like.dtype)
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        layer_types = set(getattr(config, "layer_types", None) or ())
        if window is None and not layer_types:
            return full
        masks = {"full_attention": full}
        if window is not None:
            distances_B1TN = torch.stack([distances for _, distances in weights])[:, None].to(like.device)
            # Times are sums of fractions: a sample at the window's edge, up to rounding, is outside the window.
            masks["sliding_attention"] = full.masked_fill(distances_B1TN >= window - 1e-6, -torch.inf)
        if not layer_types:
            return masks["sliding_attention"]
        if unknown := layer_types - set(masks):
            raise ValueError(
                f"layers of type {', '.join(sorted(unknown))} are not supported: use a model with causal attention."
            )
        return masks

    # Check of the architecture

    @torch.no_grad()
    def _check_architecture(self) -> None:
        """Compares logits on a few tokens: unit durations must give the model's own, other durations different ones."""
        name, length = self.model.config.model_type, 8
        if "local" in getattr(self.model.config, "attention_layers", ()):  # GPT-Neo's local layers ignore the mask
            raise ValueError(f"a {name} has layers with a window that counts tokens: use a model without such layers.")
        ids_N = torch.arange(length) * 7 % self.model.get_input_embeddings().num_embeddings
        plain = Sentence(ids_N)
        ids_1N = ids_N[None].to(self.model.device)
        own_NV = self.model(input_ids=ids_1N, use_cache=False).logits[0].float()
        remedy = "use a model whose attention adds a mask to its scores, such as a Llama."
        try:
            rule, self.rule = self.rule, "rectangle"
            unit_NV = self.logits(plain).float()
            longer = [self.logits(plain.set_duration([0], duration)).float() for duration in (3.0, 5.0)]
        except (TypeError, LookupError, AttributeError, RuntimeError, ValueError) as error:
            raise ValueError(f"a {name} does not accept durations ({error}): {remedy}") from error
        finally:
            self.rule = rule
        tolerance = 1e-3 if self.model.dtype in (torch.float32, torch.float64) else 3e-2
        problem = None
        if not bool((unit_NV - own_NV).norm() <= tolerance * own_NV.norm()):
            problem = "durations of one unit change"
        elif not all(bool(torch.isfinite(logits_NV).all()) for logits_NV in longer):
            problem = "other durations overflow"
        elif any(torch.equal(*pair) for pair in combinations([unit_NV, *longer], 2)):
            problem = "durations do not change"
        if problem is not None:
            raise ValueError(f"{problem} the logits of a {name}: {remedy}")


def _shared_prefix(sentences: Sequence[Sentence]) -> int:
    """Returns the length of the sentences' common prefix, without the last sample, which runs for each sentence."""
    first, shared = sentences[0], len(sentences[0]) - 1
    assert first.embeddings_ND is not None
    for other in sentences[1:]:
        assert other.embeddings_ND is not None
        starts_alike = other.integration_start == first.integration_start
        if not starts_alike or (first.positions_N is None) != (other.positions_N is None):
            return 0
        same_N = (other.durations_N == first.durations_N) & (other.embeddings_ND == first.embeddings_ND).all(1).cpu()
        if first.positions_N is not None and other.positions_N is not None:
            same_N &= other.positions_N == first.positions_N
        different = (~same_N).nonzero()
        shared = min(shared, int(different[0]) if len(different) else shared)
    return shared


def _learned_positions(model: Any) -> nn.Embedding | None:
    """Returns GPT-2's table of learned positions; None for a model without one."""
    table = getattr(model.base_model, "wpe", None)
    return table if isinstance(table, nn.Embedding) else None


def _check_inside(table: nn.Embedding, positions_BT: torch.Tensor, first: int) -> None:
    """Raises `OutsideTable` for positions outside the table; `first` is the index of the first sample."""
    last = table.num_embeddings - 1
    outside = ((positions_BT < -1e-9) | (positions_BT > last + 1e-9)).nonzero()
    if len(outside):
        row, sample = outside[0].tolist()
        raise OutsideTable(
            f"sample {first + sample} has position {positions_BT[row, sample].item():.4g}, and the model learned "
            f"positions from 0 to {last}: use a shorter or later sentence, or position_anchor='start'."
        )


@contextmanager
def _at_positions(table: nn.Embedding, positions_BT: torch.Tensor, first: int) -> Iterator[None]:
    """Makes the table return its rows interpolated at `positions_BT`, whatever indices the model looks up.

    `first` is the index of the first sample in its sentence. Raises `OutsideTable` for positions outside the table.
    """
    _check_inside(table, positions_BT, first)
    last = table.num_embeddings - 1
    positions_BT = positions_BT.clamp(0, last).to(table.weight.device)
    below_BT = positions_BT.floor().clamp(max=last - 1).long()
    share_BT1 = (positions_BT - below_BT)[..., None].to(table.weight.dtype)
    between_BTD = table.weight[below_BT].lerp(table.weight[below_BT + 1], share_BT1)
    handle = table.register_forward_hook(lambda *_: between_BTD)
    try:
        yield
    finally:
        handle.remove()
