"""Several output heads, one for each of the next k tokens: each step writes k tokens.

Axes: B rows of a batch, N columns of an input (padding included), k heads, D hidden size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from condense.configuration import IGNORE_INDEX
from condense.state.cache_argument import CACHE, takes_past_key_values

from .late_cache import LateCache
from .wrapper import SegmentSums, WrapperConfig, WrapperForCausalLM, WrapperOutput, positions_of, real_tokens

Supervised = Literal["all_heads", "first_head", "as_generated"]


class MultiTokenConfig(WrapperConfig):
    """`num_tokens` is the number of heads, and of tokens written per step."""

    model_type = "condense_multi_token"

    num_tokens: int = 1


@dataclass
class MultiTokenOutput(WrapperOutput):
    """`future_logits` [B, N, k - 1, V] are the logits of heads 2 to k, on request."""

    future_logits: torch.Tensor | None = None


class MultiTokenForCausalLM(WrapperForCausalLM):
    """A base model whose own head predicts the next token, with k - 1 further heads for the tokens after it.

    All heads read the final hidden state of the same token, so tokens of one step do not see each other. `generate` is
    the one from transformers, greedy or sampling; the base runs once per k tokens.
    """

    config_class = MultiTokenConfig

    def __init__(self, config: MultiTokenConfig):
        super().__init__(config)
        self.base = AutoModelForCausalLM.from_config(config.base)
        self.heads = nn.ModuleList(
            nn.Linear(config.hidden_size, config.vocab_size, bias=False) for _ in range(config.num_tokens - 1)
        )
        self.post_init()

    @classmethod
    def from_base(cls, base: Any, num_tokens: int) -> "MultiTokenForCausalLM":
        """Wraps `base` (shared, not copied); the further heads are zero, so they predict all tokens equally.

        Zeros need no random numbers and leave a trained base intact. Heads that are confident of the wrong tokens, such
        as copies of its own, would first change what it has learned. Raises `ValueError` for fewer than one token, and
        for a model that is already a wrapper.
        """
        if num_tokens < 1:
            raise ValueError(f"num_tokens={num_tokens}: write at least 1 token a step.")
        model = cls.around(base, num_tokens=num_tokens)
        model.base, weight = base, base.get_output_embeddings().weight
        for head in model.heads:
            head.weight = nn.Parameter(torch.zeros_like(weight))
        return model

    @property
    def bases(self) -> list[Any]:
        return [self.base]

    @property
    def all_heads(self) -> list[Any]:
        return [self.base.get_output_embeddings(), *self.heads]

    @takes_past_key_values
    def forward(
        self,
        input_ids: torch.LongTensor,
        attention_mask: torch.Tensor | None = None,
        cache: LateCache | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        future_logits: bool = False,
        supervised: Supervised = "all_heads",
        num_items_in_batch: int | torch.Tensor | None = None,
        return_dict: bool | None = None,
        **unused: Any,
    ) -> MultiTokenOutput:
        """Reads input_ids [B, N]; attention_mask [B, N] is 0 at padding, on either side.

        labels [B, N]: `loss` is the mean cross-entropy over all tokens and heads whose target lies in the text. With
        `num_items_in_batch` it is the sum divided by it. `supervised="first_head"` uses only next tokens.
        `"as_generated"` uses only the heads of tokens 0, k, 2k, ...: each target once, with the head that writes it. No
        logits are returned with a loss.

        Without labels: `logits` [B, N, V] of the first head, or of its last `logits_to_keep` columns; `future_logits`
        requests the other heads' logits too.

        With a cache: `logits` [B, 1, V] of the next token. A single further token belongs to the current step until k
        tokens are written. Several tokens are a prompt, after which a step begins.

        Raises `ValueError` for arguments that do not fit together or are not supported.
        """
        cache = self.prepare_call(cache, use_cache, labels, unused)
        if cache is not None:
            if future_logits:
                raise ValueError("future_logits=True: a call with a cache gives the logits of one token. Leave it out.")
            output = MultiTokenOutput(logits=self._next_logits(input_ids, attention_mask, cache), **{CACHE: cache})
            return output if return_dict is not False else output.to_tuple()
        read = self.base.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        hidden_BND = read.last_hidden_state
        if labels is None:
            hidden_BND = hidden_BND[:, -logits_to_keep:]
            output = MultiTokenOutput(logits=self.all_heads[0](hidden_BND))
            if future_logits:
                columns_BNV = [head(hidden_BND) for head in self.heads] or [output.logits[:, :, :0]]
                output.future_logits = torch.stack(columns_BNV, dim=2)
        else:
            sums = SegmentSums(self.segments_of(positions_of(input_ids, attention_mask)))
            targets_BNk = targets_of_heads(labels, attention_mask, self.config.num_tokens, supervised)
            for head, targets_BN in zip(self.all_heads, targets_BNk.unbind(dim=2), strict=True):
                sums.add(head, hidden_BND, targets_BN)
            output = MultiTokenOutput(**sums.output(num_items_in_batch))
        return output if return_dict is not False else output.to_tuple()

    def _next_logits(self, input_ids, attention_mask, cache: LateCache) -> torch.Tensor:
        """Returns the logits [B, 1, V] of the token after `input_ids`."""
        cache.add(input_ids)
        prompt = input_ids.shape[1] > 1 or cache.last_hidden_BD is None
        if prompt or cache.num_unread(0) == self.config.num_tokens:
            cache.last_hidden_BD = cache.read(0, self.base, attention_mask)
        return self.all_heads[cache.num_unread(0)](cache.last_hidden_BD)[:, None]


def targets_of_heads(
    labels_BN: torch.Tensor, attention_mask: torch.Tensor | None, num_tokens: int, supervised: Supervised = "all_heads"
) -> torch.Tensor:
    """Returns the label that each head of each token predicts, [B, N, k]; `IGNORE_INDEX` if there is none."""
    targets_BNk = labels_BN.new_full((*labels_BN.shape, num_tokens), IGNORE_INDEX)
    for ahead in range(1, min(num_tokens, labels_BN.shape[1] - 1) + 1):
        targets_BNk[:, :-ahead, ahead - 1] = labels_BN[:, ahead:]
    reads_BN = real_tokens(labels_BN, attention_mask)
    if supervised == "as_generated":
        reads_BN = reads_BN & (positions_of(labels_BN, attention_mask) % num_tokens == 0)
    targets_BNk[~reads_BN] = IGNORE_INDEX
    if supervised == "first_head":
        targets_BNk[..., 1:] = IGNORE_INDEX
    return targets_BNk
