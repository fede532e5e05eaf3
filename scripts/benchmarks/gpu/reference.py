"""The reference of the checks: a folded model in float64 on the host, texts, and the results of a model on a text.

Axes: B rows, N tokens of an input, V vocabulary; n tokens except padding, x elements of all gradients.
"""

from typing import Any, NamedTuple

import torch

from condense.eval.benchmark.models import build_model, cast_parameters
from condense.state.cache_argument import cache_of

DECODED_TOKENS = 4  # before a segment's border, and after it


class Text(NamedTuple):
    """Random tokens; `mask_BN` and `durations_BN` are None if the model gets none."""

    name: str
    ids_BN: torch.Tensor
    mask_BN: torch.Tensor | None
    durations_BN: torch.Tensor | None

    def on(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Returns the arguments of the model, on a device."""
        named = {"input_ids": self.ids_BN, "attention_mask": self.mask_BN, "durations": self.durations_BN}
        return {name: tensor.to(device) for name, tensor in named.items() if tensor is not None}


class Outcome(NamedTuple):
    """Logits at tokens except padding, and all gradients: on the host, in float64."""

    logits_nV: torch.Tensor
    gradients_x: torch.Tensor | None


def reference_model(shape: dict[str, Any], segment: int) -> Any:
    """Returns a folded model on the host in float64; bfloat16 can hold its weights exactly."""
    torch.manual_seed(0)
    model = build_model("folded", shape | {"initializer_range": shape["hidden_size"] ** -0.5}, segment, "eager")
    model.config.schedule = "sequential"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return cast_parameters(cast_parameters(model, torch.bfloat16), torch.float64)


def make_texts(vocab_size: int, segment: int) -> list[Text]:
    """Returns texts of two rows: whole segments, a partial segment at the end, durations, and padding on the left."""
    generator = torch.Generator().manual_seed(0)
    ids_BN = torch.randint(vocab_size, (2, 4 * segment), generator=generator)
    broken_BN = ids_BN[:, : 3 * segment + segment // 3]
    durations_BN = 0.2 + 1.6 * torch.rand(broken_BN.shape, generator=generator)
    mask_BN = torch.ones_like(broken_BN)
    mask_BN[1, : segment // 2 + 3] = 0
    return [
        Text("whole segments", ids_BN, None, None),
        Text("part of a segment left", broken_BN, None, None),
        Text("durations", broken_BN, None, durations_BN),
        Text("padded", broken_BN, mask_BN, None),
        Text("padded, durations", broken_BN, mask_BN, durations_BN),
    ]


def outcome_of(model: Any, text: Text, gradients: bool) -> Outcome:
    """Returns the results of one call on a text, and of its backward pass if `gradients`."""
    model.train()
    model.zero_grad(set_to_none=True)
    arguments = text.on(model.device)
    with torch.set_grad_enabled(gradients):
        output = model(**arguments, labels=arguments["input_ids"], logits_to_keep=0)
    if gradients:
        output.loss.backward()
    real_BN = torch.ones_like(text.ids_BN, dtype=torch.bool) if text.mask_BN is None else text.mask_BN.bool()
    logits_nV = output.logits.detach().double().cpu()[real_BN]
    if not gradients:
        return Outcome(logits_nV, None)
    gradients_x = torch.cat([parameter.grad.flatten().double().cpu() for parameter in model.parameters()])
    return Outcome(logits_nV, gradients_x)


@torch.no_grad()
def decode_around(model: Any, ids_BN: torch.Tensor, border: int) -> torch.Tensor:
    """Returns logits of the tokens around a segment border, read one by one; two calls read the tokens before them."""
    model.eval()
    ids_BN = ids_BN.to(model.device)
    first, output, logits = border - DECODED_TOKENS, None, []
    sizes = [first // 2, first - first // 2, *[1] * (2 * DECODED_TOKENS)]
    for part_BN in ids_BN[:, : border + DECODED_TOKENS].split(sizes, dim=1):
        output = model(input_ids=part_BN, cache=output and cache_of(output), use_cache=True)
        logits.append(output.logits)
    return torch.cat(logits[2:], dim=1).double().cpu()


@torch.no_grad()
def decode_over_two_borders(model: Any, text: Text, segment: int) -> tuple[torch.Tensor, Any]:
    """Returns logits of new tokens, one by one, over two borders of each row; and the fixed step, or None."""
    model.eval()
    assert text.mask_BN is not None
    first, end = segment - DECODED_TOKENS, 2 * segment + segment // 2 + 2 * DECODED_TOKENS
    arguments = Text("", text.ids_BN[:, :first], text.mask_BN[:, :first], None).on(model.device)
    cache = cache_of(model(**arguments, use_cache=True))
    columns = text.ids_BN[:, first:end].to(model.device).split(1, dim=1)
    logits = [model(input_ids=column_B1, cache=cache).logits for column_B1 in columns]
    return torch.cat(logits, dim=1).double().cpu(), cache.static_decoding
