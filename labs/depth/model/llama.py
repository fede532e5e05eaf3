"""Implements a stock Llama with a depth block: full attention over the text, without segments and memory.

It has the folded hybrid's weights under the same names, so each loads the other's checkpoints.

Axes: B rows of a batch, N columns of an input (padding included), C components of the control.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Cache, LlamaConfig, LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from condense.configuration import CondenseConfig
from condense.control import (
    check_control,
    check_control_of_prompt,
    control_of_columns,
    drafts_with_control,
    zero_control,
)
from condense.families import family_of
from condense.generation.mixin import NoContinuousBatching
from condense.hub.conversion import with_weights_of
from condense.hub.peft_support import add_default_targets
from condense.hub.remote_code import RemoteCodeConfig
from condense.hub.transformers_private import LlamaAttention, LlamaDecoderLayer
from condense.laboratories import DEPTH_LLAMA
from condense.modeling import CondenseForCausalLM
from condense.state.cache_argument import CACHE, CACHE_NAMES, rename_cache, takes_past_key_values

from .block import build_field
from .settings import DepthSettings
from .stock import StockDepthBlock


class DepthLlamaConfig(RemoteCodeConfig, LlamaConfig):
    """A `LlamaConfig` with `depth`, the settings of the block; `num_hidden_layers` counts the block."""

    model_type = DEPTH_LLAMA
    keys_to_ignore_at_inference = [*CACHE_NAMES, "function_evaluations"]

    depth: dict | None = None

    @property
    def control_size(self) -> int:
        """The number of control components that the model accepts."""
        return self.depth["control_size"] if self.depth else 0

    def to_dict(self) -> dict[str, Any]:
        """Serializes as in transformers; PEFT then knows the default targets of the model."""
        add_default_targets(self.model_type)
        return super().to_dict()


@dataclass
class DepthLlamaOutput(CausalLMOutputWithPast):
    """`function_evaluations` [B, N] are the evaluations of the block's field at each token, 0 at padding."""

    function_evaluations: torch.Tensor | None = None


class DepthLlamaModel(LlamaModel):
    config: DepthLlamaConfig
    layers: nn.ModuleList
    _no_split_modules = ["LlamaDecoderLayer", "StockDepthBlock"]
    _can_record_outputs = {"hidden_states": [LlamaDecoderLayer, StockDepthBlock], "attentions": LlamaAttention}

    def __init__(self, config: DepthLlamaConfig):
        settings = check_stock(config.depth, config.num_hidden_layers)
        super().__init__(config)
        block = make_stock_block(config, settings)
        layers: list[Any] = list(self.layers)
        after = layers[settings.position + 1 :]
        self.layers = nn.ModuleList([*layers[: settings.position], block, *after])
        # Layers with attention use the first slots of a cache, and the last one stays empty: the cache reads the
        # length of a text from the first.
        for layer in after:
            layer.self_attn.layer_idx -= 1
        self.post_init()


