"""The timed work: a training step, a prefill, a new token.

Axes: B rows, N tokens of an input.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..decode_state import state_of


def random_ids(model: Any, batch: int, length: int) -> torch.Tensor:
    """Returns the same tokens [B, N] at every call."""
    torch.manual_seed(0)
    return torch.randint(model.config.vocab_size, (batch, length), device=model.device)


def adamw(model: Any) -> torch.optim.Optimizer:
    """Returns the optimizer of a run: torch's fused one, Trainer's default."""
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def training_step(
    model: Any, ids_BN: torch.Tensor, optimizer: torch.optim.Optimizer | None = None
) -> Callable[[], None]:
    """Returns a call that does a forward and a backward pass, and the optimizer's step if there is one."""
    model.train()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids_BN, labels=ids_BN, use_cache=False).loss.backward()  # stock models copy keys into a cache
        if optimizer is not None:
            optimizer.step()

    return step


def reading_arguments(model: Any) -> dict[str, Any]:
    """Returns the arguments of a call for the state of a text and, if the model can, only the last logits."""
    can_choose = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {"use_cache": True} | ({"logits_to_keep": 1} if can_choose else {})


def prefill(model: Any, ids_BN: torch.Tensor) -> Callable[[], dict[str, Any]]:
    """Returns a call that reads a prompt at once, up to the logits of the next token, and returns the state."""
    model.eval()
    arguments = reading_arguments(model)

    @torch.no_grad()
    def call() -> dict[str, Any]:
        return state_of(model(input_ids=ids_BN, **arguments))

    return call


@torch.no_grad()
def read_context(
    model: Any, ids_BN: torch.Tensor, tokens_per_call: int, progress: Callable[[], object] = lambda: None
) -> tuple[dict[str, Any], torch.Tensor]:
    """Returns the state after a context, and the likeliest next token [B, 1]. `progress` is called after every call.

    A recurrent model reads the context in one call. Some of them in transformers continue a state only by single
    tokens, and treat several tokens as the start of a text.
    """
    model.eval()
    state: dict[str, Any] = {}
    output: Any = None
    arguments = reading_arguments(model)
    is_recurrent = getattr(model, "_is_stateful", False) and not hasattr(model.config, "segment_length")
    for part_BT in ids_BN.split(ids_BN.shape[1] if is_recurrent else tokens_per_call, dim=1):
        output = model(input_ids=part_BT, **state, **arguments)
        state = state_of(output)
        progress()
    return state, output.logits[:, -1:].argmax(-1)


def decoding_step(model: Any, state: dict[str, Any], next_B1: torch.Tensor) -> Callable[[], None]:
    """Returns a call that computes each row's likeliest next token from the token before, and updates `state`."""
    model.eval()

    @torch.no_grad()
    def step() -> None:
        nonlocal next_B1
        output = model(input_ids=next_B1, use_cache=True, **state)
        next_B1 = output.logits.argmax(-1)
        state.update(state_of(output))

    return step


WHOLE_TEXT_WORKLOADS: dict[str, Callable[[Any, torch.Tensor], Callable[[], Any]]] = {
    "training": training_step,
    "prefill": prefill,
}
