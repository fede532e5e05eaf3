"""Lets ZeRO-2, and ZeRO-1 with overlap_comm, reduce gradients in the order of parameters.

DeepSpeed lays gradients side by side in the order in which they come, and adds up the buffers of all ranks: the order
must be the same on every rank. Here it depends on a rank's texts, which decide whether layers run one by one, as a wave
or as captured groups. The gradients of a recurrent model are complete only at the end of the backward pass, so waiting
for all of them needs no more memory.
"""

from itertools import chain
from typing import Any

from transformers import TrainerCallback


class GradientOrder(TrainerCallback):
    """Changes the optimizer that DeepSpeed has made; leaves others, and ZeRO-3's, as they are."""

    def on_train_begin(self, args, state, control, optimizer: Any = None, **kwargs):
        zero = getattr(optimizer, "optimizer", None)  # accelerate wraps DeepSpeed's
        if hasattr(zero, "bit16_groups"):  # ZeRO-1 or 2; an error if the rest of it has other names
            reduce_in_order(zero)


def reduce_in_order(zero: Any) -> None:
    """Makes DeepSpeed's optimizer wait for all gradients of a pass, and reduce them in the order of parameters."""
    if not (zero.partition_gradients or zero.overlap_comm):
        return  # ZeRO-1 reduces gradients in this order, after the pass
    process, finish = zero.process_gradients, zero.overlapping_partition_gradients_reduce_epilogue
    order = {id(parameter): number for number, parameter in enumerate(chain.from_iterable(zero.bit16_groups))}
    waiting: dict[int, tuple[Any, int]] = {}

    def wait(parameter: Any, group: int) -> None:
        waiting[order[id(parameter)]] = parameter, group

    def reduce_and_finish() -> None:
        for number in sorted(waiting):
            process(*waiting[number])
        waiting.clear()
        finish()

    zero.process_gradients, zero.overlapping_partition_gradients_reduce_epilogue = wait, reduce_and_finish
