"""Which of the models of an evaluation are asked in a chat."""

from collections.abc import Sequence
from typing import Any

from transformers import AutoConfig

from condense.chat import check_chat_template
from condense.loading import load_config, load_tokenizer

from ..models import split_name
from ..positions import mark


def check_chat(chat: Sequence[str], models: Sequence[str]) -> None:
    """Raises `ValueError` for names in `chat` that no model has, and for tokenizers without a chat template.

    Reads tokenizers alone, so that it can be called before a model is loaded.
    """
    sources = dict(map(split_name, models))
    for name in chat:
        if name not in sources:
            raise ValueError(f"--chat {name}: no model has this name; there are {', '.join(sources)}.")
        check_chat_template(load_tokenizer(sources[name], load_config(AutoConfig, sources[name])), sources[name])


def shown_name(name: str, results: dict[str, Any]) -> str:
    """The name of a model in tables and pictures of results."""
    remarks = ["chat"] if name in results.get("chat", ()) else []
    return mark(name, results.get("positions_exceeded", {}), remarks)
