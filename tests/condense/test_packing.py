"""Several documents in one row are the texts that they are in rows of their own."""

import pytest
import torch
from transformers import DataCollatorWithFlattening, LlamaForCausalLM

from condense.packing import find_documents

from ..refusals import assert_refused
from .models import gradients_of, random_durations, random_ids, tiny_model

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.unit]

LENGTHS = [[13, 4, 26], [1, 42]]  # of the documents of two rows; segments have 5 tokens


def positions(lengths):
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])


def documents(tensor_BN, lengths=LENGTHS):
    """The documents of all rows, each as a batch of one row."""
    return [part[None] for row, counts in zip(tensor_BN, lengths, strict=True) for part in row.split(counts)]


def flattened(*lengths, **options):
    """Documents of these lengths, as `DataCollatorWithFlattening` packs them."""
    features = [{"input_ids": random_ids(1, length)[0].tolist()} for length in lengths]
    return DataCollatorWithFlattening(return_tensors="pt", **options)(features)


@pytest.mark.parametrize("schedule", ["sequential", "wavefront"])
def test_logits_are_those_of_each_document_alone(schedule):
    model, ids = tiny_model(schedule=schedule).eval(), random_ids(2, 43)
    durations = random_durations(2, 43)
    for more in ({}, {"durations": durations}):
        packed = model(ids, position_ids=positions(LENGTHS), **more)
        assert packed.past_key_values is None
        alone = [
            model(one, use_cache=False, **({"durations": lasting} if more else {})).logits[0]
            for one, lasting in zip(documents(ids), documents(durations), strict=True)
        ]
        torch.testing.assert_close(packed.logits.flatten(0, 1), torch.cat(alone), atol=1e-12, rtol=0)
    assert not torch.allclose(packed.logits, model(ids).logits)  # the control: memory crosses the borders there


@torch.enable_grad()
def test_losses_and_gradients_are_those_of_rows_of_their_own():
    model, ids = tiny_model(), random_ids(2, 43)
    labels = torch.where(torch.rand(2, 43) < 0.3, -100, ids)
    parts = list(zip(documents(ids), documents(labels), strict=True))
    total = sum((wanted[:, 1:] != -100).sum() for _, wanted in parts)
    for one, wanted in parts:
        if one.shape[1] > 1:
            model(one, labels=wanted, num_items_in_batch=total).loss.backward()
    expected = gradients_of(model)
    model.zero_grad()
    model(ids, position_ids=positions(LENGTHS), labels=labels).loss.backward()
    torch.testing.assert_close(gradients_of(model), expected, atol=1e-10, rtol=1e-8)


def test_padding_belongs_to_no_document():
    model, ids = tiny_model().eval(), random_ids(1, 20)
    mask = torch.tensor([[0] * 3 + [1] * 14 + [0] * 3])
    position_ids = torch.tensor([[1] * 3 + [*range(8), *range(6)] + [0] * 3])
    logits = model(ids, attention_mask=mask, position_ids=position_ids).logits
    alone = torch.cat([model(ids[:, 3:11]).logits, model(ids[:, 11:17]).logits], dim=1)
    torch.testing.assert_close(logits[:, 3:17], alone, atol=1e-12, rtol=0)


def test_the_flattening_collator_gives_the_loss_of_a_stock_llama(tmp_path):
    """Documents no longer than a segment, also with the arguments of flash-attention."""
    folded = tiny_model(torch.float32, segment_length=16).eval()
    folded.save_pretrained(tmp_path)
    stock = LlamaForCausalLM(folded.config).eval()
    stock.load_state_dict(folded.state_dict())
    for more in ({}, {"return_flash_attn_kwargs": True}, {"return_seq_idx": True}):
        batch = flattened(7, 16, 3, **more)
        plain = {name: batch[name] for name in ("input_ids", "labels", "position_ids")}
        torch.testing.assert_close(folded(**batch).loss, stock(**plain, use_cache=False).loss, atol=1e-5, rtol=1e-5)


def test_one_document_with_the_arguments_of_other_kernels_is_an_ordinary_text():
    """The last batch of an epoch may have one."""
    model, batch = tiny_model(), flattened(9, return_flash_attn_kwargs=True)
    torch.testing.assert_close(model(**batch).loss, model(batch["input_ids"], labels=batch["labels"]).loss)
    with pytest.raises(TypeError, match="cu_seq_lens_q"):  # which say nothing without positions
        model(batch["input_ids"], cu_seq_lens_q=batch["cu_seq_lens_q"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cu_seq_lens_q": torch.tensor([0, 9, 14])}, r"cu_seq_lens_q and .* column 6 by position_ids only"),
        ({"cu_seq_lens_k": torch.tensor([0, 6, 8, 14])}, r"cu_seq_lens_k and .* column 8 by cu_seq_lens_k only"),
        ({"cu_seq_lens_k": torch.tensor([0, 6])}, r"cu_seq_lens_k=\[0, 6\] does not fit 14 tokens"),
        ({"cu_seq_lens_q": torch.tensor([0, 9, 6, 14])}, r"cu_seq_lens_q=\[0, 9, 6, 14\] does not fit 14"),
        ({"seq_idx": torch.zeros(1, 14)}, r"seq_idx and .* column 6 by position_ids only"),
        ({"position_ids": torch.arange(14)[None]}, r"seq_idx and .* column 6 by seq_idx only"),
    ],
)
def test_packing_arguments_that_contradict_the_positions_are_refused(changes, words):
    """Also if positions have one document, and in the model without a head."""
    model, batch = tiny_model(), flattened(6, 8, return_flash_attn_kwargs=True, return_seq_idx=True)
    model(**batch)
    assert_refused(words, model, **batch | changes)
    batch.pop("labels")
    assert_refused(words, model.model, **batch | changes)


