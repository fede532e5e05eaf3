"""The common base of folded models: loading, saving, attention implementations, gradient checkpointing."""

from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from ..checks import check_shares
from ..configuration import ATTENTION_IMPLEMENTATIONS, OWN_ATTENTION, CondenseConfig
from ..execution.checkpointing import non_reentrant, offload_checkpoint
from ..families import family_of
from ..gguf_files import HUB_OPTIONS, find_file
from ..state.cache_argument import CACHE_NAMES
from ..utils.files import use_default_mode
from .card import write_card
from .loading import check_loading_report, load_model, without_load_report
from .source_name import check_name, name_as_in_memory
from .untrained import mark_untrained


class CondensePreTrainedModel(PreTrainedModel):
    config_class = CondenseConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["CondenseDecoderLayer", "DepthBlock"]
    _skip_keys_device_placement = CACHE_NAMES
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **options):
        """Extends transformers' method: a checkpoint must hold the model's weights and no others.

        Raises `ValueError` naming weights that are missing (transformers initialises them at random), unexpected, or
        have the wrong shape. `ignore_mismatched_sizes=True` permits other shapes; `output_loading_info=True` returns
        the report for the caller to check. Other libraries can't load a model that was just folded: see `source_name`.
        Those of a GGUF file are dequantized. A stock checkpoint gets the memory that `CondenseConfig` describes.
        """
        source, config = pretrained_model_name_or_path, options.get("config")
        if isinstance(config, PreTrainedConfig) and not isinstance(config, cls.config_class):
            raise ValueError(
                f"config is a {type(config).__name__}: leave it out, or pass a {cls.config_class.__name__}, such as "
                f"{cls.config_class.__name__}.from_pretrained({str(source)!r})."
            )
        if source is not None and Path(source).is_file():
            source, options["gguf_file"] = Path(source).parent, Path(source).name
        if (file := options.pop("gguf_file", None)) is not None:
            return cls._from_gguf(source, file, *model_args, **options)
        if options.pop("output_loading_info", False):
            model, report = super().from_pretrained(source, *model_args, output_loading_info=True, **options)
            _note_source(model, source, options)
            return model, report
        ignore_shapes = options.pop("ignore_mismatched_sizes", False)
        with without_load_report():
            model, report = super().from_pretrained(
                source, *model_args, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
        check_loading_report(source, report, ignore_shapes)
        _note_source(model, source, options)
        return model

    @classmethod
    def _from_gguf(cls, source: Any, file: str, *model_args: Any, **options: Any) -> Any:
        """Folds the model in a GGUF file of a folder or hub id, which transformers reads into the stock model."""
        hub_options = {name: options.pop(name) for name in HUB_OPTIONS if name in options}
        path, dtype = find_file(source, file, **hub_options), options.pop("dtype", options.pop("torch_dtype", "auto"))
        if (config := options.pop("config", None)) is None:
            config, options = cls.config_class.from_pretrained(
                path.parent, gguf_file=path.name, return_unused_kwargs=True, **options
            )
        stock = load_model(family_of(config).model_class, path, dtype=dtype)
        found = super().from_pretrained(
            None, *model_args, config=config, state_dict=stock.state_dict(), dtype=stock.dtype, **options
        )
        model = found[0] if options.get("output_loading_info") else found
        if model.can_generate():
            model.generation_config = stock.generation_config
        name_as_in_memory(model, path, "folded")
        mark_untrained(model)
        return found

    def save_pretrained(self, save_directory, is_main_process=True, *arguments, **options):
        """Extends transformers' method: adds a card, and lets others read the files as far as the umask allows.

        Raises `ValueError` for a configuration that calls refuse, because the model was not made with it.
        """
        layers = self.base_model.layers
        self.config.check(len(layers))
        check_shares(self.config, layers)
        # The names are the checkpoint's own. transformers would undo how it read quantized weights, which it can't.
        options.setdefault("save_original_format", False)
        super().save_pretrained(save_directory, is_main_process, *arguments, **options)
        use_default_mode(Path(save_directory))
        if is_main_process and not getattr(self, "_hf_peft_config_loaded", False):  # else they are adapters
            write_card(self, Path(save_directory))

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Returns the implementation to use: "auto" if none is requested."""
        requested = requested_attention or "auto"
        if requested not in ATTENTION_IMPLEMENTATIONS:
            known = ", ".join(ATTENTION_IMPLEMENTATIONS)  # in transformers' words, which callers know
            raise ValueError(f'Specified `attn_implementation="{requested}"` is not supported: choose one of {known}.')
        if requested in OWN_ATTENTION:
            return requested
        return super().get_correct_attn_implementation(requested_attention, is_init_check)

    def _set_gradient_checkpointing(self, enable=True, gradient_checkpointing_func=checkpoint, **kwargs) -> None:
        if (every := kwargs.get("every_n_layers", 1)) != 1:
            raise ValueError(
                f"every_n_layers={every}: a folded model checkpoints segments with all their layers. Leave it out; "
                "checkpoint_segments=k in the options computes k segments again at once."
            )
        if isinstance(gradient_checkpointing_func, partial):
            function, keywords = gradient_checkpointing_func.func, dict(gradient_checkpointing_func.keywords)
            keywords = non_reentrant(function, keywords)
            segments, offload = keywords.pop("checkpoint_segments", None), keywords.pop("offload_memories", False)
            if segments is not None and (not isinstance(segments, int) or segments < 1):
                raise ValueError(f"checkpoint_segments={segments!r}: pass the segments of a group, 1 or more.")
            self.base_model.checkpoint_segments = segments
            gradient_checkpointing_func = partial(function, **keywords)
            if offload:
                gradient_checkpointing_func = partial(offload_checkpoint, gradient_checkpointing_func)
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, **kwargs)


def _note_source(model: PreTrainedModel, source: Any, options: dict[str, Any]) -> None:
    if check_name(model, source, options):
        mark_untrained(model)
