"""Documents become sequences: nothing twice, nothing lost, nothing leaking."""

from collections import Counter

import numpy as np
import pytest
import torch

from condense import CondenseForCausalLM
from tests.condense.models import tiny_config
from training.data.documents import Document
from training.data.examples import collate
from training.data.store import Tokens
from training.data.summarization import SummarizationExamples, prompt_frame, summary_encoder
from training.data.text import TextExamples
from training.small_llama import word_tokenizer


class Documents:
    """A store in memory: document n is 100 n, 100 n + 1, ..."""

    def __init__(self, lengths):
        self.lengths = np.array(lengths)

    def __getitem__(self, n):
        return Tokens(100 * n + np.arange(self.lengths[n]), 1)


def sequences(examples, total_length, epoch=0):
    count = examples.num_sequences(total_length)
    return [examples.sequence(epoch * count + n, total_length) for n in range(count)]


def spans(sequence):
    return [(int(example.input_ids[0]), len(example.input_ids)) for example in sequence]


def test_cut_by_hand():
    examples = TextExamples(Documents([3, 10, 25, 9]), 0, 4, "cut", seed=None)
    assert [spans(sequence) for sequence in sequences(examples, 10)] == [[(100, 10)], [(200, 10)], [(210, 10)]]


def test_pack_by_hand():
    examples = TextExamples(Documents([3, 10, 25, 9, 1, 2, 21]), 0, 7, "pack", seed=None)
    assert [spans(sequence) for sequence in sequences(examples, 10)] == [
        [(100, 10)],
        [(200, 10)],
        [(210, 10)],
        [(600, 10)],
        [(610, 10)],
        [(0, 3), (220, 5)],
        [(300, 9)],
        [(500, 2)],  # the rests of a single token predict nothing
    ]


@pytest.mark.parametrize("total_length", [5, 16, 64])
def test_every_token_once_an_epoch(total_length):
    generator = np.random.default_rng(0)
    lengths = generator.integers(2, 90, 200)
    examples = TextExamples(Documents(lengths), 20, 180, "pack", seed=7)
    expected = Counter()
    for n in range(20, 180):
        tokens = 100 * (n) + np.arange(lengths[n])
        expected.update(tokens[:-1].tolist() if lengths[n] % total_length == 1 else tokens.tolist())
    orders = []
    for epoch in range(2):
        seen, order = Counter(), []
        for sequence in sequences(examples, total_length, epoch):
            assert sum(len(example.input_ids) for example in sequence) <= total_length
            for example in sequence:
                seen.update(example.input_ids.tolist())
                assert example.labels[0] == -100 and (example.labels[1:] == example.input_ids[1:]).all()
            order.append(spans(sequence))
        assert seen == expected
        orders.append(order)
    assert orders[0] != orders[1]
    again = examples.sequence(3, total_length)
    assert spans(again) == orders[0][3]


def test_no_whole_piece_is_named():
    with pytest.raises(ValueError, match="no document has total_length=50 tokens; the longest has 9"):
        TextExamples(Documents([3, 9]), 0, 2, "cut", seed=0).sequence(0, 50)


def test_no_memory_passes_from_one_document_to_the_next():
    """The rows of packed sequences give, token for token, what each document gives alone, and so does their loss."""
    torch.manual_seed(0)
    model = CondenseForCausalLM(tiny_config(vocab_size=700, segment_length=4)).double().eval()
    examples = TextExamples(Documents([3, 25, 5, 9, 4]), 0, 5, "pack", seed=None)
    packed = [example for sequence in sequences(examples, 12) for example in sequence]
    assert any(len(sequence) > 1 for sequence in sequences(examples, 12))
    batch = collate(packed)
    together = model(**batch)
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    losses, targets = 0.0, 0
    for row, example in enumerate(packed):
        alone = collate([example])
        torch.testing.assert_close(logits[row, : len(example.input_ids)], model(alone["input_ids"]).logits[0])
        losses += model(**alone, num_items_in_batch=1).loss
        targets += len(example.input_ids) - 1
    torch.testing.assert_close(together.loss, losses / targets)


def test_reading_on_changes_no_loss():
    """What ZeRO-3 needs: all ranks run equally many segments."""
    torch.manual_seed(0)
    model = CondenseForCausalLM(tiny_config(vocab_size=700, segment_length=4)).double()
    examples = [
        example for n in (0, 1) for example in TextExamples(Documents([5, 7]), 0, 2, "pack", None).sequence(n, 7)
    ]
    shorter, longer = model(**collate(examples)), model(**collate(examples, read_on_to=18))
    torch.testing.assert_close(shorter.loss, longer.loss)
    assert len(shorter.segment_losses) == 2 and len(longer.segment_losses) == 5


SUMMARY_WORDS = "Summarize this text Summary : - a b c d e f"


def test_summaries_by_hand():
    tokenizer = word_tokenizer([SUMMARY_WORDS])
    encode = summary_encoder(tokenizer, 18, "drop")
    documents = [Document("1", "a b c", "d"), Document("2", "a " * 30, "d"), Document("3", "a", "d " * 30)]
    short, long, impossible = encode(documents)
    text = tokenizer.convert_ids_to_tokens(short.input_ids)
    assert text == [
        "<s>",
        "Summarize",
        "this",
        "text",
        ":",
        "a",
        "b",
        "c",
        "-",
        "-",
        "-",
        "-",
        "Summary",
        ":",
        "d",
        "</s>",
    ]
    assert short.num_given == 14
    assert long == "over 18 tokens" and impossible == "summary too long for 18 tokens"
    _, cut, _ = summary_encoder(tokenizer, 18, "cut")(documents)
    assert tokenizer.convert_ids_to_tokens(cut.input_ids)[5:11] == ["a"] * 5 + ["-"] and len(cut.input_ids) == 18
    before, behind = prompt_frame(tokenizer)
    assert short.input_ids[:14].tolist() == [*before, *tokenizer("a b c")["input_ids"], *behind]


def test_only_the_summary_is_asked_for():
    class Summaries:
        lengths = np.array([6, 30, 8])

        def __getitem__(self, n):
            return Tokens(100 * n + np.arange(self.lengths[n]), 4)

    examples = SummarizationExamples(Summaries(), 0, 3, seed=None)
    assert examples.num_sequences(10) == 2
    (example,) = examples.sequence(1, 10)
    assert example.input_ids[0] == 200 and example.labels.tolist() == [-100] * 4 + [204, 205, 206, 207]
    with pytest.raises(ValueError, match="total_length=5"):
        examples.sequence(0, 5)
