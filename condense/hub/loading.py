"""Checks and loads the checkpoints that a user names: folders, hub ids, and GGUF files.

transformers loads incomplete checkpoints too: it initialises missing weights at random, ignores unexpected weights, and
treats a folder without `config.json` as a default Llama. Here each of these is an error in one sentence.
"""

import importlib
import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, GgufConfig, PreTrainedConfig, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import find_adapter_config_file

from .. import gguf_files
from ..checks import check_tokenizer
from ..configuration import CondenseConfig, check_llama_fields
from ..families import FAMILIES
from ..laboratories import REGISTERED_BY, STOCK_MODELS
from ..utils.files import is_lfs_pointer
from .generation_settings import check_settings
from .source_name import stored_source
from .transformers_private import get_tokenizer_config
from .weights import inner_tensors

ADAPTER_CONFIG = "adapter_config.json"
JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
# In the order in which transformers searches for them.
WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
CHECKED = (*FAMILIES, CondenseConfig.model_type, *STOCK_MODELS)
HUB_TIMEOUT_S = 5
NAMES_SHOWN = 3


def load_model(model_class: Any, source: str | Path, **options: Any) -> Any:
    """Calls `model_class.from_pretrained(source, **options)`; all weights must come from the checkpoint.

    `model_class`: a model class or an Auto class. Raises `ValueError` in one sentence for a folder that does not exist,
    damaged files, an invalid configuration, and weights that are missing, unexpected, of another shape or not finite.
    """
    check_source(source)
    folder, given = gguf_files.split_source(source)
    if given and not is_folded(getattr(model_class, "config_class", None)):
        given, options = _stock_options(model_class, Path(source), given, options)
    try:
        with without_load_report():
            model, report = model_class.from_pretrained(
                folder,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                trust_remote_code=False,  # the default asks the user in the middle of a command
                **given,
                **options,
            )
    except Exception as error:  # libraries may raise any exception for damaged files
        raise _refusal(source, error) from error
    check_loading_report(source, report)
    if "config" in given:
        model.generation_config = gguf_files.generation_settings(Path(source))
    remedy = "Use an earlier checkpoint, or another dtype if the weights were rounded to float16."
    check_finite(model, f"model {str(source)!r}", remedy)
    return model


def load_config(config_class: Any, source: str | Path, **options: Any) -> Any:
    """Calls `config_class.from_pretrained(source, **options)`; raises `ValueError` as `load_model` does."""
    check_source(source, with_weights=False)
    folder, given = gguf_files.split_source(source)
    try:
        if given and not is_folded(config_class):
            return _stock_config(config_class, Path(source), **options)
        return config_class.from_pretrained(folder, trust_remote_code=False, **given, **options)
    except Exception as error:
        raise _refusal(source, error) from error


def load_tokenizer(source: str | Path, config: PreTrainedConfig) -> Any:
    """Returns the tokenizer of a model's folder, hub id or GGUF file.

    Raises `ValueError` if it is missing or damaged, or has ids outside the model's vocabulary.
    """
    check_source(source, with_weights=False)
    try:
        if Path(source).is_file():
            tokenizer = gguf_files.load_tokenizer(Path(source))
        else:
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        check_tokenizer(config, tokenizer)
    except Exception as error:
        raise ValueError(f"the tokenizer of {str(source)!r} can't be used: {first_line(error)}.") from error
    return tokenizer


def tokenizer_class(source: str | Path) -> str | None:
    """Returns the `tokenizer_class` in the files of a model's folder or hub id; None if they don't name it."""
    return None if Path(source).is_file() else get_tokenizer_config(source).get("tokenizer_class")


def check_source(source: str | Path, with_weights: bool = True) -> None:
    """Raises `ValueError` if a model's folder, GGUF file or hub id does not exist, or if its files are damaged."""
    path = Path(source)
    if path.is_dir():
        _check_folder(path)
        if with_weights:
            _check_weights(path)
    elif path.exists():
        gguf_files.check_gguf(path)
    elif _is_path(str(source)) or path.suffix == ".gguf":
        noun = "file" if path.suffix == ".gguf" else "folder"
        raise ValueError(f"there is no {noun} {str(source)!r}: pass the folder of a model, or a hub id OWNER/NAME.")
    else:
        _check_hub(str(source))
    if (
        find_adapter_config_file(gguf_files.split_source(source)[0]) is not None
    ):  # transformers would load them with the model
        raise ValueError(
            f"{str(source)!r} holds adapters ({ADAPTER_CONFIG}) beside a model: move them to a folder of their own, "
            "and merge them with condense convert MODEL TARGET --merge FOLDER."
        )


