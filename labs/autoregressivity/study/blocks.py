"""Compares folded block diffusion with the autoregressive model: the likelihood bound, and quality by evaluations.

A folded Llama is trained to write blocks of 1, 4 or 16 tokens or a whole segment, and once to predict next tokens. All
models have the same first weights, batches and number of steps.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from condense.eval.intervals import format_seeds, interval
from condense.eval.results import Table, picture
from condense.eval.results_store import Record
from condense.eval.runner import Results

from ..model import BlockDiffusionForCausalLM, likelihood_bound
from .experiment import Experiment, figures, means, titles
from .pictures import draw_curve
from .setup import trained_folder

DRAWS = 16  # of masks, for the bound
QUALITY = ("reference_loss", "entropy", "distinct_2")


class Item(NamedTuple):
    """A model to train: a `block_length` of 0 is the autoregressive model."""

    block_length: int
    seed: int


class Blocks(Experiment[Item]):
    kind = "ablation_blocks"
    about = (
        "Folded block diffusion against the autoregressive model from the same weights after as many steps: the bound "
        "on the negative log likelihood of a token of held-out text, and sampled texts. With blocks of one token both "
        "are the same model. The Monte-Carlo error comes from the draws of masks; intervals are over seeds."
    )

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"draws": DRAWS}

    @property
    def block_lengths(self) -> list[int]:
        length = self.setup.size.segment_length
        return sorted({block for block in (1, 4, 16, length) if block <= length})

    def items(self) -> Sequence[Item]:
        return [Item(block, seed) for block in (0, *self.block_lengths) for seed in range(self.options.seeds)]

    def measure(self, item: Item) -> Record:
        output = self.setup.runs / f"blocks-{item.block_length}-{item.seed}"
        objective: dict[str, Any] = {"kind": "next_token"}
        if item.block_length:
            objective = {"kind": "block_diffusion", "block_length": item.block_length}
        with trained_folder(self.setup.language_recipe("folded", objective, item.seed, output)):
            model = AutoModelForCausalLM.from_pretrained(output).eval()
            return {"bound": bounds(model, self.setup.prompts), "quality": self._qualities(model, item)}

    def _qualities(self, model: Any, item: Item) -> list[dict[str, float]]:
        """Measures texts sampled with fewer and fewer evaluations of a block."""
        found = []
        steps = length = item.block_length or 1
        while steps:
            options = {"max_denoising_steps": steps, "order": "random"} if item.block_length else {}
            quality = self.setup.generated_quality(model, item.seed, **options)
            found.append({"evaluations": steps / length} | quality)  # of a token
            steps //= 2
        return found

    def summarise(self, measured: Sequence[tuple[Item, Record]]) -> dict[str, Any]:
        records, real_text = self.described(measured), self.real_text()
        return {"block_lengths": self.block_lengths, "records": records, "real_text": real_text}

    def rows(self, results: Results) -> Sequence[dict[str, Any]]:
        return [
            {"block_length": record["block_length"], "seed": record["seed"], **record["bound"], **quality}
            for record in results["records"]
            for quality in record["quality"]
        ]

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        autoregressive = _of(results, 0)
        bounds_rows, quality_rows = [], []
        for block in (0, *results["block_lengths"]):
            records = _of(results, block)
            gaps = [r["bound"]["mean"] - a["bound"]["mean"] for r, a in zip(records, autoregressive, strict=True)]
            error = max(record["bound"]["monte_carlo_error"] for record in records)
            bounds_rows.append(
                [
                    _name(block),
                    format_seeds([r["bound"]["mean"] for r in records], 4),
                    f"{error:.4f}" if block else "exact",
                    format_seeds(gaps, 4),
                ]
            )
            for qualities in _by_evaluations(records):
                cells = means(qualities, QUALITY)
                quality_rows.append([_name(block), f"{qualities[0]['evaluations']:.3g}", *cells])
        columns = ["model", "bound", "Monte-Carlo error", "minus the autoregressive model's"]
        real = ["real text", "-", *figures(results["real_text"], QUALITY)]
        return [
            Table("negative log likelihood of a token [nats]: the bound", columns, bounds_rows),
            Table(
                "sampled texts by evaluations of a token",
                ["model", "evaluations", *titles(QUALITY)],
                [real, *quality_rows],
            ),
        ]

    @classmethod
    def draw(cls, results: Results, path: Path) -> None:
        with picture(path, columns=2, figsize=(10, 3.8)) as (left, right):
            blocks = results["block_lengths"]
            found = [interval([record["bound"]["mean"] for record in _of(results, block)]) for block in blocks]
            draw_curve(left, blocks, found, band=0.15, label="bound")
            exact = fmean(record["bound"]["mean"] for record in _of(results, 0))
            left.axhline(exact, color="grey", ls="--", lw=1, label="autoregressive, exact")
            left.set_xscale("log", base=2)
            left.set_xticks(blocks, [str(block) for block in blocks])
            left.set(xlabel="tokens of a block", ylabel="negative log likelihood of a token [nats]")
            for block in (0, *blocks):
                qualities = _by_evaluations(_of(results, block))
                evaluations = [by_seed[0]["evaluations"] for by_seed in qualities]
                losses = [fmean(quality["reference_loss"] for quality in by_seed) for by_seed in qualities]
                right.plot(evaluations, losses, marker="o" if block else "x", ms=4, label=_name(block))
            right.axhline(results["real_text"]["reference_loss"], color="grey", ls="--", lw=1, label="real text")
            right.set_xscale("log", base=2)
            right.set(xlabel="evaluations of a token", ylabel="loss of the reference model [nats]")
            for panel, place in ((left, "upper left"), (right, "lower left")):
                panel.grid(alpha=0.3)
                panel.legend(fontsize=7, loc=place)


@torch.no_grad()
def bounds(model: Any, text_BN: torch.Tensor) -> dict[str, float]:
    """Returns the mean bound of a token over all texts and draws of masks, and the standard error over draws.

    For an autoregressive model it is the negative log likelihood itself.
    """
    if not isinstance(model, BlockDiffusionForCausalLM):
        return {"mean": float(model(text_BN, labels=text_BN).loss), "monte_carlo_error": 0.0}
    generator = torch.Generator().manual_seed(0)
    number = text_BN.shape[0] * (text_BN.shape[1] - 1)
    draws = [float(likelihood_bound(model, text_BN, text_BN, generator).sum()) / number for _ in range(DRAWS)]
    return {"mean": fmean(draws), "monte_carlo_error": stdev(draws) / DRAWS**0.5}


def _of(results: Results, block_length: int) -> list[dict[str, Any]]:
    return [record for record in results["records"] if record["block_length"] == block_length]


def _by_evaluations(records: Sequence[dict[str, Any]]) -> list[tuple[dict[str, float], ...]]:
    """Returns the qualities of all seeds, for each number of evaluations."""
    return list(zip(*(record["quality"] for record in records), strict=True))


def _name(block_length: int) -> str:
    return f"block of {block_length}" if block_length else "autoregressive"
