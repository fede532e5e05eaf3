"""Arms of a checkpoint that learn, by distillation or from labels, and the losses of held-out texts.

Nothing here needs DeepSpeed or pydantic, which a lent GPU may lack.

Axes: B rows or texts, N tokens, S segments of a text, L tokens of a segment, D hidden size, V vocabulary, n tokens of
several rows.
"""

import copy
import math
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from condense.eval.benchmark.timing import synchronize
from condense.eval.intervals import interval
from condense.eval.tasks.variants import variant
from condense.eval.tasks.window_attention import WINDOW_SINKS, attend_to_window
from condense.utils.text import encode

STOCK, SINK = "stock", "+sink"
LOGITS_AT_ONCE = {"cuda": 2**28, "cpu": 2**22}
TOKENS_AT_ONCE = {"cuda": 2**16, "cpu": 2**12}  # of texts whose losses are computed
DIGITS = 5  # of a stored loss
RECENT = 20  # losses of steps
WARM_UP = 0.03  # of the time of training
LAST_RATE = 0.02  # of the learning rate, at the end


class Arm(NamedTuple):
    """A way to read a text: `stock`, or folded with a share, with the beginning token as a sink or without."""

    name: str
    share: float | None
    has_sink: bool


def parse_arm(name: str) -> Arm:
    """Returns the arm `stock`, `SHARE` or `SHARE+sink`. Raises `ValueError` for other names."""
    if name == STOCK:
        return Arm(name, None, False)
    share = float(name.removesuffix(SINK))
    if not 0 <= share <= 1:
        raise ValueError(f"{name!r}: a share is between 0 and 1.")
    return Arm(name, share, name.endswith(SINK))


def build_arm(stock: Any, arm: Arm, segment_length: int) -> Any:
    """Returns a model with a copy of the stock model's weights, all of them to be trained."""
    if arm.share is None:
        return copy.deepcopy(stock).requires_grad_(True)
    sink = stock.config.bos_token_id if arm.has_sink else None
    if arm.has_sink and sink is None:
        raise ValueError(f"arm {arm.name!r}: the configuration of the model has no bos_token_id for the sink.")
    model = variant(
        stock, segment_length=segment_length, memory_source="layer_output", memory_share=arm.share,
        sink_token_id=sink, bptt_segments=None,
    )  # fmt: skip
    if stock.lm_head.weight is stock.model.embed_tokens.weight:
        model.tie_weights()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model.requires_grad_(True)


class Learner:
    """A model that learns by AdamW on float32 copies of its weights, and what its training has taken so far."""

    def __init__(self, model: Any, learning_rate: float):
        self.model, self.learning_rate = model, learning_rate
        self.weights = list(model.parameters())
        self.masters = [torch.nn.Parameter(weight.detach().clone().float()) for weight in self.weights]
        fused = model.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.masters, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
        self.tokens, self.seconds, self.skipped = 0, 0.0, 0
        self.step_seconds: list[float] = []
        self.losses: list[float] = []

    def step(self, loss_of: Callable[[Any], torch.Tensor], num_tokens: int, progress: float) -> None:
        """Takes a step; `loss_of` makes the gradients of the model's weights and returns the loss.

        `progress`, from 0 to 1, is the share of the training that is done: the learning rate rises, and then falls.
        """
        start = time.perf_counter()
        loss = loss_of(self.model)
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                master.grad = None if weight.grad is None else weight.grad.float()
                weight.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * rate_at(progress)
        if bool(norm.isfinite()):  # waits for the device
            self.optimizer.step()
        else:
            self.skipped += 1
        with torch.no_grad():
            torch._foreach_copy_([weight.data for weight in self.weights], [one.data for one in self.masters])
        self.losses.append(loss.item())
        synchronize()
        taken = time.perf_counter() - start
        self.step_seconds.append(taken)
        self.seconds, self.tokens = self.seconds + taken, self.tokens + num_tokens

    def recent_loss(self) -> float | None:
        """Returns the mean of the last losses, None if it is not finite or there is none."""
        return finite(statistics.fmean(self.losses[-RECENT:])) if self.losses else None

    def record(self) -> dict[str, Any]:
        """Returns the tokens, steps and seconds of training, the steps left out, and the last loss."""
        steps = {"steps": len(self.step_seconds), "seconds": self.seconds, "skipped_steps": self.skipped}
        return {"tokens": self.tokens, **steps, "training_loss": self.recent_loss()}


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def rate_at(progress: float) -> float:
    """Returns the share of the highest learning rate: it rises for a short time, then falls linearly."""
    falling = 1 - (1 - LAST_RATE) * min(progress, 1.0)
    return min((progress + 1e-3) / WARM_UP, 1.0) * falling


