"""`generate` of a folded model: transformers' own, with a `FoldedCache`, durations, a control, and drafts."""

from collections.abc import Mapping
from typing import Any

from transformers import GenerationMixin, MaxLengthCriteria

from ..checks import check_cache
from ..control import check_control_of_prompt, control_of_columns, drafts_with_control
from ..durations import durations_for_generation, durations_of_columns
from ..execution.static_decoding import check_static_step
from ..hub.untrained import warn_if_untrained
from ..state.cache import FoldedCache
from ..state.cache_argument import CACHE, rename_cache, takes_past_key_values
from ..state.recording import CROP_TOKENS
from ..utils.notices import say_once


class NoContinuousBatching:
    """Refuses transformers' continuous batching, whose cache holds keys and values of all tokens in pages.

    transformers would report what goes wrong in its log only, and return empty answers.
    """

    @property
    def init_continuous_batching(self):
        raise AttributeError  # `transformers serve` looks for it, and without it answers one request after the other

    def continuous_batching_context_manager(self, *arguments, **options):
        raise ValueError(
            f"continuous batching (generate_batch) keeps keys and values of all tokens in pages, which a "
            f"{type(self).__name__} can't use: call generate() with the prompts as a padded batch."
        )

    generate_batch = continuous_batching_context_manager


class OwnCacheGenerationMixin(NoContinuousBatching, GenerationMixin):
    """Generation that always uses the model's own kind of cache."""

    cache_implementations: tuple[str, ...] = ()  # transformers' names that apply to this cache

    def _prepare_generation_config(self, generation_config, **kwargs):
        """Extends transformers' method: cache settings that a checkpoint stores, not the user's, have no effect."""
        prepared, model_kwargs = super()._prepare_generation_config(generation_config, **rename_cache(kwargs))

        def is_stored(name: str) -> bool:
            stored = getattr(self.generation_config, name)  # pipelines pass a copy of these settings
            return kwargs.get(name) is None and getattr(generation_config, name, None) in (None, stored)

        if not prepared.use_cache and is_stored("use_cache"):
            prepared.use_cache = True
        unknown = prepared.cache_implementation not in self.cache_implementations
        if (unknown or model_kwargs.get(CACHE) is not None) and is_stored("cache_implementation"):
            prepared.cache_implementation = None
        return prepared, model_kwargs


