"""Reading a long text into a state, some segments at a time."""

import re
from collections.abc import Callable

import torch

from .cache import FoldedCache
from .modeling import CondenseForCausalLM

TOKENS_PER_CALL = 4096  # enough to fill a device; a call's memory does not depend on the text's length
SEGMENTS_PER_CALL = 64  # enough for a wave to spend most of its steps at full width
CHARACTERS_PER_BLOCK = 2**16  # tokenizers hold hundreds of bytes for every token of a call


@torch.no_grad()
def read(
    model: CondenseForCausalLM,
    input_ids: torch.Tensor,
    cache: FoldedCache | None = None,
    progress: Callable[[int], object] = lambda num_segments: None,
) -> FoldedCache:
    """The state after `input_ids` [B, N], in memory that does not depend on N.

    `progress` is called with the number of segments read since its last call. To go on from the state
    with `generate`, pass the next token and the cache.
    """
    cache = FoldedCache(model.config) if cache is None else cache
    length = model.config.segment_length
    num_segments = max(SEGMENTS_PER_CALL, TOKENS_PER_CALL // (length * len(input_ids)))
    for chunk in input_ids.split(length * num_segments, dim=1):
        model(chunk.to(model.device), past_key_values=cache, logits_to_keep=1)
        progress(-(-chunk.shape[1] // length))
    # `generate` slices its input by the columns a cache has seen, and copies a mask as long for every token.
    cache.num_columns = 0
    return cache


def encode(tokenizer, text: str) -> torch.Tensor:
    """The token ids [1, N] of a text, in the memory of one block of it besides the ids themselves.

    The text is cut at single spaces between two words, where tokenizers split it anyway; whether the
    space then belongs to the next word is found by trying. A tokenizer that does neither gets the
    text in one piece.
    """

    def plain(part: str) -> list[int]:
        return tokenizer(part, add_special_tokens=False)["input_ids"]

    both = plain("one two")
    if plain("one") + plain(" two") == both:
        skipped = 0
    elif plain("one") + plain("two") == both:
        skipped = 1
    else:
        return torch.tensor([tokenizer(text)["input_ids"]])
    joint = re.compile(r"(?<=[a-zA-Z]) (?=[a-zA-Z])")
    blocks: list[torch.Tensor] = []
    start = 0
    while start < len(text):
        found = joint.search(text, start + CHARACTERS_PER_BLOCK)
        end = len(text) if found is None else found.start()
        ids = plain(text[start:end]) if blocks else tokenizer(text[start:end])["input_ids"]
        blocks.append(torch.tensor(ids, dtype=torch.int32))
        start = end if found is None else end + skipped
    return torch.cat(blocks).long()[None]
