"""Continuous inputs for causal language models as they are: folded ones, and those of transformers.

A stock model takes embeddings, fractional positions and a mask of logarithms of weights; what a sample weighs is said
in `quadrature`. A folded model takes durations itself, which reach through its memory.

Axes: B sentences of a batch, N samples, T samples run now, D model width, V vocabulary.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from .quadrature import RULES, Rule, quadrature_weights
from .sentence import Sentence

ANCHORS = ("end", "start")
TOKENS_AT_ONCE = 8192


class OutsideTable(ValueError):
    """A sample sits where no position was learned."""


class ContinuousLM:
    """A causal language model that reads `Sentence`s.

    model: a `CondenseForCausalLM`, or a model of transformers such as Llama, Mistral, Phi-3, Gemma, Gemma-2 or GPT-2,
    in evaluation mode; its weights and its code stay as they are.

    position_anchor: "end" puts a sample at the end of its interval, "start" at its beginning; both shifted so that
    tokens of one unit sit at 0, 1, 2 ... A folded model has its own (`config.position_anchor`). Learned positions
    are interpolated linearly between neighbours.

    rule: "rectangle" or "trapezoid". A folded model knows rectangles only.

    Raises `ValueError` for a model that does not give its own logits back on tokens of one unit, or in which a
    duration changes nothing.
    """

    def __init__(self, model: Any, position_anchor: str | None = None, rule: Rule = "rectangle"):
        self.model = model
        self.folded = model.config.model_type == "condense_llama"
        own_anchor = getattr(model.config, "position_anchor", None) or "end"
        self.position_anchor = position_anchor or own_anchor
        self.rule = rule
        if self.position_anchor not in ANCHORS:
            raise ValueError(f"position_anchor={position_anchor!r}: choose one of {', '.join(ANCHORS)}.")
        self._check_rule(rule)
        if self.folded and self.position_anchor != own_anchor:
            raise ValueError(
                f"position_anchor={position_anchor!r}, and the folded model's is {own_anchor!r}: set it in its config."
            )
        if model.training:
            raise ValueError("the model is in training mode, where dropout makes curves of noise: call model.eval().")
        attention = model.config._attn_implementation
        if "flash" in attention and not self.folded:
            raise ValueError(f"attn_implementation={attention!r} takes no weights: load the model with sdpa or eager.")
        self.table = None if self.folded else _learned_positions(model)
        if not self.folded:
            self._check_architecture()

    def _check_rule(self, rule: str) -> None:
        if rule not in RULES:
            raise ValueError(f"rule={rule!r}: choose one of {', '.join(RULES)}.")
        if self.folded and rule != "rectangle":
            raise ValueError("a folded model knows rule='rectangle' only: trapezoids weigh a sample by its query.")

    def with_rule(self, rule: Rule) -> "ContinuousLM":
        """The same model under another rule."""
        self._check_rule(rule)
        other = copy.copy(self)
        other.rule = rule
        return other

    # What is read

    @torch.no_grad()
    def embed(self, sentence: Sentence) -> Sentence:
        """The sentence with embeddings instead of ids; those it has are kept."""
        if sentence.embeddings_ND is not None:
            return self._fitting(sentence, sentence.embeddings_ND)
        assert sentence.ids_N is not None
        size = self.model.get_input_embeddings().num_embeddings
        if not bool(((sentence.ids_N >= 0) & (sentence.ids_N < size)).all()):
            raise ValueError(f"ids outside the vocabulary of {size} tokens: they belong to another tokenizer.")
        return sentence.with_embeddings(self.model.get_input_embeddings()(sentence.ids_N.to(self.model.device)))

    def _fitting(self, sentence: Sentence, embeddings_ND: torch.Tensor) -> Sentence:
        """The sentence on the model's device. Raises `ValueError` for embeddings of another width or number format."""
        weight_VD = self.model.get_input_embeddings().weight
        if embeddings_ND.shape[1] != weight_VD.shape[1] or embeddings_ND.dtype != weight_VD.dtype:
            raise ValueError(
                f"embeddings of width {embeddings_ND.shape[1]} and {embeddings_ND.dtype} do not fit the model's, of "
                f"width {weight_VD.shape[1]} and {weight_VD.dtype}: make them with embed, or convert them."
            )
        if embeddings_ND.device == weight_VD.device:
            return sentence
        return sentence.with_embeddings(embeddings_ND.to(weight_VD.device))

    @torch.no_grad()
    def logits(self, sentence: Sentence) -> torch.Tensor:
        """Logits [N, V] behind every sample."""
        return self._run([self.embed(sentence)], first=0, state=None, last_only=False)[0][0]

    @torch.no_grad()
    def next_logits(
        self,
        sentences: Sequence[Sentence],
        reuse_prefix: bool = True,
        tokens_at_once: int = TOKENS_AT_ONCE,
        progress: Callable[[int], object] | None = None,
    ) -> torch.Tensor:
        """Logits [B, V], in float32 on the host, behind the last sample of each of several sentences.

        What sentences of one length share from their beginning on is read once. So many sentences are run at once as
        `tokens_at_once` allows, what they share included; `progress` is called with the number of sentences done since
        the last call.
        """
        if not sentences:
            raise ValueError("there are no sentences to read: pass one at least.")
        sentences = [self.embed(sentence) for sentence in sentences]
        rows: dict[int, torch.Tensor] = {}
        for length in sorted({len(sentence) for sentence in sentences}):
            numbers = [n for n, sentence in enumerate(sentences) if len(sentence) == length]
            shared = _shared_prefix([sentences[n] for n in numbers]) if reuse_prefix and len(numbers) > 1 else 0
            prefix = None
            if shared:
                prefix = self._run([sentences[numbers[0]]], 0, None, last_only=True, samples=shared)[1]
            # Each row has a copy of the state of what is shared, and a folded one's is as large as three segments.
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

    # How it is read

    def _run(
        self, sentences: list[Sentence], first: int, state: Any, last_only: bool, samples: int | None = None
    ) -> tuple[torch.Tensor, Any]:
        """Runs samples `first` up to `samples` (or the end) behind the state; logits and the state after them."""
        last = len(sentences[0]) if samples is None else samples
        embeddings = [sentence.embeddings_ND for sentence in sentences]
        inputs: dict[str, Any] = {
            "inputs_embeds": torch.stack([values[first:last] for values in embeddings if values is not None]),
            "past_key_values": state,
            "use_cache": True,
        }
        if last_only:
            inputs["logits_to_keep"] = 1
        if self.folded:
            for sentence in sentences:
                if sentence.positions_N is not None:
                    raise ValueError(
                        "a folded model takes the positions that durations give: leave out positions='equal'."
                    )
            durations_BT = torch.stack([sentence.durations_N[first:last] for sentence in sentences])
            output = self.model(durations=durations_BT, **inputs)
            return output.logits, output.past_key_values
        if state is None:
            inputs["past_key_values"] = DynamicCache()  # without a config: no layer drops what is behind its window
        positions_BT = torch.stack([self._positions(sentence)[first:last] for sentence in sentences])
        self._check_lengths(sentences)
        inputs["attention_mask"] = self._masks([self._log_weights(s, first, last) for s in sentences], inputs)
        if self.table is None:
            inputs["position_ids"] = positions_BT.to(self.model.device, torch.float32)
            output = self.model(**inputs)
        else:
            with _at_positions(self.table, positions_BT, first):
                output = self.model(**inputs, position_ids=torch.zeros_like(positions_BT, dtype=torch.long))
        return output.logits, output.past_key_values

    def _positions(self, sentence: Sentence) -> torch.Tensor:
        if sentence.positions_N is not None:
            return sentence.positions_N - 1
        offset = 1.0 if self.position_anchor == "end" else sentence.durations_N
        return sentence.time_steps_N - offset

    def _check_lengths(self, sentences: list[Sentence]) -> None:
        """Where a model picks its frequencies by the longest text of a batch, neighbours would change each other."""
        config = self.model.config
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type") not in ("dynamic", "longrope"):
            return
        limit = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        longest = max(float(sentence.time_steps_N[-1]) for sentence in sentences)
        if longest > limit:
            raise ValueError(
                f"a sentence of {longest:g} units: from {limit} on this model's rotary frequencies depend on the "
                "longest text read at once; take shorter ones."
            )

    def _log_weights(self, sentence: Sentence, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of queries `first` to `last` over all samples before `last`, and their distances in time."""
        log_weights = quadrature_weights(sentence.durations_N[:last], self.rule, first).log()
        times_N = sentence.time_steps_N[:last] if sentence.positions_N is None else sentence.positions_N[:last]
        return log_weights, times_N[first:, None] - times_N[None]

    def _masks(self, weights: list[tuple[torch.Tensor, torch.Tensor]], inputs: dict[str, Any]) -> Any:
        """What a model takes as `attention_mask`: one for all layers, or one for each of their types.

        A window that ends so many tokens back ends so many units of time back.
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
            # Times are sums of fractions: what lies at the window's end up to rounding is outside.
            masks["sliding_attention"] = full.masked_fill(distances_B1TN >= window - 1e-6, -torch.inf)
        if not layer_types:
            return masks["sliding_attention"]
        if unknown := layer_types - set(masks):
            raise ValueError(
                f"layers of type {', '.join(sorted(unknown))} are not supported: take a model of causal attention."
            )
        return masks

    # Whether that is what the model does

    @torch.no_grad()
    def _check_architecture(self) -> None:
        """On some tokens: its own logits at durations of one unit, others where they differ."""
        name, length = self.model.config.model_type, 8
        if "local" in getattr(self.model.config, "attention_layers", ()):  # as GPT-Neo's, which look at no mask for it
            raise ValueError(f"a {name} has layers whose window is counted in tokens: take a model without.")
        ids_N = torch.arange(length) * 7 % self.model.get_input_embeddings().num_embeddings
        plain = Sentence(ids_N)
        ids_1N = ids_N[None].to(self.model.device)
        own_NV = self.model(input_ids=ids_1N, use_cache=False).logits[0].float()
        remedy = "use one whose attention adds a mask to its scores, as Llama's."
        try:
            rule, self.rule = self.rule, "rectangle"
            ours_NV = self.logits(plain).float()
            longer = [self.logits(plain.set_duration([0], duration)).float() for duration in (3.0, 5.0)]
        except (TypeError, LookupError, AttributeError, RuntimeError, ValueError) as error:
            raise ValueError(f"a {name} can't be given durations ({error}): {remedy}") from error
        finally:
            self.rule = rule
        tolerance = 1e-3 if self.model.dtype in (torch.float32, torch.float64) else 3e-2
        if not bool((ours_NV - own_NV).norm() <= tolerance * own_NV.norm()):
            raise ValueError(
                f"with durations of one unit a {name} gives other logits than its own, by up to "
                f"{(ours_NV - own_NV).abs().max().item():.2g}: {remedy}"
            )
        if not all(bool(torch.isfinite(logits_NV).all()) for logits_NV in longer):
            raise ValueError(f"with other durations a {name} gives logits that are not finite: {remedy}")
        if any(torch.equal(*pair) for pair in combinations([ours_NV, *longer], 2)):
            raise ValueError(f"in a {name} durations change nothing: {remedy}")


def _shared_prefix(sentences: Sequence[Sentence]) -> int:
    """Samples that all sentences have in common from the first on, but for the last one, which is run for each."""
    first, shared = sentences[0], len(sentences[0]) - 1
    assert first.embeddings_ND is not None
    for other in sentences[1:]:
        assert other.embeddings_ND is not None
        if other.integration_start != first.integration_start or (first.positions_N is None) != (
            other.positions_N is None
        ):
            return 0
        same_N = (other.durations_N == first.durations_N) & (other.embeddings_ND == first.embeddings_ND).all(1).cpu()
        if first.positions_N is not None and other.positions_N is not None:
            same_N &= other.positions_N == first.positions_N
        different = (~same_N).nonzero()
        shared = min(shared, int(different[0]) if len(different) else shared)
    return shared


def _learned_positions(model: Any) -> nn.Embedding | None:
    """GPT-2's table of positions."""
    table = getattr(model.base_model, "wpe", None)
    return table if isinstance(table, nn.Embedding) else None


@contextmanager
def _at_positions(table: nn.Embedding, positions_BT: torch.Tensor, first: int) -> Iterator[None]:
    """Whatever the table is asked for, it answers with what lies at these positions, between its rows.

    `first` is the number of the first sample in its sentence.
    """
    last = table.num_embeddings - 1
    outside = ((positions_BT < -1e-9) | (positions_BT > last + 1e-9)).nonzero()
    if len(outside):
        row, sample = outside[0].tolist()
        raise OutsideTable(
            f"sample {first + sample} sits at position {positions_BT[row, sample].item():.4g}, and positions from 0 to "
            f"{last} were learned: take a shorter or later sentence, or position_anchor='start'."
        )
    positions_BT = positions_BT.clamp(0, last).to(table.weight.device)
    below_BT = positions_BT.floor().clamp(max=last - 1).long()
    share_BT1 = (positions_BT - below_BT)[..., None].to(table.weight.dtype)
    between_BTD = table.weight[below_BT].lerp(table.weight[below_BT + 1], share_BT1)
    handle = table.register_forward_hook(lambda *_: between_BTD)
    try:
        yield
    finally:
        handle.remove()
