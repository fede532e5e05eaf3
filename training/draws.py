"""Random numbers determined by their indices, without state: equal in every epoch, on every rank, after a resume."""

import torch

# The constants of SplitMix64 as signed numbers: int64 wraps like 64-bit unsigned numbers.
INCREMENT = 0x9E3779B97F4A7C15 - 2**64
FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def uniform(seed: int, *indices: torch.Tensor) -> torch.Tensor:
    """Returns uniform numbers in [0, 1), float64, one per element of the integer `indices`, which are broadcast.

    Index n gives output n of the generator SplitMix64 with that seed. Each further index selects an output of a
    generator that the previous output seeds.
    """
    assert indices
    state = torch.tensor((seed + 2**63) % 2**64 - 2**63, device=indices[0].device)  # as a signed number
    for index in indices:
        state = _mix(state + (index.long() + 1) * INCREMENT)
    return _shift_right(state, 11).double() * 2.0**-53


def _mix(value: torch.Tensor) -> torch.Tensor:
    value = (value ^ _shift_right(value, 30)) * FACTORS[0]
    value = (value ^ _shift_right(value, 27)) * FACTORS[1]
    return value ^ _shift_right(value, 31)


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts in zeros, as for unsigned numbers."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
