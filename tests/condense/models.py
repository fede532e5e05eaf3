"""Helpers of several tests: tiny models with large random weights, batches, gradients.

Large weights keep all compared values away from zero.
"""

from collections import Counter
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM

from condense import CondenseConfig, CondenseForCausalLM, FoldedCache
from condense.reference import reference_logits, reference_loss

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


PAPERS_MEMORY = {"memory_share": 1.0, "sink_token_id": None}  # not what a stock checkpoint gets by default
MEMORIES = {  # what a layer stores of a segment, in models of three layers
    "output": {},
    "input": {"memory_source": "layer_input"},
    "share": {"memory_share": 0.2},
    "shares": {"memory_share": [1.0, 0.0, 0.3]},
    "sink": {"sink_token_id": 7},
    "sink, shares": {"sink_token_id": 7, "memory_share": [1.0, 0.0, 0.3]},
}


def tiny_model(dtype=torch.float64, seed=0, **fields) -> CondenseForCausalLM:
    torch.manual_seed(seed)
    return vary(CondenseForCausalLM(tiny_config(**fields)).to(dtype).eval())


def vary(model):
    """Changes biases, which are initialised to 0, and norms, which are initialised to 1."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def both(llama):
    """A stored Llama as it is, and folded with the paper's memory."""
    stock = LlamaForCausalLM.from_pretrained(llama, attn_implementation="sdpa")
    return stock, CondenseForCausalLM.from_pretrained(llama, segment_length=64, **PAPERS_MEMORY)


def in_float64(stock):
    """The stock model with its norms and rotary tables in float64; transformers computes both in float32."""
    for module in stock.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            shape, eps = module.weight.shape, module.variance_epsilon
            module.forward = partial(
                torch.nn.functional.rms_norm, normalized_shape=shape, weight=module.weight, eps=eps
            )
        elif kind.endswith("RotaryEmbedding"):
            module.forward = partial(_accurate_tables, module, module.forward)
    return stock


def _accurate_tables(rotary, compute, hidden, position_ids):
    compute(hidden, position_ids)  # may change the frequencies
    frequencies = rotary.inv_freq.double()
    if rotary.rope_type == "default":
        exponents = torch.arange(len(frequencies), dtype=torch.float64) / len(frequencies)
        frequencies = rotary.config.rope_parameters["rope_theta"] ** -exponents
    angles = (position_ids[..., None] * frequencies).repeat(1, 1, 2)
    return angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling


def random_adapters(adapted, std=1.0):
    """Gives the second matrices of LoRA, which begin as zeros, random values."""
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=std)
    return adapted


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


def logits_in_parts(model, ids, sizes, durations=None, mask=None):
    """The logits of a text that is read in calls of these sizes, and the cache after them."""
    cache, logits, start = FoldedCache(model.config), [], 0
    for size in sizes:
        columns = slice(start, start + size)
        output = model(
            ids[:, columns],
            durations=None if durations is None else durations[:, columns],
            attention_mask=None if mask is None else mask[:, : start + size],
            past_key_values=cache,
        )
        logits.append(output.logits)
        start += size
    assert start == ids.shape[1]
    return torch.cat(logits, dim=1), cache


def assert_rows_alone(model, mask, logits, *inputs, atol=1e-9):
    """The logits of each padded row are those of its text alone; `inputs` are ids, and possibly durations."""
    for row, real in enumerate(mask.bool()):
        ids, *durations = (tensor[row, real][None] for tensor in inputs)
        alone = model(ids, durations=durations[0] if durations else None).logits[0]
        torch.testing.assert_close(logits[row, real], alone, atol=atol, rtol=0)


@torch.no_grad()
def greedy(model, ids, num_new):
    """Greedy decoding without a cache."""
    for _ in range(num_new):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids


@torch.no_grad()
def beam_search(model, ids, num_new, beams, inputs_at=lambda step: {}):
    """The tokens of a beam search that reads every hypothesis from its start."""
    hypotheses = [(0.0, ids[0].tolist())]
    for step in range(num_new):
        grown = []
        for score, tokens in hypotheses:
            logits = model(torch.tensor([tokens]), use_cache=False, **inputs_at(step)).logits[0, -1]
            values, indices = logits.float().log_softmax(-1).topk(beams)
            grown += [(score + v.item(), [*tokens, i.item()]) for v, i in zip(values, indices, strict=True)]
        hypotheses = sorted(grown, reverse=True)[:beams]
    return hypotheses[0][1]


def expected_logits(model, ids, durations=None):
    """The logits after the equations."""
    rows = [(row, None) for row in ids] if durations is None else zip(ids, durations, strict=True)
    return torch.stack([reference_logits(weights(model), model.config, *row) for row in rows])


def gradients_of(model) -> dict:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def gradients(model, ids, **inputs):
    """The loss of a batch and the gradients of all parameters by name."""
    model.train()
    model.zero_grad()
    loss = model(ids, labels=ids, **inputs).loss
    loss.backward()
    return loss.detach(), gradients_of(model)


def sgd_losses(model, ids, steps=3) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def reference_gradients(model, ids, detach_after=None):
    """The same, by autograd on the equations."""
    leaves = {name: tensor.requires_grad_() for name, tensor in weights(model).items()}
    loss = sum(reference_loss(leaves, model.config, row, detach_after) for row in ids) / len(ids)
    loss.backward()
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def assert_same_gradients(actual, expected, tolerance):
    torch.testing.assert_close(actual[0].double(), expected[0].double(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(actual[1], expected[1], atol=tolerance, rtol=tolerance)


def torch_checkpoint(**options):
    return partial(checkpoint, use_reentrant=False, **options)
