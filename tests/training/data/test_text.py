"""Documents become sequences: nothing twice, nothing lost, nothing leaking."""

from collections import Counter
from string import ascii_lowercase

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from condense import CondenseForCausalLM
from condense.training.data import document_task, text
from condense.training.data.documents import Document
from condense.training.data.examples import collate
from condense.training.data.store import Tokens
from condense.training.data.tasks import make_examples
from condense.training.data.text import TextExamples
from condense.training.recipe import load_recipe
from condense.training.small_llama import word_tokenizer
from tests.condense.models import tiny_config

from ..recipes import text_data, write_recipe, write_texts
from .hub import stream_files

pytestmark = pytest.mark.unit


class Documents:
    """A store in memory: document n is 100 n, 100 n + 1, ... without labels at the first `given`."""

    def __init__(self, lengths, given=1):
        self.lengths, self.given = np.array(lengths), given

    def __getitem__(self, n):
        return Tokens(100 * n + np.arange(self.lengths[n], dtype=np.int32), self.given)

    def fingerprint(self, first, last):
        return f"{first} to {last}"


def sequences(examples, total_length, epoch=0):
    count = examples.num_sequences(total_length)
    return [examples.sequence(epoch * count + n, total_length) for n in range(count)]


def spans(sequence):
    return [(int(example.input_ids[0]), len(example.input_ids)) for example in sequence]


def test_cut_by_hand():
    examples = TextExamples(Documents([3, 10, 25, 9]), 0, 4, "cut", seed=None)
    assert [spans(sequence) for sequence in sequences(examples, 10)] == [[(100, 10)], [(200, 10)], [(210, 10)]]
    assert examples.left_out(10) == "remainders of 17 tokens left out" and examples.left_out(1) == ""


