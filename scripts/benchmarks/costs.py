"""Counts costs and savings of the fold: operations, bytes, messages and launches, for texts of up to 100 M tokens.

Prints docs/results/costs/costs.txt. Nothing is measured on a GPU: launches are the operations that a model on torch's
meta device dispatches. Rates come from a data sheet (NVIDIA H200: 989 Tflop/s dense bfloat16, 4.8 TB/s, 141 GB);
matrix products are assumed to reach half of it.

Axes: B rows, R rows of a chunk, N tokens of an input, T tokens of a chunk, D hidden size, H query heads, E head
dimension; n layers of a stack.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from condense import CondenseConfig, CondenseForCausalLM
from condense.attention import IMPLEMENTATIONS
from condense.eval.benchmark.cases import SCHEDULES
from condense.ops.kernels import rms_norm

OPERATIONS_PER_SECOND = 989e12 / 2  # half the data sheet's rate
BANDWIDTH, CAPACITY, ITEM_BYTES = 4.8e12, 141e9, 2
SEGMENT = 512
LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
LLAMA_1B |= {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128_256, "tie_word_embeddings": True}
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_8B |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256, "tie_word_embeddings": False}
SHAPES = {"1.2 B": LLAMA_1B, "8 B": LLAMA_8B}
COLUMNS = ["T", "folded [Pflop]", "full [Pflop]", "ratio", "state [GB]", "kept [GB]", "read [s]", "train [s]"]
COLUMNS += ["train, 8 [s]", "travels [GB]"]
LEGEND = """\
folded, full: forward without the head. state: what a folded model holds of a text that it reads. kept: what
full attention's cache holds, and equally the memories that wait for one backward pass over the whole text.
read: forward. train: forward, recomputation, backward and head, on 1 device, and spread over 8, whose hidden
states travel over 7 borders and back.
"""


class Cost:
    """Operations and bytes of a token in the forward pass. A training step has three times as many operations, or four
    times with recomputation."""

    def __init__(self, shape: dict[str, Any]):
        self.layers, self.width, self.vocabulary = (
            shape[name] for name in ("num_hidden_layers", "hidden_size", "vocab_size")
        )
        queries, keys = (shape[name] * shape["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
        self.queries = queries
        self.layer_weights = self.width * (2 * queries + 2 * keys + 3 * shape["intermediate_size"])
        self.weights = self.layers * self.layer_weights + self.vocabulary * self.width
        self.products = 2 * self.layers * self.layer_weights
        self.head = 2 * self.vocabulary * self.width
        self.memory_products = 2 * self.layers * self.width * 2 * keys  # its keys and values in the next memory
        self.folded_attention = 4 * self.layers * queries * 1.5 * SEGMENT  # the memory, and half a segment
        self.memory_bytes = 2 * self.layers * keys * ITEM_BYTES  # keys and values of a token, in all layers
        self.folded = self.products + self.memory_products + self.folded_attention

    def full_attention(self, tokens: int) -> float:
        return 4 * self.layers * self.queries * tokens / 2


def print_texts() -> None:
    print(f"A text of T tokens, segments of {SEGMENT}, bfloat16, one text at a time")
    print(f"{'':6} {' '.join(f'{column:>14}' for column in COLUMNS)}")
    for name, shape in SHAPES.items():
        cost = Cost(shape)
        for tokens in (131_072, 2**20, 10 * 2**20, 100 * 2**20):
            print(f"{name:6} {' '.join(f'{cell:>14}' for cell in text_row(cost, tokens))}")
        weights = ITEM_BYTES * cost.layers * cost.layer_weights / BANDWIDTH
        products = SEGMENT * cost.folded / OPERATIONS_PER_SECOND
        print(
            f"{name:6} a segment: the layers' weights are read in {1e6 * weights:,.0f} us, "
            f"its products take {1e6 * products:,.0f} us"
        )
        beside = CAPACITY - ITEM_BYTES * cost.weights
        for memory, num_bytes in (("a device beside the weights", beside), ("2 TB", 2e12)):
            print(f"{name:6} {memory} holds the memories of {num_bytes / cost.memory_bytes / 2**20:,.1f} Mi tokens")
    print(LEGEND)


def text_row(cost: Cost, tokens: int) -> list[str]:
    """Returns the cells of `COLUMNS`."""
    segments = -(-tokens // SEGMENT)
    folded = tokens * cost.folded
    full = tokens * (cost.products + cost.full_attention(tokens))
    state_bytes = 3 * SEGMENT * cost.memory_bytes  # memory, current segment, next memory
    training = 4 * (folded + tokens * cost.head) / OPERATIONS_PER_SECOND
    on_8_devices = training / 8 * (segments + 7) / segments
    message_bytes = 2 * segments * 7 * SEGMENT * cost.width * ITEM_BYTES  # forward and back over 7 borders
    row = [f"{tokens:,}", f"{folded / 1e15:,.1f}", f"{full / 1e15:,.1f}", f"{full / folded:,.1f}"]
    row += [f"{state_bytes / 1e9:.3f}", f"{tokens * cost.memory_bytes / 1e9:,.1f}"]
    row += [f"{folded / OPERATIONS_PER_SECOND:,.1f}", f"{training:,.1f}", f"{on_8_devices:,.1f}"]
    return [*row, f"{message_bytes / 1e9:,.1f}"]


def print_borders() -> None:
    print("Layers spread over devices: what travels over each border, against the time of the segment")
    for name, shape in SHAPES.items():
        cost = Cost(shape)
        message = SEGMENT * cost.width * ITEM_BYTES
        for ranks in (2, 8, min(16, cost.layers)):
            seconds = SEGMENT * cost.folded / ranks / OPERATIONS_PER_SECOND
            print(
                f"{name:6} {ranks:>3} devices: {message / 2**20:.0f} MiB each {1e6 * seconds:,.0f} us, "
                f"{message / seconds / 1e9:,.1f} GB/s; bubble of a text of 131,072 tokens "
                f"{(ranks - 1) / (131_072 // SEGMENT + ranks - 1):.1%}, of 1,048,576 tokens "
                f"{(ranks - 1) / (2**20 // SEGMENT + ranks - 1):.1%}"
            )
    print()


class LaunchCounter(TorchDispatchMode):
    """Counts the operations on the meta device that would start a kernel: all except views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        views = function.is_view or function.overloadpacket in (torch.ops.aten.detach, torch.ops.aten._unsafe_view)
        leaves = [*args, *tree_leaves(result)]
        on_meta = any(isinstance(leaf, torch.Tensor) and leaf.device.type == "meta" for leaf in leaves)
        self.count += on_meta and not views
        return result


