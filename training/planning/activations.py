"""Bytes that autograd keeps for the backward pass, by kind of model.

Eager attention is counted with its scores, all other kinds without (sdpa as on a GPU).
"""

from collections.abc import Callable
from math import ceil

from transformers import LlamaConfig

from condense.embedding import EMBEDDED_TOKENS
from condense.families import family_of
from condense.kernels.cross_entropy import COPIED_LOGITS
from condense.loss import BLOCK_TOKENS, max_tokens
from condense.loss_gradient import part_tokens

from ..distillation import Distillation
from ..recipe import Recipe
from ..recipe.models import CondenseModel
from ..recipe.objectives import NextToken
from .passes import FLOAT32, Pass, Weights, element_size
from .stack import Stack, stack_of

ADJOINT_COPIES = 8.5  # measured (8 to 9): the state, its adjoint and the field's gradient, in one step of torchdiffeq
DISTILLED_LOGIT_COPIES = 7  # measured: logits and log-softmaxes of both models, products and gradients
LOGIT_COPIES = 3  # log-softmax, its gradient, and the gradient of the logits, all in float32


def kept_by_autograd(config: LlamaConfig, recipe: Recipe, a_pass: Pass, zero_stage: int = 0) -> dict[str, int]:
    """Returns the parts of a `MemoryEstimate` that autograd keeps. Raises `ValueError` if they are not estimated."""
    count = KEPT_BY_KIND.get(recipe.model.kind)
    if count is None:
        raise ValueError(f"the memory of model.kind={recipe.model.kind!r} is not estimated: start the run to see it.")
    if isinstance(recipe.objective, Distillation) and not recipe.objective.hidden_weight:
        return kept_by_distillation(config, recipe, a_pass, count(config, recipe, a_pass, zero_stage))
    if not isinstance(recipe.objective, NextToken):
        with_layers = " with a hidden_weight" if isinstance(recipe.objective, Distillation) else ""
        raise ValueError(
            f"the memory of objective.kind={recipe.objective.kind!r}{with_layers} is not estimated: start the run to "
            "see it."
        )
    return count(config, recipe, a_pass, zero_stage)


def kept_by_distillation(
    config: LlamaConfig, recipe: Recipe, a_pass: Pass, next_token: dict[str, int]
) -> dict[str, int]:
    """Adds the last hidden states of both models, and logits of both for a block of tokens, to the parts."""
    hidden = 2 * a_pass.tokens * config.hidden_size * element_size(recipe)
    at_once = min(a_pass.tokens, max_tokens(config.vocab_size))
    loss = DISTILLED_LOGIT_COPIES * FLOAT32 * config.vocab_size * at_once
    if recipe.gradient_checkpointing:  # the logits are gone before a segment is recomputed
        loss = max(0, loss - next_token["activations"])
    return next_token | {"activations": next_token["activations"] + hidden, "loss": loss}


def kept_by_stock(config: LlamaConfig, recipe: Recipe, a_pass: Pass, zero_stage: int) -> dict[str, int]:
    (length,), stack = a_pass.segments, stack_of(config)
    layer, gradients = (a_pass.rows * count(config, recipe, length, 0) for count in (_layer, _layer_gradients))
    block = a_pass.tokens * _block(config, recipe, stack)
    block_gradients = _block_gradients(config, recipe, stack, a_pass.tokens)
    loss = LOGIT_COPIES * FLOAT32 * config.vocab_size * a_pass.tokens
    if recipe.gradient_checkpointing:  # layers keep their inputs, and run again after the logits are freed
        inputs = config.num_hidden_layers * a_pass.tokens * config.hidden_size * element_size(recipe)
        later = max(layer + gradients, block + block_gradients)
    else:
        inputs, later = stack.runs * layer + block, max(gradients, block_gradients)
    activations = inputs + a_pass.tokens * _norm(config, recipe, "lm_head") + max(0, later - loss)
    return {"memories": 0, "activations": activations, "loss": loss}


