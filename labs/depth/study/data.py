"""Loads the tokens of the experiments' texts: WikiText-2 from the hub, files, or a generated text.

Axes: N tokens.
"""

import hashlib
from functools import cache
from random import Random
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer

from condense.eval.texts import HUB, hub_text, train_tokenizer
from condense.training.sample_data import ATTRIBUTES, SCENERY, story
from condense.utils.files import read_text
from condense.utils.text import encode

from .models import Size
from .options import DepthOptions

OFFLINE = "pass --text FILE --held-out FILE --tokenizer text to work without the hub"
# Sentences of the generated text that praise or criticise something, so a small model can be steered.
OPINIONS = ("The {thing} was {word}.", "Everybody said that the {trade} was {word}.", "It was a {word} {weather}.")
OPINION_WORDS = ("good", "good", "bad", "great", "terrible", "happy", "sad")


class Corpus(NamedTuple):
    """`described` names the sources of the texts and the tokenizer, for settings and results."""

    train_ids: torch.Tensor  # [N]
    held_out_ids: torch.Tensor  # [N]
    tokenizer: Any
    described: dict[str, Any]


@cache
def load_corpus(options: DepthOptions, size: Size) -> Corpus:
    """Loads the training text and the held-out text.

    A byte-level BPE is trained only on the training text. If a short text has fewer tokens than `size.vocab_size`, the
    other rows are unused. Raises `ValueError` for unreadable files, for texts shorter than a batch, and if the hub
    can't be reached.
    """
    names, texts = zip(*_texts(options), strict=True)
    trained = options.small or options.tokenizer == "text"
    tokenizer = train_tokenizer(texts[0], size.vocab_size) if trained else _hub_tokenizer()
    train_ids, held_out_ids = (encode(tokenizer, text)[0] for text in texts)
    for name, ids in zip(names, (train_ids, held_out_ids), strict=True):
        if len(ids) < size.batch * size.positions:
            raise ValueError(f"{name} has {len(ids)} tokens and a batch {size.batch * size.positions}: pass more text.")
    described = {
        "text": names[0],
        "held_out": names[1],
        "tokenizer": "byte-level BPE of the training text" if trained else "gpt2",
        "tokens_in_use": len(tokenizer),
        "train_tokens": len(train_ids),
        "held_out_tokens": len(held_out_ids),
        "fingerprint": hashlib.sha256(b"".join(ids.numpy().tobytes() for ids in (train_ids, held_out_ids))).hexdigest(),
    }
    return Corpus(train_ids, held_out_ids, tokenizer, described)


def _texts(options: DepthOptions) -> list[tuple[str, str]]:
    """Returns the names and contents of the training text and the held-out text."""
    if options.small:
        return [("generated", _generate(seed, documents)) for seed, documents in ((0, 30), (1, 5))]
    if paths := [path for path in (options.text, options.held_out) if path is not None]:
        return [(path.name, read_text(path)) for path in paths]
    return [(f"{HUB[0]} {split}", hub_text(split, OFFLINE)) for split in ("train", "test")]


def _hub_tokenizer() -> Any:
    try:
        return AutoTokenizer.from_pretrained("gpt2")
    except (OSError, ValueError) as error:
        raise ValueError(f"the tokenizer gpt2 can't be loaded from the hub: {OFFLINE}.") from error


def _generate(seed: int, documents: int) -> str:
    random, parts = Random(seed), list[str]()
    words = ATTRIBUTES | SCENERY | {"word": OPINION_WORDS}
    for _ in range(documents):
        parts.append(story(random, 200)[0])
        chosen = ({name: random.choice(values) for name, values in words.items()} for _ in range(20))
        parts += [random.choice(OPINIONS).format(**names) for names in chosen]
    return " ".join(parts)


def described_line(results: dict[str, Any]) -> str:
    """Returns `Corpus.described` as one line."""
    corpus, vocab_size = results["corpus"], results["size"]["vocab_size"]
    return (
        f"{corpus['text']} ({corpus['train_tokens']:,} tokens), held out {corpus['held_out']} "
        f"({corpus['held_out_tokens']:,}); tokenizer: {corpus['tokenizer']}, {corpus['tokens_in_use']:,} of "
        f"{vocab_size:,} tokens in use"
    )
