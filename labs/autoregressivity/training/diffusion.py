"""Diffusion of images with diffusers' schedulers: noise levels, the model's own states, and samples.

Step t of T has the noise level of the fraction (t + 1) / T of the time, so a fraction means the same noise at any T.
Steps count from 0, the cleanest state, to T - 1, which is pure noise.

Axes: B images. Images are [B, 1, 8, 8], with values from -1 to 1.
"""

from functools import cache
from typing import Any, Literal

import torch

from condense.training.data.digits import MAX_VALUE, SIDE
from condense.utils.choices import check_choice

SCHEDULE = "squaredcos_cap_v2"
SAMPLERS = ("ddpm", "ddim")


def to_images(values: torch.Tensor) -> torch.Tensor:
    """Returns images [B, 1, 8, 8] from pixel values [B, 64], which range from 0 to 16."""
    return values.view(-1, 1, SIDE, SIDE) / (MAX_VALUE / 2) - 1


def to_values(images: torch.Tensor) -> torch.Tensor:
    """Returns pixel values [B, 64] from images, rounded to integers from 0 to 16."""
    return ((images + 1) * (MAX_VALUE / 2)).round().clamp(0, MAX_VALUE).long().flatten(1)


@cache
def noise_schedule(steps: int) -> Any:
    """Returns the `DDPMScheduler` with this number of steps, for `add_noise` and `alphas_cumprod`."""
    from diffusers import DDPMScheduler  # slow to import

    return DDPMScheduler(num_train_timesteps=steps, beta_schedule=SCHEDULE)


def signal_and_noise(steps: int, times: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the factors of image and noise, [B, 1, 1, 1] for `times` [B]; at time -1 there is no noise."""
    shares = noise_schedule(steps).alphas_cumprod.to(times.device)
    shares = torch.where(times < 0, 1.0, shares[times.clamp_min(0)]).view(-1, 1, 1, 1)
    return shares.sqrt(), (1 - shares).sqrt()


def noise_between(steps: int, states: torch.Tensor, images: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """Returns the noise that turns `images` into `states` at `times` [B]."""
    signal, noise = signal_and_noise(steps, times)
    return (states - signal * images) / noise


@torch.no_grad()
def free_run(model: Any, states: torch.Tensor, first: torch.Tensor, last: torch.Tensor, steps: int) -> torch.Tensor:
    """Returns the model's own states at times `last` [B], from `states` at times `first` [B], at least as noisy.

    It takes deterministic DDIM steps like `sample`: the predicted image is clipped to [-1, 1], and the noise is what is
    left of the state.
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
    """Returns `number` images that a `DenoiserModel` makes from noise in `steps` evaluations (None: all its steps).

    Raises `ValueError` for a number of steps that does not divide the model's, and for an unknown sampler.
    """
    from diffusers import DDIMScheduler, DDPMScheduler

    check_choice("sampler", sampler, SAMPLERS)
    total = model.config.steps
    steps = total if steps is None else steps
    if steps < 1 or total % steps:
        raise ValueError(f"steps={steps} does not divide the {total} steps of the model: choose a divisor.")
    # Starts at the noisiest state, which the "leading" steps of diffusers' default would leave out.
    options = {"num_train_timesteps": total, "beta_schedule": SCHEDULE, "timestep_spacing": "trailing"}
    scheduler: Any = DDPMScheduler(**options) if sampler == "ddpm" else DDIMScheduler(**options)
    # Most pixels are at the lower end, where clipping shifts an image one way. Unless the noise matches the clipped
    # image, the shifts of 1,000 steps add up to a grey background.
    further = {} if sampler == "ddpm" else {"use_clipped_model_output": True}
    scheduler.set_timesteps(steps)
    state = torch.randn(number, 1, SIDE, SIDE, generator=generator).to(model.device)
    for time in scheduler.timesteps.tolist():
        predicted = model(state, torch.full((number,), time, device=state.device))
        state = scheduler.step(predicted, time, state, generator=generator, **further).prev_sample
    return state
