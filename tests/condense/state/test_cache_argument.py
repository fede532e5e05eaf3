"""A cache by both of its names, `cache` and `past_key_values`, whichever transformers has."""

import inspect

import pytest
import torch
from transformers import GenerationMixin, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from condense import CondenseForCausalLM, FoldedCache, to_stock
from condense.labs.autoregressivity.model import LateCache, MultiTokenForCausalLM, PositionExpertsForCausalLM
from condense.labs.depth.model import convert_to_depth
from condense.state.cache_argument import CACHE, CACHE_NAMES, cache_of, rename_cache

from ..models import random_ids, tiny_config, tiny_model

MODELS = {
    "folded": (tiny_model, lambda model: FoldedCache(model.config)),
    "depth": (lambda: convert_to_depth(to_stock(tiny_model()), 1, 2), lambda model: None),
    "heads": (lambda: MultiTokenForCausalLM.from_base(tiny_model(), 2), lambda model: LateCache(1)),
    "experts": (lambda: PositionExpertsForCausalLM.from_base(tiny_model(), 2, "modulo"), lambda model: LateCache(2)),
}


def test_the_name_is_that_of_the_installed_transformers():
    assert hasattr(CausalLMOutputWithPast(), CACHE)
    assert CACHE in inspect.signature(LlamaForCausalLM.forward).parameters
    assert CACHE in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters


@pytest.mark.parametrize("name", CACHE_NAMES)
@pytest.mark.parametrize("kind", MODELS)
def test_both_names_continue_a_text(kind, name):
    """A text in two calls has the logits of the text in one call, and `generate` continues from the cache."""
    make, empty = MODELS[kind]
    model, ids = make().eval(), random_ids(1, 12)
    with torch.no_grad():
        first = model(ids[:, :7], **{name: empty(model)}, use_cache=True)
        cache = cache_of(first)
        logits = model(ids[:, 7:], **{name: cache}, use_cache=True).logits[:, -1]
        torch.testing.assert_close(logits, model(ids, use_cache=False).logits[:, -1].reshape_as(logits))
        cache = cache_of(model(ids[:, :7], use_cache=True))
        options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        assert model.generate(ids, **{name: cache}, **options).tolist() == model.generate(ids, **options).tolist()
    assert cache.get_seq_length() == 16  # the last token is not read


@pytest.mark.parametrize("kind", MODELS)
def test_two_caches_are_refused(kind):
    make, empty = MODELS[kind]
    model, ids = make().eval(), random_ids(1, 4)
    caches = {name: empty(model) or cache_of(model(ids, use_cache=True)) for name in CACHE_NAMES}
    with pytest.raises(ValueError, match="cache and past_key_values are two names of one argument"):
        model(ids, **caches)


def test_renamed_arguments():
    cache = FoldedCache(tiny_config())
    assert rename_cache({"a": 1}) == {"a": 1}
    assert rename_cache({"a": 1, "cache": None}) == {"a": 1}
    assert rename_cache({"past_key_values": cache}, "cache") == {"cache": cache}
    assert rename_cache({"past_key_values": None, "cache": cache}, "past_key_values") == {"past_key_values": cache}


@pytest.mark.parametrize("method", [CondenseForCausalLM.forward, CondenseForCausalLM.prepare_inputs_for_generation])
def test_signatures_have_both_names(method):
    """Libraries look for an argument's name in the signature."""
    assert set(CACHE_NAMES) <= set(inspect.signature(method).parameters)


def test_answers_to_transformers_about_all_layers():
    """`all` of no layers is true: a cache of caches would count as linear attention, whose whole text is read again."""
    cache = LateCache(1)
    assert not all(cache.is_linear)
    assert not cache.is_croppable
    folded = FoldedCache(tiny_config())
    assert not folded.is_croppable
    folded.activate_past_recording()
    assert folded.is_croppable
