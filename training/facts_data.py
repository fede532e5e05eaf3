"""A small Llama with random weights that knows the words of the facts, and the commonest words of given texts.

All other words are <unk>, which does no harm in the text between facts.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from .data.fact_kinds import all_texts
from .data.generated import read_sentences
from .data.passkey import FILLER
from .recipe import Source
from .sample_data import copy_files
from .small_llama import LOOKUP, small_llama, word_tokenizer, words_of


def common_words(files: Sequence[str], number: int) -> tuple[list[str], float]:
    """Returns the commonest words of files or glob patterns, and their share of the texts.

    Raises `ValueError` for files that can't be read.
    """
    if number < 0:
        raise ValueError(f"words={number}: pass 0 or more.")
    counts = Counter[str]()
    for sentence in read_sentences([Source(files=pattern) for pattern in files]):
        counts.update(words_of(sentence))
    found = counts.most_common(number)
    return [word for word, _ in found], sum(count for _, count in found) / max(1, counts.total())


def write_facts_llama(
    folder: Path, files: Sequence[str] = (), width: int = 64, layers: int = 3, words: int = 1500, seed: int = 0
) -> None:
    """Writes FOLDER/llama and prints its size.

    If a file in the folder has different content, raises `ValueError` and changes nothing.
    """
    common, share = common_words(files, words)
    tokenizer = word_tokenizer([*all_texts(), FILLER, *common])
    model = small_llama(tokenizer, seed, width, layers, **LOOKUP)
    with TemporaryDirectory() as temporary:
        model.save_pretrained(Path(temporary) / "llama")
        tokenizer.save_pretrained(Path(temporary) / "llama")
        copy_files(Path(temporary), folder)
    known = f"; {share:.1%} of the texts are among its {len(common):,} commonest words" if files else ""
    print(f"{folder}/llama: a Llama of {model.num_parameters():,} parameters, {len(tokenizer):,} tokens{known}")
