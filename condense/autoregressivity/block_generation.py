"""Generation block by block: the tokens of a block become known over a few evaluations, then the cache reads them.

Axes: B rows, N tokens of a prompt, T tokens of a block, V vocabulary.
"""

import math
from typing import Any

import torch
from transformers import GenerationConfig

from ..cache import FoldedCache
from ..memory import Memory

ORDERS = ("confidence", "random")
# Options of transformers' generate that would change what is written, and that blocks do not have.
REFUSED = {"num_beams": 1, "num_return_sequences": 1, "prompt_lookup_num_tokens": None, "use_cache": True,
           "cache_implementation": None, "return_dict_in_generate": False}  # fmt: skip


@torch.no_grad()
def generate_blocks(
    model: Any,
    inputs: torch.Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    past_key_values: FoldedCache | None = None,
    max_denoising_steps: int | None = None,
    order: str = "confidence",
    streamer: Any = None,
    **options: Any,
) -> torch.Tensor:
    """The prompts [B, N] and after each the new tokens of a `BlockDiffusionForCausalLM`, in constant memory.

    `max_denoising_steps` is the number of evaluations of a block; by default one for each of its tokens. Each makes an
    equal share of the block's tokens known: those with the highest probability (`order="confidence"`) or any
    (`"random"`). `do_sample`, `temperature`, `top_k`, `top_p` and other processors of logits act on each place of the
    block. A block begins where the prompt has ended and goes to the end of the block in its segment; what is written
    after `max_new_tokens` or an end-of-sequence token is cut. `streamer.put` receives whole blocks.

    Rows of a padded batch are generated one after the other. Raises `ValueError` for options that blocks do not have.
    """
    prompt_BN = inputs if input_ids is None else input_ids
    if prompt_BN is None or prompt_BN.dim() != 2 or not prompt_BN.numel():
        raise ValueError("generate needs input_ids of shape [rows, tokens] with at least one token in each row.")
    config, others = model._prepare_generation_config(generation_config, **options)
    _check(config, others, max_denoising_steps, order, prompt_BN, streamer)
    model._prepare_special_tokens(config, attention_mask is not None, device=prompt_BN.device)
    num_new = config.max_new_tokens or (config.max_length or 0) - prompt_BN.shape[1]
    if num_new < 1:
        raise ValueError(f"max_length={config.max_length} leaves no room after the prompt: set max_new_tokens.")
    settings = config, num_new, max_denoising_steps, order
    if attention_mask is None or bool(attention_mask.all()):
        new_BA = _generate(model, prompt_BN, past_key_values, settings, streamer)
        return torch.cat([prompt_BN, new_BA], dim=1)
    if past_key_values is not None:
        raise ValueError("past_key_values go with prompts of one length: leave the padding out.")
    rows = [
        _generate(model, row_N[mask_N.bool()][None], None, settings, streamer)[0]
        for row_N, mask_N in zip(prompt_BN, attention_mask, strict=True)
    ]
    pad = config.pad_token_id if config.pad_token_id is not None else 0
    return torch.cat([prompt_BN, torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)], dim=1)


def _check(config: GenerationConfig, others: dict, steps: int | None, order: str, prompt_BN, streamer) -> None:
    if others:
        raise ValueError(f"{', '.join(others)}: generation by blocks has no such argument; leave it out.")
    for name, neutral in REFUSED.items():
        value = getattr(config, name, neutral)
        if value not in (neutral, None):
            raise ValueError(f"{name}={value!r}: generation by blocks has it not; leave it out.")
    if steps is not None and steps < 1:
        raise ValueError(f"max_denoising_steps={steps}: pass at least 1.")
    if order not in ORDERS:
        raise ValueError(f"order={order!r}: choose one of {', '.join(ORDERS)}.")
    if streamer is not None and prompt_BN.shape[0] > 1:
        raise ValueError(f"a streamer takes one text, and the batch has {prompt_BN.shape[0]}: pass one row.")


