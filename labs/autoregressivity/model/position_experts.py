"""Several models in place of one: each predicts at its own positions of a text and reads all tokens before them.

Axes: B rows of a batch, N columns of an input (padding included), V vocabulary.
"""

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from condense.configuration import IGNORE_INDEX
from condense.loss import next_labels
from condense.state.cache_argument import CACHE, takes_past_key_values
from condense.utils.choices import check_choice

from .late_cache import LateCache
from .wrapper import SegmentSums, WrapperConfig, WrapperForCausalLM, WrapperOutput, positions_of, real_tokens

SPLITS = ("interval", "modulo")


class PositionExpertsConfig(WrapperConfig):
    """`num_experts` k models. Position t of a text, which predicts the token at t + 1, belongs to model t * k // length
    (`split="interval"`; positions after `length` belong to the last one) or t % k (`split="modulo"`, without a length).
    """

    model_type = "condense_position_experts"

    num_experts: int = 1
    split: str = "interval"
    length: int | None = None


class PositionExpertsForCausalLM(WrapperForCausalLM):
    """k copies of a base model that take turns over the positions of a text.

    Each reads the whole text before its positions with its own weights and its own memory. `generate` is the one from
    transformers, greedy or sampling. When a model's turn comes, it reads the tokens that the others have written.
    """

    config_class = PositionExpertsConfig

    def __init__(self, config: PositionExpertsConfig):
        super().__init__(config)
        self.experts = nn.ModuleList(AutoModelForCausalLM.from_config(config.base) for _ in range(config.num_experts))
        self.post_init()
        self._find_tied_weights()

    @classmethod
    def from_base(
        cls, base: Any, num_experts: int, split: str = "interval", length: int | None = None
    ) -> "PositionExpertsForCausalLM":
        """Uses `base` itself as the first model, and copies of it: all start from its weights.

        Raises `ValueError` for fewer than one model, an unknown split, intervals without a length or of unequal length,
        and for a model that is already a wrapper.
        """
        check_split(num_experts, split, length)
        model = cls.around(base, num_experts=num_experts, split=split, length=length)
        shared = {id(base.config): base.config}
        model.experts = nn.ModuleList([base, *(copy.deepcopy(base, dict(shared)) for _ in range(num_experts - 1))])
        model._find_tied_weights()
        return model

    def _find_tied_weights(self) -> None:
        # transformers looks for them in direct children, and the models are in a list.
        self.all_tied_weights_keys = self.get_expanded_tied_weights_keys(all_submodels=True)

    @property
    def bases(self) -> list[Any]:
        return list(self.experts)

    def owners_of(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns the number of the model that predicts at each position, in the same shape."""
        number = self.config.num_experts
        if self.config.split == "modulo":
            return positions % number
        return (positions * number // self.config.length).clamp(max=number - 1)

    @takes_past_key_values
    def forward(
        self,
        input_ids: torch.LongTensor,
        attention_mask: torch.Tensor | None = None,
        cache: LateCache | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        num_items_in_batch: int | torch.Tensor | None = None,
        return_dict: bool | None = None,
        **unused: Any,
    ) -> WrapperOutput:
        """Reads input_ids [B, N]; attention_mask [B, N] is 0 at padding, on either side.

        labels [B, N]: `loss` is the mean cross-entropy of next tokens, each predicted by the owner of the position
        before it. With `num_items_in_batch` it is the sum divided by it. No logits are returned with a loss.

        Without labels: `logits` [B, N, V], or of the last `logits_to_keep` columns; zeros at padding. With a cache:
        `logits` [B, 1, V] of the next token.

        Raises `ValueError` for arguments that do not fit together or are not supported.
        """
        cache = self.prepare_call(cache, use_cache, labels, unused)
        if cache is not None:
            output = WrapperOutput(logits=self._next_logits(input_ids, attention_mask, cache), **{CACHE: cache})
            return output if return_dict is not False else output.to_tuple()
        num_columns = input_ids.shape[1]
        positions_BN = positions_of(input_ids, attention_mask)
        owners_BN = self.owners_of(positions_BN).masked_fill(~real_tokens(input_ids, attention_mask), -1)
        if labels is None and logits_to_keep:
            owners_BN[:, :-logits_to_keep] = -1
        sums = SegmentSums(self.segments_of(positions_BN))
        targets_BN = None if labels is None else next_labels(labels)
        logits_BNV = None
        for number, expert in enumerate(self.bases):
            own_BN = owners_BN == number
            # A model reads up to its last position. If it has none, it still reads one token: ranks that add
            # gradients must have the same ones.
            end = int(own_BN.any(dim=0).nonzero().max()) + 1 if own_BN.any() else 1
            mask = None if attention_mask is None else attention_mask[:, :end]
            read = expert.base_model(input_ids=input_ids[:, :end], attention_mask=mask, use_cache=False)
            hidden_BND, head = read.last_hidden_state, expert.get_output_embeddings()
            if targets_BN is not None:
                sums.add(head, hidden_BND, targets_BN.masked_fill(~own_BN, IGNORE_INDEX))
            else:
                logits_nV = head(hidden_BND[own_BN[:, :end]])
                if logits_BNV is None:
                    logits_BNV = logits_nV.new_zeros(*input_ids.shape, self.config.vocab_size)
                logits_BNV[own_BN] = logits_nV
        if logits_BNV is None:
            output = sums.output(num_items_in_batch)
        else:
            output = WrapperOutput(logits=logits_BNV[:, -(logits_to_keep or num_columns) :])
        return output if return_dict is not False else output.to_tuple()

    def _next_logits(self, input_ids, attention_mask, cache: LateCache) -> torch.Tensor:
        """Returns the logits [B, 1, V] of the token after `input_ids`."""
        owners_B = self.owners_of(positions_of(input_ids, attention_mask, cache.get_seq_length())[:, -1])
        cache.add(input_ids)
        logits_BV: torch.Tensor | None = None
        for number in owners_B.unique().tolist():  # rows differ if they are padded
            expert = self.bases[number]
            own_BV = expert.get_output_embeddings()(cache.read(number, expert, attention_mask))
            logits_BV = own_BV if logits_BV is None else torch.where((owners_B == number)[:, None], own_BV, logits_BV)
        assert logits_BV is not None
        return logits_BV[:, None]


def check_split(num_experts: int, split: str, length: int | None) -> None:
    """Raises `ValueError` for positions that can't be divided among the models."""
    if num_experts < 1:
        raise ValueError(f"num_experts={num_experts}: use at least 1 model.")
    check_choice("split", split, SPLITS)
    if split == "interval" and (length is None or length % num_experts):
        raise ValueError(
            f"length={length} does not divide into {num_experts} intervals: choose a multiple, or split='modulo'."
        )
