"""The folded Llama.

Axes: B rows, R rows taking part in a step, N columns of an input, T tokens of a step, K logits kept,
D model width, S steps, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from .attention import Visibility
from .cache import FoldedCache
from .checks import check_input, check_unused, real_tokens
from .configuration import ATTENTION_IMPLEMENTATIONS, OWN_ATTENTION, CondenseConfig
from .durations import Timeline
from .execution import RUNS, schedule_for
from .execution.cuda_graph import can_decode, decode
from .files import use_default_mode
from .layers import CondenseDecoderLayer, RMSNorm, Step
from .loading import check_loading_report, own_report
from .memory import TransientMemory
from .readers import HiddenReader, LossReader
from .segmentation import Alignment, on_device


@dataclass
class CondenseOutput(CausalLMOutputWithPast):
    """With labels also, for each step of the call, the summed cross-entropy of the tokens that its own tokens
    predict (detached), and how many those are. A call without a cache has one step per segment.
    """

    segment_losses: torch.Tensor | None = None  # [S]
    segment_targets: torch.Tensor | None = None  # [S]


class CondenseModel(nn.Module):
    """Embedding, layers and final norm of a Llama; `steps` lays out how a batch passes through them."""

    def __init__(self, config: CondenseConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(CondenseDecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)

    def steps(
        self,
        alignment: Alignment,
        state: TransientMemory | FoldedCache,
        durations_BN: torch.Tensor | None,
        like: torch.Tensor,
        keeps_state: bool,
    ) -> Iterator[Step]:
        """One step per piece; `like` gives the tables' device and dtype."""
        timeline, span = state.timeline, self.config.bptt_segments
        tables: dict[tuple[int | float, int], tuple[torch.Tensor, torch.Tensor]] = {}

        def rotary(coordinates_RT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if timeline is not None or len(coordinates_RT) > 1:
                return self.rotary_emb(like, on_device(coordinates_RT, like.device))
            place = coordinates_RT[0, 0].item(), coordinates_RT.shape[1]
            if place not in tables:  # most segments begin at the same coordinate
                tables[place] = self.rotary_emb(like, on_device(coordinates_RT, like.device))
            return tables[place]

        for piece in state.cursor.pieces(alignment.lengths):
            log_duration_RK = None
            if timeline is None or durations_BN is None:
                # Where all rows stand at the same place, one row of coordinates serves them all.
                shown = 1 if piece.uniform else len(piece.rows)
                local_RT = torch.tensor(piece.filled[:shown])[:, None] + torch.arange(piece.width)
                coordinates_RT = local_RT + torch.tensor(piece.memory_lengths[:shown])[:, None]
            else:
                coordinates_RT, local_RT = timeline.advance(alignment.take(durations_BN, piece), piece)
                log_duration_RK = timeline.log_durations(piece.rows)
                if piece.uniform:
                    log_duration_RK = log_duration_RK[:, piece.visible_keys]
                accurate = torch.promote_types(like.dtype, torch.float32)
                log_duration_RK = on_device(log_duration_RK.to(accurate), like.device)
                timeline.roll([piece.rows[r] for r in piece.completed])
            yield Step(
                piece=piece,
                rotary=rotary(coordinates_RT),
                memory_rotary=rotary(local_RT),
                visibility=Visibility(piece, log_duration_RK),
                remembers=keeps_state or piece.starts[0] + piece.width < max(alignment.lengths),
                cut_R=tuple(span is not None and (count + 1) % span == 0 for count in piece.segments),
            )


class CondensePreTrainedModel(PreTrainedModel):
    config_class = CondenseConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["CondenseDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **options):
        """As in transformers, but a checkpoint must hold the model's weights and no others.

        Raises `ValueError` naming weights that are missing (transformers initialises them at random), unexpected, or
        of another shape. `ignore_mismatched_sizes=True` permits other shapes; `output_loading_info=True` returns the
        report and leaves the judgement to the caller.
        """
        source = pretrained_model_name_or_path
        if options.pop("output_loading_info", False):
            return super().from_pretrained(source, *model_args, output_loading_info=True, **options)
        ignore_shapes = options.pop("ignore_mismatched_sizes", False)
        with own_report():
            model, report = super().from_pretrained(
                source, *model_args, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
        check_loading_report(source, report, ignore_shapes)
        return model

    def save_pretrained(self, save_directory, *arguments, **options):
        """As in transformers; others may read the files as far as the process's umask allows it."""
        super().save_pretrained(save_directory, *arguments, **options)
        use_default_mode(Path(save_directory))


class CondenseForCausalLM(CondensePreTrainedModel, GenerationMixin):
    """A Llama whose every layer keeps its output for the last segment and attends to it in the next.

    Any Llama checkpoint loads as it is:

        model = CondenseForCausalLM.from_pretrained(llama, segment_length=512)

    Gradient checkpointing works by the segment: what waits for the backward pass are the memories. For very long
    texts they can wait on the host:

        model.gradient_checkpointing_enable({"use_reentrant": False, "offload_memories": True})
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _is_stateful = True  # the state cannot roll back, so methods of generation that undo tokens refuse
    accepts_loss_kwargs = True  # Trainer passes `num_items_in_batch`
    fixed_decoding = (
        False  # True reads new tokens by a step that never changes, on CUDA a graph: see execution/cuda_graph.py
    )

    def __init__(self, config: CondenseConfig):
        super().__init__(config)
        config.check()  # fields may have been set one by one since the config was made
        _check_attention(config._attn_implementation)
        self.model = CondenseModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.gradient_checkpointing = False
        self.post_init()

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Where none is asked for, "auto"."""
        _check_attention(requested_attention or "auto")
        if requested_attention is None or requested_attention in OWN_ATTENTION:
            return requested_attention or "auto"
        return super().get_correct_attn_implementation(requested_attention, is_init_check)

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: FoldedCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        durations: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
        return_dict: bool = True,
        **unused: Any,
    ) -> CondenseOutput:
        """Reads N further tokens of each row.

        input_ids [B, N], or inputs_embeds [B, N, D]. attention_mask [B, N] or [B, columns seen + N]: 0 at
        padding, on either side; it never shifts a row's segments. A column of padding after a row's last
        token answers with that token's logits. position_ids [B, N]: accepted where consecutive within
        the input, since attention depends on differences alone. durations [B, N] in units of a token.

        labels [B, N]: `loss` is the mean cross-entropy of each token's successor in its row over all labels
        other than -100, or their sum over `num_items_in_batch`; taken segment by segment, so logits are
        returned with it only when `logits_to_keep` asks for them. `segment_losses` [S] are its parts.

        logits_to_keep: None for all logits (none with labels), 0 for all, k for the last k columns.

        use_cache: return the state as `past_key_values`; by default in evaluation mode without labels.

        unused: what `generate` passes to every model and this one does not need, such as `tokenizer`.

        Raises `ValueError` for inputs that do not fit together, and for outputs that a folded model does not have.
        """
        check_unused(unused)
        cache = past_key_values
        tokens = check_input(
            self.config,
            input_ids,
            inputs_embeds,
            attention_mask,
            position_ids,
            cache,
            labels,
            durations,
            logits_to_keep,
        )
        batch_size, num_columns = tokens.shape[:2]
        if use_cache is None:
            use_cache = self.config.use_cache and labels is None and not self.training
        if use_cache and cache is None:
            cache = FoldedCache(self.config)
        checkpointing = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if checkpointing and cache is not None:
            raise ValueError("gradient checkpointing runs segments twice, a cache reads them once: use one of the two.")

        alignment = Alignment(batch_size, num_columns, real_tokens(attention_mask, num_columns))
        fixed = self.fixed_decoding and labels is None and durations is None
        if fixed and input_ids is not None and cache is not None and can_decode(self, cache, alignment):
            output = CondenseOutput(logits=decode(self, cache, input_ids), past_key_values=cache)
            return output if return_dict else output.to_tuple()
        state = TransientMemory(batch_size, self.config) if cache is None else cache.start(batch_size)
        timeline = state.timeline
        if durations is not None and timeline is None:
            timeline = Timeline(state.cursor, self.config.position_anchor)
        like = self.model.norm.weight if inputs_embeds is None else inputs_embeds
        if timeline is not None:
            durations = timeline.known_durations(durations, alignment)
            # A refused call must leave the state as it was: check all steps before the first one runs.
            timeline.rehearse(durations, alignment, state.cursor)
        before_BD = None if cache is None else cache.last_hidden_BD
        if before_BD is None:
            before_BD = like.new_zeros(batch_size, self.config.hidden_size)

        loss_reader = hidden_reader = None
        if labels is not None:
            loss_reader = LossReader(
                self.lm_head, self.config.vocab_size, alignment, labels, recompute=not checkpointing
            )
        if labels is None or logits_to_keep is not None:
            hidden_reader = HiddenReader(alignment, logits_to_keep or num_columns)

        def embed(step: Step) -> torch.Tensor:
            part = alignment.take(tokens, step.piece)
            return part if input_ids is None else self.model.embed_tokens(part)

        def consume(hidden_RTD: torch.Tensor, step: Step):
            normed_RTD = self.model.norm(hidden_RTD)
            if cache is not None:
                cache.note_last(normed_RTD, step.piece)
            return [reader and reader.read(normed_RTD, step.piece) for reader in (loss_reader, hidden_reader)]

        steps = self.model.steps(alignment, state, durations, like, keeps_state=cache is not None)
        self.config.check()  # fields may have been set since
        schedule = schedule_for(self, alignment.lengths, state.cursor, checkpointing)
        checkpoint = self._gradient_checkpointing_func if checkpointing else None
        state.timeline = timeline  # nothing can be refused from here on
        run = RUNS[schedule](self.model.layers, steps, state, embed, consume, checkpoint)
        pieces = [piece for piece, _ in run]

        loss = logits = segment_losses = segment_targets = None
        if loss_reader is not None:
            loss = loss_reader.finish([loss for _, (loss, _) in run], num_items_in_batch)
            segment_losses = torch.stack([loss.detach() for _, (loss, _) in run])
            segment_targets = torch.tensor([loss_reader.num_targets_of(piece) for piece in pieces])
        if hidden_reader is not None:
            logits = self.lm_head(hidden_reader.finish(pieces, [hidden for _, (_, hidden) in run], before_BD))
        if cache is not None:
            cache.end_call(num_columns)
        output = CondenseOutput(loss, logits, cache, segment_losses=segment_losses, segment_targets=segment_targets)
        return output if return_dict else output.to_tuple()

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs) -> None:
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r}: a folded model always keeps a "
                "FoldedCache, whose size is constant. Leave the option out."
            )
        if generation_config.use_cache is False:
            raise ValueError("use_cache=False would read the whole text again for every token: leave it out.")
        if model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = FoldedCache(self.config)

    def _set_gradient_checkpointing(self, enable=True, gradient_checkpointing_func=checkpoint, **kwargs) -> None:
        if getattr(gradient_checkpointing_func, "keywords", {}).get("use_reentrant"):
            raise ValueError(
                "use_reentrant=True would report a gradient once per use of a weight, here once per segment: pass "
                "gradient_checkpointing_kwargs={'use_reentrant': False}."
            )
        if getattr(gradient_checkpointing_func, "keywords", {}).get("offload_memories") is not None:
            keywords = dict(gradient_checkpointing_func.keywords)
            offload = keywords.pop("offload_memories")
            gradient_checkpointing_func = partial(gradient_checkpointing_func.func, **keywords)
            if offload:
                gradient_checkpointing_func = partial(_checkpoint_on_host, gradient_checkpointing_func)
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, **kwargs)


def _check_attention(implementation: str) -> None:
    if implementation not in ATTENTION_IMPLEMENTATIONS:
        known = ", ".join(ATTENTION_IMPLEMENTATIONS)
        raise ValueError(f"attn_implementation={implementation!r} is not known: choose one of {known}.")


def _checkpoint_on_host(checkpoint, function, *arguments):
    """What a segment was given, its memories, waits for the backward pass in the host's memory."""
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint(function, *arguments)
