"""A small Llama with random weights that knows the words of the facts, and the commonest words of given texts.

    python -m condense.training.facts_data FOLDER [--text 'novels/*.txt'] [--width 64 --layers 3 --words 1500]

All other words are <unk>: in the text between facts they do no harm.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers.utils import logging

from .data.fact_kinds import all_texts
from .data.generated import read_sentences
from .data.passkey import FILLER
from .recipe import Source
from .sample_data import copy_files
from .small_llama import LOOKUP, small_llama, word_tokenizer, words_of


def common_words(files: Sequence[str], number: int) -> tuple[list[str], float]:
    """The commonest words of files or glob patterns, and the share of these texts that they make up.

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

    Raises `ValueError`, and changes nothing, where a file of the folder exists with another content.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", nargs="+", default=[], metavar="FILES", help="texts, by name or glob pattern")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--words", type=int, default=1500, help="words of the texts that the tokenizer knows")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable_progress_bar()
    write_facts_llama(options.folder, options.text, options.width, options.layers, options.words, options.seed)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:  # for the user: the message is the answer
        sys.exit(f"facts_data: {error}")
