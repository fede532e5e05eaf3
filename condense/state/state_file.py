"""The state of a `FoldedCache` in a file: safetensors, which run no code, and a description of the model that read.

A file is checked as a whole, its form, the model, and shape, dtype and values of each tensor, before it is used.

Axes: B rows of a batch, G key/value heads, L segment length, E head dimension, D hidden size.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ..durations import Timeline
from ..hub.weights import weights_fingerprint
from ..segmentation import SegmentPositions
from ..utils.files import atomic_file, check_output_file
from .cache_layer import BUFFERS
from .recording import CacheSnapshot

FORM = "folded state 1"
DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}
TIMELINE = ("durations_BL", "memory_BL", "elapsed_B", "memory_total_B")
DESCRIPTION = {"fields": dict, "dtype": str, "weights": str, "computed_in": str, "num_columns": int}
# Fields of a configuration that what is read depends on, beside those that a cache compares itself.
MORE_FIELDS = ("family", "num_attention_heads", "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias")


def write_state(snapshot: CacheSnapshot, path: str | Path, model: Any) -> None:
    """Writes a state of texts that `model` has read; the file is complete or as it was before.

    Raises `ValueError` for a state of no text, for a file that can't be written or isn't a state, and for a block of
    the caller's with a memory of unknown shape.
    """
    path, decoder = Path(path), model.get_decoder()
    check_new_state(path)
    if snapshot.last_hidden_BD is None or snapshot.computed_in is None:
        raise ValueError(f"{path}: the cache has read no token, so there is no state to save.")
    tensors = {
        f"layers.{number}.{name}": buffer
        for number, buffers in enumerate(snapshot.buffers)
        for name, buffer in zip(BUFFERS, buffers, strict=False)  # none of a block without memory
    }
    tensors |= {"last_hidden_BD": snapshot.last_hidden_BD}
    tensors |= {name: torch.tensor(getattr(snapshot.positions, name)) for name in ("offsets", "segments")}
    if snapshot.timeline is not None:
        tensors |= {name: getattr(snapshot.timeline, name) for name in TIMELINE}
    shapes = _shapes(decoder, len(snapshot.positions.offsets), snapshot.timeline is not None)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if (name := _first_difference(found, shapes)) is not None:
        raise ValueError(
            f"{path}: {name} has shape {found.get(name)}, and the block in that place announces {shapes.get(name)}: "
            "correct its attribute attention_evaluations (see DecoderBlock)."
        )
    fields = _fields(snapshot.made_for, decoder)
    described = {
        "dtype": fields.pop("dtype"),
        "weights": fields.pop("weights"),
        "fields": fields,
        "computed_in": _name(snapshot.computed_in[0]),
        "num_columns": snapshot.num_columns,
    }
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_file(path) as partial:
        partial.write_bytes(save(kept, {"form": FORM, "state": json.dumps(described)}))


def read_state(path: str | Path, model: Any, made_for: dict[str, Any]) -> CacheSnapshot:
    """Returns the state in a file, on the devices of `model`; `made_for` are the fields of a cache made for it.

    Raises `ValueError` for anything but a state of this model's weights, dtype and configuration.
    """
    decoder = model.get_decoder()
    with _open(path) as (file, described):
        _check_model(path, described, made_for, decoder)
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        num_rows = (shapes.get("offsets") or (0,))[0]
        expected = _shapes(decoder, num_rows, any(name in shapes for name in TIMELINE))
        if (name := _first_difference(shapes, expected)) is not None:
            raise _damage_error(path, f"{name} has shape {shapes.get(name)} instead of {expected.get(name)}")
        tensors = {name: file.get_tensor(name).clone() for name in shapes}  # the file may be replaced
    _check_values(path, tensors, made_for["segment_length"])
    positions = SegmentPositions(num_rows, made_for["segment_length"])
    positions.offsets, positions.segments = tensors["offsets"].tolist(), tensors["segments"].tolist()
    timeline = None
    if TIMELINE[0] in tensors:
        timeline = Timeline(positions, made_for["position_anchor"], made_for["sink_token_id"] is not None)
        for name in TIMELINE:
            setattr(timeline, name, tensors[name])
    default = _device_of(decoder, torch.device("cpu"))
    device = _device_of(decoder.norm, default)
    buffers = []
    for number, layer in enumerate(decoder.layers):
        found = [tensors[key] for name in BUFFERS if (key := f"layers.{number}.{name}") in tensors]
        buffers.append([buffer.to(_device_of(layer, default)) for buffer in found])
    return CacheSnapshot(
        made_for=made_for,
        buffers=buffers,
        positions=positions,
        timeline=timeline,
        last_hidden_BD=tensors["last_hidden_BD"].to(device),
        computed_in=(DTYPES[described["computed_in"]], device),
        num_columns=described["num_columns"],
    )


def check_state(path: str | Path) -> None:
    """Raises `ValueError` for a file that isn't a state, whatever its model."""
    with _open(path):
        pass


