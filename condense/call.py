"""One call of a model: its input without padding, and the state that it continues from.

Axes: B rows of a batch, N columns of an input (padding included), D hidden size.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch

from .checks import check_input, check_shares, real_tokens
from .execution.checkpointing import CheckpointFunction
from .hub.peft_support import check_activated_lora
from .ops.transforms import hidden_dtype
from .segmentation import UnpaddedBatch
from .state.cache import FoldedCache
from .token_inputs import TokenInputs


class Call:
    """`inputs` are token ids [B, N] or embeddings [B, N, D]. Without a cache nothing remains of the state after the
    call. `checkpoint_function` is the function of gradient checkpointing, None if it is off. It checkpoints groups of
    `checkpoint_segments`, chosen automatically if None.

    Not a dataclass: FSDP rebuilds dataclasses among a module's arguments to watch the gradients of their tensors.
    """

    def __init__(
        self,
        inputs: torch.Tensor,
        batch: UnpaddedBatch,
        token_inputs: TokenInputs,
        cache: FoldedCache | None,
        checkpoint_function: CheckpointFunction | None,
        checkpoint_segments: int | None,
    ):
        self.inputs, self.batch, self.token_inputs, self.cache = inputs, batch, token_inputs, cache
        self.checkpoint_function, self.checkpoint_segments = checkpoint_function, checkpoint_segments
        self._like: torch.Tensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Call":
        """Returns the call with its inputs on a device, which accelerate requests of a module's arguments."""
        moved = copy.copy(self)
        moved.inputs, moved._like = self.inputs.to(device, non_blocking=non_blocking), None
        return moved

    @classmethod
    def from_arguments(
        cls,
        model: Any,
        given: Mapping[str, Any],
        labels: torch.Tensor | None = None,
        logits_to_keep: int | None = None,
    ) -> "Call":
        """Makes the call from the arguments `given` to `forward` of a `CondenseModel`, or of the model around it.

        Raises `ValueError` if they do not fit together.
        """
        config, cache, use_cache = model.config, given["cache"], given["use_cache"]
        config.check(len(model.layers))  # fields may have been set since the last call
        check_shares(config, model.layers_in_use)
        if (mask := given["attention_mask"]) is not None:
            given = {**given, "attention_mask": mask.cpu()}  # the only wait for a mask that lies on the device
        inputs = check_input(config, given, labels, logits_to_keep)
        check_activated_lora(model)
        is_exporting = torch.compiler.is_exporting()
        if use_cache is None:
            use_cache = config.use_cache and labels is None and not model.training and not is_exporting
        if use_cache and cache is None:
            cache = FoldedCache(config)
        batch_size, num_columns = inputs.shape[:2]
        if is_exporting and config.depth is None:  # one text stands for all, so their number may be a symbol
            batch_size = 1
        batch = UnpaddedBatch(batch_size, num_columns, real_tokens(given["attention_mask"], num_columns))
        token_inputs = TokenInputs.from_arguments(config, given, inputs, batch, model.norm.weight)
        function = model.checkpoint_function(cache)
        call = cls(inputs, batch, token_inputs, cache, function, model.checkpoint_segments)
        if cache is not None:
            cache.check_computes_alike(call.like_hidden(model.norm.weight))
        return call

    def previous_last_hidden(self, weight: torch.Tensor, hidden_size: int) -> torch.Tensor:
        """Returns the final hidden state [B, D] of each row's last token before this call, or zeros.

        `weight` gives device and dtype; under ZeRO-3 its shape may be that of a shard.
        """
        like = self.like_hidden(weight)
        if self.cache is not None and self.cache.last_hidden_BD is not None:
            return self.cache.last_hidden_BD.to(like.dtype)  # autocast may have begun since
        return like.new_zeros(self.batch.batch_size, hidden_size)

    def like_hidden(self, weight: torch.Tensor) -> torch.Tensor:
        """Returns an empty tensor with the device and the dtype of hidden states, which follow from the given
        embeddings, or else from a weight.

        A weight that accelerate keeps in host memory or on disk between its uses is on the device "meta".
        """
        if self._like is None:
            given = self.inputs if self.inputs.is_floating_point() else weight
            device = self.inputs.device if given.is_meta else given.device
            self._like = torch.empty(0, dtype=hidden_dtype(given.dtype, device), device=device)
        return self._like

    def end(self) -> None:
        """Marks the state in the cache as complete: the output is computed."""
        if self.cache is not None:
            self.cache.end_call(self.batch.num_columns, self.batch.mask_BN)
