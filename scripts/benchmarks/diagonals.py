"""Times a short text by a wavefront, and the operations of its diagonals without modules: where does the time go?

Prints the second part of docs/results/short_texts/short_texts.txt: the models of `short_texts`, in float32 without
gradients. A diagonal has all layers, each on a different segment. Here every segment has a memory and writes one, also
the first and the last. Figures are medians in turn, after a warm-up. Run it with OMP_NUM_THREADS=1 and 2.

Axes: M layers, T tokens of a segment, K keys, D hidden size, I intermediate size, H heads, E head dimension.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from condense.eval.results import Table, hardware

from .short_texts import SHAPES, TOKENS, VOCABULARY, models, read
from .timing import medians_in_turn

REPEATS = 40


class Diagonal:
    """The operations of a diagonal on tensors of random numbers, in the order of the layer."""

    def __init__(self, shape: tuple[int, int, int, int]):
        width, layers, self.heads, tokens = shape
        self.head_width, inner = width // self.heads, 8 * width // 3
        square_4MDD = torch.randn(4, layers, width, width) / width**0.5
        self.query_MDD, self.key_MDD, self.value_MDD, self.output_MDD = square_4MDD
        self.gate_MDI, self.up_MDI = torch.randn(2, layers, width, inner) / width**0.5
        self.down_MID = torch.randn(layers, inner, width) / inner**0.5
        self.scale_M1D = torch.ones(layers, 1, width)
        self.hidden_MTD, self.inner_MTI = torch.randn(layers, tokens, width), torch.randn(layers, tokens, inner)
        self.memory_MHTE = torch.randn(layers, self.heads, tokens, self.head_width)
        self.cos_TE, self.sin_TE = torch.randn(2, tokens, self.head_width)
        hidden_key_TK = torch.ones(tokens, 2 * tokens, dtype=torch.bool).triu(tokens + 1)
        self.mask_TK = torch.zeros(tokens, 2 * tokens).masked_fill(hidden_key_TK, float("-inf"))

    def all(self) -> tuple[torch.Tensor, ...]:
        """Returns the layers' outputs, and their keys and values for the next segment."""
        normed_MTD = self._norm(self.hidden_MTD)
        query_MHTE, key_MHTE = (self._rotate(self._heads(normed_MTD @ w)) for w in (self.query_MDD, self.key_MDD))
        key_MHKE = torch.cat([self.memory_MHTE, key_MHTE], dim=2)
        value_MHKE = torch.cat([self.memory_MHTE, self._heads(normed_MTD @ self.value_MDD)], dim=2)
        attended_MHTE = F.scaled_dot_product_attention(query_MHTE, key_MHKE, value_MHKE, self.mask_TK)
        residual_MTD = self.hidden_MTD + attended_MHTE.transpose(1, 2).flatten(2) @ self.output_MDD
        normed_MTD = self._norm(residual_MTD)
        inner_MTI = F.silu(normed_MTD @ self.gate_MDI) * (normed_MTD @ self.up_MDI)
        output_MTD = residual_MTD + inner_MTI @ self.down_MID
        normed_MTD = self._norm(output_MTD)
        memory_key_MHTE = self._rotate(self._heads(normed_MTD @ self.key_MDD))
        return output_MTD, memory_key_MHTE, self._heads(normed_MTD @ self.value_MDD)

    def products(self) -> list[torch.Tensor]:
        """Returns only the products with weights and the attention, which no order of operations can save."""
        hidden_MTD = self.hidden_MTD
        square = (self.query_MDD, self.key_MDD, self.value_MDD, self.output_MDD, self.key_MDD, self.value_MDD)
        found = [hidden_MTD @ weight for weight in (*square, self.gate_MDI, self.up_MDI)]
        keys_MHKE = torch.cat([self.memory_MHTE, self.memory_MHTE], dim=2)
        attended = F.scaled_dot_product_attention(self.memory_MHTE, keys_MHKE, keys_MHKE, self.mask_TK)
        return [*found, self.inner_MTI @ self.down_MID, attended]

    def _norm(self, hidden_MTD: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden_MTD, hidden_MTD.shape[-1:], None, 1e-6) * self.scale_M1D

    def _heads(self, tensor_MTD: torch.Tensor) -> torch.Tensor:
        return tensor_MTD.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def _rotate(self, tensor_MHTE: torch.Tensor) -> torch.Tensor:
        return tensor_MHTE * self.cos_TE + tensor_MHTE.roll(self.head_width // 2, dims=-1) * self.sin_TE


def line(name: str, repeats: int = REPEATS) -> list[str]:
    """Returns the milliseconds of a whole text by stock and by a wavefront, and of its parts."""
    shape = SHAPES[name]
    _, layers, _, segment_length = shape
    stock, folded = models(shape)
    ids_BN, diagonal = torch.randint(VOCABULARY, (1, TOKENS)), Diagonal(shape)
    base = folded.model
    calls: dict[str, Callable[[], object]] = {
        "stock": partial(read, stock, None, ids_BN),
        "wavefront": partial(read, folded, "wavefront", ids_BN),
        "ends": lambda: folded.lm_head(base.norm(base.embed_tokens(ids_BN))),
        "operations": diagonal.all,
        "products": diagonal.products,
        "compiled": torch.compile(diagonal.all),
    }
    with torch.no_grad():
        seconds = medians_in_turn(calls, repeats)
    num_segments = TOKENS // segment_length  # taken as full diagonals; in a text the first and last are not full
    texts = [seconds["stock"], seconds["wavefront"], seconds["ends"]]
    texts += [num_segments * seconds[each] for each in ("operations", "products", "compiled")]
    return [name, str(num_segments + layers - 1), *(f"{1000 * each:.1f}" for each in texts)]


def main() -> None:
    print(f"{hardware()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    columns = ["model", "diagonals", "stock [ms]", "wavefront [ms]", "embedding and head [ms]"]
    columns += ["operations alone [ms]", "products and attention alone [ms]", "operations compiled [ms]"]
    title = f"one text of {TOKENS:,} tokens, float32; the last three columns: of all segments in all layers"
    print(Table(title, columns, [line(name) for name in SHAPES]))


if __name__ == "__main__":
    main()
