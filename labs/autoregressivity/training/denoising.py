"""The loss of a diffusion model, with a switch for each of the five properties of structured autoregressivity.

The state of an image at time t is the image plus noise. The target is that noise, which determines the state at t - 1.
Each time an image is read, one time and one noise are drawn.

Axes: B images, P pixels, T steps.
"""

from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator

from condense.training.data.digits import NUM_PIXELS, SIDE
from condense.training.draws import uniform
from condense.training.recipe.objectives import OBJECTIVES, Losses, ObjectiveKind
from condense.training.recipe.section import one_of

from .denoiser import LONGEST, Split
from .diffusion import free_run, noise_between, noise_schedule, to_images

# Validation measures losses at fractions n / 40 of the time, with noise that depends only on the image. Of 1,000 steps,
# every 25th is used: the spacing is odd, so experts that share out the steps modulo 2, 4 or 8 all take part.
FRACTIONS = 40
STEPS = (25, 50, 100, 125, 200, 250, 500, LONGEST)
VALIDATION_SEED = 2**40
TIMES, MASKS = 0, 1  # two draws from one seed
SMALLEST = 2.0**-54  # half the smallest step between uniform numbers


def normal(seed: int, *indices: torch.Tensor) -> torch.Tensor:
    """Returns standard normal numbers, float32, determined by their indices."""
    return torch.special.ndtri(uniform(seed, *indices).clamp_min(SMALLEST)).float()


