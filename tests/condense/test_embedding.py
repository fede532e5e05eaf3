"""What a call's embedding sees: chunks of several segments together, and with hooks the whole text, as in a Llama."""

import pytest
import torch
from torch import nn
from transformers.integrations.neftune import activate_neftune

from condense.embedding import ChunkEmbedder, is_pointwise
from condense.segmentation import SegmentPositions, UnpaddedBatch

from .models import VOCAB, gradients, padded_batch, random_ids, tiny_model

pytestmark = pytest.mark.unit

NOISE, WIDTH = 0.5, 24


class Scaled(nn.Module):
    """Stands for an adapter in the place of the embedding."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding, self.weight = embedding, embedding.weight

    def forward(self, ids):
        return self.embedding(ids) * ids.shape[1]


@pytest.mark.parametrize("lengths", [[12, 12], [12, 4]], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_a_hook_sees_the_whole_input_once(lengths, training):
    """Under ZeRO-3, whose hooks gather the weight from all ranks, rows that end early must not matter either."""
    model, seen = tiny_model(segment_length=4, schedule="sequential").train(training), []
    model.model.embed_tokens.register_forward_hook(lambda _, given, output: seen.append(given[0]))
    mask, ids = torch.arange(12) < torch.tensor(lengths)[:, None], random_ids(2, 12)
    with torch.set_grad_enabled(training):
        model(ids, attention_mask=mask.long(), use_cache=False)
    assert len(seen) == 1 and torch.equal(seen[0], ids)


def noisy(model, ids, seed=7):
    """The embeddings of a stock model under NEFTune, by its definition."""
    torch.manual_seed(seed)
    embeddings_BND = model.model.embed_tokens.weight[ids]
    bound = NOISE / (ids.shape[1] * WIDTH) ** 0.5
    return embeddings_BND + torch.zeros_like(embeddings_BND).uniform_(-bound, bound)


def under_neftune(model, ids, seed=7, **inputs):
    handle = activate_neftune(model, NOISE)
    torch.manual_seed(seed)
    found = gradients(model, ids, **inputs)
    handle.remove()
    return found


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_neftune_adds_the_noise_of_a_stock_model(checkpointing, side):
    """Its size belongs to the length of the text, and not to that of a segment."""
    model, mask = tiny_model(schedule="sequential"), None
    ids = random_ids(2, 23)
    if side is not None:
        _, ids, mask = padded_batch([23, 9, 14], side)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    loss, found = under_neftune(model, ids, attention_mask=mask)
    model.zero_grad()
    expected = model(inputs_embeds=noisy(model, ids), attention_mask=mask, labels=ids).loss
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-7, rtol=0)  # the noise is float32
    assert (loss - model(ids, attention_mask=mask, labels=ids).loss).abs() > 1e-6


@pytest.mark.parametrize("frozen", [False, True])
def test_a_hook_that_only_asks_for_gradients_gets_chunks(frozen):
    """transformers sets it for every gradient checkpointing: texts would be embedded as a whole without need."""
    model, seen = tiny_model(schedule="sequential"), []
    model.model.embed_tokens.requires_grad_(not frozen)
    model.enable_input_require_grads()
    assert is_pointwise(model.model.embed_tokens)
    model.model.layers[0].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    ids = random_ids(2, 23)
    model(ids, labels=ids).loss.backward()
    assert len(seen) == 5 and all(hidden.requires_grad for hidden in seen)
    model.model.embed_tokens.register_forward_hook(lambda *_: None)
    assert not is_pointwise(model.model.embed_tokens)


def test_noise_of_packed_documents_belongs_to_the_documents():
    """They are read as the rows of a padded batch."""
    model = tiny_model(schedule="sequential")
    lengths = [11, 7]
    texts, padded, mask = padded_batch(lengths, "right")
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = under_neftune(model, torch.cat(texts)[None], position_ids=positions)
    # The packed row has no labels for padding, and none for the first token of a document.
    labels = padded.masked_fill(mask == 0, -100)
    model.zero_grad()
    loss = model(inputs_embeds=noisy(model, padded), attention_mask=mask, labels=labels).loss
    torch.testing.assert_close(packed[0], loss.detach())


def test_another_module_in_its_place_sees_the_whole_text():
    model, ids = tiny_model(), random_ids(2, 23)
    expected = model(inputs_embeds=model.model.embed_tokens(ids) * 23, labels=ids).loss.detach()
    model.model.embed_tokens = Scaled(model.model.embed_tokens)
    torch.testing.assert_close(model(ids, labels=ids).loss.detach(), expected)


@pytest.mark.parametrize("lengths", [[13, 13], [13, 4], [3, 13]], ids=str)
@pytest.mark.parametrize("offset", [0, 2])
def test_parts_of_a_text_and_their_joint_gradient(lengths, offset):
    """As of one chunk after the other, for texts with padding that begin within a segment."""
    real = torch.arange(13) >= 13 - torch.tensor(lengths)[:, None]
    batch, positions = UnpaddedBatch(2, 13, real), SegmentPositions(2, 5)
    positions.offsets = [offset, 0]
    chunks = list(positions.chunks(batch.lengths))
    found = []
    for parts_of in (lambda one: batch.split(one, chunks), lambda one: [batch.gather(one, chunk) for chunk in chunks]):
        text_BND = torch.randn(2, 13, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
        parts = parts_of(text_BND)
        weights = [torch.arange(part.numel()).view_as(part) for part in parts]
        sum((part * weight).sum() for part, weight in zip(parts, weights, strict=True)).backward()
        found.append(([part.detach() for part in parts], text_BND.grad))
    torch.testing.assert_close(*found)


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