def distillation_loss(student: Any, teacher: Any, ids_BN: torch.Tensor) -> torch.Tensor:
    """Makes the student's gradients of KL(teacher || student), the mean over all tokens, and returns this mean.

    Each block of logits has its backward pass at once, so it is computed once and only one is in memory.
    """
    hidden_BND = student.model(ids_BN, use_cache=False).last_hidden_state
    with torch.no_grad():
        known_nD = teacher.model(ids_BN, use_cache=False).last_hidden_state.flatten(0, 1)
    leaf_BND = hidden_BND.detach().requires_grad_()
    at_once, total = _tokens_at_once(student), torch.zeros((), device=ids_BN.device)
    for leaf_nD, block_nD in zip(leaf_BND.flatten(0, 1).split(at_once), known_nD.split(at_once), strict=True):
        with torch.no_grad():
            log_teacher_nV = teacher.lm_head(block_nD).float().log_softmax(-1)
        log_student_nV = student.lm_head(leaf_nD).float().log_softmax(-1)
        loss = F.kl_div(log_student_nV, log_teacher_nV, reduction="sum", log_target=True) / ids_BN.numel()
        loss.backward(inputs=[leaf_BND, *student.lm_head.parameters()])
        total += loss.detach()
    hidden_BND.backward(leaf_BND.grad)
    return total


def label_loss(model: Any, ids_BN: torch.Tensor, labels_BN: torch.Tensor) -> torch.Tensor:
    """Makes the gradients of the model's own loss and returns it."""
    loss = model(ids_BN, labels=labels_BN, use_cache=False).loss
    loss.backward()
    return loss.detach()


