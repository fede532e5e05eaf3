"""A Llama with segment recurrence, called a folded Llama.

For segments, chunks and calls see `segmentation`; for the state between them see `memory` and `cache`.

Axes: B rows of a batch, R rows of a chunk, N columns of an input (padding included), T tokens of a chunk, D hidden
size.
"""

from copy import deepcopy
from typing import Any, cast

import torch
from torch import nn

from .attention import AttentionMetadataBuilder
from .call import Call
from .checks import check_attention_name, check_export, check_unused
from .configuration import CondenseConfig
from .decoder_stack import DecoderBlock, decoder_stack
from .embedding import ChunkEmbedder
from .execution import default_checkpoint_segments, is_sharded, make_executor, schedule_for
from .execution.checkpointing import CheckpointFunction
from .execution.static_decoding import can_decode, decode, fixed_decoding_of
from .generation.mixin import FoldedGenerationMixin
from .hub.pretrained_model import CondensePreTrainedModel
from .hub.source_name import name_as_in_memory
from .layers import RMSNorm
from .ops.linear import apply_linear
from .ops.shared_weights import share_weights
from .outputs import CondenseModelOutput, CondenseOutput, LayerOutputs, OutputAccumulator
from .packing import PackedDocuments, find_documents
from .rotary import RotaryEmbedding
from .segmentation import UnpaddedBatch
from .sinks import begins_memory, compute_sinks
from .state.cache import FoldedCache
from .state.cache_argument import CACHE, takes_past_key_values
from .state.memory import RecurrentState, TransientState
from .token_inputs import TokenInputs


class PreparedCall:
    """A call that a model around a `CondenseModel` runs there. `is_sharded`: see `execution.is_sharded`.

    Not a tuple or a dataclass: hooks of a module look for tensors and modules in these, and move or watch them.
    """

    def __init__(self, call: Call, accumulated: OutputAccumulator, is_sharded: bool):
        self.call, self.accumulated, self.is_sharded = call, accumulated, is_sharded

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "PreparedCall":
        return PreparedCall(self.call.to(device, non_blocking), self.accumulated, self.is_sharded)