def is_folded(config_class: Any) -> bool:
    """Returns whether a class of configurations, if it is one, is of folded models."""
    return isinstance(config_class, type) and issubclass(config_class, CondenseConfig)


def _stock_options(
    model_class: Any, path: Path, given: dict[str, Any], options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments with which transformers reads a GGUF file into a stock model, and the rest of `options`."""
    if is_deepspeed_zero3_enabled():
        raise ValueError(
            f"{path}: ZeRO-3 divides weights as they are read, and those of a GGUF file have to be dequantized first. "
            "Write a folder with condense convert, and start from it."
        )
    dtype = options.pop("dtype", None) or "auto"
    config_class = getattr(model_class, "config_class", None) or AutoConfig
    config, options = _stock_config(config_class, path, return_unused_kwargs=True, **options)
    dtype = gguf_files.stored_dtype(path) if dtype == "auto" else dtype
    return given | {"config": config, "dtype": dtype, "quantization_config": GgufConfig(dequantize=True)}, options


def _stock_config(config_class: Any, path: Path, **options: Any) -> Any:
    found = gguf_files.stock_config(path, **options)
    config = found[0] if isinstance(found, tuple) else found
    if config_class not in (AutoConfig, type(config)):
        raise ValueError(
            f"{path} holds a model of type {config.model_type!r}, not {config_class.model_type!r}: pass another."
        )
    return found


def is_stock(source: str | Path) -> bool:
    """Returns whether a model's folder, GGUF file or hub id has a stock checkpoint that can be folded; False if it has
    none."""
    try:
        return load_config(AutoConfig, source).model_type in FAMILIES
    except ValueError:
        return False


@contextmanager
def without_load_report() -> Iterator[None]:
    """Stops transformers from printing the loading report, which `check_loading_report` checks."""
    logger = logging.getLogger("transformers.modeling_utils")

    def is_other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def check_loading_report(source: str | Path, report: Mapping[str, Collection], ignore_shapes: bool = False) -> None:
    """Raises `ValueError` if transformers' loading report names missing, unexpected or mismatched weights."""
    problems = []
    if missing := report["missing_keys"]:
        problems.append(f"lacks {_list(missing)}")
    if unexpected := report["unexpected_keys"]:
        problems.append(f"holds {_list(unexpected)}, which the model of its config.json does not have")
    if (shapes := report["mismatched_keys"]) and not ignore_shapes:
        found = [f"{name} {list(there)}, but the model has {list(expected)}" for name, there, expected in shapes]
        problems.append(f"holds {_list(found)}")
    if problems:
        raise ValueError(
            f"model {str(source)!r} {'; and '.join(problems)}: its config.json and its weights belong to different "
            "models, or a file is incomplete. Copy the checkpoint again, or correct config.json."
        )


def check_finite(model: PreTrainedModel, source: str, remedy: str) -> None:
    """Raises `ValueError` naming the first weight of a model with values that are not finite."""
    for name, parameter in model.named_parameters():
        if not all(map(_is_finite, inner_tensors(parameter.detach()))):
            raise ValueError(f"{source}: {name} holds values that are not finite. {remedy}")


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.is_meta or not tensor.is_floating_point() or tensor.itemsize < 2:
        return True
    accurate = torch.promote_types(tensor.dtype, torch.float32)
    return bool(torch.isfinite(tensor.sum(dtype=accurate)))  # does not copy the weight


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        remedy = "pass the folder of a model"
        if (folder / ADAPTER_CONFIG).is_file():
            name = stored_source(read_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path"))
            remedy = f"merge its adapters with condense convert {name or 'MODEL'} TARGET --merge {folder}"
        raise ValueError(f"{folder} holds no config.json: {remedy}.")
    found = {name: read_object(folder / name) for name in JSON_FILES if (folder / name).is_file()}
    model_type = found["config.json"].get("model_type")
    if model_type in REGISTERED_BY:
        importlib.import_module(REGISTERED_BY[model_type])
    if model_type not in CONFIG_MAPPING and "auto_map" in found["config.json"]:  # whose code would be asked for
        raise ValueError(
            f"{folder / 'config.json'} names the model_type {model_type!r}, which neither condense nor the installed "
            "transformers has: correct it."
        )
    if (settings := found.get("generation_config.json")) is not None:
        check_settings(settings, folder / "generation_config.json")
    if model_type in CHECKED:
        check_llama_fields(found["config.json"], f"{folder / 'config.json'}: ")


def _check_weights(folder: Path) -> None:
    """Checks the weight file, or the shards, that transformers would load."""
    name = next((name for name in WEIGHTS if (folder / name).is_file()), WEIGHTS[0])
    names = {name}
    if name.endswith(".json"):
        shards = read_object(folder / name).get("weight_map")
        names = set(map(str, shards.values())) if isinstance(shards, dict) else set()  # then transformers refuses it
    if absent := [file for file in names if not (folder / file).is_file()]:
        raise ValueError(f"{folder} lacks {_list(absent)}: copy the model's weights there.")
    for file in sorted(names):
        if file.endswith(".safetensors"):
            check_safetensors(folder / file)
        else:
            _check_pointer(folder / file)


def read_object(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises `ValueError` for a damaged file, or if it holds anything else."""
    _check_pointer(path)
    try:
        return dict(**json.loads(path.read_text(encoding="utf-8")))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged: it is not JSON of an object ({first_line(error)}). Copy it again."
        ) from error


def check_safetensors(path: Path) -> None:
    """Raises `ValueError` for a damaged file of weights."""
    _check_pointer(path)
    try:
        with safe_open(path, framework="pt"):  # reads the header and compares it with the file size
            pass
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or incomplete ({first_line(error)}): copy the file again.") from error


def _check_pointer(path: Path) -> None:
    if is_lfs_pointer(path):
        raise ValueError(f"{path} is a Git LFS pointer, not the file itself: fetch it with git lfs pull.")


def _is_path(source: str) -> bool:
    """Returns whether a string is a path rather than a hub id: hub ids are NAME or OWNER/NAME."""
    begins = source.startswith((os.sep, ".", "~"))
    return begins or source.endswith(os.sep) or source.count("/") > 1 or "\\" in source or "=" in source


def _check_hub(source: str) -> None:
    """Asks the hub once; transformers would retry for half a minute and report a wrong path as a problem of the hub."""
    if isinstance(try_to_load_from_cache(source, "config.json"), str):
        return
    try:
        HfApi().model_info(source, timeout=HUB_TIMEOUT_S)
    except HfHubHTTPError as error:
        if not isinstance(error, RepositoryNotFoundError):
            return  # transformers has a message for each of these
        reason = "lists no such model, or it is private and you are not logged in"
    except Exception as error:  # the HTTP library differs between releases of huggingface_hub
        reason = f"can't be reached ({first_line(error)})"
    else:
        return
    raise ValueError(f"there is no folder {source!r}, and the hub {reason}: pass a folder or a hub id.")


def _refusal(source: str | Path, error: Exception) -> Exception:
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        type(error) is ValueError and "\n" not in str(error)
    ):
        return error  # of the machine, or one sentence already
    remedy = "install what it needs" if isinstance(error, ImportError) else "correct or replace its files"
    return ValueError(f"model {str(source)!r} can't be loaded ({first_line(error)}): {remedy}.")


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, or the second of two lines if the first ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    message = lines[-1] if len(lines) == 2 and lines[0].endswith(":") else lines[0]
    message = message.rstrip(".:")
    return message if type(error) in (ValueError, OSError) else f"{type(error).__name__}: {message}"


def _list(names: Collection[str]) -> str:
    first = sorted(names)[:NAMES_SHOWN]
    return ", ".join(first) + (f" and {len(names) - len(first)} more" if len(names) > len(first) else "")
