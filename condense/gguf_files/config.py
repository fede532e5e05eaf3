"""The configuration of the model in a GGUF file, as its config.json would hold it, and what the file must hold."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LlamaConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import cached_file

from ..extras import check_installed, how_to_install
from ..families import FAMILIES
from .header import Header, is_gguf, read_header

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # a Mistral's is "llama"
FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
ROPE_FACTORS = "rope_freqs.weight"  # [head_dim / 2]: what llama.cpp divides each rotary frequency by
LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SCALINGS = {  # the fields of `rope_parameters`, by the type of scaling
    "linear": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_context_length",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    },
}
HUB_OPTIONS = ("cache_dir", "local_files_only", "revision", "subfolder", "token")
DTYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # by the number of a tensor's type


def split_source(source: str | Path) -> tuple[str, dict[str, str]]:
    """Returns what `from_pretrained` takes for a source: a folder or hub id, and `gguf_file` for a file."""
    path = Path(source)
    return (str(path.parent), {"gguf_file": path.name}) if path.is_file() else (str(source), {})


def find_file(source: str | Path, gguf_file: str, **hub_options: Any) -> Path:
    """Returns the path of a GGUF file in a folder or on the hub."""
    return Path(cached_file(str(source), gguf_file, **hub_options))


def check_gguf(path: Path) -> None:
    """Raises `ValueError` for a file that is not GGUF or is incomplete, and for a model that condense does not fold."""
    if not is_gguf(path):
        raise ValueError(
            f"{str(path)!r} is a file that does not begin with GGUF: pass the folder that holds the model, or copy the "
            "GGUF file again."
        )
    _check_tensors(path, stock_config(path))


def stock_config(path: Path, **options: Any) -> Any:
    """Returns the configuration of the stock model in a file. `options` are those of `from_dict`."""
    fields = config_fields(path)
    return FAMILIES[fields["model_type"]].config_class.from_dict(fields, **options)


def config_fields(path: Path) -> dict[str, Any]:
    """Returns the fields of the stock model's config.json. Raises `ValueError` for a model that is not folded."""
    check_installed("a GGUF file", "gguf")
    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:  # in a checkout that isn't
        raise ValueError(f"a GGUF file needs {' and '.join(missing)}: {how_to_install('gguf')}.")
    header = read_header(path)
    metadata, family = header.metadata, header.metadata.get("general.architecture")
    if (parts := metadata.get("split.count", 1)) > 1:
        raise ValueError(f"{path} is one of {parts} parts of a model: join them with llama-gguf-split --merge.")
    if family not in ARCHITECTURES:
        raise ValueError(
            f"{path} holds a model of the architecture {family!r}: condense reads GGUF files of the architectures "
            f"{', '.join(ARCHITECTURES)}. Pass a file of one of them."
        )
    own = {"vocab_size": len(metadata.get("tokenizer.ggml.tokens", ())), **_fields_of(metadata, family)}
    if missing := [name for name in FIELDS.values() if not own.get(name)]:
        raise ValueError(f"{path} is damaged: it has no {family}.{missing[0]}. Convert the model to GGUF again.")
    found = {name: own[key] for name, key in FIELDS.items()}
    rotated = own.get("rope.dimension_count")
    head_dim = own.get("attention.key_length") or rotated or found["hidden_size"] // found["num_attention_heads"]
    if rotated not in (None, head_dim):
        raise ValueError(f"{path} rotates only {rotated} of a head's {head_dim} dimensions, which condense does not.")
    found |= {"model_type": family, "head_dim": head_dim, "tie_word_embeddings": "output.weight" not in header.tensors}
    found |= {
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
    }
    return {**found, **_special_tokens(metadata), "rope_parameters": _rope_parameters(path, header, own, head_dim)}


def generation_settings(path: Path) -> GenerationConfig:
    """Returns the settings of `generate`: the special tokens, and the settings of sampling in the file."""
    settings = GenerationConfig.from_model_config(stock_config(path))
    given = _fields_of(read_header(path).metadata, "general.sampling")
    found = {name: given[key] for name, key in SAMPLING.items() if key in given}
    settings.update(**found, **({"do_sample": True} if found else {}))
    return settings


