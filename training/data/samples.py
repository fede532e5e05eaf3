"""Texts that a model samples from itself, for training without any data: drawn once, stored, and resumed after a kill.

The stock model with full attention writes them, token by token from its own distribution. A part of the store is one
batch of texts; its random numbers depend only on the seed and its number.

Axes: B texts, N tokens.
"""

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from filelock import FileLock
from transformers import GenerationConfig

from condense import CondenseForCausalLM, to_stock
from condense.generation.nonfinite_logits import RefuseNonFiniteLogits
from condense.hub import loading
from condense.utils.notices import without_notices
from condense.utils.progress import ProgressBar

from ..checkpoints.contents import contents_of
from .store import FORMAT, Store, Tokens, name_of, part_name, room_for, write_part_file

if TYPE_CHECKING:
    from ..recipe import SampleData

TOKENS_AT_ONCE = 2**17  # of the texts that are drawn together
WEIGHTS = ("config.json", "*.safetensors", "*.bin")  # files that decide what a model writes


def sample_store(data: "SampleData", source: str, tokenizer: Any, total_length: int, texts: int) -> Store:
    """Returns at least `texts` texts of `total_length` tokens by the model in `source`, kept in `data.prepared`.

    Draws missing texts first. Processes wait for each other. A folded model writes as the stock model of its weights.
    Raises `ValueError` for a tokenizer without a first token, and for a model with a depth block.
    """
    first, batch = first_token(tokenizer), max(1, TOKENS_AT_ONCE // total_length)
    described = {
        "format": FORMAT, "weights": contents_of(source, WEIGHTS) or [source], "tokens": total_length, "first": first,
        "seed": data.seed, "temperature": data.temperature, "batch": batch,
    }  # fmt: skip
    folder = data.prepared / f"samples-{name_of(described)}"
    folder.mkdir(parents=True, exist_ok=True)
    parts = -(-texts // batch)
    with FileLock(folder / ".lock"):
        missing = [number for number in range(parts) if not (folder / part_name(number)).exists()]
        if missing:
            (folder / "settings.json").write_text(json.dumps(described | {"source": source}), encoding="utf-8")
            model = stock_model(source)
            done, unit = parts - len(missing), f" x {batch} texts"
            for number in ProgressBar(missing, initial=done, total=parts, desc="sampling texts", unit=unit):
                texts_BN = draw(model, first, (batch, total_length), data.temperature, data.seed * 2**20 + number)
                with room_for(folder):
                    kept = [Tokens(text_N, 1) for text_N in texts_BN]
                    write_part_file(folder / part_name(number), kept, {"counts": {}, "positions": None, "ended": False})
            del model
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return Store(folder)


def first_token(tokenizer: Any) -> int:
    """Returns the token that a text begins with. Raises `ValueError` if the tokenizer has none."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    raise ValueError(
        "data.task=samples begins each text with the tokenizer's first token, and it has neither bos_token nor "
        "eos_token: add one to tokenizer_config.json, or train on documents (data.task=text)."
    )


def stock_model(source: str) -> Any:
    """Returns the stock model of a checkpoint, in the dtype of its weights, on this rank's GPU if there is one.

    It writes by its own distribution, without the checkpoint's settings of `generate`, such as penalties.
    """
    with without_notices():
        # A stock model has no segments; those of one token fit every sliding window.
        check_writer(loading.load_config(CondenseForCausalLM.config_class, source, segment_length=1), source)
        model = to_stock(loading.load_model(CondenseForCausalLM, source, dtype="auto", segment_length=1))
    model.generation_config = GenerationConfig()
    return model.to(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")


def check_writer(config: Any, source: str) -> None:
    """Raises `ValueError` for a model with a depth block, whose weights no stock model has."""
    if getattr(config, "depth", None) is not None:
        raise ValueError(
            f"model={source!r} has a depth block, so no stock model of its weights can write texts: train on "
            "documents (data.task=text)."
        )


@torch.no_grad()
def draw(
    model: Any, first: int, shape: tuple[int, int], temperature: float, seed: int, streamer: Any = None
) -> np.ndarray:
    """Returns texts [B, N] that begin with `first`. An end of text is a token like others: another text follows it.

    `streamer` is told of each token, as by transformers' `generate`.
    """
    batch, total_length = shape
    first_B1 = torch.full((batch, 1), first, device=model.device)
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        texts_BN = model.generate(
            first_B1, attention_mask=torch.ones_like(first_B1), do_sample=True, temperature=temperature, top_k=0,
            top_p=1.0, eos_token_id=None, pad_token_id=first, min_new_tokens=total_length - 1,
            max_new_tokens=total_length - 1, logits_processor=[RefuseNonFiniteLogits()],
            streamer=streamer,
        )  # fmt: skip
    return texts_BN.cpu().numpy()
