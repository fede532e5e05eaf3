"""Helpers of several tests: tiny models with large random weights, batches, gradients.

Large weights keep all compared values away from zero.
"""

from collections import Counter
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from condense import CondenseConfig, CondenseForCausalLM
from condense.reference import reference_loss

VOCAB = 61


def tiny_config(**fields) -> CondenseConfig:
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "segment_length": 5,
        "initializer_range": 0.25,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
        **fields,
    }
    attention = fields.pop("attn_implementation", "sdpa")
    return CondenseConfig(**fields, attn_implementation=attention)


MEMORIES = {  # what a layer stores of a segment, in models of three layers
    "output": {},
    "input": {"memory_source": "layer_input"},
    "share": {"memory_share": 0.2},
    "shares": {"memory_share": [1.0, 0.0, 0.3]},
}


def tiny_model(dtype=torch.float64, seed=0, **fields) -> CondenseForCausalLM:
    torch.manual_seed(seed)
    model = CondenseForCausalLM(tiny_config(**fields)).to(dtype).eval()
    with torch.no_grad():  # biases are initialised to 0 and norms to 1: change both
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


class Operations(TorchDispatchMode):
    """Counts torch's operations by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        self.counts[operation.overloadpacket.__name__] += 1
        return operation(*arguments, **options or {})


def weights(model) -> dict:
    """The state dict in float64; a tied head is left out, since its weight is the embedding's."""
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    return {name: tensor.detach().double() for name, tensor in model.state_dict().items() if name not in tied}


def random_ids(batch_size: int, num_tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, VOCAB, (batch_size, num_tokens), generator=torch.Generator().manual_seed(seed))


def moved_to_host(monkeypatch) -> list[torch.Size]:
    """The shapes of the tensors that `save_on_cpu` moves from now on."""
    moved, save_on_cpu = [], torch.autograd.graph.save_on_cpu

    class Noted(save_on_cpu):
        def __init__(self, pin_memory):
            super().__init__(pin_memory)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: (moved.append(tensor.shape), pack(tensor))[1]

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Noted)
    return moved


def random_durations(batch_size: int, num_tokens: int, seed: int = 0) -> torch.Tensor:
    return 0.1 + 2 * torch.rand(batch_size, num_tokens, generator=torch.Generator().manual_seed(seed)).double()


def padded_batch(lengths, side):
    """Random texts of these lengths, and the same texts as a batch padded on one side: (texts, ids, mask)."""
    total = max(lengths)
    ids, mask = torch.zeros(len(lengths), total, dtype=torch.long), torch.zeros(len(lengths), total, dtype=torch.long)
    rows = [random_ids(1, length, seed=length)[0] for length in lengths]
    for row, tokens in enumerate(rows):
        columns = slice(total - len(tokens), None) if side == "left" else slice(0, len(tokens))
        ids[row, columns], mask[row, columns] = tokens, 1
    return rows, ids, mask


def gradients(model, ids, **inputs):
    """The loss of a batch and the gradients of all parameters by name."""
    model.train()
    model.zero_grad()
    loss = model(ids, labels=ids, **inputs).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def reference_gradients(model, ids, detach_after=None):
    """The same, by autograd on the equations."""
    leaves = {name: tensor.requires_grad_() for name, tensor in weights(model).items()}
    loss = sum(reference_loss(leaves, model.config, row, detach_after) for row in ids) / len(ids)
    loss.backward()
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def assert_same_gradients(actual, expected, tolerance):
    torch.testing.assert_close(actual[0].double(), expected[0].double(), atol=tolerance, rtol=tolerance)
    for name in actual[1]:
        torch.testing.assert_close(actual[1][name], expected[1][name], atol=tolerance, rtol=tolerance, msg=name)


def torch_checkpoint(**options):
    return partial(checkpoint, use_reentrant=False, **options)