def stored_dtype(path: Path) -> torch.dtype:
    """Returns the dtype of a file's weights, beside norms of float32; float32 if any are quantized."""
    kinds = {tensor.kind for tensor in read_header(path).tensors.values()}
    return DTYPES[max(kinds)] if kinds <= set(DTYPES) else torch.float32


def _fields_of(metadata: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(f"{prefix}."): value for key, value in metadata.items() if key.startswith(f"{prefix}.")}


def _special_tokens(metadata: dict[str, Any]) -> dict[str, Any]:
    """Returns the ids of the special tokens; a text ends at the end of a turn, too."""
    own = _fields_of(metadata, "tokenizer.ggml")
    ends = [own[key] for name in ("eos", "eot", "eom") if (key := f"{name}_token_id") in own]
    ends = list(dict.fromkeys(ends))
    return {
        "bos_token_id": own.get("bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": own.get("padding_token_id"),
    }


def _rope_parameters(path: Path, header: Header, own: dict[str, Any], head_dim: int) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": own.get("rope.freq_base", 10000.0)}
    scaling = {name: value for name, value in _fields_of(own, "rope.scaling").items() if name != "finetuned"}
    kind = scaling.pop("type", "none")
    if kind != "none":
        known = SCALINGS.get(kind, {})
        if not known or (others := scaling.keys() - known.values()):
            said = f"of the type {kind!r}" if not known else f"with {sorted(others)[0]}"
            raise ValueError(
                f"{path} scales rotary positions {said}, which condense can't read: fold the Hugging Face checkpoint."
            )
        rope |= {"rope_type": kind} | {name: scaling[key] for name, key in known.items() if key in scaling}
    if ROPE_FACTORS in header.tensors:
        rope |= _llama_3(path, header, rope["rope_theta"], head_dim)
    return rope


def _llama_3(path: Path, header: Header, theta: float, head_dim: int) -> dict[str, Any]:
    """Returns the scaling of rotary frequencies that has the factors in a file: they hold nothing else of it."""
    stored = header.tensors[ROPE_FACTORS]
    factors_H = np.fromfile(path, dtype="<f4", count=stored.shape[0], offset=stored.start)
    scaling = {"rope_type": "llama3", "factor": float(factors_H.max()), **LLAMA_3}
    config = LlamaConfig(
        head_dim=head_dim, max_position_embeddings=2**20, rope_parameters={"rope_theta": theta, **scaling}
    )
    frequencies_H = ROPE_INIT_FUNCTIONS["llama3"](config)[0].numpy()
    plain_H = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    if factors_H.shape != plain_H.shape or not np.allclose(plain_H / factors_H, frequencies_H, rtol=1e-4, atol=0):
        raise ValueError(
            f"{path} divides rotary frequencies by other factors than a Llama 3 does: fold the model's Hugging Face "
            "checkpoint instead."
        )
    return scaling


def _check_tensors(path: Path, config: PreTrainedConfig) -> None:
    """Raises `ValueError` if a file lacks weights of its model, or holds others, which transformers would ignore."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    (key,) = (key for key, name in MODEL_ARCH_NAMES.items() if name == config.model_type)
    names = get_tensor_name_map(key, config.num_hidden_layers)
    with torch.device("meta"):
        weights = FAMILIES[config.model_type].model_class(config).state_dict()
    stems = [name.rpartition(".") for name in weights if name != "lm_head.weight" or not config.tie_word_embeddings]
    expected = {f"{names.get_name(stem)}.{kind}" for stem, _, kind in stems}
    found = {name for name in read_header(path).tensors if name != ROPE_FACTORS and not name.endswith("rot_embd")}
    problems = (("lacks", expected - found), ("holds, beside the weights of its kind,", found - expected))
    for problem, names_of in problems:
        if names_of:
            more = f" and {len(names_of) - 1} more" if len(names_of) > 1 else ""
            raise ValueError(
                f"{path}, a {config.model_type}, {problem} {min(names_of)}{more}: fold the model's Hugging Face "
                "checkpoint instead."
            )
