"""Texts and tokenizers of experiments that train their own models."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from condense.training.data.shards import source_files
from condense.training.recipe import Source

END = "<|endoftext|>"
HUB = ("Salesforce/wikitext", "wikitext-2-raw-v1")


def check_apart(text: Iterable[str], held_out: Iterable[str]) -> None:
    """Raises `ValueError` if two lists of files or glob patterns share a file, or a file is missing."""
    files, others = (
        {path.resolve(): path for pattern in patterns for path in source_files(Source(files=pattern))}
        for patterns in (text, held_out)
    )
    if both := [str(files[path]) for path in files if path in others]:
        raise ValueError(f"{', '.join(both)}: text to train on and to evaluate with; pass a different held-out text.")


def train_tokenizer(text: str, vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE of at most `vocab_size` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=[END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def hub_text(split: str, otherwise: str) -> str:
    """Loads a split of WikiText-2. Raises `ValueError`, with the remedy `otherwise`, if the hub can't be reached."""
    from datasets import load_dataset

    try:
        return "".join(load_dataset(*HUB, split=split)["text"])
    except (OSError, ValueError) as error:
        raise ValueError(f"{HUB[0]} can't be loaded from the hub: {otherwise}.") from error