@contextmanager
def one_launch_each() -> Iterator[None]:
    """Makes norms and attention one operation each, as on CUDA, and norms of several layers two, with the product by
    their weights; on the meta device they are many."""

    def norm(hidden_RTD: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        return hidden_RTD.clone() if weight.dim() == 1 else hidden_RTD.clone() * 1.0

    with (
        patch.object(rms_norm, "plain_rms_norm", norm),
        patch.dict(IMPLEMENTATIONS, sdpa=lambda query_RHTE, *_: query_RHTE.clone()),
    ):
        yield


def count_launches(model: Any, tokens: int, schedule: str) -> int:
    """Returns the number of launches of a prefill."""
    model.config.schedule = schedule
    ids_BN = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    with torch.no_grad(), one_launch_each(), LaunchCounter() as counted:
        model(input_ids=ids_BN, use_cache=True, logits_to_keep=1)
    return counted.count


def meta_model() -> Any:
    """Returns a model of the 1.2 B shape without storage; only its rotary frequencies are computed."""
    shape = LLAMA_1B | {"vocab_size": 1000}
    with torch.device("meta"):
        model: Any = CondenseForCausalLM(CondenseConfig(**shape, segment_length=SEGMENT)).bfloat16().eval()
    with torch.device("cpu"):
        model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    model.model.rotary_emb.to("meta")
    return model


def print_launches() -> None:
    print("Launches of a prefill of the 1.2 B shape")
    model, cost = meta_model(), Cost(LLAMA_1B)
    for tokens in (2048, 8192, 65_536, 131_072):
        counts = {schedule: count_launches(model, tokens, schedule) for schedule in SCHEDULES}
        seconds = tokens * cost.folded / OPERATIONS_PER_SECOND
        print(
            f"{tokens:>7,} tokens: sequential {counts['sequential']:,}, wavefront {counts['wavefront']:,}; the "
            f"products take {1e3 * seconds:,.0f} ms, a launch may take {1e6 * seconds / counts['sequential']:.1f} us "
            f"and {1e6 * seconds / counts['wavefront']:.1f} us before the device waits for the host"
        )


def kept_bytes(config: CondenseConfig, tokens: int) -> int:
    """Returns the bytes that a forward pass keeps for the backward pass, without the parameters."""
    model: Any = CondenseForCausalLM(config).train()
    storages: dict[int, torch.Tensor] = {}
    ids_BN = torch.randint(0, config.vocab_size, (1, tokens))

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor  # held, so no other tensor gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(input_ids=ids_BN, labels=ids_BN).loss
    assert loss.requires_grad
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(tensor.untyped_storage().nbytes() for address, tensor in storages.items() if address not in own)


def print_kept_activations() -> None:
    print("Kept for the backward pass, on a CPU in float32, wavefront over sequential")
    for width, intermediate, layers, segment, segments in (
        (64, 176, 2, 40, 16), (128, 2048, 4, 32, 8), (256, 688, 6, 32, 8), (512, 1408, 8, 64, 8)
    ):  # fmt: skip
        kept = {}
        for schedule in SCHEDULES:
            config = CondenseConfig(
                vocab_size=500, hidden_size=width, intermediate_size=intermediate, num_hidden_layers=layers,
                num_attention_heads=8, num_key_value_heads=4, segment_length=segment, schedule=schedule,
            )  # fmt: skip
            kept[schedule] = kept_bytes(config, segment * segments)
        ratio = kept["wavefront"] / kept["sequential"]
        print(f"{layers} layers of width {width}, {segments} segments of {segment}: {ratio:.3f}")
    print()


def main() -> None:
    print_texts()
    print_borders()
    print_kept_activations()
    print_launches()


if __name__ == "__main__":
    main()
