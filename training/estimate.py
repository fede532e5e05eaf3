"""What a run will need: memory of a rank by part, and its tokens and FLOPs. Nothing is run.

All sizes are in bytes. Attention is counted as its kernels keep it for the backward pass: eager with its scores, all
others (sdpa as on a GPU) without. Not counted: the CUDA context, the allocator's fragmentation, buffers of NCCL, and
what lives within a single operation.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from condense.configuration import CondenseConfig
from condense.loss import MAX_LOGITS

from .recipe import Recipe

FLOAT32 = 4
LOGIT_COPIES = 3  # log-softmax, its gradient, and the gradient behind it, all in float32
GIB = 2**30


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the fullest rank: parts as they are at the worst moment of a pass, but for `step` and `host`."""

    weights: int  # what passes compute with; under ZeRO-3 the rank's share of it
    gathered_weights: int  # ZeRO-3: at most so much of all shares is there at a time
    master_weights: int  # the optimizer's own, float32
    moments: int  # Adam's two, float32
    gradients: int  # as the ZeRO stage keeps them, and buffers for them that stay
    reduce_buckets: int  # through which they pass from rank to rank, once the logits are gone
    summed_gradients: int  # what autograd still sums up, less the activations that are gone by then
    memories: int  # keys and values that segments were given by the segment before
    activations: int  # what autograd keeps besides
    loss: int  # logits that exist at a time, with their gradients
    step: int  # the optimizer step's copies of the gradients; no pass is running then
    host: int  # in the CPU's memory, where DeepSpeed offloads to it

    @property
    def total(self) -> int:
        """The most that is needed on the device at a time."""
        stays = self.weights + self.gathered_weights + self.master_weights + self.moments + self.gradients
        in_pass = self.summed_gradients + self.memories + self.activations + max(self.loss, self.reduce_buckets)
        return stays + max(in_pass, self.step)

    def as_dict(self) -> dict[str, int]:
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True)
class Pass:
    """What a rank runs at once."""

    rows: int
    segments: list[int]  # tokens of each; a stock Llama has one

    @property
    def tokens(self) -> int:
        return self.rows * sum(self.segments)


def estimate(config: LlamaConfig, recipe: Recipe, deepspeed: dict[str, Any], ranks: int) -> MemoryEstimate:
    """Memory of a rank, at the length that needs most; `deepspeed` is what DeepSpeed's configuration file holds.

    Raises `ValueError` where the recipe's batch does not divide by the number of ranks.
    """
    accumulates = recipe.accumulation(ranks) > 1
    shapes, zero = parameter_shapes(config), deepspeed.get("zero_optimization") or {}
    states = _kept_by_deepspeed(config, recipe, zero, ranks, shapes, accumulates)
    estimates = []
    for one in passes(config, recipe, ranks):
        kept = _kept_by_autograd(config, recipe, one)
        leave = zero.get("stage", 0) >= 2 or accumulates
        summed = _summed_gradients(config, recipe, one, shapes, leave, kept)
        estimates.append(MemoryEstimate(**states, **kept, summed_gradients=summed))
    return max(estimates, key=lambda one: one.total)


def parameter_shapes(config: LlamaConfig) -> list[torch.Size]:
    """Of every parameter, tied ones once, in the model's order."""
    with torch.device("meta"):  # a folded Llama has the parameters of its Llama
        return [parameter.shape for parameter in LlamaForCausalLM(config).parameters()]


