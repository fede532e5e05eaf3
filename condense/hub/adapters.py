"""Adapters that PEFT has trained, checked and merged into the weights of their model."""

import json
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from ..checks import check_not_quantized
from ..extras import check_installed
from .adapter_base import BASE, embedding_names, memory_of_base, other_shapes, other_values, tokens_of_base
from .loading import ADAPTER_CONFIG, check_finite, check_safetensors, first_line, is_stock, read_object
from .source_name import stored_source

WEIGHTS = "adapter_model.safetensors"
RECIPE = "recipe.json"  # of the training, beside the adapters
MEGATRON = ("megatron_config", "megatron_core")  # PEFT imports the module that the second one names
LOAD_OTHER_MODELS = ("XLORA", "SHADOW")  # from the paths in their configuration


def check_adapters(folder: Path, reader: str) -> None:
    """Raises `ValueError` if a folder has no adapters, if they are damaged or could run code, or if PEFT is not
    installed. `reader` is the command that reads them."""
    check_installed(reader, "adapters")
    for name in (ADAPTER_CONFIG, WEIGHTS):  # pickled weights could run code
        if not (folder / name).is_file():
            raise ValueError(
                f"{reader} {folder}: it has no {name}. Pass the output of a training with lora, or a folder that "
                "PEFT's save_pretrained wrote."
            )
    check_adapter_config(folder / ADAPTER_CONFIG)
    check_safetensors(folder / WEIGHTS)


def check_adapter_config(path: Path) -> None:
    """Raises `ValueError` for a damaged configuration, for fields that make PEFT import a module, for methods that load
    other models, and for a method or fields that the installed PEFT does not know."""
    fields = read_object(path)
    if fields.get("megatron_config") or fields.get("megatron_core") not in (None, "megatron.core"):
        given = " and ".join(f"{name}={fields[name]!r}" for name in MEGATRON if fields.get(name))
        raise ValueError(
            f"{path} has {given}, so PEFT would import a module: it could run code. Use adapters from a source "
            "that you trust, and delete these fields: a folded model does not need them."
        )
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PeftType, __version__

    method = fields.get("peft_type")
    if not isinstance(method, str) or method not in PEFT_TYPE_TO_CONFIG_MAPPING:
        raise ValueError(
            f"{path}: peft_type={method!r} is not a method of peft {__version__}: install the version that wrote "
            f"it ({fields.get('peft_version', 'not named')}), or copy the file again."
        )
    if method in LOAD_OTHER_MODELS:
        raise ValueError(
            f"{path}: peft_type={method!r} loads other models that the file names: merge adapters of another "
            "method, such as LORA."
        )
    known = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(method)].__dataclass_fields__
    if unknown := sorted(name for name, value in fields.items() if value and name not in known):
        raise ValueError(
            f"{path} has {', '.join(unknown)}, which peft {__version__} does not know and would ignore: install the "
            f"version that wrote it ({fields.get('peft_version', 'not named')})."
        )


