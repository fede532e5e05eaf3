"""Times of several models side by side: in turn, repeat by repeat, so that what drifts drifts for all.

Axes: B rows, N tokens.
"""

import gc
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from condense import CondenseConfig

from ..profile.memory import CudaMemory, ResidentMemory, is_out_of_memory
from ..profile.shapes import build
from .sizes import Sizes


class OutOfTimeError(Exception):
    """The run's minutes are over."""


@dataclass
class Bench:
    """One run: where it measures, until when, and what it has found so far."""

    sizes: Sizes
    device: torch.device
    dtype: torch.dtype
    deadline: float
    memory: Any
    part: str = ""
    points: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def check(self, name: str, passed: bool | None, note: str) -> None:
        """Notes whether something holds; None where it can't be asked here."""
        self.checks.append({"part": self.part, "name": name, "passed": passed, "note": note})
        if passed is not True:
            say(f"  {'n/a ' if passed is None else 'WRONG'} {name}: {note}")

    def random_ids(self, model: Any, batch: int, length: int) -> torch.Tensor:
        torch.manual_seed(0)
        return torch.randint(model.config.vocab_size, (batch, length), device=self.device)


@dataclass(frozen=True)
class Variant:
    """How a model is run. Stock models have no segments and no schedule."""

    kind: str
    attention: str = "sdpa"
    segment_length: int | None = None
    schedule: str | None = None
    checkpointing: bool = False
    fixed_decoding: bool = False


@dataclass
class Entrant:
    """One who races: `call` runs `model`, set up as `variant`; what comes of it is put into `point`."""

    variant: Variant
    model: Any
    call: Callable[[], object]
    point: dict[str, Any]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def new_bench(sizes: Sizes, deadline: float) -> Bench:
    if torch.cuda.is_available():
        return Bench(sizes, torch.device("cuda"), torch.bfloat16, deadline, CudaMemory())
    return Bench(sizes, torch.device("cpu"), torch.float32, deadline, ResidentMemory())


def attentions() -> list[str]:
    """What stock transformers is fastest with; SDPA's CUDA kernel is FlashAttention."""
    return ["sdpa", "flash_attention_2"] if has_flash_attn() else ["sdpa"]


def has_flash_attn() -> bool:
    return torch.cuda.is_available() and importlib.util.find_spec("flash_attn") is not None


def schedules() -> tuple[list[str], str]:
    """The schedules that there are, and why one is missing."""
    try:
        CondenseConfig(schedule="wavefront")
    except ValueError as error:
        return ["sequential"], f"no wavefront: {error}"
    return ["sequential", "wavefront"], ""


def folded(segments: Sequence[int], attention: str = "sdpa", checkpointing: bool = False) -> list[Variant]:
    """A folded model with each segment length and each schedule."""
    return [
        Variant("folded", attention, segment, schedule, checkpointing)
        for segment in segments
        for schedule in schedules()[0]
    ]


def build_models(bench: Bench, shape: dict[str, Any], kinds: Sequence[str] = ("stock", "folded")) -> dict[str, Any]:
    """Models with random weights, made on the device: a billion of them take long on a CPU."""
    models = {}
    for kind in kinds:
        with bench.device:
            models[kind] = cast(build(kind, shape, bench.sizes.segment, "sdpa"), bench.dtype)
    return models


def cast(model: Any, dtype: torch.dtype) -> Any:
    """Parameters alone, as `from_pretrained` does: `model.to(dtype)` would round the rotary frequencies too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def own_bytes(model: Any) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def configure(model: Any, variant: Variant) -> None:
    """The same weights serve all variants: what differs between them is read at every forward pass."""
    model.set_attn_implementation(variant.attention)
    if variant.kind == "folded":
        model.config.segment_length = variant.segment_length
        model.config.schedule = variant.schedule
        model.fixed_decoding = variant.fixed_decoding
    if variant.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()


def train(model: Any, ids_BN: torch.Tensor) -> None:
    """A forward and a backward pass, without an optimizer."""
    model.train()
    model(input_ids=ids_BN, labels=ids_BN, use_cache=False).loss.backward()  # stock models copy keys into a cache


@torch.no_grad()
def prefill(model: Any, ids_BN: torch.Tensor) -> Any:
    """Reads a prompt into a state, in one call, up to the next token's logits."""
    model.eval()
    return model(input_ids=ids_BN, use_cache=True, logits_to_keep=1)