def kept_by_condense(config: LlamaConfig, recipe: Recipe, a_pass: Pass, zero_stage: int) -> dict[str, int]:
    assert isinstance(recipe.model, CondenseModel)
    stack, width, size = stack_of(config), config.hidden_size, element_size(recipe)
    checkpointing, last = recipe.gradient_checkpointing, len(a_pass.segments) - 1
    at_once = _computes_loss_at_once(recipe, zero_stage)
    span = recipe.model.bptt_segments or getattr(config, "bptt_segments", None)
    # Checkpoints keep memories unchanged; otherwise attention keeps them, and eager repeats them for the query heads.
    repeated = recipe.attention == "eager" and not checkpointing
    heads = config.num_attention_heads if repeated else config.num_key_value_heads
    copies = stack.memories if checkpointing else stack.runs  # attention keeps one for each evaluation of a layer
    kept_memories, activations, memory = [], [], 0
    for number, tokens in enumerate(a_pass.segments):
        kept_memories.append(2 * a_pass.rows * copies * memory * heads * config.head_dim * size)
        kept_once, source, projected = _block(config, recipe, stack), 0, 0  # bytes of a token
        if not at_once:  # the final norm's; else the gradients of hidden states, below
            kept_once += _norm(config, recipe, "lm_head")
        if number < last:  # the norms before the next segment's keys and values, and of these keys
            cut = span is not None and (number + 1) % span == 0
            projected = stack.projected(cut)
            source = _copies(recipe, "k_proj", "v_proj") * width * size
            source += _head_norms(config, recipe, config.num_key_value_heads)
            if not cut and size < FLOAT32:  # a copy; in float32 it is the next layer's input
                source += width * FLOAT32
            elif not cut and projected:  # the last layer's output and means of input and output, which no layer reads
                kept_once += (at_once + stack.blended) * width * FLOAT32
        layers = stack.runs * _layer(config, recipe, tokens, memory)
        activations.append(a_pass.rows * (layers + tokens * (projected * source + kept_once)))
        memory = tokens
    first = a_pass.segments[0]
    group = recipe.model.checkpoint_segments if checkpointing else len(a_pass.segments)
    assert isinstance(group, int), "see with_checkpoint_segments"
    logits = _loss(config, recipe, a_pass, at_once)
    gradients = a_pass.rows * _layer_gradients(config, recipe, first, first if last else 0)
    later = max(gradients, _block_gradients(config, recipe, stack, a_pass.rows * first))
    kept = max(sum(activations[begin : begin + group]) for begin in range(0, len(activations), group))
    # Checkpoints run before the loss, or again after it.
    loss = max(0, logits - kept) if checkpointing else logits
    hidden_gradients = a_pass.tokens * width * size
    if not at_once:  # with checkpoints the last layer's outputs themselves, and normed for the head
        hidden_gradients *= 2 * checkpointing
    elif checkpointing and recipe.model.offload_memories:
        hidden_gradients = 0
    if checkpointing:
        kept_memories = kept_memories[::group]  # the memories before each group
    # Offloaded memories wait on the host, except those of the group that is computed.
    memories = max(kept_memories) if recipe.model.offload_memories else sum(kept_memories)
    return {
        "memories": memories,
        "activations": kept + max(0, later - loss) + (_sink(config, recipe, stack) if last else 0),
        "hidden_gradients": hidden_gradients,
        "loss": loss,
    }


def _loss(config: LlamaConfig, recipe: Recipe, a_pass: Pass, at_once: bool) -> int:
    """Returns the bytes of a folded model's logits, and of the tensors computed from them, that exist at a time."""
    size = element_size(recipe)
    block, part = _tokens_of_loss(config, a_pass, size, at_once)
    if not at_once:
        return part * config.vocab_size * FLOAT32 * LOGIT_COPIES
    # A block's hidden states wait. A part of them is normed; the norm's backward pass runs when the logits are gone.
    hidden, normed = 2 * block * config.hidden_size * size, part * config.hidden_size * FLOAT32
    logits = part * config.vocab_size * size + _copied_logits(config, part, size)
    return hidden + max(logits + 2 * normed, 6 * normed)