def draw(places: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns new noise [B, 1, 8, 8] and times [B] for the images at these places [B].

    Both depend on the place and on torch's random generator, which a checkpoint keeps. The ranks' generators are in the
    same state, so only the places make images on two ranks differ.
    """
    seed = int(torch.randint(2**62, ()))
    noise = normal(seed, places[:, None], torch.arange(NUM_PIXELS, device=places.device)).view(-1, 1, SIDE, SIDE)
    times = (uniform(seed, places, torch.full_like(places, NUM_PIXELS)) * steps).long()
    return noise, times


def hidden(seed: int, kind: int, places: torch.Tensor, number: int, rate: float) -> torch.Tensor:
    """Returns which of the `number` items of each image are unknown, [B, number]: always the same, `rate` of them.

    The count is rounded down, so at least one is known.
    """
    things = torch.arange(number, device=places.device)
    chances = uniform(seed, torch.full_like(places, kind)[:, None], places[:, None], things)
    return chances.argsort(dim=1, stable=True).argsort(dim=1) < int(rate * number)


@OBJECTIVES.register
class Denoising(ObjectiveKind):
    """Mean squared error of the noise that the model predicts, as in DDPM. At most one switch may be off neutral.

    The loss is a mean over the pixels of all images of a step. With missing targets or masks, the divisor is the
    expected number of pixels with a target.
    """

    kind: Literal["denoising"] = "denoising"
    steps: Annotated[int, one_of(STEPS)] = Field(LONGEST, description="task subdivision: steps of the diffusion")
    experts: int = Field(1, ge=1, description="weight sharing: networks that divide the steps")
    split: Split = Field("interval", description="how they divide them")
    free_running: int = Field(1, ge=1, description="teacher forcing: every so many steps, one has the true state")
    missing: float = Field(0.0, ge=0, lt=1, description="frequent supervision: share of times with no target")
    unknown: Literal["ignore", "free_run"] = Field(
        "ignore", description="free_run: when a target is missing, the next state is the model's own"
    )
    mask: float = Field(0.0, ge=0, lt=1, description="complete supervision: share of pixels with no target")
    seed: int = Field(0, description="of missing targets and masks")
    fixed: bool = Field(True, description="false: missing targets and masks are drawn anew each time, as a control")

    needs_places = True
    is_of_images = True

    @model_validator(mode="after")
    def _check_switches(self):
        neutral = {"steps": LONGEST, "experts": 1, "free_running": 1, "missing": 0.0, "mask": 0.0}
        changed = [f"{name}={getattr(self, name)}" for name, value in neutral.items() if getattr(self, name) != value]
        if len(changed) > 1:
            raise ValueError(f"{' and '.join(changed)}: an ablation changes one of them; leave the others out")
        if self.steps % self.experts:
            raise ValueError(f"experts={self.experts} does not divide {self.steps} steps: choose a divisor")
        return self

    def prepare_model(self, model: Any, recipe: Any) -> Any:
        model.share_out(self.experts, self.split)
        model.config.steps = self.steps
        return model

    def num_targets(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns the number of pixels: unlike with next tokens, the first one is predicted too."""
        return torch.tensor(batch["input_ids"].numel())

    def losses(self, model: Any, batch: dict[str, torch.Tensor], num_targets: torch.Tensor | int) -> Losses:
        images, places = to_images(batch["input_ids"]), batch["places"]
        noise, times = draw(places, self.steps)
        seed = self.seed if self.fixed else int(torch.randint(2**62, ()))
        known, share, first = self._known_and_start(seed, places, times)
        states, target = noise_schedule(self.steps).add_noise(images, noise, first), noise
        if first is not times:
            states = free_run(model, states, first, times, self.steps)
            is_own = (first > times).view(-1, 1, 1, 1)
            target = torch.where(is_own, noise_between(self.steps, states, images, times), noise)
        predicted = model(states, times)
        if known is None:
            loss = F.mse_loss(predicted, target)
        else:
            loss = (known * F.mse_loss(predicted, target, reduction="none")).mean() / share
        own = self.num_targets(batch)
        loss = loss * (own / num_targets)
        return Losses(loss, (loss.detach() * num_targets)[None], own[None])

    def _known_and_start(
        self, seed: int, places: torch.Tensor, times: torch.Tensor
    ) -> tuple[torch.Tensor | None, float, torch.Tensor]:
        """Returns which items have a target, broadcastable to [B, 1, 8, 8] (None: all), their share, and times [B].

        From the true states at these times, the model runs freely to `times`, without gradients.
        """
        if self.missing:
            missing, first = hidden(seed, TIMES, places, self.steps, self.missing), times
            known_B = ~missing.gather(1, times[:, None])[:, 0]
            if self.unknown == "free_run":
                first = torch.where(known_B, self._last_known_state(missing, times), times)
            return known_B.view(-1, 1, 1, 1), 1 - int(self.missing * self.steps) / self.steps, first
        if self.mask:
            masked = hidden(seed, MASKS, places, NUM_PIXELS, self.mask)
            return ~masked.view(-1, 1, SIDE, SIDE), 1 - int(self.mask * NUM_PIXELS) / NUM_PIXELS, times
        if self.free_running > 1:  # groups of times, from the noisy end; the first one of each has the true state
            return None, 1.0, times + (self.steps - 1 - times) % self.free_running
        return None, 1.0, times

    def _last_known_state(self, missing: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """Returns the nearest time from `times` [B] up whose state is known, given the missing targets [B, T].

        The target at t + 1 determines the state at t. The state at T - 1 is pure noise and always known.
        """
        every = torch.arange(self.steps, device=times.device)
        above = torch.where(~missing & (every > times[:, None]), every, self.steps)
        return above.min(dim=1).values - 1

    @torch.no_grad()
    def evaluation_losses(self, model: Any, batch: dict[str, torch.Tensor]) -> Losses:
        """Returns the error at fixed times with true states and all targets: comparable across all settings."""
        states, noise, times = validation_states(batch["input_ids"], self.steps)
        errors = F.mse_loss(model(states, times), noise, reduction="none")
        return Losses(errors.mean(), errors.sum()[None], torch.tensor([errors.numel()]))


def validation_states(values: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns states, noises and times of images at all fractions of the time except 1, when only noise is left.

    States and noises are the same for any number of steps; a time may lie between two of fewer than 1,000 steps.
    """
    fractions = torch.arange(1, FRACTIONS, device=values.device)
    pixels = torch.arange(NUM_PIXELS, device=values.device)
    keys = torch.zeros_like(values[:, 0])
    for pixel in values.unbind(1):
        keys = keys * (2**20 + 7) + pixel  # int64 wraps
    noise = normal(VALIDATION_SEED, keys[:, None, None], fractions[:, None], pixels)
    noise = noise.view(-1, 1, SIDE, SIDE)
    images = to_images(values).repeat_interleave(len(fractions), dim=0)
    levels = (fractions * (LONGEST // FRACTIONS) - 1).repeat(len(values))
    times = (fractions * (steps / FRACTIONS) - 1).repeat(len(values))  # eighths are exact
    return noise_schedule(LONGEST).add_noise(images, noise, levels), noise, times
