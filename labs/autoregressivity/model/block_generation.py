"""Block-by-block generation: a few evaluations determine a block's tokens, then the cache reads them.

Axes: B rows, N tokens of a prompt, T tokens of a block, V vocabulary.
"""

import math
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from condense.state.cache import FoldedCache
from condense.state.memory import Memory
from condense.utils.choices import check_choice

ORDERS = ("confidence", "random")
# Neutral values of options of transformers' generate that would change the text and that blocks do not support.
REFUSED: dict[str, Any] = {
    "num_beams": 1, "num_return_sequences": 1, "prompt_lookup_num_tokens": None, "use_cache": True,
    "cache_implementation": None, "return_dict_in_generate": False, "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0, "min_new_tokens": None, "min_length": 0, "stop_strings": None, "max_time": None,
    "bad_words_ids": None, "sequence_bias": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "begin_suppress_tokens": None, "exponential_decay_length_penalty": None, "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0, "guidance_scale": 1, "token_healing": False, "watermarking_config": None,
}  # fmt: skip


@torch.no_grad()
def generate_blocks(
    model: Any,
    inputs: torch.Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    max_denoising_steps: int | None = None,
    order: str | None = None,
    streamer: Any = None,
    **options: Any,
) -> torch.Tensor:
    """Returns the prompts [B, N], each followed by its new tokens; memory is constant.

    `max_denoising_steps` is the number of evaluations of a block, by default one per token. Each determines an equal
    share of the block's tokens. `order` says which: `"random"` ones (the default with `do_sample`), or the most
    probable (`"confidence"`, the default without). Sampling in confidence order does not follow the model's
    distribution: unlikely tokens are drawn again. `temperature`, `top_k`, `top_p` and the like act on each token.

    If the prompt ends inside a block, generation starts with the rest of that block. Text after `max_new_tokens` or an
    end-of-sequence token is cut. `streamer.put` receives whole blocks.

    Rows of a padded batch are generated one after the other. Raises `ValueError` for unsupported options.
    """
    prompt_BN = inputs if input_ids is None else input_ids
    if prompt_BN is None or prompt_BN.dim() != 2 or not prompt_BN.numel():
        raise ValueError("generate needs input_ids of shape [rows, tokens] with at least one token in each row.")
    config, others = model._prepare_generation_config(generation_config, **options)
    order = order or ("random" if config.do_sample else "confidence")
    _check(config, others, max_denoising_steps, order)
    if streamer is not None and len(prompt_BN) > 1:  # it would end after the first row, or receive no other
        raise ValueError(f"a streamer takes one text, and the batch has {len(prompt_BN)}: pass one row.")
    model._prepare_special_tokens(config, attention_mask is not None, device=prompt_BN.device)
    num_new = config.max_new_tokens or (config.max_length or 0) - prompt_BN.shape[1]
    if num_new < 1:
        raise ValueError(f"max_length={config.max_length} leaves no room after the prompt: set max_new_tokens.")
    settings = config, num_new, max_denoising_steps, order
    if attention_mask is None or bool(attention_mask.all()):
        return torch.cat([prompt_BN, _generate(model, prompt_BN, settings, streamer)], dim=1)
    if len(empty := (attention_mask.sum(1) == 0).nonzero()):
        raise ValueError(f"row {int(empty[0])} of the prompts is only padding: leave the row out, or give it a token.")
    rows = [
        _generate(model, row_N[mask_N.bool()][None], settings, streamer)[0]
        for row_N, mask_N in zip(prompt_BN, attention_mask, strict=True)
    ]
    return torch.cat([prompt_BN, pad_sequence(rows, batch_first=True, padding_value=_padding(config))], dim=1)


def _check(config: GenerationConfig, others: dict, steps: int | None, order: str) -> None:
    if others:
        raise ValueError(f"{', '.join(others)}: generation by blocks does not accept it; leave it out.")
    for name, neutral in REFUSED.items():
        value = getattr(config, name, neutral)
        if value not in (neutral, None):
            raise ValueError(f"{name}={value!r}: generation by blocks does not support it; leave it out.")
    if steps is not None and (type(steps) is not int or steps < 1):
        raise ValueError(f"max_denoising_steps={steps!r}: pass a whole number of at least 1.")
    check_choice("order", order, ORDERS)


def _padding(config: GenerationConfig) -> int:
    """Returns the token after the end of a text: as in transformers, the first end token by default."""
    if config.pad_token_id is not None:
        return config.pad_token_id
    ends = config.eos_token_id
    return 0 if ends is None else ends if isinstance(ends, int) else ends[0]


