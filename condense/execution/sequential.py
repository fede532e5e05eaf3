"""All layers of a chunk, then the next chunk.

Axes: R rows of a chunk, T tokens of a chunk, D hidden size.
"""

from collections.abc import Sequence
from functools import partial

from ..attention import AttentionMetadata
from ..layers import DecoderBlock
from ..memory import RecurrentState
from .executor import CheckpointFunction, ChunkOutput, Embed, OutputFunction, run_checkpointed, run_layers


class SequentialExecutor:
    """With `checkpoint`, a chunk stores only the memories that it sees; its activations are computed again, one chunk
    at a time.
    """

    def __init__(
        self,
        layers: Sequence[DecoderBlock],
        state: RecurrentState,
        embed: Embed,
        output: OutputFunction,
        checkpoint: CheckpointFunction | None = None,
    ):
        self.layers, self.state, self.embed, self.output, self.checkpoint = layers, state, embed, output, checkpoint

    def submit(self, metadata: AttentionMetadata) -> list[ChunkOutput]:
        key_values = self.state.key_values(metadata.chunk)
        # Not a method: a checkpoint would keep this object, and with it the state, until the backward pass.
        forward = partial(_forward, self.layers, self.embed, self.output, metadata)
        output, memories = run_checkpointed(self.checkpoint, forward, metadata, None, key_values)
        if metadata.writes_memory:
            self.state.write_memory(memories, metadata.chunk)
        return [(metadata.chunk, output)]

    def finish(self) -> list[ChunkOutput]:
        return []


def _forward(layers, embed: Embed, output: OutputFunction, metadata: AttentionMetadata, _, key_values):
    hidden_RTD, memories = run_layers(layers, embed(metadata.chunk), key_values, metadata)
    return output(hidden_RTD, metadata.chunk), memories