def test_pack_by_hand():
    examples = TextExamples(Documents([3, 10, 25, 9, 1, 2, 21]), 0, 7, "pack", seed=None)
    assert [spans(sequence) for sequence in sequences(examples, 10)] == [
        [(100, 10)],
        [(200, 10)],
        [(210, 10)],
        [(600, 10)],
        [(610, 10)],
        [(300, 9)],
        [(220, 5), (0, 3)],
        [(500, 2)],  # the remainders of a single token predict nothing
    ]
    assert examples.left_out(10) == "remainders of 2 tokens left out"
    alike = TextExamples(Documents([3, 7, 3, 6, 3, 2]), 0, 6, "pack", seed=None)
    assert [spans(sequence) for sequence in sequences(alike, 10)] == [
        [(100, 7)],
        [(300, 6)],
        [(0, 3), (200, 3), (400, 3)],
        [(500, 2)],
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
            assert len(sequence) * max(len(example.input_ids) for example in sequence) <= total_length
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


def test_a_long_document_is_tokenised_in_pieces(monkeypatch):
    """A tokenizer holds hundreds of bytes for every token of a call; the tokens are those of one call."""
    names = [f"the{letter}" for letter in ascii_lowercase]
    words = np.random.default_rng(0).choice(names, 150_000)
    texts = ["thea theb", " ".join(words), "thec", "\n".join(words[:5_000])]
    tokenizer, calls = word_tokenizer(names), []
    expected = [[1, *tokenizer(one)["input_ids"], 2] for one in texts]
    monkeypatch.setattr(text, "CHARACTERS_AT_ONCE", 200_000)
    read = type(tokenizer).__call__

    def reading(self, given, **options):
        calls.append(len(given) if isinstance(given, str) else sum(map(len, given)))
        return read(self, given, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", reading)
    found = text.text_encoder(tokenizer, 2)([Document("a", one) for one in texts])
    assert [one.input_ids.tolist() for one in found[:2]] == expected[:2] and found[3].input_ids.tolist() == expected[3]
    assert found[2] == "under 2 tokens" and found[1].input_ids.dtype == np.int32
    assert len(texts[1]) > 500_000 and max(calls) < 300_000


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
    """ZeRO-3 needs it: all ranks run equally many segments."""
    torch.manual_seed(0)
    model = CondenseForCausalLM(tiny_config(vocab_size=700, segment_length=4)).double()
    examples = [
        example for n in (0, 1) for example in TextExamples(Documents([5, 7]), 0, 2, "pack", None).sequence(n, 7)
    ]
    shorter, longer = model(**collate(examples)), model(**collate(examples, extend_to=18))
    torch.testing.assert_close(shorter.loss, longer.loss)
    assert len(shorter.segment_losses) == 2 and len(longer.segment_losses) == 5


def examples_of(folder, tokenizer, fit, files, stage, held_out, overrides=()):
    """Returns the examples of a recipe with one stage of (length, steps) on files of the folder."""
    fields = {"data": text_data(folder, fit, files), "evaluation": {"sequences": held_out}}
    path = write_recipe(folder, "m", [stage], global_batch=4, **fields)
    return make_examples(load_recipe(path, list(overrides)), tokenizer)


def test_rests_of_a_single_token_are_no_sequences_to_validate_with(tmp_path):
    """Documents of four tokens make one sequence of three each, so eight sequences take eight documents."""
    write_texts(tmp_path / "texts.jsonl", ["a b"] * 100)
    training, held_out = examples_of(tmp_path, word_tokenizer(["a b"]), "pack", "texts.jsonl", (3, 5), held_out=8)
    assert held_out.num_sequences(3) == 8 and training.num_sequences(3) == 92


def test_packed_sequences_to_validate_with_are_of_all_lengths(tmp_path):
    """They are fewer than the held-out documents make, because rows do not fill sequences."""
    write_texts(tmp_path / "texts.jsonl", ("a " * (10 + n * 37 % 90) for n in range(900)))
    _, held_out = examples_of(tmp_path, word_tokenizer(["a"]), "pack", "texts.jsonl", (100, 5), held_out=100)
    lengths = [
        [len(row.input_ids) for number in range(count) for row in held_out.sequence(number, 100)]
        for count in (100, held_out.num_sequences(100))
    ]
    assert held_out.num_sequences(100) > 120 and np.mean(lengths[0]) == pytest.approx(np.mean(lengths[1]), rel=0.1)
    assert min(lengths[0]) < 16 and max(lengths[0]) > 96


def test_a_long_document_held_out_leaves_as_much_to_train_on(tmp_path, monkeypatch):
    """As much as the steps need, of a data set of the hub; of files, all others."""
    monkeypatch.setattr(document_task, "LEAST_DOCUMENTS", 0)
    write_texts(tmp_path / "texts.jsonl", ("a b " * n for n in (500, 50, 50, 50)))
    stream_files(monkeypatch, "json", tmp_path / "texts.jsonl")
    for sources, num_documents in (([], 3), (["data.sources=[{hub: owner/name}]"], 2)):
        training, held_out = examples_of(tmp_path, word_tokenizer(["a b"]), "cut", "texts.jsonl", (10, 5), 2, sources)
        assert (held_out.first, held_out.last, training.first, training.last) == (0, 1, 1, 1 + num_documents)
        assert training.num_sequences(10) == 10 * num_documents


def test_max_documents_limits_training_and_not_the_validation(tmp_path):
    for name, words in (("train", "a b " * 20), ("other", "b a " * 5)):
        write_texts(tmp_path / f"{name}.jsonl", [words] * 200)
    tokenizer, other = word_tokenizer(["a b"]), f"evaluation.sources=[{{files: {tmp_path}/other.jsonl}}]"
    overrides = ["data.max_documents=2", other]
    training, held_out = examples_of(tmp_path, tokenizer, "cut", "train.jsonl", (10, 50), 150, overrides)
    assert (training.first, training.last, held_out.num_sequences(10)) == (0, 2, 150)


def test_a_novel_in_whole_pieces(tmp_path, stories, novel):
    """A real tokenizer: the sequences are the book's tokens, and only the first has a bos."""
    tokenizer = AutoTokenizer.from_pretrained(stories)
    text = novel.read_text(encoding="utf-8")[:60_000]
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(text, encoding="utf-8")
    training, _ = examples_of(tmp_path, tokenizer, "cut", "*.txt", (512, 2), held_out=1)
    ids = np.array([1, *tokenizer(text, add_special_tokens=False)["input_ids"], 2])
    expected = {tuple(part) for part in ids[: len(ids) // 512 * 512].reshape(-1, 512).tolist()}
    parts = [tuple(sequence[0].input_ids.tolist()) for sequence in sequences(training, 512)]
    assert set(parts) == expected and len(parts) == len(expected) == len(ids) // 512
    assert [part[0] for part in parts].count(1) == 1


@pytest.mark.parametrize("fit", ["cut", "pack"])
def test_a_place_is_the_same_in_every_epoch_and_at_every_length(fit):
    lengths = [3, 10, 25, 9, 1, 2, 21]
    examples = TextExamples(Documents(lengths), 1, 7, fit, seed=0)
    token_at = [100 * document + n for document, length in enumerate(lengths) for n in range(length)]
    for total_length in (10, 5):
        for epoch in (0, 1):
            for example in (row for sequence in sequences(examples, total_length, epoch) for row in sequence):
                places = range(example.place, example.place + len(example.input_ids))
                assert [token_at[place] for place in places] == example.input_ids.tolist()


def test_batches_have_places_where_asked():
    examples = TextExamples(Documents([3, 10, 25]), 0, 3, "cut", seed=None)
    rows = [example for sequence in sequences(examples, 10) for example in sequence]
    assert collate(rows, with_places=True)["places"].tolist() == [3, 13, 23]
    assert "places" not in collate(rows)