class CondenseModel(CondensePreTrainedModel):
    """Embedding, decoder layers and final norm of a Llama, with recurrence over segments."""

    _keys_to_ignore_on_load_unexpected = [r"lm_head\..*"]  # of a checkpoint with a head

    def __init__(self, config: CondenseConfig):
        super().__init__(config)
        config.check()  # fields may have been set one by one since the config was made
        check_attention_name(config._attn_implementation)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = decoder_stack(config)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.checkpoint_segments: int | None = None  # None: as many as make good use of a graph, otherwise 1
        self.post_init()

    @property
    def layers_in_use(self) -> nn.ModuleList:
        """Returns all layers, or fewer while early-exit drafting has reduced `config.num_hidden_layers`."""
        number = self.config.num_hidden_layers
        return self.layers if number == len(self.layers) else self.layers[:number]

    @takes_past_key_values
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: FoldedCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        durations: torch.Tensor | None = None,
        control: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        _prepared: "PreparedCall | None" = None,
        **unused: Any,
    ) -> Any:
        """Returns the final hidden states [B, N, D] of N further tokens of each row; see `CondenseForCausalLM.forward`.

        A model around this one runs its call here, because this model's hooks must be called: FSDP's hooks gather its
        weights.
        """
        if _prepared is not None:
            self.run(_prepared)
            return _prepared.accumulated.tensors()  # FSDP gathers the weights again when their gradients come
        given = {
            "input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids,
            "cache": cache, "inputs_embeds": inputs_embeds, "durations": durations,
            "control": control, "use_cache": use_cache, "output_hidden_states": output_hidden_states,
        }  # fmt: skip
        check_export(given)
        if (documents := find_documents(given | unused)) is not None:
            output = documents.pack_output(self.forward(**documents.unpack_arguments(given | unused)))
            return output if return_dict is not False else output.to_tuple()
        check_unused(unused, position_ids, cache)
        call = Call.from_arguments(self, given)
        previous_BD = call.previous_last_hidden(self.norm.weight, self.config.hidden_size)
        with LayerOutputs(self, call, output_hidden_states) as layer_outputs:
            accumulated = OutputAccumulator(self.norm, None, 0, call, None, call.batch.num_columns)
            self.run(PreparedCall(call, accumulated, is_sharded(self)))
        last_BND = accumulated.last_hidden(previous_BD)
        output = CondenseModelOutput(last_BND, call.cache, layer_outputs.hidden_states(previous_BD))
        output.function_evaluations = call.token_inputs.evaluations.collect()
        call.end()
        return output if return_dict is not False else output.to_tuple()

    def run(self, prepared: "PreparedCall") -> None:
        """Runs the call chunk by chunk. The chunks' outputs are added to `accumulated`, in order."""
        call, accumulated = prepared.call, prepared.accumulated
        inputs, batch, cache = call.inputs, call.batch, call.cache
        like = call.like_hidden(self.norm.weight)
        new = TransientState.empty(batch.batch_size, self.config)
        state = new if cache is None else cache.start(batch.batch_size, like)
        timeline = call.token_inputs.start(state, self.config, like)
        checkpointing = call.checkpoint_function is not None
        segments = (call.checkpoint_segments or 1) if checkpointing else None
        layers = self.layers_in_use
        embedding = getattr(self, "embed_tokens", None)
        embed = ChunkEmbedder(embedding, inputs, batch, deepcopy(state.positions).chunks(batch.lengths))
        sharded = prepared.is_sharded or is_sharded(self)
        schedule = schedule_for(
            self.config, layers, batch.lengths, state, segments, timeline is not None, embed.dtype, sharded
        )
        state.timeline = timeline  # all checks are done: the state may change

        if call.checkpoint_segments is None and schedule.stack is not None:
            cell_tokens = batch.batch_size * self.config.segment_length
            segments = default_checkpoint_segments(self.config, cell_tokens, like.element_size())
        executor = make_executor(schedule, layers, state, embed, call.checkpoint_function, segments or 1)
        recomputed = [one for one in (layers, embedding) if one is not None] if checkpointing else []
        with share_weights(recomputed, sums=not state.positions.is_one_chunk(batch.lengths)):
            metadata = self.metadata_builder(like, batch, state, call.token_inputs, cache is not None, checkpointing)
            for chunk in state.positions.chunks(batch.lengths):
                accumulated.add(executor.submit(metadata.build(chunk)))
            accumulated.add(executor.finish())
            accumulated.finish()

    def checkpoint_function(self, cache: FoldedCache | None) -> CheckpointFunction | None:
        """Returns the function of gradient checkpointing; None if it is off."""
        if not (self.gradient_checkpointing and self.training and torch.is_grad_enabled()):
            return None
        if cache is not None:
            raise ValueError("gradient checkpointing runs segments twice, a cache reads them once: use one of the two.")
        return self._gradient_checkpointing_func

    def metadata_builder(
        self,
        like: torch.Tensor,
        batch: UnpaddedBatch,
        state: RecurrentState,
        token_inputs: TokenInputs | None = None,
        has_cache: bool = False,
        checkpointing: bool = False,
    ) -> AttentionMetadataBuilder:
        """Returns the builder of the chunks' attention metadata; `like` gives device and dtype of rotary tables.

        Computes the sinks if a chunk writes the beginning of a memory.
        """
        inputs = TokenInputs(batch, like.device) if token_inputs is None else token_inputs
        span, shares_masks = self.config.bptt_segments, not (checkpointing or torch.compiler.is_exporting())
        sinks = compute_sinks(self, like) if begins_memory(state.positions, batch.lengths, has_cache) else None
        return AttentionMetadataBuilder(
            self.rotary_emb, like, batch, state, inputs, span, has_cache, shares_masks, sinks
        )

    def replace_layers(self, first: int, end: int, block: DecoderBlock) -> None:
        """Puts one block, an `nn.Module`, in place of layers `first` to `end - 1`.

        The block works unchanged with caches, padding, gradient checkpointing and generation, under the sequential
        schedule. If it returns a `Memory`, it receives it as `key_values` in the next segment. Sets
        `config.num_hidden_layers`, so give each model its own config. Existing caches become invalid: a cache has one
        entry for each member of the stack. `from_pretrained` does not know the block.

        Raises `ValueError` if the range is not within the stack.
        """
        if not 0 <= first < end <= len(self.layers):
            raise ValueError(f"layers {first} to {end}: choose 0 <= first < end <= {len(self.layers)}.")
        self.layers = nn.ModuleList([*self.layers[:first], cast(nn.Module, block), *self.layers[end:]])
        self.config.num_hidden_layers = len(self.layers)
        if isinstance(shares := self.config.memory_share, list):
            self.config.memory_share = [*shares[:first], shares[end - 1], *shares[end:]]
        name_as_in_memory(self, self.config.name_or_path, "changed")


