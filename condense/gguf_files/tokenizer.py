"""The tokenizer in a GGUF file.

A file names the rule that splits texts before merges are applied, `tokenizer.ggml.pre`. transformers takes GPT-2's for
a name that it does not know, adds tokens of GPT-2 to the vocabulary, and leaves special tokens out that hold other than
ASCII characters. So byte-level tokenizers are made here, and only the others are transformers'.
"""

import logging
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ..hub.transformers_private import GGUF_PRE_TOKENIZER_SPLITS
from .header import read_header

logger = logging.getLogger(__name__)

CONTROL, USER_DEFINED = 3, 4  # types of tokens
BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
AS_GPT_2 = ("gpt-2", "mpt", "olmo", "phi-2", "trillion", "granite-docling")
# llama.cpp takes these rules' words whole, and puts `bos_token` before texts where a file doesn't say.
WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")


def load_tokenizer(path: Path) -> Any:
    """Returns the tokenizer of a file. Raises `ValueError` for one that is not byte-level or SentencePiece's."""
    metadata = read_header(path).metadata
    own = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items() if "tokenizer.ggml." in key}
    kind, rule = own.get("model"), own.get("pre")
    begins = kind == SENTENCEPIECE or rule in WHOLE_WORDS
    options = {
        "add_bos_token": own.get("add_bos_token", begins),
        "add_eos_token": own.get("add_eos_token", False),
        "chat_template": metadata.get("tokenizer.chat_template"),
        **{name: own["tokens"][own[key]] for name, stem in SPECIAL.items() if (key := f"{stem}_token_id") in own},
    }
    if kind == BYTE_LEVEL:
        return PreTrainedTokenizerFast(tokenizer_object=_byte_level(own, path), name_or_path=str(path), **options)
    if kind != SENTENCEPIECE:
        raise ValueError(f"it is of the kind {kind!r}, and condense reads {BYTE_LEVEL!r} and {SENTENCEPIECE!r}")
    tokenizer = PreTrainedTokenizerFast(name_or_path=str(path.parent), gguf_file=path.name, **options)
    tokenizer.name_or_path = str(path)
    _join_words(tokenizer.backend_tokenizer, with_first=own.get("add_space_prefix", True))
    return tokenizer


def _join_words(tokenizer: Tokenizer, with_first: bool) -> None:
    """Lets ▁ stand for each space; `with_first` puts one before a text and after each special token."""
    tokenizer.pre_tokenizer = None
    first = [normalizers.Prepend("▁")] if with_first else []
    tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if with_first else []))


def _byte_level(own: dict[str, Any], path: Path) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(own["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in own["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=own.get("pre") in WHOLE_WORDS))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_splits(own.get("pre"), path))
    tokenizer.decoder = decoders.ByteLevel()
    kinds = own.get("token_type", [])
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        words = [word for word, its_kind in zip(own["tokens"], kinds, strict=False) if its_kind == kind]
        tokenizer.add_tokens([AddedToken(word, normalized=False, special=special) for word in words])
    return tokenizer


def _splits(rule: str | None, path: Path) -> list[Any]:
    """Returns the steps that split a text into the pieces that merges are applied to."""
    if rule in GGUF_PRE_TOKENIZER_SPLITS:
        pattern = Regex(GGUF_PRE_TOKENIZER_SPLITS[rule])
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return [pre_tokenizers.Split(pattern, behavior="isolated"), bytes_only]
    as_gpt_2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if rule in DIGITS_APART:
        return [pre_tokenizers.Digits(individual_digits=True), as_gpt_2]
    if rule not in AS_GPT_2:
        logger.warning(
            "%s names the rule %r for splitting texts, which is not known: it is taken for GPT-2's, so some texts have "
            "other tokens than in llama.cpp. Load the tokenizer of the model's Hugging Face checkpoint instead.",
            path, rule,
        )  # fmt: skip
    return [as_gpt_2]
