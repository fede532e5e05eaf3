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
        forward = partial(self._forward, metadata)
        output, memories = run_checkpointed(self.checkpoint, forward, metadata, None, key_values)
        if metadata.writes_memory:
            self.state.write_memory(memories, metadata.chunk)
        return [(metadata.chunk, output)]

    def _forward(self, metadata: AttentionMetadata, _, key_values):
        hidden_RTD, memories = run_layers(self.layers, self.embed(metadata.chunk), key_values, metadata)
        return self.output(hidden_RTD, metadata.chunk), memories

    def finish(self) -> list[ChunkOutput]:
        return []
