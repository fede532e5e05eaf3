"""Diffusion of images by diffusers' schedulers: noise levels, the model's own states, and samples.

The noise level of step t out of T is that of the fraction (t + 1) / T of the time: so the same fractions mean the same
noise at each T. Steps count from 0, the cleanest state, to T - 1, which is noise alone.

Axes: B images. Images are [B, 1, 8, 8], with values from -1 to 1.
"""

from functools import cache
from typing import Any, Literal

import torch

from ..data.digits import MAX_VALUE, SIDE

SCHEDULE = "squaredcos_cap_v2"
SAMPLERS = ("ddpm", "ddim")


def to_images(values: torch.Tensor) -> torch.Tensor:
    """Images [B, 1, 8, 8] from the values of their pixels [B, 64], which are from 0 to 16."""
    return values.view(-1, 1, SIDE, SIDE) / (MAX_VALUE / 2) - 1


def to_values(images: torch.Tensor) -> torch.Tensor:
    """Values of pixels [B, 64] from images, rounded to integers from 0 to 16."""
    return ((images + 1) * (MAX_VALUE / 2)).round().clamp(0, MAX_VALUE).long().flatten(1)


@cache
def noise_schedule(steps: int) -> Any:
    """The `DDPMScheduler` of this number of steps, for `add_noise` and `alphas_cumprod`."""
    from diffusers import DDPMScheduler  # takes seconds

    return DDPMScheduler(num_train_timesteps=steps, beta_schedule=SCHEDULE)


def signal_and_noise(steps: int, times: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of the image and of the noise at each time, [B, 1, 1, 1] for `times` [B]; at -1 there is no noise."""
    shares = noise_schedule(steps).alphas_cumprod.to(times.device)
    shares = torch.where(times < 0, 1.0, shares[times.clamp_min(0)]).view(-1, 1, 1, 1)
    return shares.sqrt(), (1 - shares).sqrt()


def noise_between(steps: int, states: torch.Tensor, images: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """The noise that makes `states` of `images` at `times` [B]."""
    signal, noise = signal_and_noise(steps, times)
    return (states - signal * images) / noise


@torch.no_grad()
def free_run(model: Any, states: torch.Tensor, first: torch.Tensor, last: torch.Tensor, steps: int) -> torch.Tensor:
    """The model's own states at the times `last` [B], from `states` at the times `first` [B], at least as noisy.

    It takes deterministic DDIM steps as `sample` does: the predicted image is cut to values from -1 to 1, and the noise
    is what is left of the state.
    """
    states, times = states.clone(), first.clone()
    for _ in range(int((first - last).max())):
        rows = (times > last).nonzero().flatten()
        state, time = states[rows], times[rows]
        predicted = model(state, time)
        signal, noise = signal_and_noise(steps, time)
        image = ((state - noise * predicted) / signal).clamp(-1, 1)
        left = (state - signal * image) / noise
        signal, noise = signal_and_noise(steps, time - 1)
        states[rows] = signal * image + noise * left
        times[rows] -= 1
    return states


@torch.no_grad()
def sample(
    model: Any,
    number: int,
    steps: int | None = None,
    sampler: Literal["ddpm", "ddim"] = "ddpm",
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """`number` images that a `DenoiserModel` makes of noise in `steps` evaluations; None: as many as it has steps.

    Raises `ValueError` for a number of steps that the model's does not divide into, and for an unknown sampler.
    """
    from diffusers import DDIMScheduler, DDPMScheduler

    if sampler not in SAMPLERS:
        raise ValueError(f"sampler={sampler!r} is unknown: choose one of {', '.join(SAMPLERS)}.")
    total = model.config.steps
    steps = total if steps is None else steps
    if steps < 1 or total % steps:
        raise ValueError(f"steps={steps} does not divide the {total} steps of the model: choose a divisor.")
    # From the noisiest state on: the "leading" steps of diffusers' default would leave it out.
    options = {"num_train_timesteps": total, "beta_schedule": SCHEDULE, "timestep_spacing": "trailing"}
    scheduler: Any = DDPMScheduler(**options) if sampler == "ddpm" else DDIMScheduler(**options)
    # Most pixels are at the lower end, where cutting moves an image to one side: without a noise that fits the image
    # that is cut, the shifts of 1,000 steps add up to a grey background.
    further = {} if sampler == "ddpm" else {"use_clipped_model_output": True}
    scheduler.set_timesteps(steps)
    state = torch.randn(number, 1, SIDE, SIDE, generator=generator).to(model.device)
    for time in scheduler.timesteps.tolist():
        predicted = model(state, torch.full((number,), time, device=state.device))
        state = scheduler.step(predicted, time, state, generator=generator, **further).prev_sample
    return state
