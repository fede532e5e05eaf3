"""Reads the header of a GGUF file: its metadata, and where its tensors are. The whole file is little-endian:

"GGUF", version, number of tensors, number of metadata entries,
metadata entries (key, type, value),
tensors (name, sizes from the last axis on, type, offset in the data),
the data, from the next multiple of `general.alignment` on
"""

import mmap
import struct
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # where `general.alignment` gives no other
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
FLOAT32, STRING, ARRAY = 6, 8, 9


class StoredTensor(NamedTuple):
    """`kind`: the number of its type in ggml. `start`: its first byte in the file."""

    shape: tuple[int, ...]
    kind: int
    start: int
    num_bytes: int


class Header(NamedTuple):
    """`num_bytes`: all before the data."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]
    num_bytes: int


def is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_header(path: Path) -> Header:
    """Returns a file's header. Raises `ValueError` for a file that is damaged, incomplete or not GGUF."""
    stat = path.stat()
    return _read_header(path.resolve(), stat.st_size, stat.st_mtime_ns)


@cache
def _read_header(path: Path, size: int, changed_ns: int) -> Header:
    if not is_gguf(path):
        raise ValueError(f"{path} is not a GGUF file, which begins with {MAGIC.decode()}: copy the file again.")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _parse(data)
    except (struct.error, UnicodeDecodeError, KeyError, OverflowError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path} is damaged or incomplete: its header ends too early ({reason}). Copy it again."
        ) from error
    needed = max((tensor.start + tensor.num_bytes for tensor in header.tensors.values()), default=0)
    if needed > size:
        raise ValueError(f"{path} is incomplete: it has {size:,} of at least {needed:,} bytes. Copy it again.")
    return header


def _parse(data: mmap.mmap) -> Header:
    from gguf import GGML_QUANT_SIZES

    cursor = _Cursor(data, len(MAGIC))
    version, num_tensors, num_entries = cursor.take("IQQ")
    if version not in VERSIONS:
        raise ValueError(
            f"this GGUF file has version {version}: condense reads the versions 2 and 3. Convert it again."
        )
    metadata = {}
    for _ in range(num_entries):
        key = cursor.string()
        metadata[key] = cursor.value(*cursor.take("I"))
    table = []
    for _ in range(num_tensors):
        name, (num_axes,) = cursor.string(), cursor.take("I")
        sizes, (kind, offset) = cursor.take(f"{num_axes}Q"), cursor.take("IQ")
        table.append((name, sizes[::-1], kind, offset))
    data_start = -(-cursor.position // (align := metadata.get("general.alignment", ALIGNMENT))) * align
    tensors = {}
    for name, shape, kind, offset in table:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        tensors[name] = StoredTensor(shape, kind, data_start + offset, prod(shape) // block * block_bytes)
    return Header(metadata, tensors, cursor.position)


class _Cursor:
    """Reads values one after the other."""

    def __init__(self, data: mmap.mmap, position: int):
        self.data, self.position = data, position

    def take(self, kinds: str) -> tuple[Any, ...]:
        """Returns numbers of the given `struct` types."""
        found = struct.unpack_from(f"<{kinds}", self.data, self.position)
        self.position += struct.calcsize(f"<{kinds}")
        return found

    def string(self) -> str:
        (length,) = self.take("Q")
        (found,) = self.take(f"{length}s")
        return found.decode("utf-8")

    def value(self, kind: int) -> Any:
        """Returns a value of a metadata type."""
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return _number(kind, self.take(SCALARS[kind])[0])
        kind, count = self.take("IQ")
        if kind in SCALARS:
            return list(self.take(f"{count}{SCALARS[kind]}"))
        return [self.value(kind) for _ in range(count)]


def _number(kind: int, value: Any) -> Any:
    return float(str(np.float32(value))) if kind == FLOAT32 else value  # 1e-05, not 9.999999747378752e-06