def _tokens_of_loss(config: LlamaConfig, a_pass: Pass, size: int, at_once: bool = True) -> tuple[int, int]:
    """Returns the tokens of a block of the loss, which has whole segments, and of a part that has logits at a time."""
    chunk = a_pass.rows * a_pass.segments[0]
    block = min(a_pass.tokens, chunk * ceil(BLOCK_TOKENS / chunk))
    most = max_tokens(config.vocab_size)
    return block, part_tokens(block, most, "cuda", size) if at_once else min(block, most)


def _copied_logits(config: LlamaConfig, part: int, size: int) -> int:
    """Returns the bytes of float32 copies of logits, which their gradients replace."""
    return FLOAT32 * min(part * config.vocab_size, COPIED_LOGITS) * (size < FLOAT32)


def _is_read(recipe: Recipe, *linear: str) -> bool:
    """Returns whether the gradient of one of these linear maps, or of its adapter, needs its input."""
    return recipe.lora is None or any(name in recipe.lora.targets for name in linear)


def _copies(recipe: Recipe, *linear: str) -> int:
    """Returns how many copies of a token a norm keeps: normalized, for its weight; scaled, for these linear maps."""
    return (recipe.lora is None) + _is_read(recipe, *linear)


def _norm(config: LlamaConfig, recipe: Recipe, *linear: str) -> int:
    """Returns the bytes that a norm before these linear maps keeps of a token: its input in float32, and copies."""
    return (FLOAT32 + _copies(recipe, *linear) * element_size(recipe)) * config.hidden_size


def _head_norms(config: LlamaConfig, recipe: Recipe, heads: int) -> int:
    """Returns the bytes that norms of queries and keys keep of a token: their input in float32, and it normalized."""
    kept = (FLOAT32 + (recipe.lora is None) * element_size(recipe)) * heads * config.head_dim
    return kept if family_of(config).query_key_norms else 0


def _block(config: LlamaConfig, recipe: Recipe, stack: Stack) -> int:
    """Returns the bytes that a depth block keeps of a token, besides its runs of a layer."""
    size, width = element_size(recipe), config.hidden_size
    scaled = FLOAT32 * width  # what alpha multiplies
    if not stack.width:
        return stack.kept * scaled
    if stack.is_adjoint:  # the states at both ends
        return 2 * FLOAT32 * width
    return stack.kept * (_norm(config, recipe) + 2 * size * stack.width + scaled)


def _sink(config: LlamaConfig, recipe: Recipe, stack: Stack) -> int:
    """Returns the bytes that autograd keeps of a sink, beside checkpoints too: of one token in all layers. Of the last
    layer only keys and values are used."""
    if getattr(config, "sink_token_id", None) is None:
        return 0
    below = (stack.runs - 1) * _layer(config, recipe, 1, 0) + _block(config, recipe, stack)
    return below + _norm(config, recipe, "k_proj", "v_proj")


def _block_gradients(config: LlamaConfig, recipe: Recipe, stack: Stack, tokens: int) -> int:
    """Returns the bytes that an MLP field's backward pass adds: gradients beside softplus, or the adjoint's state."""
    if stack.is_adjoint:
        return int(ADJOINT_COPIES * FLOAT32 * 2 * config.hidden_size * (stack.width + tokens))
    return 2 * element_size(recipe) * stack.width * tokens


