"""The work that is timed: a training step, a prefill, a new token. Each function prepares it and returns the call.

Axes: B rows, N tokens of an input.
"""

from collections.abc import Callable
from typing import Any

import torch

from condense.prefill import prefill_calls


def random_ids(model: Any, batch: int, length: int) -> torch.Tensor:
    """The same tokens [B, N] at every call."""
    torch.manual_seed(0)
    return torch.randint(model.config.vocab_size, (batch, length), device=model.device)


def adamw(model: Any) -> torch.optim.Optimizer:
    """The optimizer of a run: torch's fused one, as Trainer's default."""
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def training_step(
    model: Any, ids_BN: torch.Tensor, optimizer: torch.optim.Optimizer | None = None
) -> Callable[[], None]:
    """A forward and a backward pass, and the step of the optimizer if there is one."""
    model.train()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids_BN, labels=ids_BN, use_cache=False).loss.backward()  # stock models copy keys into a cache
        if optimizer is not None:
            optimizer.step()

    return step


def prefill(model: Any, ids_BN: torch.Tensor) -> Callable[[], Any]:
    """A prompt in one call, up to the logits of the next token. The call returns the cache."""
    model.eval()

    @torch.no_grad()
    def call() -> Any:
        return model(input_ids=ids_BN, use_cache=True, logits_to_keep=1).past_key_values

    return call


def read_context(
    model: Any, ids_BN: torch.Tensor, tokens_per_call: int, progress: Callable[[], object] = lambda: None
) -> tuple[Any, torch.Tensor]:
    """The cache after a context, and the likeliest next token [B, 1]. `progress` is called after every call."""
    model.eval()
    last: Any = None
    for _, output in prefill_calls(model, ids_BN, tokens_per_call):
        last = output
        progress()
    return last.past_key_values, last.logits.argmax(-1)


def decoding_step(model: Any, cache: Any, next_B1: torch.Tensor) -> Callable[[], None]:
    """Each call computes one new token of every row, the likeliest one, from the token before it."""
    model.eval()

    @torch.no_grad()
    def step() -> None:
        nonlocal next_B1
        next_B1 = model(input_ids=next_B1, past_key_values=cache, use_cache=True).logits.argmax(-1)

    return step


WHOLE_TEXT_WORKLOADS: dict[str, Callable[[Any, torch.Tensor], Callable[[], Any]]] = {
    "training": training_step,
    "prefill": prefill,
}