class CondenseForCausalLM(CondensePreTrainedModel, FoldedGenerationMixin):
    """A Llama in which every layer stores its output for the last segment and attends to it in the next.

    Any Llama checkpoint loads as it is:

        model = CondenseForCausalLM.from_pretrained(llama, segment_length=512)

    Gradient checkpointing works segment by segment and stores the memories. For very long texts, host memory can hold
    them:

        model.gradient_checkpointing_enable({"use_reentrant": False, "offload_memories": True})
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _is_stateful = False  # permits assisted decoding: FoldedCache.crop removes rejected tokens
    accepts_loss_kwargs = True  # Trainer passes `num_items_in_batch`
    # True: Trainer's evaluation gets all logits with the loss, for its metrics, as with a Llama. False: the
    # logits of long texts are never all in memory.
    logits_in_evaluation = True
    # True: new tokens run with static shapes, on CUDA as a graph; "compiled": as compiled code, too. See
    # execution/static_decoding.py.
    fixed_decoding: bool | str = False

    def __init__(self, config: CondenseConfig):
        super().__init__(config)
        self.model = CondenseModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @takes_past_key_values
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: FoldedCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        durations: torch.Tensor | None = None,
        control: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
        return_dict: bool | None = None,
        **unused: Any,
    ) -> CondenseOutput:
        """Reads N further tokens of each row.

        input_ids [B, N], or inputs_embeds [B, N, D]. attention_mask [B, N] or [B, columns seen + N]: 0 at padding, on
        either side; padding never shifts a row's segments. The host reads it, without waiting if it lies there. A
        column of padding after a row's last token has that token's logits. position_ids [B, N]: each 0 within a row
        begins another document, which is read as a text of its own. Otherwise they must be consecutive, and have no
        effect, because attention depends only on differences. durations [B, N], not negative: the length of each token
        on the position axis, which is also its weight in attention; 1.0, the default, is an ordinary token.

        control [B, C] or [B, N, C]: the control of each text or of each token, in a model with a depth block
        (`condense.labs.depth`); zeros if not given. `function_evaluations` [B, N] are the evaluations of the block's
        field at each token.

        labels [B, N]: `loss` is the cross-entropy of next-token prediction (labels are shifted here): the mean over all
        labels other than -100 or, with `num_items_in_batch`, the sum divided by it. It is computed after the last
        layer, for blocks of about 4,096 tokens, so logits are returned with it only if `logits_to_keep` requests them,
        or in evaluation by Trainer, which passes `num_items_in_batch` without gradients, unless `logits_in_evaluation`
        is False. Its sums over the chunks are in `segment_losses`. Its gradients are computed with it, also under
        gradient checkpointing, and then second derivatives (`create_graph=True`) are refused. Autograd computes them
        if the head has hooks or is not a plain linear map, and in other cases (docs/performance.md, "The loss").

        logits_to_keep: None for all logits (with labels: see there), 0 for all, k for the last k columns.

        cache: the state to continue from, also under the name `past_key_values`. use_cache: return the state (before
        transformers 5.24 as `past_key_values`); default `config.use_cache`; False in training or with labels.

        output_hidden_states: also return `hidden_states`, the L + 1 tensors [B, N, D] before the first layer and after
        each layer, the last of them after the final norm. Layers then run sequentially.

        unused: arguments that `generate` passes to every model and this one does not need, such as `tokenizer`.

        Raises `ValueError` for inputs whose shapes, ids or cache do not fit together or to the model, for gradient
        checkpointing with a cache or with `output_hidden_states`, for several documents in a row with a cache or
        `logits_to_keep`, and for `output_attentions`.
        """
        given = {
            "input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids,
            "cache": cache, "inputs_embeds": inputs_embeds, "durations": durations,
            "control": control, "use_cache": use_cache, "output_hidden_states": output_hidden_states,
        }  # fmt: skip
        more = {"labels": labels, "logits_to_keep": logits_to_keep, "num_items_in_batch": num_items_in_batch}
        check_export(given | more)
        if (documents := find_documents(given | more | unused)) is not None:
            output = self._forward_documents(documents, given, more | unused)
        else:
            check_unused(unused, position_ids, cache)
            output = self._forward_texts(given, labels, logits_to_keep, num_items_in_batch)
        return output if return_dict is not False else output.to_tuple()

    def _forward_texts(
        self,
        given: dict[str, Any],
        labels: torch.LongTensor | None,
        logits_to_keep: int | None,
        num_items_in_batch: int | torch.Tensor | None,
    ) -> CondenseOutput:
        """Computes the output of at most one text in each row; `given` are the arguments of the model without head."""
        evaluates = self.logits_in_evaluation and not (self.training or torch.is_grad_enabled())
        if labels is not None and num_items_in_batch is not None and evaluates:  # Trainer calls
            logits_to_keep = logits_to_keep or 0
        call = Call.from_arguments(self.model, given, labels, logits_to_keep)
        layer_outputs = LayerOutputs(self.model, call, given["output_hidden_states"])
        if labels is None and not layer_outputs.requested and (decoded := self._decode_static(given, call)) is not None:
            return decoded
        previous_BD = call.previous_last_hidden(self.model.norm.weight, self.config.hidden_size)
        num_kept = (logits_to_keep or call.batch.num_columns) if labels is None or logits_to_keep is not None else None
        with layer_outputs:
            accumulated = OutputAccumulator(
                self.model.norm, self.lm_head, self.config.vocab_size, call, labels, num_kept
            )
            accumulated.replace_tensors(self.model(_prepared=PreparedCall(call, accumulated, is_sharded(self))))
        output = accumulated.build_output(previous_BD, num_items_in_batch)
        setattr(output, CACHE, call.cache)
        output.hidden_states = layer_outputs.hidden_states(previous_BD)
        output.function_evaluations = call.token_inputs.evaluations.collect()
        call.end()
        return output

    def _decode_static(self, given: dict[str, Any], call: Call) -> CondenseOutput | None:
        """Reads a new token of each row in a step of fixed shape; None if `fixed_decoding` is off or does not apply.

        The call must be without labels and `output_hidden_states`.
        """
        cache, input_ids = call.cache, given["input_ids"]
        if cache is None or input_ids is None or given["durations"] is not None:
            return None
        if not (fixed_decoding_of(self, cache) and can_decode(self, cache, call.batch)):
            return None
        return CondenseOutput(logits=decode(self, cache, input_ids), **{CACHE: cache})

    def _forward_documents(
        self, documents: PackedDocuments, given: dict[str, Any], more: dict[str, Any]
    ) -> CondenseOutput:
        """Returns the output of several documents in a row, each read as a separate text."""
        unpacked = documents.unpack_arguments(given | more)
        if more["labels"] is not None:
            return documents.pack_output(self.forward(**unpacked))
        # The head sees no padding between documents.
        read = documents.pack_output(self.model(**{name: unpacked[name] for name in given}))
        output = CondenseOutput(
            logits=apply_linear(self.lm_head, read.last_hidden_state), hidden_states=read.hidden_states
        )
        output.function_evaluations = read.function_evaluations
        return output