class DepthLlamaForCausalLM(NoContinuousBatching, LlamaForCausalLM):
    """A stock Llama with a depth block in place of some layers; create it with `convert_to_depth`."""

    config: DepthLlamaConfig

    def __init__(self, config: DepthLlamaConfig):
        LlamaPreTrainedModel.__init__(self, config)  # super() would first build a stock Llama and discard it
        self.model = DepthLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @property
    def depth_block(self) -> StockDepthBlock:
        return next(layer for layer in self.model.layers if isinstance(layer, StockDepthBlock))

    @takes_past_key_values
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        control: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> DepthLlamaOutput:
        """Runs like the stock Llama. control [B, C] or [B, N, C]: the control of each text, or of each token of this
        call; zeros by default. Raises `ValueError` for a control that does not fit.
        """
        inputs = inputs_embeds if input_ids is None else input_ids
        if inputs is not None and control is not None:
            check_control(self.config.control_size, control, (inputs.shape[0], inputs.shape[1]))
        elif inputs is not None and self.config.control_size:
            control = zero_control(self.config.control_size, inputs, self.lm_head.weight)
        output = super().forward(
            input_ids, attention_mask, position_ids, cache, inputs_embeds, labels, use_cache, logits_to_keep,
            control=control, return_dict=True, **kwargs,
        )  # fmt: skip
        assert inputs is not None  # checked by the stock Llama
        evaluations = self._function_evaluations(inputs.shape[:2], attention_mask)
        output = DepthLlamaOutput(**output, function_evaluations=evaluations)
        return output if return_dict is not False else output.to_tuple()

    def _function_evaluations(self, shape: torch.Size, attention_mask: torch.Tensor | None) -> torch.Tensor:
        counted = torch.as_tensor(self.depth_block.function_evaluations, device=self.lm_head.weight.device)
        evaluations_BN = counted.long().expand(shape).clone()
        if attention_mask is not None and attention_mask.dim() == 2:
            real_BN = attention_mask[:, -shape[1] :].to(evaluations_BN.device, torch.bool)
            evaluations_BN[~real_BN] = 0
        return evaluations_BN

    def _prepare_generation_config(self, generation_config, **kwargs):
        return super()._prepare_generation_config(generation_config, **rename_cache(kwargs))

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs) -> None:
        check_control_of_prompt(model_kwargs, generation_config.is_assistant)
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)

    def _get_candidate_generator(self, *, model_kwargs, assistant_model=None, assistant_tokenizer=None, **options):
        """Extends transformers' method: an assistant that does not take the control drafts without it."""
        if not drafts_with_control(self, assistant_model, assistant_tokenizer):
            model_kwargs = {name: value for name, value in model_kwargs.items() if name != "control"}
        return super()._get_candidate_generator(
            model_kwargs=model_kwargs,
            assistant_model=assistant_model,
            assistant_tokenizer=assistant_tokenizer,
            **options,
        )

    @takes_past_key_values
    def prepare_inputs_for_generation(self, input_ids, cache=None, inputs_embeds=None, **kwargs):
        inputs = super().prepare_inputs_for_generation(
            input_ids,
            **{CACHE: cache},
            inputs_embeds=inputs_embeds,  # transformers looks for this name
            **kwargs,
        )
        if (control := inputs.get("control")) is not None:
            read = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
            seen = 0 if cache is None else int(cache.get_seq_length())
            inputs["control"] = control_of_columns(control, seen, read.shape[1])
        return inputs


def check_stock(depth: dict[str, Any] | None, num_layers: int) -> DepthSettings:
    """Returns the settings of a stock Llama's block. Raises `ValueError` for settings that only a folded model has."""
    settings = DepthSettings.from_dict(depth or {})
    if settings.field == "layer":
        raise ValueError(
            "a stock Llama can't have the field 'layer', whose attention needs the cache of a folded model: fold the "
            "model with a segment at least as long as the texts, which gives the logits of full attention, or choose "
            "the field 'mlp'."
        )
    if num_layers < 2:
        raise ValueError("a stock Llama keeps at least one layer: without attention its tokens would not be a text.")
    if settings.position >= num_layers:
        raise ValueError(f"depth: position={settings.position} in a stack of {num_layers} layers.")
    return settings


def to_depth_llama(model: CondenseForCausalLM) -> DepthLlamaForCausalLM:
    """Makes a stock hybrid, in evaluation mode, that shares the weights of a folded one.

    Raises `ValueError` for a model without a depth block, for one with the field `layer`, and for a family other than
    Llama.
    """
    check_llama(model.config)
    depth = check_stock(model.config.depth, model.config.num_hidden_layers).to_dict()
    return with_weights_of(model, DepthLlamaConfig, DepthLlamaForCausalLM, depth=depth)


def check_llama(config: CondenseConfig) -> None:
    """Raises `ValueError` for a folded model of another family: its stock layers can't use a depth block."""
    if config.family != LlamaConfig.model_type:
        raise ValueError(
            f"a stock hybrid is a Llama, and this model is a folded {family_of(config).title}: keep it folded, with a "
            "segment at least as long as the texts for the logits of full attention."
        )


def replace_stock_layers(llama: LlamaForCausalLM, block: StockDepthBlock) -> DepthLlamaForCausalLM:
    """Makes a hybrid of a stock Llama's weights and a block, whose settings say which layers it replaces."""
    settings, layers = block.settings, llama.model.layers
    kept = nn.ModuleList([*layers[: settings.position], block, *layers[settings.position + settings.num_replaced :]])
    weights = {name: weight for name, weight in llama.state_dict().items() if not name.startswith("model.layers.")}
    weights |= kept.state_dict(prefix="model.layers.")
    depth, num_layers = settings.to_dict(), len(kept)
    return with_weights_of(
        llama, DepthLlamaConfig, DepthLlamaForCausalLM, weights, depth=depth, num_hidden_layers=num_layers
    )


def make_stock_block(config: LlamaConfig, settings: DepthSettings) -> StockDepthBlock:
    return StockDepthBlock(build_field(config, settings), settings)
