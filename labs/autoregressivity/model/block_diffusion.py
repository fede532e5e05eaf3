"""A folded Llama that writes a block of tokens at a time: masked diffusion within a block, recurrence over segments.

Segments are divided into blocks of `block_length` tokens. There are two streams with the same weights:

- The clean stream is the folded Llama: causal within the segment. Blocks see its keys and values as the text before
  them. Its outputs become the memory of the next segment.
- The noisy stream reads the tokens of each block, some of them masked. A noisy token sees the memory, the clean tokens
  of the segment's earlier blocks, and all noisy tokens of its own block.

As in the original Llama, a token's output predicts the next token. So a block's first token is always known, and its
last target isn't one of its inputs. With one-token blocks nothing is masked, and the model is autoregressive.

The objective is the absorbing-diffusion bound on a block's log likelihood (MDLM), with time integrated out. Of n
targets, k are masked, k uniform in 1..n, and each masked target has the weight n / k. The last predicted token isn't an
input, so the bound is looser than with all tokens as inputs.

Axes: B rows of a batch, N columns of an input, T tokens of a chunk, K keys, D hidden size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from condense.attention import AttentionMask
from condense.configuration import IGNORE_INDEX, CondenseConfig
from condense.embedding import as_hidden
from condense.execution.executor import run_layers
from condense.loss import next_labels
from condense.modeling import CondenseForCausalLM
from condense.outputs import CondenseOutput
from condense.segmentation import Chunk, UnpaddedBatch, on_device
from condense.state.memory import KeyValueState, Memory, TransientState

from .block_generation import generate_blocks
from .wrapper import cross_entropies

ATTENTION = ("eager", "sdpa")  # these accept any mask


class BlockDiffusionConfig(CondenseConfig):
    """A `CondenseConfig` with `block_length`, the number of tokens written at a time.

    Raises `ValueError` if the block does not divide the segment, or the model has a depth block.
    """

    model_type = "condense_block_diffusion"

    block_length: int = 16

    def check(self, num_layers: int | None = None) -> None:
        super().check(num_layers)
        if type(self.block_length) is not int or self.block_length < 1 or self.segment_length % self.block_length:
            raise ValueError(
                f"block_length={self.block_length!r} does not divide segment_length={self.segment_length}: choose a "
                "divisor of it."
            )
        if self.depth is not None:
            raise ValueError("a model with a depth block can't use block diffusion: convert the model with all layers.")


class Corruption(NamedTuple):
    """The masked inputs of the noisy stream, and the weight of each token's target in the bound."""

    masked_BN: torch.Tensor
    weight_BN: torch.Tensor

    @classmethod
    def draw(
        cls, target_BN: torch.Tensor, segment_length: int, block_length: int, generator: torch.Generator | None = None
    ) -> "Corruption":
        """Draws once per block: of its n targets, k are masked, k uniform in 1..n; the others have weight 0.

        `target_BN` is the token after each one, or `IGNORE_INDEX` if it is missing or given, as in a prompt. Such a
        token is never masked. Draws are made on the host.
        """
        batch_size, num_columns = target_BN.shape
        block_N = block_of(torch.arange(num_columns), segment_length, block_length)
        num_blocks = int(block_N[-1]) + 1
        is_target_BN = (target_BN != IGNORE_INDEX).cpu()
        count_BJ = torch.zeros(batch_size, num_blocks).index_add_(1, block_N, is_target_BN.float())
        number_BJ = (torch.rand(batch_size, num_blocks, generator=generator) * count_BJ).floor() + 1
        # Each target's place in a random order of its block, from 0; other tokens come after the targets.
        order_BN = torch.rand(batch_size, num_columns, generator=generator, dtype=torch.float64) / 2
        order_BN = block_N + order_BN.masked_fill(~is_target_BN, 0.75)
        place_BN = order_BN.argsort(dim=1).argsort(dim=1) - torch.searchsorted(block_N, block_N)
        hidden_BN = is_target_BN & (place_BN < number_BJ[:, block_N])
        weight_BN = torch.where(hidden_BN, (count_BJ / number_BJ)[:, block_N], 0.0)
        masked_BN = torch.zeros_like(hidden_BN)
        masked_BN[:, 1:] = hidden_BN[:, :-1] & (block_N[1:] == block_N[:-1])
        device = target_BN.device
        return cls(on_device(masked_BN, device), on_device(weight_BN, device))