def _generate(model, prompt_BN, settings, streamer) -> torch.Tensor:
    config, num_new, max_steps, order = settings
    cache = FoldedCache(model.config)
    if streamer is not None:
        streamer.put(prompt_BN.cpu())
    if prompt_BN.shape[1] > 1:
        model(prompt_BN[:, :-1], cache=cache, logits_to_keep=1)
    ends = torch.as_tensor([] if config.eos_token_id is None else config.eos_token_id, device=prompt_BN.device)
    written_BN, ended_B1 = prompt_BN, torch.zeros(len(prompt_BN), 1, dtype=torch.bool, device=prompt_BN.device)
    while (left := num_new - (written_BN.shape[1] - prompt_BN.shape[1])) > 0 and not bool(ended_B1.all()):
        last_B1 = written_BN[:, -1:]
        block_BT = _denoise(model, cache, written_BN, prompt_BN.shape[1], config, max_steps, order)
        read_BT = torch.cat([last_B1, block_BT[:, :-1]], dim=1)
        model(read_BT, cache=cache, logits_to_keep=1)  # the clean stream: the block is part of the text now
        block_BT = block_BT[:, :left]
        is_end_BT = torch.isin(block_BT, ends)
        after_end_BT = (is_end_BT.cumsum(1) - is_end_BT.long() > 0) | ended_B1
        kept_BT = block_BT.masked_fill(after_end_BT, _padding(config))
        ended_B1 = ended_B1 | is_end_BT.any(1, keepdim=True)
        if bool(ended_B1.all()):
            kept_BT = kept_BT[:, : int((~after_end_BT).sum(1).max())]
        if streamer is not None:
            streamer.put(kept_BT[0].cpu())
        written_BN = torch.cat([written_BN, kept_BT], dim=1)
    if streamer is not None:
        streamer.end()
    return written_BN[:, prompt_BN.shape[1] :]


def _denoise(
    model,
    cache: FoldedCache,
    written_BN,
    prompt_length: int,
    config: GenerationConfig,
    max_steps: int | None,
    order: str,
):
    """Returns the tokens [B, T] after the text `written_BN`; the cache has all of it except the last token.

    The block is read from its start, as in training. Tokens that belong to the prompt are known.
    """
    offset = cache.positions.offsets[0] if cache.positions.offsets else 0
    num_known = offset % model.config.block_length + 1
    start, width = offset + 1 - num_known, model.config.block_length + 1 - num_known
    seen = _visible_memories(model, cache, start)
    processors = model._get_logits_processor(
        generation_config=config, input_ids_seq_length=prompt_length, device=written_BN.device, model_kwargs={}
    )
    repeated = written_BN.repeat_interleave(width, dim=0)
    token_BT = written_BN.new_zeros(len(written_BN), width)
    known_BT = torch.zeros_like(token_BT, dtype=torch.bool)
    prefix_BT = written_BN[:, -num_known:]
    steps = min(max_steps or width, width)
    for step in range(steps):
        read_BT = torch.cat([prefix_BT, token_BT[:, :-1]], dim=1)
        masked_BT = torch.cat([torch.zeros_like(prefix_BT, dtype=torch.bool), ~known_BT[:, :-1]], dim=1)
        logits_BTV = model.look_ahead(read_BT, masked_BT, start, seen)[:, num_known - 1 :].float()
        score_BTV = processors(repeated, logits_BTV.flatten(0, 1)).view_as(logits_BTV)
        probability_BTV = score_BTV.softmax(-1)
        if config.do_sample:
            drawn_BT = torch.multinomial(probability_BTV.flatten(0, 1), 1).view_as(token_BT)
        else:
            drawn_BT = score_BTV.argmax(-1)
        chance_BT = probability_BTV.gather(2, drawn_BT[..., None])[..., 0]
        preference_BT = chance_BT if order == "confidence" else torch.rand_like(chance_BT)
        preference_BT = preference_BT.masked_fill(known_BT, -math.inf)
        number = -(-int((~known_BT[0]).sum()) // (steps - step))  # the same in all rows
        chosen_BT = torch.zeros_like(known_BT).scatter(1, preference_BT.topk(number, dim=1).indices, True)
        token_BT, known_BT = torch.where(chosen_BT, drawn_BT, token_BT), known_BT | chosen_BT
    return token_BT


def _visible_memories(model, cache: FoldedCache, start: int) -> list[Memory | None]:
    """Returns what each layer sees of the cached text: its memory and the current segment up to a block's start."""
    length = model.config.segment_length
    first = 0 if cache.positions.segments and cache.positions.segments[0] else length
    if first == length + start:
        return [None] * len(cache.layers)
    return [Memory(*(buffer[:, :, first : length + start] for buffer in layer.buffers[:2])) for layer in cache.layers]
