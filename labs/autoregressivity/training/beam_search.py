"""Beam search for DDPM sampling: each step draws several candidates for the next state and keeps the likeliest.

DDPM draws the state x_s after x_t from q(x_s | x_t, x0), where x0 is the image that the network predicts at x_t. The
score of a candidate x_s is the error of the noise predicted in it,

    || (x_s - a_s x0) / b_s - e(x_s, s) ||^2 / P,

with the factors a_s of the image and b_s of the noise, and the network's prediction e(x_s, s). It is the term at time s
of the variational bound on the likelihood of x0, weighted as in training. A beam's score is the sum over its states;
lower is better. The score costs no extra evaluation, because the next step from x_s starts with e(x_s, s).

Axes: B images, R rows: the beams or candidates of all images, grouped by image; P pixels.
"""

from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch

from condense.training.data.digits import SIDE

from .diffusion import SCHEDULE, noise_between


class Found(NamedTuple):
    """Images [B, 1, 8, 8], and the mean error [B] of the noise predicted on the way to each."""

    images: torch.Tensor
    errors: torch.Tensor


def num_evaluations(steps: int, candidates: int) -> int:
    """Returns the network evaluations per image: the first state is noise and has no rivals."""
    return 1 + (steps - 1) * candidates


@torch.no_grad()
def beam_search(
    model: Any,
    number: int,
    steps: int,
    candidates: int,
    width: int = 1,
    choice: Literal["likeliest", "random"] = "likeliest",
    generator: torch.Generator | None = None,
) -> Found:
    """Returns `number` images that a `DenoiserModel` makes from noise.

    Each of the `steps` draws `candidates` per image and keeps `width` of them as beams. `choice="random"` keeps random
    ones at the same cost. With one candidate this is plain DDPM.

    Raises `ValueError` if `steps` exceeds the model's steps, or if `width` does not divide `candidates`.
    """
    from diffusers import DDPMScheduler

    total = model.config.steps
    if not 2 <= steps <= total:
        raise ValueError(f"steps={steps}: choose 2 to {total}, the steps of the model.")
    if width < 1 or candidates < 1 or candidates % width:
        raise ValueError(f"width={width} does not divide candidates={candidates}: choose a divisor.")
    times = [round(total * (steps - step) / steps) - 1 for step in range(steps)]
    scheduler: Any = DDPMScheduler(num_train_timesteps=total, beta_schedule=SCHEDULE)
    scheduler.set_timesteps(timesteps=times)
    states = torch.randn(number, 1, SIDE, SIDE, generator=generator).to(model.device)
    scores = torch.zeros(number, device=model.device)
    noise = model(states, torch.full((number,), times[0], device=model.device))
    first = torch.arange(number, device=model.device)[:, None] * candidates
    for now, later in pairwise(times):
        children = number * candidates // len(states)
        states, noise, scores = (one.repeat_interleave(children, dim=0) for one in (states, noise, scores))
        step = scheduler.step(noise, now, states, generator=generator)
        states, images = step.prev_sample, step.pred_original_sample
        times_R = torch.full((len(states),), later, device=model.device)
        noise = model(states, times_R)
        errors = (noise_between(total, states, images, times_R) - noise).square().mean(dim=(1, 2, 3))
        scores = scores + errors
        order = scores if choice == "likeliest" else torch.rand(len(scores), generator=generator).to(scores)
        kept = (first + order.view(number, -1).topk(width, largest=False).indices).flatten()  # best first
        states, noise, scores = states[kept], noise[kept], scores[kept]
    states, noise, scores = states[::width], noise[::width], scores[::width]
    images = scheduler.step(noise, times[-1], states, generator=generator).prev_sample
    return Found(images, scores / (steps - 1))
