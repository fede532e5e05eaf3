"""Talking slower: if the tokens of a text have durations by a schedule, does the next-token loss change?

Folded models are trained without durations, and with the durations of each schedule. The model without durations reads
held-out text with those of every schedule, the others with their own and with durations of one. A schedule's control
has the same durations in an order unrelated to the tokens.

Axes: B texts, N tokens of a text, P tokens of a prompt.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from condense import CondenseForCausalLM
from condense.eval.intervals import format_seeds, interval
from condense.eval.options import identify
from condense.eval.results import Table, picture
from condense.eval.results_store import Key, Record
from condense.eval.runner import Results
from condense.eval.study.training import make_once
from condense.hub import loading
from condense.state.cache_argument import cache_of

from ..training.speech_rate import Difficulty, SpeechRate
from .experiment import Experiment, figures, means, titles
from .setup import trained_folder

QUALITY = ("reference_loss", "entropy", "distinct_2")


class Speech(NamedTuple):
    schedule: Any
    shuffled: bool = False

    @property
    def label(self) -> str:
        return f"{self.schedule.replace('_', ' ')}{', shuffled' if self.shuffled else ''}"

    @property
    def control(self) -> "Speech | None":
        """Returns the shuffled schedule. Both schedules by difficulty share one: they have the same distribution."""
        if self.shuffled or self == EVEN:
            return None
        return Speech("cosine" if self.schedule == "cosine" else "hard_long", True)


EVEN = Speech("even")
SPEECHES = [
    EVEN, Speech("cosine"), Speech("cosine", True), Speech("hard_long"), Speech("hard_short"), Speech("hard_long", True)
]  # fmt: skip


class Item(NamedTuple):
    trained: Speech
    seed: int


class SpeechRates(Experiment[Item]):
    kind = "ablation_speech_rate"
    about = (
        "The next-token loss of held-out text whose tokens have durations by a schedule, in training, in reading, or "
        "in both. Changes are against the model trained and read without durations, and against the control, whose "
        "durations are unrelated to the tokens. They are paired by seed: mean and 95 % t interval."
    )

    def settings(self) -> dict[str, Any]:
        self.setup.make()
        return identify(self.options) | self.setup.described()

    def items(self) -> Sequence[Item]:
        return [Item(speech, seed) for speech in SPEECHES for seed in range(self.options.seeds)]

    def key(self, item: Item) -> Key:
        return {"trained": item.trained.label, "seed": item.seed}

    def measure(self, item: Item) -> Record:
        judge, windows_BN = self._judge(item.seed), self.setup.prompts
        model, difficulty = self._load_trained(item, judge), Difficulty.load(str(judge))
        reads = SPEECHES if item.trained == EVEN else [item.trained, EVEN]
        losses = {read.label: self.loss(model, windows_BN, read, difficulty) for read in reads}
        prompt_length = self.setup.size.prompt_length
        rate = self._rate(item.trained, difficulty)
        text_BN = talk(model, rate, windows_BN[:, :prompt_length], self.setup.size.length - prompt_length, item.seed)
        return {"losses": losses, "quality": self.setup.quality(text_BN)}

    def _judge(self, seed: int) -> Path:
        """Trains a model without durations, and stores it with its losses on some of its texts."""

        def write(folder: Path) -> None:
            Difficulty.learn(self._train(EVEN, seed), self.setup.windows(self.setup.texts[0])).save(folder)

        return make_once(self.setup.inputs / f"judge-{seed}", write)

    def _load_trained(self, item: Item, judge: Path) -> Any:
        if item.trained == EVEN:
            return loading.load_model(CondenseForCausalLM, str(judge), dtype=torch.float32).eval()
        return self._train(item.trained, item.seed, judge)

    def _train(self, speech: Speech, seed: int, judge: Path | None = None) -> Any:
        output = self.setup.runs / f"speech_rate-{speech.label}-{seed}"
        objective: dict[str, Any] = {"kind": "speech_rate", "schedule": speech.schedule, "shuffled": speech.shuffled}
        if speech.schedule.startswith("hard"):
            objective["judge"] = str(judge)
        with trained_folder(self.setup.language_recipe("folded", objective, seed, output, evaluation=None)):
            return loading.load_model(CondenseForCausalLM, str(output), dtype=torch.float32).eval()

    def _rate(self, speech: Speech, difficulty: Difficulty) -> SpeechRate | None:
        """Returns the durations of a schedule; None for durations of one."""
        if speech == EVEN:
            return None
        judged = difficulty if speech.schedule.startswith("hard") else None
        return SpeechRate(speech.schedule, self.setup.size.length, judged, speech.shuffled)

    @torch.no_grad()
    def loss(self, model: Any, text_BN: torch.Tensor, speech: Speech, difficulty: Difficulty) -> float:
        """Returns the mean next-token loss of texts read with these durations."""
        rate = self._rate(speech, difficulty)
        durations_BN = None if rate is None else rate.read(text_BN)
        return float(model(text_BN, labels=text_BN, durations=durations_BN).loss)

    def summarise(self, measured: Sequence[tuple[Item, Record]]) -> dict[str, Any]:
        return {"records": self.described(measured), "real_text": self.real_text()}

    def rows(self, results: Results) -> Sequence[dict[str, Any]]:
        return [
            {"trained": record["trained"], "read": read, "seed": record["seed"], "loss": loss}
            for record in results["records"]
            for read, loss in record["losses"].items()
        ]

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        rows, qualities = [], []
        for trained, read in _pairs():
            control = read.control if trained in (EVEN, read) else None
            against = "-"
            if control is not None:
                against = _percent(results, (trained, read), (EVEN if trained == EVEN else control, control))
            change = "-" if trained == read == EVEN else _percent(results, (trained, read), (EVEN, EVEN))
            losses = format_seeds(_losses(results, trained, read), 4)
            rows.append([trained.label, read.label, losses, change, against])
        for speech in SPEECHES:
            found = [record["quality"] for record in results["records"] if record["trained"] == speech.label]
            qualities.append([speech.label, *means(found, QUALITY)])
        real = ["real text", *figures(results["real_text"], QUALITY)]
        columns = ["trained with", "read with", "loss", "change [%]", "against the control [%]"]
        return [
            Table("next-token loss by durations", columns, rows),
            Table("texts written with the durations of training", ["durations", *titles(QUALITY)], [real, *qualities]),
        ]

    @classmethod
    def draw(cls, results: Results, path: Path) -> None:
        pairs = [pair for pair in _pairs() if pair != (EVEN, EVEN)]
        with picture(path, figsize=(8, 4.2)) as panel:
            for place, pair in enumerate(pairs):
                mean, low, high = interval(_changes(results, pair, (EVEN, EVEN)))
                color = "tab:grey" if any(speech.shuffled for speech in pair) else "tab:blue"
                panel.plot([mean], [place], "o", color=color, ms=5)
                if low is not None:
                    panel.plot([low, high], [place, place], color=color, lw=1.5)
            panel.axvline(0, color="black", lw=0.8)
            panel.set_yticks(range(len(pairs)), [f"{one.label}  |  {other.label}" for one, other in pairs])
            panel.invert_yaxis()
            panel.set_ylabel("trained with  |  read with")
            panel.set_xlabel("change of the next-token loss [%]; grey: controls")
            panel.grid(alpha=0.3, axis="x")


@torch.no_grad()
def talk(model: Any, rate: SpeechRate | None, prompt_BP: torch.Tensor, num_tokens: int, seed: int) -> torch.Tensor:
    """Returns the prompts, each with `num_tokens` tokens sampled at temperature 1; every token has its duration."""
    generator, text_BN, cache = torch.Generator().manual_seed(seed), prompt_BP, None
    for number in range(num_tokens):
        part_BN = text_BN[:, -1:] if number else prompt_BP
        durations_BN = None if rate is None else rate.read(part_BN)
        output = model(part_BN, durations=durations_BN, cache=cache, use_cache=True, logits_to_keep=1)
        cache = cache_of(output)
        drawn_B1 = torch.multinomial(output.logits[:, -1].float().softmax(dim=-1), 1, generator=generator)
        text_BN = torch.cat([text_BN, drawn_B1], dim=1)
    return text_BN


def _pairs() -> list[tuple[Speech, Speech]]:
    """Returns the pairs of durations in training and in reading."""
    others = [speech for speech in SPEECHES if speech != EVEN]
    return [*((EVEN, read) for read in SPEECHES), *((one, read) for one in others for read in (one, EVEN))]


def _losses(results: Results, trained: Speech, read: Speech) -> list[float]:
    """Returns the losses by seed."""
    return [record["losses"][read.label] for record in results["records"] if record["trained"] == trained.label]


def _changes(results: Results, pair: tuple[Speech, Speech], other: tuple[Speech, Speech]) -> list[float]:
    """Returns the changes of the loss by seed, in percent."""
    losses, others = _losses(results, *pair), _losses(results, *other)
    return [100 * (one / two - 1) for one, two in zip(losses, others, strict=True)]


def _percent(results: Results, pair: tuple[Speech, Speech], other: tuple[Speech, Speech]) -> str:
    return format_seeds(_changes(results, pair, other), 2)
