"""How often a call uses the weight of the embedding."""

import pytest
import torch

from condense.embedding import ChunkEmbedder
from condense.segmentation import SegmentPositions, UnpaddedBatch

from .models import VOCAB, random_ids, tiny_model

pytestmark = pytest.mark.unit


def uses(model, lengths) -> int:
    """The uses of the embedding for texts of three segments, whose rows end after these numbers of tokens."""
    count = []
    handle = model.model.embed_tokens.register_forward_hook(lambda *_: count.append(1))
    mask = torch.arange(12) < torch.tensor(lengths)[:, None]
    model(torch.randint(VOCAB, (2, 12)), attention_mask=mask.long(), use_cache=False)
    handle.remove()
    return len(count)


def test_ranks_of_zero_3_use_the_weight_equally_often():
    """Each use of a weight that ZeRO-3 divides gathers it from all ranks, so rows that end early must not matter."""
    model = tiny_model(segment_length=4, schedule="sequential")
    assert (uses(model, [12, 12]), uses(model, [12, 4])) == (1, 2)  # equal rows share a use
    model.model.embed_tokens.weight.ds_id = 0
    assert uses(model, [12, 12]) == uses(model, [12, 4]) == 3


def test_compiled_code_embeds_texts_of_other_sizes():
    """At the second size the compiler treats sizes, and with them the chunks' counts, as symbols."""
    embedding = torch.nn.Embedding(VOCAB, 4)

    def embedded(ids):
        lengths = [ids.shape[1]] * len(ids)
        chunks = [SegmentPositions(len(ids), 5).chunks(lengths) for _ in range(2)]
        embed = ChunkEmbedder(embedding, ids, UnpaddedBatch(*ids.shape, None), chunks[0])
        return torch.cat([embed(chunk) for chunk in chunks[1]], dim=1)

    torch._dynamo.reset()
    compiled = torch.compile(embedded, backend="eager")
    for shape in ((1, 13), (2, 7), (3, 16)):
        ids = random_ids(*shape)
        assert torch.equal(compiled(ids), embedding(ids))
    torch._dynamo.reset()