class FoldedGenerationMixin(OwnCacheGenerationMixin):
    cache_implementations = ("static", "dynamic")

    @takes_past_key_values
    def prepare_inputs_for_generation(
        self,
        input_ids,
        next_sequence_length=None,
        cache=None,
        inputs_embeds=None,  # transformers looks for this name
        is_first_iteration=False,
        new_token_duration: Any = None,
        _is_assisted: bool = False,
        **kwargs,
    ):
        """Extends transformers' method: the first call of assisted decoding leaves out the tokens that the cache has,
        if the input is the whole text.

        `generate` takes `new_token_duration` beside the arguments of `forward`: the duration of each generated token, 1
        by default, or a function from the generation step, counted from 0, to one duration for all texts or one for
        each, [B]. It depends only on the step: drafts of assisted decoding ask for a step several times. `durations`
        [B, N] then belong to the prompt, 1 by default; with a cache of an earlier call, to the whole text.
        """
        seen = 0 if cache is None else cache.get_seq_length()
        if _is_assisted and is_first_iteration and _num_columns(kwargs) == input_ids.shape[1]:
            next_sequence_length = input_ids.shape[1] - seen
        inputs = super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            **{CACHE: cache},
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        if cache is None and not is_first_iteration:
            inputs.pop("position_ids", None)  # transformers counts them from a row's padding
        given = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
        if (control := inputs.get("control")) is not None:
            inputs["control"] = control_of_columns(control, seen, given.shape[1])
        if new_token_duration is not None:  # with durations of the prompt: `_prepare_cache_for_generation`
            inputs["durations"] = durations_of_columns(kwargs["durations"], new_token_duration, seen, given.shape[1])
        return inputs

    def _get_stopping_criteria(self, *arguments, **options):
        """Extends transformers' method: no length of a text is more than the model was made for."""
        criteria = super()._get_stopping_criteria(*arguments, **options)
        for one in criteria:
            if isinstance(one, MaxLengthCriteria):
                one.max_position_embeddings = None  # positions are counted within two segments
        return criteria

    def _get_candidate_generator(self, *, model_kwargs, assistant_model=None, assistant_tokenizer=None, **options):
        """Extends transformers' method: an assistant with another model or other tokens drafts without durations, and
        one that does not take the control without it."""
        if model_kwargs.get("inputs_embeds") is not None:
            raise ValueError("drafts begin with token ids, which inputs_embeds do not have: leave out one of the two.")
        own = ["_is_assisted"]
        if not isinstance(assistant_model, FoldedGenerationMixin) or assistant_tokenizer is not None:
            own += ["durations", "new_token_duration"]
        if not drafts_with_control(self, assistant_model, assistant_tokenizer):
            own.append("control")
        model_kwargs = {name: value for name, value in model_kwargs.items() if name not in own}
        return super()._get_candidate_generator(
            model_kwargs=model_kwargs,
            assistant_model=assistant_model,
            assistant_tokenizer=assistant_tokenizer,
            **options,
        )

    def _assisted_decoding(self, input_ids, *arguments, **options):
        mask, num_columns = options.get("attention_mask"), input_ids.shape[1]
        if mask is not None and mask.shape[1] != num_columns:  # transformers would cut off its last columns
            raise ValueError(
                f"attention_mask has padding and {mask.shape[1]} columns, and the input has {num_columns}: drafts need "
                "the whole text, so pass its tokens too."
            )
        try:
            return super()._assisted_decoding(input_ids, *arguments, **options, _is_assisted=True)
        finally:
            if isinstance(cache := options.get(CACHE), FoldedCache):
                cache.deactivate_past_recording()

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, *args, **kwargs
    ) -> None:
        if (generation_config.prompt_lookup_num_tokens or 0) > CROP_TOKENS:
            raise ValueError(
                f"prompt_lookup_num_tokens={generation_config.prompt_lookup_num_tokens}: a FoldedCache can remove the "
                f"last {CROP_TOKENS} tokens. Choose a smaller number."
            )
        early_exit, num_layers = generation_config.assistant_early_exit, self.config.num_hidden_layers
        if early_exit is not None and not 1 <= early_exit <= num_layers:
            raise ValueError(f"assistant_early_exit={early_exit}: choose 1 to {num_layers}, the layers that draft.")
        if generation_config.prefill_chunk_size is not None and model_kwargs.get("inputs_embeds") is not None:
            raise ValueError(
                "prefill_chunk_size cuts token ids, and inputs_embeds are given: leave out one of the two."
            )
        implementation = generation_config.cache_implementation
        if implementation not in (None, *self.cache_implementations):
            say_once(f"cache_implementation={implementation!r} has no effect: a folded model has a FoldedCache.")
            implementation = None
        if implementation is not None:
            self._check_cache_implementation(implementation, model_kwargs)
        check_control_of_prompt(model_kwargs, generation_config.is_assistant)
        warn_if_untrained(self, generation_config.max_length)
        rows_per_text = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        timed = durations_for_generation(model_kwargs, batch_size, rows_per_text, generation_config.is_assistant)
        if timed:
            _check_timed_generation(generation_config)
            model_kwargs.update(timed)
        if model_kwargs.get(CACHE) is None:
            if generation_config.use_cache is False:  # the whole text is read again for every token, as requested
                return
            model_kwargs[CACHE] = cache = FoldedCache(self.config)
            if implementation is not None:
                cache.fixed_decoding = implementation == "static" and (self.fixed_decoding or True)
        elif not generation_config.is_assistant:
            check_cache(self.config, model_kwargs[CACHE])
            _check_new_columns(model_kwargs)
        if generation_config.is_assistant:  # the main model rejects some of the assistant's tokens
            model_kwargs[CACHE].activate_past_recording()

    def _check_cache_implementation(self, name: str, model_kwargs) -> None:
        if model_kwargs.get(CACHE) is not None:
            raise ValueError(
                f"cache_implementation={name!r} makes a cache, and another is given as cache: pass one of the two."
            )
        if name == "static":
            check_static_step(self, "cache_implementation='static'", "leave it out")


def _num_columns(arguments: Mapping[str, Any]) -> int | None:
    """Returns the columns of the whole text. `generate` drops a mask without padding, and keeps the positions."""
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    columns = positions if mask is None else mask
    return None if columns is None else columns.shape[1]


def _check_new_columns(arguments: Mapping[str, Any]) -> None:
    """Raises `ValueError` for a cache that has read all columns of the input: transformers would read them again."""
    seen, num_columns = arguments[CACHE].get_seq_length(), _num_columns(arguments)
    if num_columns is not None and seen >= num_columns:
        raise ValueError(
            f"the cache has read {seen} columns and the input {num_columns}: pass the whole text with at least one new "
            "token, or only the new tokens with the attention_mask of the whole text."
        )


def _check_timed_generation(generation_config) -> None:
    """Raises `ValueError` for options of `generate` that read tokens without durations."""
    for name, neutral in (("guidance_scale", 1), ("token_healing", False)):  # a second text, another end of the prompt
        if (value := getattr(generation_config, name)) not in (None, neutral):
            raise ValueError(
                f"{name}={value} reads tokens without durations: leave it out, or durations and new_token_duration."
            )
