"""Beam search for DDPM sampling against a loop over candidates, and its limits against the plain sampler."""

from itertools import pairwise

import pytest
import torch

from condense.labs.autoregressivity.training.beam_search import beam_search, num_evaluations
from condense.labs.autoregressivity.training.denoiser import DenoiserConfig, DenoiserModel
from condense.labs.autoregressivity.training.diffusion import noise_schedule, sample

T = 25


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return DenoiserModel(DenoiserConfig(channels=[16], steps=T)).eval()


def generator():
    return torch.Generator().manual_seed(7)


def drawn_after(state, noise, now, later, normal):
    """The next state of DDPM and the image that it is drawn around, by the formulas of its paper."""
    levels = noise_schedule(T).alphas_cumprod
    level, before = levels[now], levels[later] if later >= 0 else torch.tensor(1.0)
    image = ((state - (1 - level).sqrt() * noise) / level.sqrt()).clamp(-1, 1)
    kept = level / before
    mean = before.sqrt() * (1 - kept) / (1 - level) * image + kept.sqrt() * (1 - before) / (1 - level) * state
    return mean + ((1 - before) / (1 - level) * (1 - kept)).clamp(min=1e-20).sqrt() * normal, image


@torch.no_grad()
@pytest.mark.parametrize(("candidates", "width"), [(3, 1), (4, 2)])
def test_against_a_loop_over_candidates(model, candidates, width):
    number, times = 2, [24, 20, 16, 11, 7, 3]  # 6 steps, which do not divide the 25
    found = beam_search(model, number, 6, candidates, width, generator=generator())
    levels, draws = noise_schedule(T).alphas_cumprod, generator()
    first = torch.randn(number, 1, 8, 8, generator=draws)
    beams = [[(0.0, first[image])] for image in range(number)]  # scores and states
    for now, later in pairwise(times):
        normal = torch.randn(number * candidates, 1, 8, 8, generator=draws)
        for image in range(number):
            rivals = []
            for score, state in beams[image]:
                noise = model(state[None], torch.tensor([now]))[0]
                for _ in range(candidates // len(beams[image])):
                    drawn = normal[image * candidates + len(rivals)]
                    rival, predicted = drawn_after(state, noise, now, later, drawn)
                    own = (rival - levels[later].sqrt() * predicted) / (1 - levels[later]).sqrt()
                    error = (own - model(rival[None], torch.tensor([later]))[0]).square().mean().item()
                    rivals.append((score + error, rival))
            assert len(rivals) == candidates
            beams[image] = sorted(rivals, key=lambda rival: rival[0])[:width]
    for image in range(number):
        score, state = beams[image][0]
        last, _ = drawn_after(state, model(state[None], torch.tensor([times[-1]]))[0], times[-1], -1, 0.0)
        torch.testing.assert_close(found.images[image], last, atol=1e-4, rtol=1e-4)
        assert found.errors[image].item() == pytest.approx(score / 5, rel=1e-4)


def test_one_candidate_is_ddpm(model):
    assert torch.equal(
        beam_search(model, 3, 5, 1, generator=generator()).images, sample(model, 3, 5, "ddpm", generator())
    )


def test_evaluations_are_counted_and_choice_matters(model):
    rows = 0

    def counted(states, times):
        nonlocal rows
        rows += len(states)
        return model(states, times)

    counted.config, counted.device = model.config, model.device
    likeliest, chance = (beam_search(counted, 8, 7, 4, 2, choice, generator()) for choice in ("likeliest", "random"))
    assert rows == 2 * 8 * num_evaluations(7, 4)
    assert (likeliest.errors < chance.errors).all()
    assert not torch.equal(likeliest.images, chance.images)


@pytest.mark.parametrize(
    ("steps", "candidates", "width", "message"),
    [(26, 2, 1, "steps=26: choose 2 to 25"), (1, 2, 1, "steps=1:"), (5, 4, 3, "width=3 does not divide candidates=4")],
)
def test_refusals(model, steps, candidates, width, message):
    with pytest.raises(ValueError, match=message):
        beam_search(model, 1, steps, candidates, width)