def passes(config: LlamaConfig, recipe: Recipe, ranks: int) -> list[Pass]:
    """One for each length of the recipe's texts; shorter texts of a curriculum come in more rows."""
    length: int = recipe.segment_length or getattr(config, "segment_length", None) or CondenseConfig.segment_length
    if recipe.curriculum:
        tokens, lengths = recipe.curriculum.tokens_per_step // ranks, recipe.curriculum.lengths
        if tokens < lengths[-1] * length:
            raise ValueError(
                f"tokens_per_step={recipe.curriculum.tokens_per_step} does not hold one text of {lengths[-1]} segments "
                f"of {length} tokens on each of {ranks} ranks: allow at least {lengths[-1] * length * ranks}."
            )
        return [Pass(tokens // (segments * length), [length] * segments) for segments in lengths]
    return [Pass(recipe.micro_batch, _segments(recipe, length, stage.total_length)) for stage in recipe.stages or ()]


def _segments(recipe: Recipe, length: int, total_length: int) -> list[int]:
    if not recipe.folded:
        return [total_length]
    return [min(length, total_length - start) for start in range(0, total_length, length)]


def _kept_by_autograd(config: LlamaConfig, recipe: Recipe, one: Pass) -> dict[str, int]:
    """The parts `memories`, `activations` and `loss`."""
    return _kept_by_fold(config, recipe, one) if recipe.folded else _kept_by_llama(config, recipe, one)


def _kept_by_llama(config: LlamaConfig, recipe: Recipe, one: Pass) -> dict[str, int]:
    (length,), layers = one.segments, config.num_hidden_layers
    layer, gradients = (one.rows * count(config, recipe, length, 0) for count in (_layer, _layer_gradients))
    loss = LOGIT_COPIES * FLOAT32 * config.vocab_size * one.tokens
    if recipe.gradient_checkpointing:  # layers keep their inputs, and are recomputed when the logits are gone
        inputs, later = layers * one.tokens * config.hidden_size * _element_size(recipe), layer + gradients
    else:
        inputs, later = layers * layer, gradients
    activations = inputs + one.tokens * _norm(config, recipe) + max(0, later - loss)
    return {"memories": 0, "activations": activations, "loss": loss}


def _kept_by_fold(config: CondenseConfig | LlamaConfig, recipe: Recipe, one: Pass) -> dict[str, int]:
    layers, width, vocab, size = config.num_hidden_layers, config.hidden_size, config.vocab_size, _element_size(recipe)
    checkpointing, last = recipe.gradient_checkpointing, len(one.segments) - 1
    span = recipe.bptt_segments or getattr(config, "bptt_segments", None)
    # Checkpoints keep memories as they are; otherwise they are a part of what attention keeps.
    repeated = recipe.attention == "eager" and not checkpointing
    heads = config.num_attention_heads if repeated else config.num_key_value_heads
    kept_memories, activations, memory = [], [], 0
    for number, tokens in enumerate(one.segments):
        kept_memories.append(2 * one.rows * layers * memory * heads * config.head_dim * size)
        layer = _layer(config, recipe, tokens, memory)
        if number < last:  # the norm before the next segment's keys and values
            layer += 2 * tokens * width * size
            cut = span is not None and (number + 1) % span == 0
            if not cut and size < FLOAT32:  # a copy; in float32 it is the next layer's input
                layer += tokens * width * FLOAT32
        activations.append(one.rows * (layers * layer + tokens * _norm(config, recipe)))
        memory = tokens
    first = one.segments[0]
    chunk = min(one.rows * first, max(1, MAX_LOGITS // vocab))
    if checkpointing:  # a whole segment is recomputed, with the logits of all its chunks
        held = one.rows * first
    else:  # logits are recomputed by chunks, where they are wider than hidden states
        held = chunk if vocab > width else one.tokens
    loss = FLOAT32 * vocab * ((LOGIT_COPIES - 1) * chunk + held)
    later = one.rows * _layer_gradients(config, recipe, first, first if last else 0)
    kept = max(activations) if checkpointing else sum(activations)
    # On the host, all wait but those of the segment that is computed.
    memories = max(kept_memories) if recipe.offload_memories else sum(kept_memories)
    if checkpointing and recipe.schedule == "wavefront":  # every diagonal keeps the hidden states it was given
        kept += one.tokens * layers * width * size
    return {"memories": memories, "activations": kept + max(0, later - loss), "loss": loss}


def _norm(config: LlamaConfig, recipe: Recipe) -> int:
    """What a norm keeps of a token: its input in float32, normalized, and times its weight."""
    return (FLOAT32 + 2 * _element_size(recipe)) * config.hidden_size


def _layer(config: LlamaConfig, recipe: Recipe, tokens: int, memory: int) -> int:
    """What autograd keeps of a layer for one row, without the memory where that is counted for itself."""
    size, heads, keys = _element_size(recipe), config.num_attention_heads, memory + tokens
    norms = 2 * _norm(config, recipe)
    mlp = 4 * size * config.intermediate_size  # gate, its SiLU, up, and their product
    query_and_output = 2 * size * heads * config.head_dim
    own_keys = keys if recipe.gradient_checkpointing else tokens
    if recipe.attention == "eager":
        keys_and_values = 2 * own_keys * size * heads * config.head_dim
        score = FLOAT32 + (size if size < FLOAT32 else 0)  # softmax, and what values are weighed with
        if recipe.attention_dropout:
            score += 1 + (size if size == FLOAT32 else 0)
        scores = heads * tokens * keys * score
    else:
        keys_and_values = 2 * own_keys * size * config.num_key_value_heads * config.head_dim
        scores = heads * tokens * FLOAT32  # their sums
    return tokens * (norms + mlp + query_and_output) + keys_and_values + scores


def _layer_gradients(config: LlamaConfig, recipe: Recipe, tokens: int, memory: int) -> int:
    """What a layer's own gradients add to what it keeps, for one row: of the MLP's inner states, or of scores."""
    inner = _element_size(recipe) * tokens * (2 * config.intermediate_size + config.hidden_size)
    scores = FLOAT32 * tokens * (tokens + memory) * config.num_attention_heads
    return max(inner, scores if recipe.attention == "eager" else 0)


def _summed_gradients(
    config: LlamaConfig, recipe: Recipe, one: Pass, shapes: list[torch.Size], leave: bool, kept: dict[str, int]
) -> int:
    """Gradients that autograd holds at the end of the backward pass, beyond the activations that are gone by then.

    A weight's gradients are summed over all its uses before DeepSpeed sees them: over all segments, which ends in the
    first one, so that no ZeRO stage divides them before. A weight of a single use loses its gradient at once, where
    `leave` is true.
    """
    numels, size = [shape.numel() for shape in shapes], _element_size(recipe)
    whole = size * sum(numels)
    if len(one.segments) > 1:
        # Another gradient of the head, and the sum with it, come when the logits go.
        another = max(0, 2 * size * max(numels) - kept["loss"])
        gone = 0 if recipe.gradient_checkpointing else kept["activations"] // len(one.segments)
        return max(0, whole + another - gone)
    length, tied = one.segments[0], size * max(numels) * config.tie_word_embeddings
    first_layer = one.rows * sum(part(config, recipe, length, 0) for part in (_layer, _layer_gradients))
    # The head's gradient waits for the embedding's; in the end there are both, and their sum.
    summed = (tied if leave else whole) + max(2 * tied, first_layer)
    return max(0, summed - kept["activations"] - kept["loss"])


def _kept_by_deepspeed(
    config: LlamaConfig, recipe: Recipe, zero: dict[str, Any], ranks: int, shapes: list[torch.Size], accumulates: bool
) -> dict[str, int]:
    """As deepspeed/runtime/zero/stage_1_and_2.py and stage3.py allocate it."""
    stage, size = zero.get("stage", 0), _element_size(recipe)
    numels = [shape.numel() for shape in shapes]
    count, largest = sum(numels), max(numels)
    bucket = zero.get("reduce_bucket_size", 500_000_000)
    bucket = config.hidden_size**2 if bucket == "auto" else int(bucket)
    offloads, offloads_weights = (
        (zero.get(name) or {}).get("device", "none") != "none" for name in ("offload_optimizer", "offload_param")
    )
    parts = dict.fromkeys(("weights", "gathered_weights", "gradients", "reduce_buckets", "host"), 0)
    if stage == 3:
        share = sum(ceil(numel / ranks) for numel in numels)
        parts["host" if offloads_weights else "weights"] += size * share
        parts["gathered_weights"] = size * min(count, int(zero.get("stage3_max_live_parameters", 1_000_000_000)))
        parts["host" if offloads else "gradients"] += size * share
        parts["gradients"] += size * bucket
        at_once = min(share, int(zero.get("sub_group_size", 1_000_000_000)))
    else:
        share, owned = (count, 0) if stage == 0 else _fullest_partition(shapes, ranks)
        at_once = share
        parts["weights"] = size * count
        if stage < 2 and accumulates:
            parts["gradients"] = size * count
        if stage > 0 and not offloads:  # a further micro-batch is reduced beside the ones before
            parts["gradients"] += size * owned * (2 if stage == 2 and accumulates else 1)
        if stage > 0 and zero.get("contiguous_gradients", True):
            parts["reduce_buckets"] = size * bucket * (2 if zero.get("overlap_comm") else 1)
        if offloads:  # buffers for one gradient, the new weights, and gradients of the micro-batches before
            parts["gradients"] += size * largest
            parts["host"] += size * (largest + share + (owned if stage == 2 and accumulates else 0))
    has_master = size < FLOAT32 or stage > 0  # ZeRO copies float32 weights too
    master, moments = FLOAT32 * share * has_master, 2 * FLOAT32 * share
    if offloads:
        parts["host"] += master + moments + FLOAT32 * share  # and float32 gradients
        return {**parts, "master_weights": 0, "moments": 0, "step": 0}
    step = (FLOAT32 + (size if size < FLOAT32 else 0)) * at_once * has_master
    if stage == 0 and not accumulates:
        step += size * count
    return {**parts, "master_weights": master, "moments": moments, "step": step}


def _fullest_partition(shapes: list[torch.Size], ranks: int) -> tuple[int, int]:
    """Elements of a rank's partition under ZeRO-1 and 2; and, on the fullest rank, of the weights that begin, end or
    lie in it: their gradients are kept whole."""
    share, owned = 0, [0] * ranks
    for decays in (True, False):  # DeepSpeed divides each of Trainer's two groups by itself
        numels = [shape.numel() for shape in shapes if (len(shape) > 1) == decays]
        partition = 2 * ceil(sum(numels) / (2 * ranks))
        share += partition
        start = 0
        for numel in numels:
            for rank in range(start // partition, (start + numel - 1) // partition + 1):
                owned[rank] += numel
            start += numel
    return share, max(owned)


def _element_size(recipe: Recipe) -> int:
    return 2 if recipe.dtype == "bfloat16" else FLOAT32


def plan(config: LlamaConfig, recipe: Recipe, ranks: int) -> dict[str, Any]:
    """The run in numbers: parameters, steps, sequences, tokens, FLOPs. A curriculum's are those of its last length.

    FLOPs are 6 per parameter and token, 12 per channel for each query and key that meet, and those of the memories'
    keys and values; what checkpointing runs again is not in them.
    """
    parameters = sum(shape.numel() for shape in parameter_shapes(config))
    heads, key_width = config.num_attention_heads, config.num_key_value_heads * config.head_dim
    accumulation = recipe.accumulation(ranks)
    each = passes(config, recipe, ranks)
    if recipe.curriculum:
        each = each[-1:]
    steps = [recipe.steps] if recipe.curriculum else [stage.steps for stage in recipe.stages or ()]
    stages, flops = [], 0
    for one, num_steps in zip(each, steps, strict=True):
        sequences = one.rows * ranks * accumulation
        length = sum(one.segments)
        pairs, remembered = 0, 0
        for number, tokens in enumerate(one.segments):
            pairs += tokens * (one.segments[0] if number else 0) + tokens * (tokens + 1) // 2
            remembered += tokens if number < len(one.segments) - 1 else 0
        per_layer = 12 * heads * config.head_dim * pairs + 6 * 2 * config.hidden_size * key_width * remembered
        flops += num_steps * sequences * (6 * parameters * length + config.num_hidden_layers * per_layer)
        stages.append({"total_length": length, "steps": num_steps, "sequences_per_step": sequences})
    return {
        "parameters": parameters,
        "ranks": ranks,
        "accumulation": accumulation,
        "sequences_at_once": each[-1].rows,
        "stages": stages,
        "tokens_per_step": max(stage["sequences_per_step"] * stage["total_length"] for stage in stages),
        "steps": sum(steps),
        "sequences": sum(stage["steps"] * stage["sequences_per_step"] for stage in stages),
        "tokens": sum(stage["steps"] * stage["sequences_per_step"] * stage["total_length"] for stage in stages),
        "flops": flops,
    }


def estimates(
    config: LlamaConfig, recipe: Recipe, deepspeed: dict[str, Any], ranks: Sequence[int]
) -> list[dict[str, Any]]:
    """One row of bytes for each number of ranks, or why the recipe does not run on so many."""
    rows: list[dict[str, Any]] = []
    for number in ranks:
        try:
            rows.append({"ranks": number, **estimate(config, recipe, deepspeed, number).as_dict()})
        except ValueError as error:
            rows.append({"ranks": number, "error": str(error)})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of `estimates` as text, in GiB a rank; parts that are nowhere needed are left out."""
    names = [name for row in rows for name in row if name not in ("ranks", "error")]
    names = [name for name in dict.fromkeys(names) if any(row.get(name) for row in rows)]
    names.sort(key=lambda name: ("total", "host").index(name) if name in ("total", "host") else -1)
    titles = {name: name.replace("_", " ") for name in names}
    lines = ["  ".join(["ranks", *titles.values()])]
    for row in rows:
        cells = [f"{row['ranks']:5}"]
        if "error" in row:
            cells.append(row["error"])
        else:
            cells += [f"{row[name] / GIB:{len(title)}.2f}" for name, title in titles.items()]
        lines.append("  ".join(cells))
    return "\n".join(lines)
