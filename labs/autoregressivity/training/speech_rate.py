"""Schedules of the time a text takes: each token has a duration, with a mean of one unit over the text.

A token's duration is known as soon as the token is: it depends on the token's place, or on the losses of the tokens so
far. It changes only the predictions of later tokens.

Axes: B rows, N tokens, V vocabulary.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch.nn.utils.rnn import pad_sequence

from condense import CondenseForCausalLM
from condense.hub import loading
from condense.state.cache_argument import CACHE, cache_of
from condense.training.draws import uniform
from condense.training.recipe.objectives import OBJECTIVES, Losses, ObjectiveKind, next_token_losses

Schedule = Literal["even", "cosine", "hard_long", "hard_short"]
LEVELS = 100  # of difficulty
SHORTEST, LONGEST = 0.5, 1.5  # durations, by difficulty
FILE = "difficulty.json"
ORDER_SEED = 2**41


def cosine_durations(length: int) -> torch.Tensor:
    """Returns [N] for a text of `length` tokens. After n tokens the time is N sin²(pi n / 2N), the share of noise in
    the cosine schedule of diffusion models. Tokens are close together in time at both ends of a text."""
    angles = torch.arange(length + 1, dtype=torch.float64) / length * torch.pi / 2
    return (length * angles.sin().square()).diff()


class Difficulty:
    """How hard a token is: the quantile of its loss under a judge model, among the losses of known texts."""

    def __init__(self, judge: Any, thresholds: torch.Tensor):
        self.judge, self.thresholds = judge.eval(), thresholds

    @classmethod
    @torch.no_grad()
    def learn(cls, judge: Any, text_BN: torch.Tensor) -> "Difficulty":
        """Learns the quantiles from the losses of some texts' tokens, except the first of each text."""
        logits_BNV = judge.eval()(text_BN, use_cache=False).logits[:, :-1].float()
        losses = F.cross_entropy(logits_BNV.flatten(0, 1), text_BN[:, 1:].flatten(), reduction="none")
        return cls(judge, losses.double().quantile(torch.arange(1, LEVELS, dtype=torch.float64) / LEVELS))

    def save(self, folder: Path) -> None:
        """Saves the quantiles beside the judge."""
        self.judge.save_pretrained(folder)
        (folder / FILE).write_text(json.dumps({"thresholds": self.thresholds.tolist()}), encoding="utf-8")

    @staticmethod
    @cache
    def load(folder: str) -> "Difficulty":
        thresholds = json.loads((Path(folder) / FILE).read_text(encoding="utf-8"))["thresholds"]
        judge = loading.load_model(CondenseForCausalLM, folder, dtype=torch.float32)
        return Difficulty(judge, torch.tensor(thresholds, dtype=torch.float64))

    def quantiles(self, losses: torch.Tensor) -> torch.Tensor:
        levels = torch.searchsorted(self.thresholds.to(losses.device), losses.double())
        return (levels + 0.5) / LEVELS


