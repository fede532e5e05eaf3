"""Texts in pieces have the tokens of the whole text, and each begins as the tokenizer's texts do."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from condense.eval.tasks.windows import read_texts
from condense.training.data.documents import read_documents
from condense.training.recipe import Source
from condense.training.small_llama import word_tokenizer
from condense.utils import text as module
from condense.utils.files import read_text
from condense.utils.text import encode, first_tokens, pieces_of, template_tokens

SPECIAL = ["<s>", "</s>", "<unk>"]
# Runs of spaces, line breaks, other scripts, and a line of words without sentences.
STORY = (
    "Once upon a time,  there was a café in Paris.\n\nიდგა ერთი ღარიბი კაცი;\tshe said: 'Don't go!'\n从前有一个女孩。\n"
)
TEXT = STORY * 12 + "word after word with no stop " * 12 + STORY


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return tokenizer, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)


def unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return tokenizer, trainers.UnigramTrainer(vocab_size=150, special_tokens=SPECIAL, unk_token="<unk>")


def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return tokenizer, trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL)


def across_words():
    """A BPE with tokens of several words, as of a SentencePiece model that does not split at spaces."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return tokenizer, trainers.BpeTrainer(vocab_size=85, special_tokens=SPECIAL)


def trained(kind, template="$A"):
    tokenizer, trainer = kind()
    tokenizer.train_from_iterator([TEXT], trainer)
    ids = [(token, tokenizer.token_to_id(token)) for token in SPECIAL]
    tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("template", ["$A", "<s> $A", "$A </s>", "<s> $A </s>"])
@pytest.mark.parametrize("kind", [byte_level, unigram, word_piece, across_words])
def test_pieces_have_the_tokens_of_the_whole_text(kind, template, monkeypatch):
    """A first token comes once, and the tokenizer's last one never: the text goes on."""
    tokenizer = trained(kind, template)
    whole = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    for size in (20, 97, 333):
        monkeypatch.setattr(module, "CHARACTERS_PER_PIECE", size)
        assert len(list(pieces_of(tokenizer, TEXT))) > len(TEXT) // size // 4
        assert encode(tokenizer, TEXT)[0].tolist() == [tokenizer.bos_token_id, *whole]
        assert encode(tokenizer, TEXT, with_first=False)[0].tolist() == whole


def test_pieces_of_a_novel(stories, novel, monkeypatch):
    text = read_text(novel)[:200_000]
    monkeypatch.setattr(module, "CHARACTERS_PER_PIECE", 5_000)
    for tokenizer in (AutoTokenizer.from_pretrained(stories), word_tokenizer([text])):
        pieces = list(pieces_of(tokenizer, text))
        assert len(pieces) == 40 and max(map(len, pieces)) < 5_100
        whole = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert encode(tokenizer, text)[0].tolist() == [tokenizer.bos_token_id, *whole]


def test_a_text_without_borders_is_one_piece(monkeypatch):
    monkeypatch.setattr(module, "CHARACTERS_PER_PIECE", 20)
    tokenizer, text = trained(byte_level), "从前有一个女孩。" * 50
    assert list(pieces_of(tokenizer, text)) == [text]
    assert list(pieces_of(tokenizer, "")) == [""]


def test_the_tokens_around_a_text():
    assert template_tokens(trained(byte_level, "<s> $A </s>")) == ([0], [1])
    assert template_tokens(trained(byte_level, "$A </s>")) == ([], [1])
    assert template_tokens(trained(byte_level, "</s> <s> $A")) == ([1, 0], [])
    assert first_tokens(trained(byte_level, "</s> <s> $A")) == [1, 0]  # the template's own
    assert first_tokens(trained(byte_level)) == [0]
    bare = trained(byte_level)
    bare.bos_token = None
    assert first_tokens(bare) == []
    # Only the letter z gives a token.
    small = Tokenizer(models.BPE(vocab={"<s>": 0, "z": 1}, merges=[]))
    small.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    small = PreTrainedTokenizerFast(tokenizer_object=small, bos_token="<s>")
    assert template_tokens(small) == ([0], [])


@pytest.mark.parametrize("data", ["\ufeffThe sky\r\nis blue.\r\n", "The sky\ris blue.\r", "The sky\nis blue.\n"])
def test_every_reader_gets_the_same_text(data, tmp_path):
    expected, path = "The sky\nis blue.\n", tmp_path / "text.txt"
    path.write_bytes(data.encode())
    assert read_text(path) == expected
    (document,) = read_documents([Source(files=str(path))], with_summaries=False)
    assert document.text == expected
    tokenizer = trained(byte_level)
    (ids,) = read_texts(tokenizer, [str(path)])
    assert tokenizer.decode(ids) == f"<s>{expected}"


def test_json_lines_after_a_byte_order_mark(tmp_path):
    path = tmp_path / "documents.jsonl"
    path.write_bytes("\ufeff".encode() + json.dumps({"text": "kept\r\n"}).encode() + b"\r\n")
    (document,) = read_documents([Source(files=str(path))], with_summaries=False)
    assert document.text == "kept\r\n"  # what a JSON text holds is meant