def _tokens_at_once(model: Any) -> int:
    return max(1, LOGITS_AT_ONCE[model.device.type] // model.config.vocab_size)


def read_tokens(tokenizer: Any, path: Path) -> torch.Tensor:
    """Returns the token ids [N] of a text file."""
    return encode(tokenizer, path.read_text(encoding="utf-8"))[0]


def held_out_texts(files: list[torch.Tensor], num_tokens: int, num_texts: int) -> tuple[torch.Tensor, list[int]]:
    """Returns texts [B, N + 1] of N predicted tokens, spread over the files [N], and the number of each text's file.

    Raises `ValueError` if no file has as many tokens.
    """
    found, numbers = [], []
    for number, ids_N in enumerate(files):
        pieces = [piece for piece in ids_N.split(num_tokens + 1) if len(piece) == num_tokens + 1]
        wanted = min(len(pieces), num_texts // len(files) + (number < num_texts % len(files)))
        found += [pieces[one * len(pieces) // wanted] for one in range(wanted)]
        numbers += [number] * wanted
    if not found:
        raise ValueError(
            f"no held-out file has {num_tokens + 1:,} tokens: pass longer files, or a lower --held-tokens."
        )
    return torch.stack(found), numbers


def training_texts(files: list[torch.Tensor], num_rows: int, num_tokens: int, seed: int) -> Iterator[torch.Tensor]:
    """Yields batches of texts [B, N] from random places in the files [N]."""
    files = [ids_N for ids_N in files if len(ids_N) >= num_tokens]
    if not files:
        raise ValueError(f"no training file has {num_tokens:,} tokens: pass longer files, or a lower --train-tokens.")
    generator = np.random.default_rng(seed)
    places = np.array([len(ids_N) - num_tokens + 1 for ids_N in files])
    while True:
        rows = []
        for place in generator.integers(places.sum(), size=num_rows).tolist():
            number = int(np.searchsorted(places.cumsum(), place, side="right"))
            start = place - int(places[:number].sum())
            rows.append(files[number][start : start + num_tokens])
        yield torch.stack(rows)


def made_ahead(make: Callable[[], Any]) -> Generator[Any, None, None]:
    """Yields what `make` returns, made in a thread while the one before is in use."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(make)
        while True:
            found, waiting = waiting.result(), pool.submit(make)
            yield found


@torch.no_grad()
def segment_losses(model: Any, ids_BN: torch.Tensor, segment_length: int, rows: int | None = None) -> np.ndarray:
    """Returns the mean loss [B, S] of the tokens that each segment predicts, of texts of S L + 1 tokens.

    `rows` are read at a time.
    """
    at_once, found = _tokens_at_once(model), []
    rows = rows or max(1, TOKENS_AT_ONCE[model.device.type] // ids_BN.shape[1])
    for part_BN in ids_BN.to(model.device).split(rows):
        hidden_nD = model.model(part_BN[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)
        blocks = zip(hidden_nD.split(at_once), part_BN[:, 1:].flatten().split(at_once), strict=True)
        losses = [F.cross_entropy(model.lm_head(one).float(), target_n, reduction="none") for one, target_n in blocks]
        found.append(torch.cat(losses).view(len(part_BN), -1, segment_length).mean(2).cpu())
    return torch.cat(found).double().numpy()


def last_two_losses(model: Any, ids_BN: torch.Tensor, segment_length: int) -> np.ndarray:
    """Returns the losses [B, S - 1] of the segments from the second on, each read after the one before it alone."""
    num_segments = (ids_BN.shape[1] - 1) // segment_length
    pairs = [ids_BN[:, (one - 1) * segment_length : (one + 1) * segment_length + 1] for one in range(1, num_segments)]
    found_nS = segment_losses(model, torch.cat(pairs), segment_length)
    return found_nS[:, 1].reshape(num_segments - 1, len(ids_BN)).T


def window_losses(stock: Any, ids_BN: torch.Tensor, segment_length: int) -> np.ndarray:
    """Returns the losses [B, S] by StreamingLLM's window of as many keys as two segments, sinks among them."""
    with attend_to_window(stock, 2 * segment_length, min(WINDOW_SINKS, segment_length)):
        return segment_losses(stock, ids_BN, segment_length, rows=1)


def above(own_BS: np.ndarray, other_BS: np.ndarray, first: int) -> dict[str, Any]:
    """Returns how far losses are above others, from a segment on: `mean`, `low` and `high` (95 %, over texts), and
    means by text and by segment. A loss that is not finite makes all of them None."""
    difference_BS = own_BS - other_BS
    if not np.isfinite(difference_BS).all():
        return dict.fromkeys(("mean", "low", "high", "by_text", "by_segment"))
    by_text = difference_BS[:, first:].mean(1)
    mean, low, high = interval(by_text.tolist())
    return {"mean": mean, "low": low, "high": high, "by_text": rounded(by_text),
            "by_segment": rounded(difference_BS.mean(0))}  # fmt: skip


def rounded(values: np.ndarray) -> list[float]:
    return np.round(values, DIGITS).tolist()


def text_flops(config: Any, num_weights: int, num_tokens: int, segment_length: int | None) -> int:
    """Returns the operations of a training step on a text: forward and backward, all weights trained.

    `num_weights` are the weights that are multiplied with; a sink is not counted.
    """
    segment = segment_length or num_tokens
    sizes = [min(segment, num_tokens - first) for first in range(0, num_tokens, segment)]
    pairs = sum(size * (segment if number else 0) + size * (size + 1) // 2 for number, size in enumerate(sizes))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * head_dim * pairs
    memories = 12 * config.hidden_size * config.num_key_value_heads * head_dim * sum(sizes[:-1])
    return 6 * num_weights * num_tokens + attention + config.num_hidden_layers * memories


def multiplied_weights(model: Any) -> int:
    """Returns the weights that a token is multiplied with: an untied input embedding is looked up."""
    embedding = model.model.embed_tokens.weight
    looked_up = 0 if model.lm_head.weight is embedding else embedding.numel()
    return sum(weight.numel() for weight in model.parameters()) - looked_up
