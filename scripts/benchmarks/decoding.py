"""Times new tokens on a CPU, one at a time: ordinary, fixed and compiled steps of a folded model, beside stock models.

Prints docs/results/decoding/decoding.txt. Figures are medians of a token's time in turn, after a warm-up that also
compiles. The stock model runs with transformers' growing cache, with its static cache, and with that cache and a
compiled forward pass. Run it with OMP_NUM_THREADS=1 and 2.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

from condense import FoldedCache
from condense.eval.benchmark.models import build_model
from condense.eval.results import Table, hardware
from condense.state.cache_argument import CACHE

from .timing import medians_in_turn

TOKENS, REPEATS = 480, 60  # tokens before, and new tokens
VOCABULARY, SEGMENT_LENGTH = 2048, 128
# Hidden size, layers, heads.
SHAPES = {
    "5 layers of width 64": (64, 5, 4),
    "6 layers of width 256": (256, 6, 8),
    "8 layers of width 512": (512, 8, 8),
}
KINDS = ["stock", "stock, static", "stock, static, compiled", "folded", "folded, fixed", "folded, compiled"]


def models(shape: tuple[int, int, int]) -> tuple[Any, Any]:
    hidden_size, layers, heads = shape
    fields = {
        "hidden_size": hidden_size, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "intermediate_size": 8 * hidden_size // 3 // 8 * 8, "vocab_size": VOCABULARY,
        "max_position_embeddings": 2**16,
    }  # fmt: skip
    stock, folded = (build_model(kind, fields, SEGMENT_LENGTH, "auto").eval() for kind in ("stock", "folded"))
    folded.load_state_dict(stock.state_dict())
    return stock, folded


def stepper(kind: str, stock: Any, folded: Any, batch: int, repeats: int = REPEATS) -> Callable[[], torch.Tensor]:
    """Returns a function that reads the next token after a text, each time with the same cache."""
    ids_BN = torch.randint(VOCABULARY, (batch, TOKENS))
    forward: Any = stock
    if kind.startswith("folded"):
        cache: Any = FoldedCache(folded.config)
        mode = {"folded": False, "folded, fixed": True, "folded, compiled": "compiled"}[kind]

        def forward(**given: Any) -> Any:
            folded.fixed_decoding = mode
            return folded(**given)

    else:
        length = TOKENS + 2 * repeats + 8
        cache = (
            DynamicCache(config=stock.config) if kind == "stock" else StaticCache(stock.config, max_cache_len=length)
        )
    with torch.no_grad():
        (folded if kind.startswith("folded") else stock)(input_ids=ids_BN, use_cache=True, **{CACHE: cache})
    if kind.endswith("static, compiled"):
        forward = torch.compile(stock, dynamic=False)

    def step() -> torch.Tensor:
        with torch.no_grad():
            return forward(input_ids=ids_BN[:, :1], use_cache=True, **{CACHE: cache}).logits

    return step


def line(name: str, batch: int, repeats: int = REPEATS) -> list[str]:
    """Returns the tokens per second of each kind, and the compiled folded model's over the best stock model's."""
    torch.manual_seed(0)
    stock, folded = models(SHAPES[name])
    steps = {kind: stepper(kind, stock, folded, batch, repeats) for kind in KINDS}
    for step in steps.values():  # compiles
        for _ in range(3):
            step()
    seconds = medians_in_turn(steps, repeats)
    rates = {kind: batch / value for kind, value in seconds.items()}
    best = max(rate for kind, rate in rates.items() if kind.startswith("stock"))
    return [name, str(batch), *(f"{rate:,.0f}" for rate in rates.values()), f"{rates['folded, compiled'] / best:.2f}"]


def main() -> None:
    print(f"{hardware()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    columns = ["model", "rows", *KINDS, "folded, compiled / best stock"]
    title = f"new tokens a second after {TOKENS} tokens, float32, segments of {SEGMENT_LENGTH}"
    print(Table(title, columns, [line(name, batch) for name in SHAPES for batch in (1, 4)]))


if __name__ == "__main__":
    main()
