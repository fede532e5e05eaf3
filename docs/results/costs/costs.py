"""What the fold costs and saves, counted: operations, bytes, messages and launches, for texts up to 100 million tokens.

Nothing here is measured but the launches, which are the operations that a model on torch's meta device dispatches.
Rates are a data sheet's (NVIDIA H200: 989 Tflop/s dense bfloat16, 4.8 TB/s, 141 GB), of which matrix
products are assumed to reach half.
"""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from condense import CondenseConfig, CondenseForCausalLM
from condense.attention import IMPLEMENTATIONS
from condense.execution.stacking import StackedNorm
from condense.layers import RMSNorm

FLOPS, BANDWIDTH, CAPACITY, REACHED, BYTES = 989e12, 4.8e12, 141e9, 0.5, 2
SEGMENT = 512
LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
LLAMA_1B |= {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128_256, "tie_word_embeddings": True}
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_8B |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256, "tie_word_embeddings": False}
SHAPES = {"1.2 B": LLAMA_1B, "8 B": LLAMA_8B}


class Cost:
    """Per token, forward; a training step is three times as much, four times with recomputation."""

    def __init__(self, shape: dict):
        self.layers, self.width, self.vocabulary = (
            shape[name] for name in ("num_hidden_layers", "hidden_size", "vocab_size")
        )
        queries, keys = (shape[name] * shape["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
        self.queries, self.keys = queries, keys
        self.layer_weights = self.width * (2 * queries + 2 * keys + 3 * shape["intermediate_size"])
        self.weights = self.layers * self.layer_weights + self.vocabulary * self.width
        self.products = 2 * self.layers * self.layer_weights
        self.head = 2 * self.vocabulary * self.width
        self.memory_products = 2 * self.layers * self.width * 2 * keys  # what a token will be in the next memory
        self.folded_attention = 4 * self.layers * queries * 1.5 * SEGMENT  # the memory, and half a segment
        self.memory_bytes = 2 * self.layers * keys * BYTES  # keys and values of a token, in all layers

    def full_attention(self, tokens: int) -> float:
        return 4 * self.layers * self.queries * tokens / 2


def texts() -> None:
    print(f"A text of T tokens, segments of {SEGMENT}, bfloat16, one text at a time")
    columns = ["T", "folded [Pflop]", "full [Pflop]", "ratio", "state [GB]", "kept [GB]", "read [s]", "train [s]"]
    columns += ["train, 8 [s]", "travels [GB]"]
    print(f"{'':6} {' '.join(f'{column:>14}' for column in columns)}")
    for name, shape in SHAPES.items():
        cost = Cost(shape)
        for tokens in (131_072, 2**20, 10 * 2**20, 100 * 2**20):
            segments = -(-tokens // SEGMENT)
            folded = tokens * (cost.products + cost.memory_products + cost.folded_attention)
            full = tokens * (cost.products + cost.full_attention(tokens))
            state = 3 * SEGMENT * cost.memory_bytes  # memory, current segment, next memory
            kept = tokens * cost.memory_bytes
            training = 4 * (folded + tokens * cost.head) / (FLOPS * REACHED)
            spread = training / 8 * (segments + 7) / segments
            travels = 2 * segments * 7 * SEGMENT * cost.width * BYTES  # forward and back over 7 borders
            row = [f"{tokens:,}", f"{folded / 1e15:,.1f}", f"{full / 1e15:,.1f}", f"{full / folded:,.1f}"]
            row += [f"{state / 1e9:.3f}", f"{kept / 1e9:,.1f}", f"{folded / (FLOPS * REACHED):,.1f}"]
            row += [f"{training:,.1f}", f"{spread:,.1f}", f"{travels / 1e9:,.1f}"]
            print(f"{name:6} {' '.join(f'{cell:>14}' for cell in row)}")
        weights = BYTES * cost.layers * cost.layer_weights / BANDWIDTH
        products = SEGMENT * (cost.products + cost.memory_products + cost.folded_attention) / (FLOPS * REACHED)
        print(
            f"{name:6} a segment: the layers' weights are read in {1e6 * weights:,.0f} us, "
            f"its products take {1e6 * products:,.0f} us"
        )
        for place, room in (("a device beside the weights", CAPACITY - BYTES * cost.weights), ("2 TB", 2e12)):
            print(f"{name:6} {place} holds the memories of {room / cost.memory_bytes / 2**20:,.1f} Mi tokens")
    print(
        "folded, full: forward without the head. state: what a folded model holds of a text that it reads. kept: what"
    )
    print("full attention's cache holds, and equally the memories that wait for one backward pass over the whole text.")
    print(
        "read: forward. train: forward, recomputation, backward and head, on 1 device, and spread over 8, whose hidden"
    )
    print("states travel over 7 borders and back.\n")


def borders() -> None:
    print("Layers spread over devices: what travels over each border, against the time of the segment")
    for name, shape in SHAPES.items():
        cost = Cost(shape)
        message = SEGMENT * cost.width * BYTES
        for ranks in (2, 8, min(16, cost.layers)):
            operations = SEGMENT * (cost.products + cost.memory_products + cost.folded_attention) / ranks
            seconds = operations / (FLOPS * REACHED)
            print(
                f"{name:6} {ranks:>3} devices: {message / 2**20:.0f} MiB each {1e6 * seconds:,.0f} us, "
                f"{message / seconds / 1e9:,.1f} GB/s; bubble of a text of 131,072 tokens "
                f"{(ranks - 1) / (131_072 // SEGMENT + ranks - 1):.1%}, of 1,048,576 tokens "
                f"{(ranks - 1) / (2**20 // SEGMENT + ranks - 1):.1%}"
            )
    print()


class Launches(TorchDispatchMode):
    """Operations that would start a kernel: all but those that only look at a tensor otherwise."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
        views = function.is_view or function.overloadpacket in (torch.ops.aten.detach, torch.ops.aten._unsafe_view)
        on_meta = any(tensor.device.type == "meta" for tensor in [*tensors, *torch.utils._pytree.tree_leaves(result)]
                      if isinstance(tensor, torch.Tensor))  # fmt: skip
        self.count += on_meta and not views
        return result


def launches() -> None:
    """On the meta device norms and attention fall into many operations that are one kernel each on CUDA."""
    RMSNorm.forward = lambda norm, hidden_RTD: hidden_RTD.clone()
    StackedNorm.normalize = lambda norm, hidden_nRTD, stacked: hidden_nRTD.clone() * stacked.weight
    IMPLEMENTATIONS["sdpa"] = lambda query_RHTE, *_: query_RHTE.clone()
    print("Launches of a prefill of the 1.2 B shape")
    shape = LLAMA_1B | {"vocab_size": 1000}
    with torch.device("meta"):
        model = CondenseForCausalLM(CondenseConfig(**shape, segment_length=SEGMENT)).bfloat16().eval()
    with torch.device("cpu"):
        model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    model.model.rotary_emb.to("meta")
    cost = Cost(LLAMA_1B)
    for tokens in (2048, 8192, 65_536, 131_072):
        counts = Counter()
        for schedule in ("sequential", "wavefront"):
            model.config.schedule = schedule
            ids_BN = torch.zeros(1, tokens, dtype=torch.long, device="meta")
            with torch.no_grad(), Launches() as counted:
                model(input_ids=ids_BN, use_cache=True, logits_to_keep=1)
            counts[schedule] = counted.count
        seconds = tokens * (cost.products + cost.memory_products + cost.folded_attention) / (FLOPS * REACHED)
        print(
            f"{tokens:>7,} tokens: sequential {counts['sequential']:,}, wavefront {counts['wavefront']:,}; the "
            f"products take {1e3 * seconds:,.0f} ms, a launch may take {1e6 * seconds / counts['sequential']:.1f} us "
            f"and {1e6 * seconds / counts['wavefront']:.1f} us before the device waits for the host"
        )


def kept_activations() -> None:
    print("Kept for the backward pass, on a CPU in float32, wavefront over sequential")
    for width, intermediate, layers, segment, segments in (
        (64, 176, 2, 40, 16), (128, 2048, 4, 32, 8), (256, 688, 6, 32, 8), (512, 1408, 8, 64, 8)
    ):  # fmt: skip
        kept = []
        for schedule in ("sequential", "wavefront"):
            config = CondenseConfig(
                vocab_size=500, hidden_size=width, intermediate_size=intermediate, num_hidden_layers=layers,
                num_attention_heads=8, num_key_value_heads=4, segment_length=segment, schedule=schedule,
            )  # fmt: skip
            model, storages = CondenseForCausalLM(config).train(), {}
            ids_BN = torch.randint(0, 500, (1, segment * segments))

            def note(tensor, storages=storages):
                storages[tensor.untyped_storage().data_ptr()] = tensor  # kept, so that no other takes its place
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                loss = model(input_ids=ids_BN, labels=ids_BN).loss
            assert loss.requires_grad
            own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
            memory = {place: tensor for place, tensor in storages.items() if place not in own}
            kept.append(sum(tensor.untyped_storage().nbytes() for tensor in memory.values()))
        print(f"{layers} layers of width {width}, {segments} segments of {segment}: {kept[1] / kept[0]:.3f}")
    print()


if __name__ == "__main__":
    texts()
    borders()
    kept_activations()
    launches()
