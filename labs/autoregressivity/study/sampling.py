"""Compares beam search for DDPM sampling with plain DDPM and DDIM, at equal numbers of evaluations of the network.

The diffusion model of the ablations is trained once for each seed, and samples its digits in every way. With several
candidates, there are fewer steps. The control chooses candidates at random.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from condense.eval.intervals import LINEAR, LOG, LOGIT, Scale, format_seeds, interval
from condense.eval.options import identify
from condense.eval.results import Table, picture
from condense.eval.results_store import Key, Record
from condense.eval.runner import Results
from condense.utils.progress import ProgressBar

from ..training.beam_search import beam_search, num_evaluations
from ..training.denoiser import DenoiserModel
from ..training.diffusion import sample, to_values
from .digit_quality import digit_quality, held_out_quality
from .experiment import Experiment, figures
from .options import AblationOptions
from .pictures import draw_bounds, draw_curve, log_scale
from .setup import trained_folder

QUALITY = {"frechet_distance": "Fréchet distance", "confident": "confident", "class_entropy": "class entropy [nats]"}
EVALUATIONS, SMALL_EVALUATIONS = (5, 25, 125), (5, 25)  # every sampler can take exactly these numbers


class Sampler(NamedTuple):
    """A way to sample. Of the `candidates` of a step, `width` go on; both are 0 for plain samplers."""

    name: Any
    candidates: int = 0
    width: int = 0

    @property
    def label(self) -> str:
        if not self.candidates:
            return self.name.upper()
        return f"{self.name}, {self.width} of {self.candidates}"

    def steps(self, evaluations: int) -> int:
        """Returns the number of steps that take exactly this number of evaluations."""
        if not self.candidates:
            return evaluations
        steps = 1 + (evaluations - 1) // self.candidates
        assert num_evaluations(steps, self.candidates) == evaluations
        return steps


DDPM, DDIM = Sampler("ddpm"), Sampler("ddim")
BEAMS = [Sampler("likeliest", 2, 1), Sampler("likeliest", 4, 1), Sampler("likeliest", 4, 2)]
CONTROLS = [Sampler("random", 2, 1), Sampler("random", 4, 1)]  # the width does not change their distribution
SAMPLERS = [DDPM, DDIM, *BEAMS, *CONTROLS]


class Sampling(Experiment[int]):
    """An item is a seed: one model and all its samples."""

    kind = "ablation_sampling"
    about = (
        "Digits of one diffusion model for each seed, sampled with equal numbers of evaluations of the network for an "
        "image. The error is the error of the predicted noise on the way to an image, which beam search makes small; "
        "its control chooses among as many candidates at random. Means of Fréchet distances and of their ratios, "
        "paired by seed, are geometric; 95 % t intervals over seeds."
    )

    def __init__(self, options: AblationOptions, output: Path):
        super().__init__(options, output)
        self.evaluations = SMALL_EVALUATIONS if options.small else EVALUATIONS

    def settings(self) -> dict[str, Any]:
        return identify(self.options) | {"evaluations": list(self.evaluations), "size": asdict(self.setup.size)}

    def items(self) -> Sequence[int]:
        return range(self.options.seeds)

    def key(self, item: int) -> Key:
        return {"seed": item}

    def measure(self, item: int) -> Record:
        output = self.setup.runs / f"sampling-{item}"
        with trained_folder(self.setup.image_recipe({"kind": "denoising"}, item, output)):
            model: Any = DenoiserModel.from_pretrained(output).eval()
            ways = [(sampler, evaluations) for sampler in SAMPLERS for evaluations in self.evaluations]
            with ProgressBar(ways, desc="sampling", unit="way", leave=False) as bar:
                return {"samples": [self._sample(model, sampler, evaluations, item) for sampler, evaluations in bar]}

    def _sample(self, model: Any, sampler: Sampler, evaluations: int, seed: int) -> dict[str, Any]:
        """Samples in one way. All samplers begin with the same noise."""
        generator, number = torch.Generator().manual_seed(seed), self.setup.size.images
        steps, error = sampler.steps(evaluations), {}
        if sampler.candidates:
            found = beam_search(model, number, steps, sampler.candidates, sampler.width, sampler.name, generator)
            images, error = found.images, {"error": float(found.errors.mean())}
        else:
            images = sample(model, number, steps, sampler.name, generator)
        quality = digit_quality(to_values(images).numpy())
        return {"sampler": sampler.label, "evaluations": evaluations, "steps": steps, **error, **quality}

    def summarise(self, measured: Sequence[tuple[int, Record]]) -> dict[str, Any]:
        samples = [{"seed": seed, **found} for seed, record in measured for found in record["samples"]]
        return {"samples": samples, "real_images": held_out_quality()}

    def rows(self, results: Results) -> Sequence[dict[str, Any]]:
        return results["samples"]

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        columns = ["evaluations", "sampler", "steps", *QUALITY.values(), "Fréchet / DDPM's", "/ random's", "error"]
        real = ["-", "held-out images", "-", *figures(results["real_images"], list(QUALITY)), *"---"]
        rows = [_row(results, sampler, evaluations) for evaluations in results["evaluations"] for sampler in SAMPLERS]
        return [Table("sampled digits at equal evaluations", columns, [real, *rows])]

    @classmethod
    def draw(cls, results: Results, path: Path) -> None:
        evaluations = results["evaluations"]
        with picture(path, columns=len(QUALITY), figsize=(13, 4)) as panels:
            for panel, (name, label) in zip(panels, QUALITY.items(), strict=True):
                for number, sampler in enumerate(SAMPLERS):
                    found = [interval(_values(results, sampler, count, name), _scale(name)) for count in evaluations]
                    places = [at + (number - len(SAMPLERS) // 2) / 12 for at in range(len(evaluations))]
                    style = {"ddpm": "-", "ddim": "-", "likeliest": "--", "random": ":"}[sampler.name]
                    draw_curve(panel, places, found, band=0, color=f"C{number}", ls=style, lw=1, label=sampler.label)
                    draw_bounds(panel, places, found, color=f"C{number}", lw=1.5, alpha=0.5)
                panel.axhline(results["real_images"][name], color="grey", ls="-.", lw=1, label="held-out images")
                panel.set_xticks(range(len(evaluations)), [str(count) for count in evaluations])
                panel.set(xlabel="evaluations of the network for an image", ylabel=label)
                panel.grid(alpha=0.3)
            log_scale(panels[0])
            panels[0].legend(fontsize=7)


def _scale(name: str) -> Scale:
    return {"frechet_distance": LOG, "confident": LOGIT}.get(name, LINEAR)


def _values(results: Results, sampler: Sampler, evaluations: int, name: str) -> list[float]:
    """Returns the values of a measure by seed, if it was measured."""
    return [
        found[name]
        for found in results["samples"]
        if (found["sampler"], found["evaluations"]) == (sampler.label, evaluations) and name in found
    ]


def _row(results: Results, sampler: Sampler, evaluations: int) -> list[Any]:
    distances = _values(results, sampler, evaluations, "frechet_distance")

    def over(other: Sampler) -> str:
        others = _values(results, other, evaluations, "frechet_distance")
        return format_seeds([one / two for one, two in zip(distances, others, strict=True)], 3, LOG)

    control = next((one for one in CONTROLS if one.candidates == sampler.candidates), None)
    return [
        evaluations, sampler.label, sampler.steps(evaluations),
        *(format_seeds(_values(results, sampler, evaluations, name), 3, _scale(name)) for name in QUALITY),
        "-" if sampler == DDPM else over(DDPM),
        "-" if control is None or control == sampler else over(control),
        format_seeds(_values(results, sampler, evaluations, "error"), 4),
    ]  # fmt: skip