def _generate(model, prompt_BN, cache: FoldedCache | None, settings, streamer) -> torch.Tensor:
    config, num_new, max_steps, order = settings
    cache = FoldedCache(model.config) if cache is None else cache
    if streamer is not None:
        streamer.put(prompt_BN.cpu())
    if prompt_BN.shape[1] > 1:
        model(prompt_BN[:, :-1], past_key_values=cache, logits_to_keep=1)
    ends = torch.as_tensor([] if config.eos_token_id is None else config.eos_token_id, device=prompt_BN.device)
    pad = config.pad_token_id if config.pad_token_id is not None else 0
    written_BN, ended_B1 = prompt_BN, torch.zeros(len(prompt_BN), 1, dtype=torch.bool, device=prompt_BN.device)
    while (left := num_new - (written_BN.shape[1] - prompt_BN.shape[1])) > 0 and not bool(ended_B1.all()):
        last_B1 = written_BN[:, -1:]
        block_BT = _denoise(model, cache, written_BN, config, max_steps, order)
        read_BT = torch.cat([last_B1, block_BT[:, :-1]], dim=1)
        model(read_BT, past_key_values=cache, logits_to_keep=1)  # the clean stream: the block is part of the text now
        after_end_BT = torch.isin(block_BT, ends).cumsum(1).roll(1, dims=1).bool()
        after_end_BT[:, 0] = False
        kept_BT = block_BT.masked_fill(after_end_BT | ended_B1, pad)[:, :left]
        ended_B1 = ended_B1 | torch.isin(kept_BT, ends).any(1, keepdim=True)
        if bool(ended_B1.all()) and ends.numel():
            kept_BT = kept_BT[:, : _last_end(kept_BT, ends)]
        if streamer is not None:
            streamer.put(kept_BT[0].cpu())
        written_BN = torch.cat([written_BN, kept_BT], dim=1)
    if streamer is not None:
        streamer.end()
    return written_BN[:, prompt_BN.shape[1] :]


def _last_end(kept_BT: torch.Tensor, ends: torch.Tensor) -> int:
    """The number of columns up to the last row's end-of-sequence token."""
    columns = torch.isin(kept_BT, ends).any(0).nonzero()
    return int(columns[-1]) + 1 if len(columns) else kept_BT.shape[1]


def _denoise(model, cache: FoldedCache, written_BN, config: GenerationConfig, max_steps: int | None, order: str):
    """The tokens [B, T] after the text `written_BN`, of which the cache has all but the last."""
    offset = cache.positions.offsets[0] if cache.positions.offsets else 0
    width = model.config.block_length - offset % model.config.block_length
    seen = _seen(model, cache, offset)
    processors = model._get_logits_processor(
        generation_config=config, input_ids_seq_length=written_BN.shape[1], device=written_BN.device, model_kwargs={}
    )
    token_BT = written_BN.new_zeros(len(written_BN), width)
    known_BT = torch.zeros_like(token_BT, dtype=torch.bool)
    steps = min(max_steps or width, width)
    for step in range(steps):
        read_BT = torch.cat([written_BN[:, -1:], token_BT[:, :-1]], dim=1)
        masked_BT = torch.cat([torch.zeros_like(known_BT[:, :1]), ~known_BT[:, :-1]], dim=1)
        logits_BTV = model.look_ahead(read_BT, masked_BT, offset, seen).float()
        repeated = written_BN.repeat_interleave(width, dim=0)
        score_BTV = processors(repeated, logits_BTV.flatten(0, 1)).view_as(logits_BTV)
        probability_BTV = score_BTV.softmax(-1)
        if config.do_sample:
            drawn_BT = torch.multinomial(probability_BTV.flatten(0, 1), 1).view_as(token_BT)
        else:
            drawn_BT = score_BTV.argmax(-1)
        chance_BT = probability_BTV.gather(2, drawn_BT[..., None])[..., 0]
        preference_BT = chance_BT if order == "confidence" else torch.rand_like(chance_BT)
        preference_BT = preference_BT.masked_fill(known_BT, -math.inf)
        number = -(-int((~known_BT[0]).sum()) // (steps - step))  # all rows know equally many
        chosen_BT = torch.zeros_like(known_BT).scatter(1, preference_BT.topk(number, dim=1).indices, True)
        token_BT, known_BT = torch.where(chosen_BT, drawn_BT, token_BT), known_BT | chosen_BT
    return token_BT


def _seen(model, cache: FoldedCache, offset: int) -> list[Memory | None]:
    """What each layer sees of the text in the cache: its memory, and the current segment so far."""
    length = model.config.segment_length
    first = 0 if cache.positions.segments and cache.positions.segments[0] else length
    if first == length + offset:
        return [None] * len(cache.layers)
    return [Memory(*(buffer[:, :, first : length + offset] for buffer in layer.buffers[:2])) for layer in cache.layers]
