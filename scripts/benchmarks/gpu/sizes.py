"""The sizes of the measurements: real ones for a GPU, and tiny ones that run the same code on any device in seconds."""

from dataclasses import dataclass
from typing import Any

from condense.eval.benchmark.models import table_1


@dataclass(frozen=True)
class Sizes:
    """The sizes of all measurements. `table_1` and `large` are timed shapes; `checked` are compared with float64."""

    table_1: dict[str, Any]
    large: dict[str, Any]
    checked: dict[str, tuple[dict[str, Any], int]]  # name: shape, tokens of a segment
    waits_segments: tuple[int, int]  # of the two texts, for the tiny shape, whose waits of the host are compared
    segment: int  # of the large shape
    training_segments: tuple[int, ...]  # of the Table I shape
    training_eager: int
    training_memory: int
    training_steps: tuple[int, ...]
    large_training: tuple[int, ...]  # of the large shape
    steps: tuple[tuple[str, dict[str, Any], int, int], ...]  # name, shape, texts, tokens of each
    prefill_schedules: int
    prefill_full: int
    decode_short: int
    decode_long: dict[int, int]  # batch: tokens of context
    stock_decode: dict[int, int]  # the same for the stock model, whose state grows
    new_tokens: int
    schedule_segments: tuple[int, ...]
    schedule_lengths: tuple[int, ...]
    schedule_training_lengths: tuple[int, ...]
    longest_first: int
    longest_cap: int
    repeats: int


def _shape(
    layers: int, hidden: int, intermediate: int, heads: int, groups: int, head: int, vocab: int
) -> dict[str, Any]:
    return table_1() | {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
    }


# One shape groups its heads and one does not: SDPA may use other kernels for grouped heads.
TINY = _shape(layers=3, hidden=64, intermediate=96, heads=4, groups=4, head=16, vocab=101)
MIDDLE = _shape(layers=4, hidden=512, intermediate=1024, heads=8, groups=2, head=64, vocab=1024)
REHEARSAL = _shape(layers=2, hidden=64, intermediate=96, heads=4, groups=2, head=16, vocab=101)

LARGE = table_1() | {"hidden_size": 2048, "num_hidden_layers": 16}  # Llama-3.2-1B
REAL = Sizes(
    table_1=table_1(),
    large=LARGE,
    checked={"tiny": (TINY, 16), "middle": (MIDDLE, 128)},
    waits_segments=(8, 32),
    segment=512,
    training_segments=(256, 512),
    training_eager=8192,
    training_memory=16_384,
    training_steps=(4096, 2048),
    large_training=(8192, 32_768),
    steps=(
        ("Table I", table_1(), 1, 4096),
        ("1.2 B", LARGE, 1, 8192),
        ("Table I", table_1(), 1, 2048),
        ("Table I", table_1(), 1, 16_384),
        ("1.2 B", LARGE, 8, 4096),  # Table III's own step
        ("1.2 B", LARGE, 1, 32_768),
    ),
    prefill_schedules=65_536,
    prefill_full=131_072,
    decode_short=1024,
    decode_long={1: 2**20, 32: 65_536},
    stock_decode={1: 65_536, 32: 1024},
    new_tokens=128,
    schedule_segments=(256, 512, 1024),
    schedule_lengths=(2048, 8192, 32_768),
    schedule_training_lengths=(2048, 8192),
    longest_first=16_384,
    longest_cap=2**22,
    repeats=5,
)
SMOKE = Sizes(
    table_1=REHEARSAL,
    large=REHEARSAL,
    checked={"tiny": (TINY, 16)},
    waits_segments=(2, 4),
    segment=16,
    training_segments=(16, 32),
    training_eager=64,
    training_memory=96,
    training_steps=(64, 32),
    large_training=(64,),
    steps=(("rehearsal", REHEARSAL, 1, 64), ("rehearsal", REHEARSAL, 2, 32)),
    prefill_schedules=128,
    prefill_full=160,
    decode_short=32,
    decode_long={1: 256, 2: 64},
    stock_decode={1: 64, 2: 32},
    new_tokens=4,
    schedule_segments=(8, 16),
    schedule_lengths=(32, 64),
    schedule_training_lengths=(32,),
    longest_first=32,
    longest_cap=128,
    repeats=2,
)
