"""Measures the distance between the end of a model's own fixed steps and the exact solution of its flow.

Axes: B texts, T tokens, D hidden size, V vocabulary.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import nn

from .readings import Reading, batches, input_of, next_token_losses, output_of

STEPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)  # Euler steps of the curve


def distances(end_BTD: torch.Tensor, exact_BTD: torch.Tensor, start_BTD: torch.Tensor) -> dict[str, float]:
    """Returns ratios of norms over all tokens: of the difference to end and displacement, and of these two."""
    error, moved, size = (x.norm() for x in (end_BTD - exact_BTD, exact_BTD - start_BTD, exact_BTD))
    ratios = {"to_state": error / size, "to_displacement": error / moved, "displacement": moved / size}
    return {name: float(ratio) for name, ratio in ratios.items()}


@torch.no_grad()
def diverge(model: Any, module: nn.Module, last: nn.Module, reading: Reading, ids_BT: torch.Tensor) -> dict[str, Any]:
    """Measures how far a float64 model's own steps diverge from the exact solution, in hidden states and predictions.

    The flow lies between the input of `module` and the output of `last`. Returns `distances` and

    - `one_more_step`: the error with one more Euler step, relative to the model's own error. For a smooth field it is
      about n / (n + 1) for n steps.
    - `curve`: the error relative to the displacement by Euler steps.
    - `logits`: norm of the difference of logits, each token's mean subtracted, relative to the norm of the logits.
    - `kl`: KL(exact || steps) of the next-token distributions, in nats, mean over tokens.
    - `loss`, `loss_change`: the loss of the model's own steps, and what the exact solution adds to it.
    """
    start_BTD = input_of(model, module, ids_BT)
    exact_BTD = reading.exact(start_BTD)
    own_BTD = reading.fixed(start_BTD, "euler", reading.steps)
    errors = {
        steps: distances(reading.fixed(start_BTD, "euler", steps), exact_BTD, start_BTD)["to_displacement"]
        for steps in sorted({*STEPS, reading.steps, reading.steps + 1})
    }
    sums = defaultdict[str, float](float)
    for part in batches(ids_BT, model.config.vocab_size):
        own_BTV, exact_BTV = (_logits(model, last, end_BTD[part], ids_BT[part]) for end_BTD in (own_BTD, exact_BTD))
        losses = {
            "loss": float(next_token_losses(own_BTV, ids_BT[part]).sum()),
            "exact_loss": float(next_token_losses(exact_BTV, ids_BT[part]).sum()),
        }
        for name, value in (losses | logits_difference(own_BTV, exact_BTV)).items():
            sums[name] += value
    predicted = ids_BT[:, 1:].numel()
    return {
        **distances(own_BTD, exact_BTD, start_BTD),
        "one_more_step": errors[reading.steps + 1] / errors[reading.steps],
        "curve": {"steps": list(errors), "errors": list(errors.values())},
        "logits": (sums["difference"] / sums["size"]) ** 0.5,
        "kl": sums["kl"] / ids_BT.numel(),
        "loss": sums["loss"] / predicted,
        "loss_change": (sums["exact_loss"] - sums["loss"]) / predicted,
    }


def logits_difference(own_BTV: torch.Tensor, exact_BTV: torch.Tensor) -> dict[str, float]:
    """Sums the squares of the difference and of the exact logits, both centred, and KL(exact || own) in nats."""
    own_BTV, exact_BTV = own_BTV.log_softmax(-1), exact_BTV.log_softmax(-1)
    kl = float((exact_BTV.exp() * (exact_BTV - own_BTV)).sum())
    own_BTV, exact_BTV = (logits - logits.mean(-1, keepdim=True) for logits in (own_BTV, exact_BTV))
    difference, size = float((own_BTV - exact_BTV).square().sum()), float(exact_BTV.square().sum())
    return {"difference": difference, "size": size, "kl": kl}


def _logits(model: Any, last: nn.Module, end_BTD: torch.Tensor, ids_BT: torch.Tensor) -> torch.Tensor:
    with output_of(last, end_BTD):
        return model(input_ids=ids_BT, use_cache=False).logits
