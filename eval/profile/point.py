"""One point of a profile, measured in a process of its own.

So neither memory that an earlier point has left behind nor a kernel that it has warmed up counts.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MODES = ("training", "prefill", "decoding")
NEW_TOKENS = 32
WARM_UP_TOKENS = 4
CHUNK = 2048  # tokens read at once before decoding


@dataclass(frozen=True)
class Point:
    """What is measured. `segment_length` is None for a stock model, half the window for a sliding one."""

    kind: str
    mode: str
    length: int
    batch: int
    segment_length: int | None
    attention: str
    checkpointing: bool


@dataclass(frozen=True)
class Setting:
    """What all points of a profile share. `dtype` "auto" is bfloat16 on CUDA, float32 on a CPU."""

    shape: dict[str, Any]
    dtype: str
    repeats: int
    snapshots: str | None


def measure(point: Point, setting: Setting) -> dict[str, Any]:
    """Seconds (median, lowest and highest of the repeats; per token when decoding) and bytes, in this process.

    `peak_bytes` is the peak during what is measured, everything included; `before_bytes` is what the
    process or the allocator held with the model loaded and nothing run. What does not fit into memory
    gives `out_of_memory`.
    """
    import torch

    from .memory import is_out_of_memory, memory_of
    from .shapes import build

    device, dtype = place(setting)
    memory = memory_of(device)
    figures: dict[str, Any] = {"memory_is": memory.description, "dtype": dtype, "out_of_memory": False}
    torch.manual_seed(0)
    model = build(point.kind, setting.shape, point.segment_length, point.attention)
    figures["parameters"] = model.num_parameters()
    if setting.snapshots:
        torch.cuda.memory._record_memory_history()
    try:
        model = model.to(device, getattr(torch, dtype))
        figures["before_bytes"] = memory.now()
        memory.restart()
        figures |= {"training": _training, "prefill": _prefill, "decoding": _decoding}[point.mode](
            model, point, setting.repeats
        )
        figures["peak_bytes"] = memory.peak()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        figures["out_of_memory"] = True
    if setting.snapshots:
        name = "-".join(str(value) for value in asdict(point).values())
        Path(setting.snapshots).mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(Path(setting.snapshots) / f"{name}.pickle"))
    return figures


def place(setting: Setting) -> tuple[str, str]:
    """The device, and the number format there."""
    import torch

    on_cuda = torch.cuda.is_available()
    dtype = {"auto": "bfloat16" if on_cuda else "float32"}.get(setting.dtype, setting.dtype)
    return "cuda" if on_cuda else "cpu", dtype


def training_step(model: Any, point: Point) -> Callable[[], None]:
    """A forward and a backward pass. Checkpointing is by layer in stock models, by segment in a folded one."""
    import torch

    model.train()
    if point.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids_BN = torch.randint(0, model.config.vocab_size, (point.batch, point.length), device=model.device)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids_BN, labels=ids_BN).loss.backward()

    return step


def prefill(model: Any, point: Point) -> Callable[[], Any]:
    """Reading a prompt into the state that is returned, in one call, up to the next token's logits."""
    import torch

    model.eval()
    ids_BN = torch.randint(0, model.config.vocab_size, (point.batch, point.length), device=model.device)

    @torch.no_grad()
    def read() -> Any:
        return model(input_ids=ids_BN, use_cache=True, logits_to_keep=1).past_key_values

    return read


def _training(model: Any, point: Point, repeats: int) -> dict[str, Any]:
    step = training_step(model, point)
    step()
    return times([timed(step) for _ in range(repeats)])


def _prefill(model: Any, point: Point, repeats: int) -> dict[str, Any]:
    read = prefill(model, point)
    state_bytes = _state_bytes(read())
    return times([timed(read) for _ in range(repeats)]) | {"state_bytes": state_bytes}


def _decoding(model: Any, point: Point, repeats: int) -> dict[str, Any]:
    """New tokens behind a context of `length` tokens, one at a time: each token is a repeat."""
    import torch

    model.eval()
    ids_BN = torch.randint(0, model.config.vocab_size, (point.batch, point.length), device=model.device)
    with torch.no_grad():
        cache, next_B1 = None, ids_BN[:, :1]
        for chunk in ids_BN.split(CHUNK, dim=1):
            output = model(input_ids=chunk, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, next_B1 = output.past_key_values, output.logits[:, -1:].argmax(-1)

        def step() -> None:
            nonlocal next_B1
            logits = model(input_ids=next_B1, past_key_values=cache, use_cache=True).logits
            next_B1 = logits[:, -1:].argmax(-1)

        for _ in range(WARM_UP_TOKENS):
            step()
        return times([timed(step) for _ in range(repeats * NEW_TOKENS)]) | {"state_bytes": _state_bytes(cache)}


def _state_bytes(cache: Any) -> int:
    from ..models import state_bytes

    return state_bytes(cache)


def times(seconds: list[float]) -> dict[str, Any]:
    return {
        "seconds": statistics.median(seconds),
        "seconds_low": min(seconds),
        "seconds_high": max(seconds),
        "repeats": len(seconds),
    }


def timed(function: Callable[[], object]) -> float:
    import torch

    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start


def main(measure: Callable[[Point, Setting], dict[str, Any]]) -> None:
    """Measures what the command line asks for, and prints it as JSON."""
    from training.subprocesses import end_with_parents

    end_with_parents()
    point, setting = json.loads(sys.argv[1])
    print(json.dumps(measure(Point(**point), Setting(**setting))))