def check_new_state(path: Path) -> None:
    """Raises `ValueError` if a state can't be written there, or would replace a file that isn't a state."""
    check_output_file(path)
    if path.exists():
        try:
            check_state(path)
        except ValueError as error:
            raise ValueError(f"{path} exists and is not a state: pass another path.") from error


@contextmanager
def _open(path: str | Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields an open file and its description. Raises `ValueError` for a file that isn't a state."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file, _describe(path, file.metadata())
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{path} can't be read as a state ({error}): pass a file of save() or --save-state."
        ) from error


def _shapes(decoder: Any, num_rows: int, with_timeline: bool) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all tensors of a state by their names."""
    config = decoder.config
    heads, length, size = config.num_key_value_heads, config.segment_length, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"offsets": (num_rows,), "segments": (num_rows,)}
    shapes["last_hidden_BD"] = (num_rows, config.hidden_size)
    for number, layer in enumerate(decoder.layers):
        if evaluations := getattr(layer, "attention_evaluations", 0):
            current, following = (num_rows, evaluations * heads, 2 * length, size), (num_rows, heads, length, size)
            for name, shape in zip(BUFFERS, (current, current, following, following), strict=True):
                shapes[f"layers.{number}.{name}"] = shape
    if with_timeline:
        shapes |= {name: (num_rows, length) if name.endswith("_BL") else (num_rows,) for name in TIMELINE}
    return shapes


def _first_difference(shapes: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> str | None:
    names = sorted(shapes.keys() | expected.keys())
    return next((name for name in names if shapes.get(name) != expected.get(name)), None)


def _fields(made_for: dict[str, Any], decoder: Any) -> dict[str, Any]:
    """Returns what a state's model must have in common with its reader, as JSON returns it."""
    fields = json.loads(json.dumps(made_for | {name: getattr(decoder.config, name) for name in MORE_FIELDS}))
    return fields | {"dtype": _name(decoder.dtype), "weights": weights_fingerprint(decoder)}


def _describe(path: str | Path, metadata: dict[str, str] | None) -> dict[str, Any]:
    if not metadata or metadata.get("form") != FORM:
        raise ValueError(f"{path} is not a state of a folded model: pass a file of save() or --save-state.")
    try:
        described = json.loads(metadata["state"])
        whole = all(type(described[name]) is kind for name, kind in DESCRIPTION.items())
        whole = whole and described["computed_in"] in DTYPES and described["num_columns"] >= 0
    except (LookupError, TypeError, ValueError, RecursionError):
        whole = False
    if not whole:
        raise _damage_error(path, "its description is not that of a state")
    return described


def _check_model(path: str | Path, described: dict[str, Any], made_for: dict[str, Any], decoder: Any) -> None:
    stored = described["fields"] | {"dtype": described["dtype"], "weights": described["weights"]}
    for name, value in _fields(made_for, decoder).items():
        if stored.get(name) != value:
            raise ValueError(
                f"{path} is the state of a model with {name}={stored.get(name)!r}, and this one has {value!r}: load it "
                "with the model that read the text."
            )


def _check_values(path: str | Path, tensors: dict[str, torch.Tensor], segment_length: int) -> None:
    kinds = {tensor.dtype for name, tensor in tensors.items() if name.startswith("layers.")}
    for name, tensor in tensors.items():
        whole = name in ("offsets", "segments")
        allowed = [torch.int64] if whole else [torch.float64] if name in TIMELINE else list(DTYPES.values())
        fits = len(kinds) <= 1 and tensor.dtype in allowed and bool(torch.isfinite(tensor).all())
        if whole or name in TIMELINE:
            fits = fits and bool((tensor >= 0).all())
        if name == "offsets":
            fits = fits and len(tensor) > 0 and bool((tensor < segment_length).all())
        if not fits:
            raise _damage_error(path, f"{name} has another dtype or other values than in a state")


def _damage_error(path: str | Path, reason: str) -> ValueError:
    return ValueError(f"{path} is damaged ({reason}): read the text again.")


def _device_of(module: Any, default: torch.device) -> torch.device:
    """Returns the device of a module's weights; `default` if a device map keeps them elsewhere between their uses."""
    return next((one.device for one in module.parameters() if not one.is_meta), default)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
