"""The name of a call's cache: `cache` since transformers 5.24, `past_key_values` before.

The methods of models take both names. What transformers passes and returns is named `CACHE`.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from transformers import GenerationMixin

_NEW, _OLD = CACHE_NAMES = "cache", "past_key_values"
CACHE = _NEW if _NEW in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters else _OLD


def takes_past_key_values(method: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a method with the parameter `cache` take it as `past_key_values`, too.

    The method raises `ValueError` for two caches.
    """
    signature = inspect.signature(method)

    @wraps(method)
    def with_both(*arguments: Any, past_key_values: Any = None, **options: Any) -> Any:
        if past_key_values is not None:
            options = rename_cache(options | {_OLD: past_key_values}, _NEW)
        return method(*arguments, **options)

    *named, last = signature.parameters.values()
    assert last.kind is last.VAR_KEYWORD, f"{method.__qualname__} has no **options"
    alias = inspect.Parameter(_OLD, inspect.Parameter.KEYWORD_ONLY, default=None)
    with_both.__signature__ = signature.replace(parameters=[*named, alias, last])  # type: ignore[attr-defined]
    return with_both


def rename_cache(arguments: dict[str, Any], name: str = CACHE) -> dict[str, Any]:
    """Returns the arguments with the cache, if there is one, under `name` only. Raises `ValueError` for two caches."""
    rest = {key: value for key, value in arguments.items() if key not in CACHE_NAMES}
    given = [arguments[key] for key in CACHE_NAMES if arguments.get(key) is not None]
    if not given:
        return rest
    if given[0] is not given[-1]:
        raise ValueError("cache and past_key_values are two names of one argument: pass one of them.")
    return rest | {name: given[0]}


def cache_of(output: Any) -> Any:
    """Returns the cache in a call's output."""
    return getattr(output, CACHE)
