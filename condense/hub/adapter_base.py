"""The model that adapters were trained on: a description beside them, by which another one is refused.

It has the model's memory, and of each weight the shape and a few values. Copies of a model in another dtype, or
quantized ones, have the same values up to rounding. Vectors (norms and biases) are never quantized: they agree to
bfloat16's digits, and tell one training from another. Matrices may be rounded to a few bits, and tell whole models
apart. docs/healing.md says what this can't see.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .loading import read_object
from .source_name import FIELDS
from .weights import spread_values

BASE = "condense_base.json"
SAMPLES = 32  # values of each weight
DIGITS = 4
VECTOR_ERROR, NEAR_ZERO = 0.005, 1e-7  # relative: bfloat16's 2**-8 and that of DIGITS; absolute: float16's
# Of 32 values, relative. On SmolLM2-135M 4 bits are off by at most 0.33, 2 bits by 0.75; unrelated weights by 0.99.
MATRIX_ERROR = 0.85


def describe_base(model: Any) -> dict[str, Any]:
    """Returns the description of a model that adapters are to be trained on."""
    weights = {}
    for name, weight in _weights(model).items():
        values = [float(f"{value:.{DIGITS}g}") for value in _values(weight).tolist()]
        weights[name] = {"shape": list(weight.shape), "values": values}
    memory = {name: getattr(model.config, name) for name in FIELDS if hasattr(model.config, name)}
    return {"memory": memory, "weights": weights}


def write_base(description: dict[str, Any], folder: Path) -> None:
    (folder / BASE).write_text(json.dumps(description) + "\n", encoding="utf-8")


def memory_of_base(folder: Path) -> dict[str, Any]:
    """Returns the fields of the memory with which a folder's adapters were trained; empty if it is not described."""
    return {name: value for name, value in _read(folder, "memory").items() if name in FIELDS}


def tokens_of_base(model: Any, folder: Path) -> int:
    """Returns the vocabulary of the described model, whose embedding has the names of `model`'s; 0 if there is none."""
    described = _weights_of_base(folder)
    return max((described[name].shape[0] for name in _with_a_row_for_each_token(model) & described.keys()), default=0)


def other_shapes(model: Any, folder: Path) -> str | None:
    """Says how the weights of a model differ in name or shape from those that a folder's adapters were trained on; None
    if they don't, or if those are not described. Vocabularies may differ."""
    described, own = _weights_of_base(folder), _weights(model)
    per_token = _with_a_row_for_each_token(model)
    for name in sorted(described.keys() ^ own.keys()) if described else ():
        return f"it has {name}, which theirs lacks" if name in own else f"it lacks {name}, which theirs has"
    for name, base in described.items():
        shape = list(own[name].shape)
        if shape[name in per_token :] != base.shape[name in per_token :]:
            return f"its {name} has the shape {shape}, and theirs {base.shape}"
    return None


def other_values(model: Any, folder: Path) -> str | None:
    """Says which weight of a model, of the described shapes, has other values; None if none has. Its vocabulary may be
    larger; weights on the meta device have no values."""
    own, per_token = _weights(model), _with_a_row_for_each_token(model)
    for name, base in _weights_of_base(folder).items():
        weight = own[name][: base.shape[0]] if name in per_token else own[name]
        if not weight.is_meta and not _agree(
            _values(weight, len(base.values)), base.values, of_vector=weight.dim() == 1
        ):
            return f"its {name} has other values than theirs"
    return None


def embedding_names(model: Any) -> list[str]:
    """Returns the names of the embedding and the head."""
    found = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name for name, module in model.named_modules() if module in found]


def _with_a_row_for_each_token(model: Any) -> set[str]:
    return {f"{name}.weight" for name in embedding_names(model)}


def _weights(model: Any) -> dict[str, torch.Tensor]:
    """Returns a model's weights by name, a tied one under each of its names; without LoRA's, if it has adapters."""
    named = model.named_parameters(remove_duplicate=False)
    return {name.replace(".base_layer.", "."): weight for name, weight in named if ".lora_" not in name}


def _values(weight: torch.Tensor, number: int = SAMPLES) -> torch.Tensor:
    return spread_values(weight.detach(), number).float().cpu()


def _agree(values: torch.Tensor, described: torch.Tensor, of_vector: bool) -> bool:
    error = values - described
    if of_vector:
        return bool((error.abs() <= VECTOR_ERROR * described.abs() + NEAR_ZERO).all())
    return bool(error.norm() <= MATRIX_ERROR * described.norm())


class _Weight(NamedTuple):
    shape: list[int]
    values: torch.Tensor


def _weights_of_base(folder: Path) -> dict[str, _Weight]:
    try:
        return {
            name: _Weight(list(found["shape"]), torch.tensor(found["values"], dtype=torch.float32).flatten())
            for name, found in _read(folder, "weights").items()
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / BASE} is damaged: its weights have no shape and values. Copy it again.") from error


def _read(folder: Path, section: str) -> dict[str, Any]:
    """Returns a section of the description in a folder; empty if there is none."""
    path = folder / BASE
    if not path.is_file():
        return {}
    found = read_object(path).get(section)
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it has no {section}. Copy it again.")
    return found