MODES = {"training": train, "prefill": prefill}


def compare(
    bench: Bench, row: str, mode: str, models: dict[str, Any], variants: Sequence[Variant], length: int, batch: int = 1
) -> None:
    """Races variants on a text of random tokens, and adds a point for each under the name `row`."""
    entrants = []
    for variant in variants:
        model = models[variant.kind]
        ids_BN = bench.random_ids(model, batch, length)
        point = {"row": row, "mode": mode, "length": length, "batch": batch}
        entrants.append(Entrant(variant, model, lambda m=model, i=ids_BN: MODES[mode](m, i), point))
    race(bench, entrants, bench.sizes.repeats)


def race(bench: Bench, entrants: Sequence[Entrant], repeats: int, warm_ups: int = 1) -> None:
    """Fills in and adds the entrants' points.

    `seconds` is the median of the repeats; `peak_bytes` the peak during them, on CUDA without what was held
    for other entrants; `before_bytes` is the model alone. What does not fit into memory has `out_of_memory`.
    """
    free(bench)
    for entrant in entrants:
        entrant.point |= asdict(entrant.variant) | {
            "part": bench.part,
            "hidden_size": entrant.model.config.hidden_size,
            "layers": entrant.model.config.num_hidden_layers,
            "out_of_memory": not all(_run(bench, entrant) for _ in range(warm_ups)),
            "memory_is": bench.memory.description,
            "before_bytes": own_bytes(entrant.model),
        }
    running = [entrant for entrant in entrants if not entrant.point["out_of_memory"]]
    taken: list[list[tuple[float, int]]] = [[] for _ in running]
    for repeat in range(repeats):
        start = time.monotonic()
        for entrant, runs in zip(running, taken, strict=True):
            if (run := _run(bench, entrant)) is not None:
                runs.append(run)
        if repeat + 1 < repeats and bench.left() < 2 * (time.monotonic() - start):
            say("  fewer repeats: the time is nearly over")
            break
    for entrant, runs in zip(running, taken, strict=True):
        if not runs:  # it fitted only while the others' kernels were not yet loaded
            entrant.point["out_of_memory"] = True
            continue
        times = [seconds for seconds, _ in runs]
        entrant.point |= {
            "seconds": statistics.median(times),
            "seconds_low": min(times),
            "seconds_high": max(times),
            "repeats": len(times),
            "peak_bytes": max(peak for _, peak in runs),
        }
    bench.points += [entrant.point for entrant in entrants]
    for entrant in entrants:
        say(f"  {describe(entrant.point)}")
    free(bench)


def _run(bench: Bench, entrant: Entrant) -> tuple[float, int] | None:
    """Seconds and the peak in bytes; None where it does not fit into memory."""
    configure(entrant.model, entrant.variant)
    of_others = bench.memory.now() - own_bytes(entrant.model) if bench.device.type == "cuda" else 0
    bench.memory.restart()
    seconds = attempt(bench, entrant.call)
    peak = bench.memory.peak() - of_others
    entrant.model.zero_grad(set_to_none=True)
    if seconds is None:
        free(bench)
        return None
    return seconds, peak


def attempt(bench: Bench, call: Callable[[], object]) -> float | None:
    """Seconds that a call takes, until the device is done; None where it does not fit into memory."""
    try:
        synchronize(bench)
        start = time.perf_counter()
        call()
        synchronize(bench)
        return time.perf_counter() - start
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None


def synchronize(bench: Bench) -> None:
    if bench.device.type == "cuda":
        torch.cuda.synchronize()


def free(bench: Bench) -> None:
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()


def describe(point: dict[str, Any]) -> str:
    """One line for whoever waits."""
    name = f"{point['row']}, {point['length']:,} tokens: {variant_name(point)}"
    if point["out_of_memory"]:
        return f"{name}: OOM"
    state = f", state {point['state_bytes'] / 2**20:,.1f} MiB" if "state_bytes" in point else ""
    return f"{name}: {1000 * point['seconds']:,.2f} ms, peak {point['peak_bytes'] / 2**20:,.0f} MiB{state}"


def variant_name(point: dict[str, Any]) -> str:
    words = [point["kind"], point["attention"]]
    if point["kind"] == "folded":
        words += [f"segment {point['segment_length']}", str(point["schedule"])]
    return " ".join(words + ["checkpointing"] * point["checkpointing"])
