"""The texts on which the cost of folding is measured: the user's, or samples of the model itself.

Axes: N tokens of a text, B texts.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from condense.training.data.documents import good_documents, read_documents
from condense.training.data.samples import draw
from condense.training.recipe import Source
from condense.utils.files import atomic_file, read_text
from condense.utils.progress import ProgressBar
from condense.utils.text import encode

from ..decoding import neutral_decoding
from ..models import EvaluatedModel
from ..results import MAKE_ROOM

SAMPLES = "fold_cost.samples.json"


def long_texts(tokenizer: Any, data: Sequence[str], text_field: str, num_texts: int, least: int) -> list[torch.Tensor]:
    """Returns the token ids [N] of the first documents that have at least `least` tokens.

    Raises `ValueError` for a broken document, or if no document is that long.
    """
    reader = read_documents([Source(files=files, text=text_field) for files in data], with_summaries=False)
    texts, longest = list[torch.Tensor](), 0
    for document in good_documents(reader, "refuse"):
        ids_N = encode(tokenizer, document.text)[0]
        longest = max(longest, len(ids_N))
        if len(ids_N) >= least:
            texts.append(ids_N)
        if len(texts) == num_texts:
            break
    if not texts:
        raise ValueError(
            f"data {', '.join(data)}: the longest document has {longest:,} tokens, and {least:,} are needed: pass a "
            "longer text, or fewer or shorter segments."
        )
    return texts


def own_samples(
    stock: Any, model: EvaluatedModel, shape: tuple[int, int], first: int, seed: int, folder: Path
) -> list[torch.Tensor]:
    """Returns texts [N] that the stock model writes at temperature 1 after the token `first`.

    They are drawn once, and kept in a file of the folder: another machine would draw others.
    """
    name, weights = model.name, model.describe()["weights"]
    wanted = {"weights": weights, "texts": shape[0], "tokens": shape[1], "first": first, "seed": seed}
    path = folder / SAMPLES
    with FileLock(folder / f".{SAMPLES}.lock"):
        kept = json.loads(read_text(path)) if path.exists() else {}
        if kept.get(name, {}).get("settings") != wanted:
            with ProgressBar(total=shape[1] - 1, desc=f"texts by {name}", unit="token") as bar, neutral_decoding(stock):
                texts_BN = draw(stock, first, shape, 1.0, seed, _Counter(bar))
            kept[name] = {"settings": wanted, "texts": texts_BN.tolist()}
            with atomic_file(path, MAKE_ROOM) as file:
                file.write_text(json.dumps(kept), encoding="utf-8")
    return [torch.tensor(text) for text in kept[name]["texts"]]


class _Counter:
    """A streamer of transformers that moves a progress bar."""

    def __init__(self, bar: ProgressBar):
        self.bar, self.has_prompt = bar, False

    def put(self, ids: torch.Tensor) -> None:
        if self.has_prompt:
            self.bar.update()
        self.has_prompt = True

    def end(self) -> None:
        pass