def block_of(index_N: torch.Tensor, segment_length: int, block_length: int) -> torch.Tensor:
    """Returns the number of the block that each token of a text belongs to."""
    per_segment = segment_length // block_length
    return index_N // segment_length * per_segment + index_N % segment_length // block_length


@dataclass(frozen=True)
class VisibleKeys(AttentionMask):
    """A given mask [T, K], true if a query sees a key."""

    visible_TK: torch.Tensor | None = None

    @property
    def lower_right(self) -> bool:
        return False

    def boolean(self, num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
        assert self.visible_TK is not None and self.visible_TK.shape == (num_queries, num_keys)
        return on_device(self.visible_TK, device)


class RecordedKeyValues:
    """A layer's memory, which records the keys and values of the chunk that is added to it."""

    def __init__(self, memory: KeyValueState | None):
        self.memory_of_layer = memory
        self.seen: Memory | None = None

    def extend(self, key_RGTE, value_RGTE, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        memory = self.memory_of_layer
        self.seen = Memory(*((key_RGTE, value_RGTE) if memory is None else memory.extend(key_RGTE, value_RGTE, chunk)))
        return self.seen


class BlockDiffusionForCausalLM(CondenseForCausalLM):
    """`model(ids)` is the clean stream, a folded Llama; `model(ids, masked=...)` is the noisy one.

    Create it with `to_block_diffusion`. `generate` writes block by block. Training with blocks longer than one token
    does not train the clean stream to predict; blocks only see it.
    """

    config: BlockDiffusionConfig

    def __init__(self, config: BlockDiffusionConfig):
        super().__init__(config)
        self.mask_embedding = nn.Parameter(torch.zeros(config.hidden_size))

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, BlockDiffusionForCausalLM):
            nn.init.normal_(module.mask_embedding, std=self.config.initializer_range)

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Returns the implementation to use; raises `ValueError` if it accepts only its own masks."""
        if requested_attention in (None, "auto"):
            return "sdpa"
        if requested_attention not in ATTENTION:
            raise ValueError(
                f"attn_implementation={requested_attention!r} does not support block masks: choose one of "
                f"{', '.join(ATTENTION)}."
            )
        return requested_attention

    def forward(
        self, input_ids=None, masked: torch.Tensor | None = None, targets: torch.Tensor | None = None, **arguments: Any
    ) -> CondenseOutput:
        """Works like `CondenseForCausalLM.forward`. With `masked` [B, N], boolean, runs the noisy stream over whole
        texts without padding, with the inputs at `masked` replaced by a mask. It returns `logits` [B, N, V] of the
        token after each one. With `targets` [B, N] too, it returns no logits but the `loss` [n] of each
        `targets[targets != -100]`, and holds a bounded number of logits at a time.

        Raises `ValueError` for a mask at a block's first token, and for arguments of the clean stream only.
        """
        if masked is None:
            return super().forward(input_ids, **arguments)
        mask = arguments.pop("attention_mask", None)
        harmless = ("use_cache", "return_dict")
        given = [name for name, value in arguments.items() if value is not None and name not in harmless]
        if given or (mask is not None and not bool(mask.all())):
            raise ValueError(
                f"{', '.join(given) or 'padding'}: the noisy stream only accepts masked and input_ids of one length."
            )
        self._check_masked(input_ids, masked)
        hidden_BND = self.noisy_hidden(input_ids, masked)
        if targets is None:
            return CondenseOutput(logits=self.lm_head(hidden_BND))
        counted_BN = targets != IGNORE_INDEX
        return CondenseOutput(loss=cross_entropies(self.lm_head, hidden_BND[counted_BN], targets[counted_BN]))

    def _check_masked(self, input_ids: torch.Tensor, masked_BN: torch.Tensor) -> None:
        first_N = torch.arange(input_ids.shape[1]) % self.config.segment_length % self.config.block_length == 0
        if bool(masked_BN[:, first_N.to(masked_BN.device)].any()):
            raise ValueError("masked is true at the first token of a block, which is always known: set it to false.")
        if self.model.gradient_checkpointing and self.training:
            raise ValueError("block diffusion can't use gradient checkpointing: set gradient_checkpointing=false.")

    def noisy_hidden(self, input_ids_BN: torch.Tensor, masked_BN: torch.Tensor) -> torch.Tensor:
        """Returns the final hidden states [B, N, D] of the noisy stream."""
        model, (batch_size, num_columns) = self.model, input_ids_BN.shape
        layers: Any = model.layers
        clean_BND = as_hidden(model.embed_tokens(input_ids_BN))
        noisy_BND = torch.where(masked_BN[..., None], self.mask_embedding.to(clean_BND), clean_BND)
        batch, state = UnpaddedBatch(batch_size, num_columns, None), TransientState.empty(batch_size, self.config)
        builder = model.metadata_builder(clean_BND, batch, state)
        chunks, outputs = list(state.positions.chunks(batch.lengths)), []
        streams = batch.split(clean_BND, chunks), batch.split(noisy_BND, chunks)
        for chunk, clean_RTD, noisy_RTD in zip(chunks, *streams, strict=True):
            metadata = builder.build(chunk)
            key_values: list[Any] = [RecordedKeyValues(memory) for memory in state.key_values(chunk)]
            _, memories = run_layers(layers, clean_RTD, key_values, metadata)
            if metadata.writes_memory:
                state.write_memory(memories, chunk)
            mask = VisibleKeys(chunk, visible_TK=visible_to_blocks(chunk, self.config.block_length))
            output_RTD, _ = run_layers(
                layers,
                noisy_RTD,
                [seen_by_layer.seen for seen_by_layer in key_values],
                replace(metadata, mask=mask, writes_memory=False),
            )
            outputs.append(output_RTD)
        return model.norm(torch.cat(outputs, dim=1))

    def look_ahead(
        self, token_BT: torch.Tensor, masked_BT: torch.Tensor, offset: int, seen: Sequence[Memory | None]
    ) -> torch.Tensor:
        """Returns logits [B, T, V] of one block after the keys and values `seen` by each layer; stores nothing.

        `offset` is the place of the first token in its segment. Keys that layers see beyond these are memory.
        """
        model, (batch_size, width) = self.model, token_BT.shape
        layers: Any = model.layers
        num_seen = 0 if seen[0] is None else seen[0].key_RGKE.shape[2]
        batch, state = UnpaddedBatch(batch_size, width, None), TransientState.empty(batch_size, self.config)
        state.positions.offsets, state.positions.segments = [offset] * batch_size, [int(num_seen > offset)] * batch_size
        chunk = next(state.positions.chunks(batch.lengths))
        clean_BTD = as_hidden(model.embed_tokens(token_BT))
        noisy_BTD = torch.where(masked_BT[..., None], self.mask_embedding.to(clean_BTD), clean_BTD)
        builder = model.metadata_builder(clean_BTD, batch, state)
        mask = VisibleKeys(chunk, visible_TK=torch.ones(width, num_seen + width, dtype=torch.bool))
        metadata = replace(builder.build(chunk), mask=mask, writes_memory=False)
        hidden_BTD, _ = run_layers(layers, noisy_BTD, seen, metadata)
        return self.lm_head(model.norm(hidden_BTD))

    def generate(self, inputs=None, generation_config=None, **options: Any):
        """Generates like transformers' `generate`, but block by block: see `generate_blocks`."""
        return generate_blocks(self, inputs, generation_config, **options)


def likelihood_bound(
    model: Any, input_ids_BN: torch.Tensor, labels_BN: torch.Tensor, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Returns an unbiased estimate [B, N] of the bound on each next token's negative log likelihood, in nats.

    `model` is a `BlockDiffusionForCausalLM`, or a wrapper that trains one. The estimate of a single token is noisy: it
    is 0 if the draw shows the token. With one-token blocks it is the negative log likelihood itself. Tokens before the
    first label, such as a prompt, are given.

    Raises `ValueError` if an unlabelled token follows a labelled one: earlier targets would see it.
    """
    config = getattr(model, "module", model).config
    target_BN = next_labels(labels_BN)
    is_target_BN = target_BN[:, :-1] != IGNORE_INDEX
    if bool((is_target_BN[:, :-1] & ~is_target_BN[:, 1:]).any()):
        raise ValueError(
            "a token without a label (-100) follows a labelled token: within a block, targets would see it before "
            "it is written. Label all tokens after the prompt."
        )
    corruption = Corruption.draw(target_BN, config.segment_length, config.block_length, generator)
    hidden_BN = corruption.weight_BN > 0  # only these need logits
    loss_n = model(
        input_ids=input_ids_BN, masked=corruption.masked_BN, targets=target_BN.masked_fill(~hidden_BN, IGNORE_INDEX)
    ).loss
    bound_BN = loss_n.new_zeros(target_BN.shape)
    return bound_BN.masked_scatter(hidden_BN, loss_n * corruption.weight_BN[hidden_BN].to(loss_n.dtype))


def visible_to_blocks(chunk: Chunk, block_length: int) -> torch.Tensor:
    """Returns the mask [T, M + 2 T] for the keys [memory M ; clean T ; noisy T] of a chunk that begins its segment.

    A noisy token sees the memory, the clean tokens of earlier blocks, and the noisy tokens of its own.
    """
    assert chunk.uniform and chunk.offsets[0] == 0
    block_T = torch.arange(chunk.width) // block_length
    memory = torch.ones(chunk.width, chunk.memory_lengths[0], dtype=torch.bool)
    return torch.cat([memory, block_T < block_T[:, None], block_T == block_T[:, None]], dim=1)


def block_config(config: CondenseConfig, block_length: int | None) -> BlockDiffusionConfig:
    """Returns the configuration that `to_block_diffusion` makes of a folded one; raises `ValueError` as it does."""
    own = ("model_type", "architectures")
    fields = {name: value for name, value in config.to_dict().items() if name not in own}
    return BlockDiffusionConfig(**fields, block_length=config.segment_length if block_length is None else block_length)


def to_block_diffusion(model: CondenseForCausalLM, block_length: int | None = None) -> BlockDiffusionForCausalLM:
    """Makes a block diffusion model from a folded Llama, sharing its weights; the mask starts as the mean embedding.
    `block_length` is the segment by default.

    Raises `ValueError` if the block does not divide the segment, or the model can't have blocks.
    """
    if isinstance(model, BlockDiffusionForCausalLM) or not isinstance(model, CondenseForCausalLM):
        raise ValueError(f"{type(model).__name__} can't be converted: pass a CondenseForCausalLM.")
    made = BlockDiffusionForCausalLM(block_config(model.config, block_length))
    made.load_state_dict(model.state_dict(), strict=False, assign=True)
    if model.lm_head.weight is model.model.embed_tokens.weight:
        made.tie_weights()
    made = made.to(model.device)
    with torch.no_grad():
        embedding_VD = model.model.embed_tokens.weight
        made.mask_embedding = nn.Parameter(embedding_VD.mean(0).to(embedding_VD))
    made.generation_config = model.generation_config
    return made.train(model.training)
