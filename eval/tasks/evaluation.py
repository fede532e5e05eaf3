"""The common part of the evaluations: models named by options, continuations of prompts, shares of right answers.

Axes: B rows, N columns of the prompts.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from transformers import AutoConfig

from condense.generation.chat import check_chat_template
from condense.hub.loading import load_config, load_tokenizer

from ..models import EvaluatedModel, generate, load_models, split_name
from ..options import Options as BaseOptions
from ..options import identify
from ..overview import Figure, remark_of
from ..results import Table, some_table
from ..runner import Results, Task
from .window_model import WindowModel

Item = TypeVar("Item")


class Evaluation(Task[Item]):
    """A measurement of models, with its `Options`."""

    Options: ClassVar[type[BaseOptions]]

    def __init__(self, options: Any, models: Sequence[EvaluatedModel]):
        self.options, self.models = options, models

    @classmethod
    def load(cls, options: Any) -> Any:
        """Loads the models named in the options. Raises `ValueError` if something can't be measured."""
        return cls(options, cls.load_models(options))

    @classmethod
    def load_for(cls, options: Any, output: Path) -> Any:
        """Loads like `load`; a task may keep in its `output` what it draws once."""
        return cls.load(options)

    @staticmethod
    def load_models(options: Any) -> list[EvaluatedModel]:
        check_chat(getattr(options, "chat", ()), options.models)
        return load_models(options.models, options.dtype, options.attention, options.device_map)

    def settings(self) -> dict[str, Any]:
        return identify(self.options) | {"models": [model.describe() for model in self.models]}


def complete(
    evaluated: EvaluatedModel, prompt_ids_BN: torch.Tensor, new_tokens: int, **options: Any
) -> tuple[torch.Tensor, int]:
    """Returns the likeliest tokens [B, new] after prompts of one length, and the state's bytes of one prompt."""
    if isinstance(evaluated, WindowModel):
        return evaluated.complete(prompt_ids_BN, new_tokens)
    found_BN, num_bytes = generate(
        evaluated.model,
        prompt_ids_BN,
        torch.ones_like(prompt_ids_BN),
        do_sample=False,
        pad_token_id=evaluated.tokenizer.pad_token_id,
        max_new_tokens=new_tokens,
        **options,
    )
    return found_BN[:, prompt_ids_BN.shape[1] :], num_bytes // len(prompt_ids_BN)


def answer(
    evaluated: EvaluatedModel, prompts: Sequence[list[int]], ends: Collection[int], **options: Any
) -> tuple[list[list[int]], int]:
    """Returns the tokens after each prompt, up to the first end token, and the bytes of all prompts' state."""
    padding = evaluated.tokenizer.pad_token_id
    pad, num_columns = min(ends, default=0) if padding is None else padding, max(map(len, prompts))
    sequences, num_bytes = generate(
        evaluated.model,
        torch.tensor([[pad] * (num_columns - len(prompt)) + prompt for prompt in prompts]),
        torch.tensor([[0] * (num_columns - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
        eos_token_id=sorted(ends) or None,
        pad_token_id=pad,
        **options,
    )
    rows = sequences[:, num_columns:].tolist()
    return [list(takewhile(lambda token: token not in ends, row)) for row in rows], num_bytes


@contextmanager
def naming_length(length: int, model: str) -> Iterator[None]:
    """Adds the option and the model to the error of a length into which a prompt does not fit."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"--lengths {length}, in tokens of {model}: {error}") from error


def data_of(results: Results) -> str:
    """Returns the names of the files that were read."""
    return ", ".join(Path(name).name for name in results["data"])


def in_percent(share: dict[str, Any]) -> tuple[str, str]:
    """Formats the share of right answers and its 95 % interval."""
    accuracy, low, high = (100 * share[field] for field in ("accuracy", "low", "high"))
    return f"{accuracy:.1f}", f"{low:.1f} to {high:.1f}"


def with_interval(share: dict[str, Any] | None) -> str:
    return "-" if share is None else "{} ({})".format(*in_percent(share))


def figure_of(model: str, measure: str, share: dict[str, Any], results: Results) -> Figure:
    bounds = (100 * share[field] for field in ("accuracy", "low", "high"))
    return Figure(model, measure, *bounds, remark=remark_of(model, results))


def kibibytes(cells: Sequence[dict[str, Any]]) -> str:
    """Formats the largest state of a text."""
    return f"{max(cell['state_bytes'] for cell in cells) / 1024:,.1f}"


def dtype_of(name: str, results: Results) -> str:
    """Returns a model's number format, which is also its state's."""
    return next((model.get("dtype") or "-" for model in results.get("models", ()) if model["name"] == name), "-")


def state_unit(results: Results, *names: str) -> str:
    """Returns the unit of `kibibytes`, with the number formats of these models."""
    return ", ".join(["KiB", *dict.fromkeys(dtype for name in names if (dtype := dtype_of(name, results)) != "-")])


def left_out_table(title: str, what: str, results: Results) -> list[Table]:
    """Returns a table of the reasons why something was left out, if anything was."""
    return some_table(title, ["reason", what], [[why, f"{count:,}"] for why, count in results["left_out"].items()])


def check_chat(chat: Sequence[str], models: Sequence[str]) -> None:
    """Raises `ValueError` for a name in `chat` that no model has, or a tokenizer without a chat template.

    Loads only tokenizers, so it can be called before a model is loaded.
    """
    sources = dict(map(split_name, models))
    for name in chat:
        if name not in sources:
            raise ValueError(f"--chat {name}: no model has this name; there are {', '.join(sources)}.")
        check_chat_template(load_tokenizer(sources[name], load_config(AutoConfig, sources[name])), sources[name])


def shown_name(name: str, results: dict[str, Any]) -> str:
    """Returns the name of a model in tables and pictures of results."""
    found = remark_of(name, results, "chat")
    return f"{name} ({found})" if found else name
