"""Draws by index against a generator in Python's integers, and against published outputs of SplitMix64."""

import numpy as np
import pytest
import torch

from condense.training.draws import uniform

pytestmark = pytest.mark.unit

WORD = 2**64


def outputs(seed: int, count: int) -> list[int]:
    """The first outputs of SplitMix64, whose state goes on from one to the next."""
    found = []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) % WORD
        word = seed
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
        found.append(word ^ (word >> 31))
    return found


def as_fraction(word: int) -> float:
    return (word >> 11) / 2**53


def test_the_reference_is_splitmix64():
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert outputs(1234567, 4) == published


@pytest.mark.parametrize("seed", [0, 1234567, 2**63 + 5, WORD - 1])
def test_a_number_is_the_output_of_its_index(seed):
    assert uniform(seed, torch.arange(50)).tolist() == [as_fraction(word) for word in outputs(seed, 50)]
    assert uniform(seed, torch.tensor([49, 0], dtype=torch.int32)).tolist() == [
        as_fraction(outputs(seed, 50)[49]), as_fraction(outputs(seed, 1)[0])
    ]  # fmt: skip


def test_further_indices_are_broadcast():
    place, token = torch.arange(7)[:, None], torch.arange(5)
    drawn = uniform(3, place, token)
    seeds = outputs(3, 7)
    assert drawn.tolist() == [[as_fraction(word) for word in outputs(seed, 5)] for seed in seeds]
    assert drawn.dtype == torch.float64


def test_numbers_are_uniform_and_independent():
    drawn = uniform(0, torch.arange(10**9, 10**9 + 300)[:, None], torch.arange(300)).numpy()
    assert drawn.min() >= 0 and drawn.max() < 1
    counts, _ = np.histogram(drawn, bins=100, range=(0, 1))
    chi_squared = ((counts - 900) ** 2 / 900).sum()
    assert 50 < chi_squared < 160  # 99 degrees of freedom
    for other in (uniform(1, torch.arange(10**9, 10**9 + 300)[:, None], torch.arange(300)).numpy(), drawn.T):
        upper = np.triu_indices(300, 1)
        assert abs(np.corrcoef(drawn[upper], other[upper])[0, 1]) < 0.02
    assert abs(np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1]) < 0.02