def _layer(config: LlamaConfig, recipe: Recipe, tokens: int, memory: int) -> int:
    """Returns the bytes that autograd keeps of a layer for one row, without a memory that is counted separately."""
    size, heads, keys = element_size(recipe), config.num_attention_heads, memory + tokens
    norms = _norm(config, recipe, "q_proj", "k_proj", "v_proj") + _norm(config, recipe, "gate_proj", "up_proj")
    norms += _head_norms(config, recipe, heads + config.num_key_value_heads)
    # The gate, its SiLU and up, and their product.
    mlp = (3 + _is_read(recipe, "down_proj")) * size * config.intermediate_size
    adapters = _adapters(config, recipe)
    query_and_output = 2 * size * heads * config.head_dim
    own_keys = keys if recipe.gradient_checkpointing else tokens
    if recipe.attention == "eager":
        keys_and_values = 2 * own_keys * size * heads * config.head_dim
        score = FLOAT32 + (size if size < FLOAT32 else 0)  # softmax, and its copy in the values' type
        if recipe.attention_dropout:
            score += 1 + (size if size == FLOAT32 else 0)
        scores = heads * tokens * keys * score
    else:
        keys_and_values = 2 * own_keys * size * config.num_key_value_heads * config.head_dim
        scores = heads * tokens * FLOAT32  # their sums
    return tokens * (norms + mlp + adapters + query_and_output) + keys_and_values + scores


def _adapters(config: LlamaConfig, recipe: Recipe) -> int:
    """Returns the bytes that a layer's adapters keep of a token: B's input, and with dropout a mask and A's input."""
    if recipe.lora is None:
        return 0
    lora, size = recipe.lora, element_size(recipe)
    widths = {"o_proj": config.num_attention_heads * config.head_dim, "down_proj": config.intermediate_size}
    dropped = sum(widths.get(target, config.hidden_size) for target in lora.targets) if lora.dropout else 0
    return size * lora.rank * len(lora.targets) + (size + 1) * dropped


def _layer_gradients(config: LlamaConfig, recipe: Recipe, tokens: int, memory: int) -> int:
    """Returns the bytes that a layer's gradients add, for one row: of the MLP's inner states, or of the scores."""
    inner = element_size(recipe) * tokens * (2 * config.intermediate_size + config.hidden_size)
    scores = FLOAT32 * tokens * (tokens + memory) * config.num_attention_heads
    return max(inner, scores if recipe.attention == "eager" else 0)