class SpeechRate:
    """The durations of texts read from the beginning, in one part or several.

    `length` is the texts' length. `shuffled` is the control, in which durations say nothing about their tokens: cosine
    durations are in random order, and a duration by difficulty comes from a random token so far, because any other
    order would reveal later tokens.
    """

    def __init__(self, schedule: Schedule, length: int, difficulty: Difficulty | None = None, shuffled: bool = False):
        assert schedule != "even" and (difficulty is None) == (schedule == "cosine")
        self.schedule, self.length, self.difficulty = schedule, length, difficulty
        drawn_N, columns_N = uniform(ORDER_SEED, torch.arange(length)), torch.arange(length)
        self.order_N = columns_N
        if shuffled:
            self.order_N = drawn_N.argsort() if schedule == "cosine" else (drawn_N * (columns_N + 1)).long()
        self.seen = 0  # tokens
        self.durations_BN = torch.empty(0, 0)  # before they are shuffled
        self.cache: Any = None
        self.last_logits_B1V: torch.Tensor | None = None

    def read(self, ids_BN: torch.Tensor) -> torch.Tensor:
        """Returns the durations [B, N] of N more tokens. Raises `ValueError` beyond the length of the texts."""
        seen, end = self.seen, self.seen + ids_BN.shape[1]
        if end > self.length:
            raise ValueError(f"the text has {end} tokens, and its schedule {self.length}: give it the text's length.")
        if self.difficulty is None:
            self.durations_BN = cosine_durations(self.length).expand(len(ids_BN), -1)
        else:
            own_BN = self._by_difficulty(ids_BN).cpu()
            self.durations_BN = own_BN if seen == 0 else torch.cat([self.durations_BN, own_BN], dim=1)
        self.seen = end
        return self.durations_BN[:, self.order_N[seen:end]].float()

    @torch.no_grad()
    def _by_difficulty(self, ids_BN: torch.Tensor) -> torch.Tensor:
        assert self.difficulty is not None
        judge = self.difficulty.judge.to(ids_BN.device)
        output = judge(ids_BN, use_cache=True, **{CACHE: self.cache})
        predicted_BNV = output.logits.float()
        first = self.last_logits_B1V is None
        if self.last_logits_B1V is not None:
            predicted_BNV = torch.cat([self.last_logits_B1V, predicted_BNV], dim=1)
        self.cache, self.last_logits_B1V = cache_of(output), predicted_BNV[:, -1:]
        targets_BN = ids_BN[:, 1:] if first else ids_BN
        losses_BN = F.cross_entropy(predicted_BNV[:, :-1].mT, targets_BN, reduction="none")
        quantiles_BN = self.difficulty.quantiles(losses_BN)
        if first:  # nothing predicts the first token
            quantiles_BN = F.pad(quantiles_BN, (1, 0), value=0.5)
        if self.schedule == "hard_short":
            quantiles_BN = 1 - quantiles_BN
        return SHORTEST + (LONGEST - SHORTEST) * quantiles_BN


@OBJECTIVES.register
class SpeechRateObjective(ObjectiveKind):
    """Predicts the next tokens of texts whose tokens have scheduled durations."""

    kind: Literal["speech_rate"] = "speech_rate"
    schedule: Schedule = Field("even", description="even: all durations are one; hard_long, hard_short: by difficulty")
    judge: str | None = Field(None, description="hard_long, hard_short: folder of a `Difficulty`")
    shuffled: bool = Field(False, description="the control: durations say nothing about their tokens")

    needs_folded: ClassVar[bool] = True

    @model_validator(mode="after")
    def _check_judge(self):
        by_difficulty = self.schedule in ("hard_long", "hard_short")
        has_judge = self.judge is not None and (Path(self.judge) / FILE).is_file()
        if by_difficulty != has_judge or (self.judge is not None and not has_judge):
            raise ValueError(
                f"judge={self.judge!r} with schedule={self.schedule}: hard_long and hard_short need a folder with "
                f"{FILE}, and no other schedule has one"
            )
        return self

    def check_model(self, config: Any, tokenizer: Any, recipe: Any) -> None:
        if self.judge is None:
            return
        size, known = config.vocab_size, loading.load_config(CondenseForCausalLM.config_class, self.judge).vocab_size
        if size != known:
            raise ValueError(
                f"objective.judge={self.judge!r} knows {known} tokens, and the model has {size}: train a judge with "
                "the model's tokenizer."
            )

    def losses(self, model: Any, batch: dict[str, torch.Tensor], num_targets: torch.Tensor | int) -> Losses:
        if self.schedule != "even":
            batch = batch | {"durations": self.durations(batch["input_ids"], batch.get("attention_mask"))}
        return next_token_losses(model, batch, num_targets)

    def durations(self, ids_BN: torch.Tensor, mask_BN: torch.Tensor | None) -> torch.Tensor:
        """Returns durations [B, N]; each text of a batch with padding, which is on the right, has its own schedule."""
        if mask_BN is not None:
            texts = (ids_N[None, :length] for ids_N, length in zip(ids_BN, mask_BN.sum(1).tolist(), strict=True))
            rows = [self.durations(text, None)[0] for text in texts]
            return pad_sequence(rows, batch_first=True, padding_value=1.0)
        difficulty = None if self.judge is None else Difficulty.load(self.judge)
        return SpeechRate(self.schedule, ids_BN.shape[1], difficulty, self.shuffled).read(ids_BN)