def test_positions_that_pass_zero_begin_no_document():
    """As a stock Llama, attention sees their differences alone."""
    model, ids = tiny_model(segment_length=16), random_ids(2, 9)
    expected = model(ids).logits
    torch.testing.assert_close(model(ids, position_ids=torch.arange(-4, 5)[None]).logits, expected, atol=0, rtol=0)


def test_packing_arguments_of_several_rows_count_all_columns():
    """Padding belongs to no document, whatever the arguments say there."""
    model, ids = tiny_model(), random_ids(2, 6)
    given = {
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 1], [0, 1, 2, 3, 4, 5]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0], [1] * 6]),
    }
    expected = model(ids, **given).logits
    for borders in ([0, 3, 5, 6, 12], [0, 3, 3, 6, 12]):
        assert torch.equal(model(ids, **given, cu_seq_lens_q=torch.tensor(borders)).logits, expected)
    with pytest.raises(ValueError, match="in row 1 another document begins at column 2 by cu_seq_lens_q"):
        model(ids, **given, cu_seq_lens_q=torch.tensor([0, 3, 6, 8, 12]))


def test_a_row_of_padding_beside_packed_documents():
    model, ids = tiny_model().eval(), random_ids(1, 6)
    position_ids, mask = torch.tensor([[0, 1, 2, 0, 1, 2]]), torch.tensor([[1] * 6, [0] * 6])
    both = model(ids.repeat(2, 1), attention_mask=mask, position_ids=position_ids.repeat(2, 1))
    torch.testing.assert_close(both.logits[:1], model(ids, position_ids=position_ids).logits, atol=1e-12, rtol=0)


def test_the_head_gets_no_padding_between_documents(monkeypatch):
    model, seen = tiny_model().eval(), []
    model.lm_head.register_forward_hook(lambda _, given, output: seen.append(tuple(given[0].shape[:2])))
    positions_BN = torch.cat([torch.arange(30), *[torch.arange(2)] * 5])[None]
    output = model(random_ids(1, 40), position_ids=positions_BN, output_hidden_states=True)
    assert seen == [(1, 40)] and output.logits.shape[:2] == (1, 40)
    assert torch.equal(model.lm_head(output.hidden_states[-1]), output.logits)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_cache": True}, "a cache has one text per row"),
        ({"logits_to_keep": 1}, "logits_to_keep=1 with several documents"),
        ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 3]])}, "positions must be consecutive"),
        ({"attention_mask": torch.ones(1, 4)}, r"attention_mask of shape \(1, 4\) fits neither"),
        ({"attention_mask": torch.ones(1, 1, 6, 6)}, r"attention_mask of shape \(1, 1, 6, 6\) fits neither"),
        ({"position_ids": torch.tensor([[0, 0]])}, r"position_ids of shape \(1, 2\) do not fit"),
        ({"labels": torch.zeros(1, 5, dtype=torch.long)}, r"labels of shape \(1, 5\) do not fit"),
    ],
)
def test_mistakes_are_named(options, words):
    given = {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])} | options
    assert_refused(words, tiny_model(), random_ids(1, 6), **given)


def test_a_model_that_gets_no_new_positions_has_one_text(monkeypatch):
    model = tiny_model().eval()
    monkeypatch.setattr("condense.packing.PackedDocuments.unpack_arguments", lambda *_: pytest.fail("unpacked"))
    ids = random_ids(2, 9)
    assert torch.equal(model(ids, position_ids=torch.arange(9)[None]).logits, model(ids).logits)
    assert model.generate(ids, max_new_tokens=3, attention_mask=torch.ones(2, 9)).shape == (2, 12)


def test_a_mask_that_numbers_documents_is_refused():
    """Its numbers would all count as tokens of one text."""
    model, ids = tiny_model(), random_ids(1, 4)
    for values in ([1, 1, 2, 2], [0.0, 0.0, -1e9, 1.0], [0.5, 1.0, 1.0, 1.0]):
        with pytest.raises(ValueError, match=r"attention_mask has the value .*position_ids that begin anew"):
            model(ids, attention_mask=torch.tensor([values]))
    expected = model(ids, attention_mask=torch.tensor([[0, 1, 1, 1]])).logits
    for dtype in (torch.bool, torch.float32, torch.int32):
        assert torch.equal(model(ids, attention_mask=torch.tensor([[0, 1, 1, 1]], dtype=dtype)).logits, expected)


def test_compiled_code_finds_the_documents_after_texts_of_other_sizes():
    """Their sizes are symbols to the compiler, those of the first positions are numbers."""

    def found(ids, position_ids):
        given = {"input_ids": ids, "inputs_embeds": None, "position_ids": position_ids, "attention_mask": None}
        return find_documents(given) is not None, ids + 1

    torch._dynamo.reset()
    compiled = torch.compile(found, backend="eager")
    for shape in ((1, 27), (2, 13), (3, 4)):
        assert compiled(random_ids(*shape), None)[0] is False
    assert compiled(random_ids(2, 43), positions(LENGTHS))[0] is True
    torch._dynamo.reset()
