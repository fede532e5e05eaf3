"""Times small models in float32: one short text, beside the stock model, and a padded batch, beside its real tokens.

Prints docs/results/short_texts/short_texts.txt. Figures are medians in turn, after a warm-up. Run it with
OMP_NUM_THREADS=1 and 2.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from condense.eval.benchmark.models import build_model
from condense.eval.results import Table, hardware

from .timing import medians_in_turn

REPEATS = 15
VOCABULARY, TOKENS = 2048, 1024
# Hidden size, layers, heads, segment length.
SHAPES = {
    "2 layers of width 128, segments of 64": (128, 2, 4, 64),
    "5 layers of width 64, segments of 32": (64, 5, 4, 32),
}
ROW_LENGTHS = [512, 1024, 1536, 2048, 2560, 3072, 3584, 4096]


def models(shape: tuple[int, int, int, int]) -> tuple[Any, Any]:
    """Returns a stock model and the same model folded."""
    hidden_size, layers, heads, segment_length = shape
    torch.manual_seed(0)
    fields = {
        "hidden_size": hidden_size, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "intermediate_size": 8 * hidden_size // 3, "vocab_size": VOCABULARY,
        "max_position_embeddings": 2**16,
    }  # fmt: skip
    stock, folded = (build_model(kind, fields, segment_length, "auto").eval() for kind in ("stock", "folded"))
    folded.load_state_dict(stock.state_dict())
    return stock, folded


def read(model: Any, schedule: str | None, ids_BN: torch.Tensor, **options: Any) -> torch.Tensor:
    if schedule is not None:
        model.config.schedule = schedule
    with torch.no_grad():
        return model(ids_BN, use_cache=False, **options).logits


@torch.no_grad()
def hidden(model: Any, ids_BN: torch.Tensor, **options: Any) -> torch.Tensor:
    """Returns the last hidden states. The head is left out, because a packed row can't say which logits to keep."""
    model.config.schedule = "auto"
    return model.model(ids_BN, use_cache=False, **options).last_hidden_state


def one_text(shape: str, tokens: int = TOKENS, repeats: int = REPEATS) -> list[str]:
    """Returns a line of the first table."""
    stock, folded = models(SHAPES[shape])
    ids_BN = torch.randint(VOCABULARY, (1, tokens))
    calls: dict[str, Callable[[], object]] = {"stock": partial(read, stock, None, ids_BN)}
    calls |= {schedule: partial(read, folded, schedule, ids_BN) for schedule in ("sequential", "wavefront", "auto")}
    seconds = medians_in_turn(calls, repeats)
    better = min(seconds["sequential"], seconds["wavefront"])
    ratios = [seconds["auto"] / seconds["stock"], seconds["auto"] / better]
    return [shape, *(f"{1000 * value:.1f}" for value in seconds.values()), *(f"{ratio:.2f}" for ratio in ratios)]


def padded(shape: str, lengths: list[int], repeats: int = REPEATS) -> list[str]:
    """Returns a line of the second table: rows of unequal length with padding, as many tokens in rows of equal length,
    the same texts row by row, and packed in one row."""
    _, folded = models(SHAPES[shape])
    ids_BN = torch.randint(VOCABULARY, (len(lengths), max(lengths)))
    mask_BN = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    mean = sum(lengths) // len(lengths)
    position_ids_1N = torch.cat([torch.arange(length) for length in lengths])[None]
    calls: dict[str, Callable[[], object]] = {
        "padded": lambda: hidden(folded, ids_BN, attention_mask=mask_BN),
        "equal": lambda: hidden(folded, ids_BN[:, :mean]),
        "one by one": lambda: [hidden(folded, ids_BN[row : row + 1, :each]) for row, each in enumerate(lengths)],
        "packed": lambda: hidden(folded, ids_BN[mask_BN.bool()][None], position_ids=position_ids_1N),
    }
    seconds = medians_in_turn(calls, repeats)
    ratios = [seconds["padded"] / seconds[name] for name in ("equal", "one by one", "packed")]
    return [shape, *(f"{1000 * value:.0f}" for value in seconds.values()), *(f"{ratio:.2f}" for ratio in ratios)]


def main() -> None:
    print(f"{hardware()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    columns = ["model", "stock [ms]", "sequential [ms]", "wavefront [ms]", "auto [ms]", "auto / stock", "auto / better"]
    print(Table(f"one text of {TOKENS:,} tokens, float32", columns, [one_text(shape) for shape in SHAPES]))
    columns = ["model", "padded [ms]", "rows of one length [ms]", "row by row [ms]", "packed [ms]"]
    columns += ["padded / one length", "padded / row by row", "padded / packed"]
    title = f"{len(ROW_LENGTHS)} rows of {min(ROW_LENGTHS):,} to {max(ROW_LENGTHS):,} tokens, float32"
    print(Table(title, columns, [padded(shape, ROW_LENGTHS) for shape in SHAPES]))


if __name__ == "__main__":
    main()