def summed_gradients(
    config: LlamaConfig,
    recipe: Recipe,
    a_pass: Pass,
    weights: Weights,
    freed_at_once: bool,
    kept: dict[str, int],
    reduce_buckets: int,
    zero_stage: int,
) -> int:
    """Returns the bytes of gradients at the end of the backward pass, less the activations that are freed by then.

    A weight's gradients are summed over its uses in all segments, in float32 (`condense/shared_weights.py`), before
    DeepSpeed receives them. No ZeRO stage divides them earlier. If `freed_at_once`, the gradient of a weight with a
    single use is freed at once.
    """
    at_once = _computes_loss_at_once(recipe, zero_stage) and recipe.lora is None
    forward = _head_gradients(config, recipe, a_pass, weights) if at_once else 0
    if recipe.gradient_checkpointing:  # no group's activations exist while logits do
        forward -= max(0, kept["activations"] - _loss(config, recipe, a_pass, at_once))
    numels, size, segments = [shape.numel() for shape in weights.trained], element_size(recipe), len(a_pass.segments)
    largest, tied = max(numels), config.tie_word_embeddings
    if segments > 1 and at_once:
        # The backward pass begins with the sum of the head's gradients, and its product with the gradient of the loss.
        # In its last segment the sums of all layers exist. At the end the layers' gradients exist, and the head's. A
        # tied embedding's rows are added to the head's; an untied one has a gradient, and a sum if rows can't wait.
        head, layers = size * largest, sum(numels) - largest * (1 if tied else 2)
        rows_wait = size < FLOAT32 and a_pass.tokens < config.vocab_size
        has_parts = _tokens_of_loss(config, a_pass, element_size(recipe))[1] < a_pass.tokens  # their sum is in float32
        begin = (FLOAT32 * largest if has_parts else head) + head
        # In float32, autograd adds a tied embedding's gradient to the head's.
        embedded = a_pass.tokens > EMBEDDED_TOKENS and not (rows_wait or (tied and size == FLOAT32))
        layer = a_pass.rows * _layer_gradients(config, recipe, a_pass.segments[0], a_pass.segments[0])
        last_segment = kept["activations"] * a_pass.segments[-1] // sum(a_pass.segments)
        summed = FLOAT32 * (layers + largest * embedded) + head
        if rows_wait:
            at_end = size * layers + head * (1 if tied else 2)
        else:
            at_end = size * layers + 2 * head + (FLOAT32 * largest if size < FLOAT32 else head * tied)
        logits = max(0, kept["loss"] - reduce_buckets)
        if recipe.gradient_checkpointing:
            assert isinstance(recipe.model, CondenseModel) and isinstance(recipe.model.checkpoint_segments, int)
            of_layers = FLOAT32 * layers + head
            backward = of_layers + FLOAT32 * largest * embedded
            if recipe.model.checkpoint_segments >= segments:  # otherwise a later group is computed beside all sums
                backward = max(of_layers, backward - last_segment)
            # The group's own gradients are among the activations unless the logits are larger.
            later = max(layer, _block_gradients(config, recipe, stack_of(config), a_pass.rows * a_pass.segments[0]))
            backward = max(backward - max(0, logits - later), at_end - kept["activations"] - logits)
        else:
            backward = max(begin + layer, summed + layer - last_segment, at_end - kept["activations"]) - logits
    elif segments > 1:
        # Another gradient of the head, and in float32 the sum with it, exist after the logits are freed.
        another = max(0, (2 if size == FLOAT32 else 1) * size * largest - kept["loss"])
        freed = 0 if recipe.gradient_checkpointing else kept["activations"] // segments
        backward = FLOAT32 * sum(numels) + another - freed
    else:
        length, tied_bytes = a_pass.segments[0], size * largest * (tied and recipe.lora is None)
        first_layer = a_pass.rows * sum(part(config, recipe, length, 0) for part in (_layer, _layer_gradients))
        # The head's gradient waits for the embedding's; at the end both exist, and their sum.
        summed = (tied_bytes if freed_at_once else size * sum(numels)) + max(2 * tied_bytes, first_layer)
        backward = summed - kept["activations"] - kept["loss"]
    return max(0, forward, backward)


def _head_gradients(config: LlamaConfig, recipe: Recipe, a_pass: Pass, weights: Weights) -> int:
    """Returns the bytes that the gradients of a head add to the most that `_loss` counts.

    Their sum exists beside the logits of all parts except the first. The product with a part exists beside the
    gradients of its logits. In float32 it is added to the sum as it is computed.
    """
    size, largest = element_size(recipe), max(shape.numel() for shape in weights.trained)
    _, part = _tokens_of_loss(config, a_pass, element_size(recipe))
    summed = FLOAT32 * largest * (part < a_pass.tokens)
    gone = _copied_logits(config, part, size)
    product = size * largest * (size < FLOAT32 or not summed)
    return max(summed, summed + product - gone)


def _computes_loss_at_once(recipe: Recipe, zero_stage: int) -> bool:
    """Returns whether the forward pass computes the loss's gradients (`condense/loss_gradient.py`)."""
    of_head = recipe.lora is not None and "lm_head" in recipe.lora.targets
    ordinary = isinstance(recipe.model, CondenseModel) and not isinstance(recipe.objective, Distillation)
    return ordinary and not of_head and zero_stage < 3


KEPT_BY_KIND: dict[str, Callable[[LlamaConfig, Recipe, Pass, int], dict[str, int]]] = {
    "condense": kept_by_condense,
    "stock": kept_by_stock,
}
