"""All layers of a chunk, then the next chunk.

Axes: R rows of a chunk, T tokens of a chunk, D hidden size.
"""

from collections.abc import Sequence

from ..attention import AttentionMetadata
from ..decoder_stack import DecoderBlock
from ..state.memory import RecurrentState
from .executor import ChunkOutput, Embed, run_layers


class SequentialExecutor:
    def __init__(self, layers: Sequence[DecoderBlock], state: RecurrentState, embed: Embed):
        self.layers, self.state, self.embed = layers, state, embed

    def submit(self, metadata: AttentionMetadata) -> list[ChunkOutput]:
        chunk = metadata.chunk
        key_values = self.state.key_values(chunk)
        hidden_RTD, memories = run_layers(self.layers, self.embed(chunk), key_values, metadata)
        if metadata.writes_memory:
            self.state.write_memory(memories, chunk)
        return [(chunk, hidden_RTD)]

    def finish(self) -> list[ChunkOutput]:
        return []
