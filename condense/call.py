"""One call of a model: its input without padding, and the state that it continues from.

Axes: B rows of a batch, N columns of an input (padding included), D hidden size, C components of the control.
"""

import torch

from .cache import FoldedCache
from .evaluations import EvaluationCounts
from .execution.checkpointing import CheckpointFunction
from .segmentation import UnpaddedBatch


class Call:
    """`inputs` are token ids [B, N] or embeddings [B, N, D]. Without a cache nothing remains of the state after it.
    `checkpoint_function` is that of gradient checkpointing, None where it is off, by groups of `checkpoint_segments`,
    which are chosen if they are None.
    `control` is [B, C] or [B, N, C].

    Not a dataclass: FSDP rebuilds those among a module's arguments to watch the gradients of their tensors.
    """

    def __init__(
        self,
        inputs: torch.Tensor,
        batch: UnpaddedBatch,
        durations: torch.Tensor | None,
        cache: FoldedCache | None,
        checkpoint_function: CheckpointFunction | None,
        checkpoint_segments: int | None,
        control: torch.Tensor | None = None,
    ):
        self.inputs, self.batch, self.durations, self.cache, self.control = inputs, batch, durations, cache, control
        self.checkpoint_function, self.checkpoint_segments = checkpoint_function, checkpoint_segments
        self.evaluations = EvaluationCounts(batch, inputs.device)
        self._like: torch.Tensor | None = None

    def previous_last_hidden(self, weight: torch.Tensor, hidden_size: int) -> torch.Tensor:
        """The final hidden state [B, D] of each row's last token before this call; zeros where there is none.

        `weight` gives device and dtype; its shape may be that of a part, under ZeRO-3.
        """
        if self.cache is not None and self.cache.last_hidden_BD is not None:
            return self.cache.last_hidden_BD
        return self.like_hidden(weight).new_zeros(self.batch.batch_size, hidden_size)

    def like_hidden(self, weight: torch.Tensor) -> torch.Tensor:
        """A tensor with the device and the dtype of hidden states: embeddings that are given, or else a weight.

        A weight that accelerate keeps in host memory or on disk between its uses is on the device "meta".
        """
        if self._like is None:
            if self.inputs.is_floating_point():
                self._like = self.inputs
            else:
                self._like = self.inputs.new_empty(0, dtype=weight.dtype) if weight.is_meta else weight
        return self._like

    def end(self) -> None:
        """The output is computed: the state in the cache is complete."""
        if self.cache is not None:
            self.cache.end_call(self.batch.num_columns, self.batch.mask_BN)