def trained_memory(folder: Path, source: str) -> dict[str, Any]:
    """Returns the fields of the memory that `condense train` used for a folder of adapters of the model `source`, or
    for one of its checkpoints. Adapters of former versions describe no base: they have the recipe's fields only."""
    if memory := memory_of_base(folder):
        return memory
    recipe = (folder.parent if folder.name.startswith("checkpoint-") else folder) / RECIPE
    try:
        model = dict(json.loads(recipe.read_text(encoding="utf-8"))["model"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # not a recipe of this package
        return {}
    if "source" not in model or model.get("kind", "condense") != "condense":
        return {}
    model = with_former_memory(model, source)
    found = {name: model.get(name) for name in ("segment_length", "memory_share")}
    found = {name: value for name, value in found.items() if isinstance(value, int | float | list)}
    sink = model["sink_token_id"]
    return found if sink == "auto" else {**found, "sink_token_id": None if sink == "none" else sink}


def with_former_memory(model: dict[str, Any], source: str) -> dict[str, Any]:
    """Returns a stored recipe's section of a folded model with the memory that its run had: former versions folded a
    stock checkpoint with all of a layer's output and without a sink."""
    if "sink_token_id" in model:
        return model
    if not is_stock(source):
        return model | {"sink_token_id": "auto"}
    share = model.get("memory_share")
    return model | {"memory_share": 1.0 if share is None else share, "sink_token_id": "none"}


def check_base(model: Any, folder: Path) -> None:
    """Raises `ValueError` if a folder's adapters say that they were trained on another model than this one. Of weights
    on the meta device only names and shapes are compared."""
    difference = other_shapes(model, folder)
    if difference is None and (tokens := tokens_of_base(model, folder)) > model.config.vocab_size:
        raise ValueError(f"--merge {folder}: the adapters do not fit the model. {_add_tokens(tokens, model)}")
    remedy = _pass_base(folder)
    if difference is None and (difference := other_values(model, folder)) is not None:
        remedy += f" To merge them all the same, delete {BASE}."
    if difference is not None:
        raise ValueError(
            f"--merge {folder}: this model is not the one that the adapters were trained on: {difference}. {remedy}"
        )


def merge_adapters(model: Any, folder: Path) -> Any:
    """Merges a folder's adapters into the model's weights, in its dtype: for LoRA, W + (alpha / rank) B A.

    A tied head is untied if the adapters change it and the embedding differently. Raises `ValueError` for adapters that
    belong to another model or can't be merged, for quantized weights, and if merged weights are not finite.
    """
    check_not_quantized(model.config, f"--merge {folder}")
    check_base(model, folder)
    dtype, tied = model.dtype, model.config.tie_word_embeddings
    own = set(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of tied weights, which are untied here
        warnings.filterwarnings("error", message="Found missing adapter keys")
        adapted = _load_adapters(model, folder)
        _separate(adapted, own)
        merged = _merge(adapted, folder)
    with torch.no_grad():
        for parameter in merged.parameters():  # not the buffers: rotary tables stay in float32
            parameter.data = parameter.data.to(dtype)
    if tied:
        head, embedding = merged.get_output_embeddings().weight, merged.get_input_embeddings().weight
        merged.config.tie_word_embeddings = torch.equal(head, embedding)
        merged.tie_weights()
    check_finite(
        merged, f"--merge {folder}", f"Use an earlier checkpoint's adapters, or a --dtype with more range than {dtype}."
    )
    return merged


def _load_adapters(model: Any, folder: Path) -> Any:
    from peft import PeftModel

    remedy = _right_model(model, folder)
    try:
        adapted = PeftModel.from_pretrained(model, str(folder))
    except Exception as error:  # PEFT may raise any exception for wrong shapes and settings
        raise ValueError(
            f"--merge {folder}: the adapters do not fit the model ({first_line(error)}). {remedy}"
        ) from error
    if not hasattr(adapted.base_model, "merge_and_unload"):
        raise _unmergeable(adapted, folder, "virtual tokens are not weights")
    unexpected = adapted.load_adapter(str(folder), "default").unexpected_keys  # loaded once more, for the names
    # Of an embedding that was resized, PEFT also writes copies that it does not read.
    if any(not _is_of(key, embedding_names(model)) for key in unexpected):
        raise ValueError(f"--merge {folder}: the adapters belong to layers that the model does not have. {remedy}")
    return adapted


def _is_of(key: str, modules: list[str]) -> bool:
    return any(f".{name}." in key for name in modules)


def _right_model(model: Any, folder: Path) -> str:
    """Says to which model adapters belong that do not fit this one."""
    tokens = _num_tokens(read_object(folder / ADAPTER_CONFIG), folder, model)
    return _add_tokens(tokens, model) if tokens > model.config.vocab_size else _pass_base(folder)


def _add_tokens(tokens: int, model: Any) -> str:
    """The model that adapters were trained on may have the name of this one."""
    return (
        f"They were trained with at least {tokens} tokens, and the model has {model.config.vocab_size}: add the tokens "
        f"with model.resize_token_embeddings({tokens}), save the model and the tokenizer of the training in a folder, "
        "and pass this folder."
    )


def _pass_base(folder: Path) -> str:
    name = stored_source(read_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path"))
    return f"Pass the model that they were trained on{f', {name!r}' if name else ''}."


def _num_tokens(config: dict[str, Any], folder: Path, model: Any) -> int:
    """Returns the most tokens that adapters of the embedding and the head are for; 0 if there are none."""
    indices = config.get("trainable_token_indices") or []
    sizes = [1 + index for index in (indices if isinstance(indices, list) else chain(*indices.values()))]
    names = embedding_names(model)
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in list(file.keys()) if _is_of(key, names)}
    return max([*sizes, *(size for size in chain(*shapes.values()) if size != model.config.hidden_size)], default=0)


def _separate(adapted: nn.Module, own: set[nn.Parameter]) -> None:
    """Gives each module its own copy of the model's `own` weights that several modules share: merging the adapters of
    one module would change the others."""
    seen = set()
    for module in adapted.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen:
                setattr(module, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))
            elif parameter in own:
                seen.add(parameter)


def _merge(adapted: Any, folder: Path) -> Any:
    try:
        return adapted.merge_and_unload()
    except Exception as error:  # for methods that depend on the text, or that are more than weights
        raise _unmergeable(adapted, folder, first_line(error)) from error


def _unmergeable(adapted: Any, folder: Path, reason: str) -> ValueError:
    method = adapted.active_peft_config.peft_type.value
    return ValueError(
        f"--merge {folder}: adapters of {method} with these settings can't be merged into weights ({reason}). Load "
        "them with PEFT instead: PeftModel.from_pretrained(model, FOLDER)."
    )
