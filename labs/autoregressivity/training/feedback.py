"""Free running: a model reads its own predictions instead of the text, and is then trained on what it has read.

Axes: B texts, L leaves of a text's tree, R = B L rows, N tokens, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel

from condense.state.cache_argument import CACHE, cache_of
from condense.training.recipe.objectives import Losses, next_token_losses

# Maps the logits [R, V] of the rows so far to the rows that continue (None: all, unchanged) and what each reads next:
# token ids [R] or embeddings [R, D].
Feedback = Callable[[torch.Tensor], tuple[torch.Tensor | None, torch.Tensor]]


def likeliest(logits_RV: torch.Tensor) -> tuple[None, torch.Tensor]:
    return None, logits_RV.argmax(dim=-1)


class Expected:
    """Feeds back the mean of all embeddings, weighted by the probabilities of their tokens."""

    def __init__(self, weight_VD: torch.Tensor):
        self.weight_VD = weight_VD

    def __call__(self, logits_RV: torch.Tensor) -> tuple[None, torch.Tensor]:
        mean_RD = logits_RV.softmax(dim=-1) @ self.weight_VD.to(logits_RV.dtype)
        return None, mean_RD.to(self.weight_VD.dtype)


class Tree:
    """Continues every leaf with `samples` sampled tokens; if a text has more than `width` leaves, `width` remain.

    They are drawn uniformly without replacement. A leaf whose next token is given continues with it `samples` times.
    """

    def __init__(self, texts: int, samples: int = 1, width: int = 1):
        self.texts, self.samples, self.width = texts, samples, width

    def __call__(self, logits_RV: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        tokens_RC = sample(logits_RV, self.samples)
        leaves = len(logits_RV) // self.texts
        children = leaves * self.samples
        if children == leaves:
            return None, tokens_RC[:, 0]
        first_B = torch.arange(self.texts, device=logits_RV.device)[:, None] * children
        if children > self.width:
            order_BC = torch.rand(self.texts, children, device=logits_RV.device).argsort(dim=-1)
            kept_R = (first_B + order_BC[:, : self.width].sort(dim=-1).values).flatten()
        else:
            kept_R = torch.arange(self.texts * children, device=logits_RV.device)
        return kept_R // self.samples, tokens_RC.flatten()[kept_R]


def sample(logits_RV: torch.Tensor, number: int) -> torch.Tensor:
    """Draws token ids [R, number] independently, by inverse CDF from uniform numbers of torch's generator."""
    cumulative_RV = logits_RV.double().softmax(dim=-1).cumsum(dim=-1)
    drawn_RC = torch.rand(len(logits_RV), number, dtype=torch.float64, device=logits_RV.device)
    return torch.searchsorted(cumulative_RV, drawn_RC, right=True).clamp(max=logits_RV.shape[-1] - 1)


@contextmanager
def inference(model: Any) -> Iterator[None]:
    """Disables gradients and dropout, and enables the cache even if training uses gradient checkpointing."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def read_inputs(model: Any, inputs: torch.Tensor, known_BN: torch.Tensor, feedback: Feedback) -> torch.Tensor:
    """Returns `inputs`, ids [B, N] or embeddings [B, N, D], with unknown positions replaced by the model's feedback.

    The feedback at a position comes from the model's output at the position before, given the inputs read so far. If
    the feedback branches, the result has R rows, grouped by text.
    """
    assert bool(known_BN[:, 0].all()), "nothing predicts the first token"
    inputs, known_RN, cache, start = inputs.clone(), known_BN, None, 0
    with inference(model):
        for column in (~known_BN.all(dim=0)).nonzero()[:, 0].tolist():
            part = inputs[:, start:column]
            read = {"inputs_embeds" if part.is_floating_point() else "input_ids": part}
            output = model(**read, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
            cache, start = cache_of(output), column
            logits_RV = output.logits[:, -1]
            rows_R, next_R = feedback(logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32)))
            if rows_R is not None:
                inputs, known_RN = inputs[rows_R], known_RN[rows_R]
                cache.reorder_cache(rows_R)
            given_R = known_RN[:, column].view(-1, *[1] * (next_R.dim() - 1))
            inputs[:, column] = torch.where(given_R, inputs[:, column], next_R)
    return inputs


def free_running_losses(
    model: Any, batch: dict[str, torch.Tensor], num_targets: torch.Tensor | int, known_BN: torch.Tensor, kind: str,
    samples: int = 1, width: int = 1,
) -> Losses:  # fmt: skip
    """Returns next-token losses after inputs that are only partly the text's; for a tree, the mean over its leaves.

    Gradients follow the single pass over these inputs. They do not flow through the inputs to the outputs that produced
    them.
    """
    own = extract_model_from_parallel(model)
    batch = dict(batch)
    ids_BN = batch.pop("input_ids")
    embeddings = own.get_input_embeddings()
    if kind == "expected":
        with torch.no_grad():
            embedded_BND = embeddings(ids_BN)
        read_BND = read_inputs(own, embedded_BND, known_BN, Expected(embeddings.weight))
        read_BND = torch.where(known_BN[:, :, None], embeddings(ids_BN), read_BND)
        return next_token_losses(model, batch | {"inputs_embeds": read_BND}, num_targets)
    feedback = likeliest if kind == "argmax" else Tree(len(ids_BN), samples, width)
    read_RN = read_inputs(own, ids_BN, known_BN, feedback)
    leaves = len(read_RN) // len(ids_BN)
    batch = {name: tensor.repeat_interleave(leaves, dim=0) for name, tensor in batch.items()}
    losses = next_token_losses(model, batch | {"input_ids": read_RN}, num_targets * leaves)
    return Losses(losses.loss, losses.sums_S / leaves, losses.targets_S // leaves)
