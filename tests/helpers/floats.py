"""A binary float format by its definition, in float64."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch


class Format(NamedTuple):
    """A format with subnormal numbers.

    Args:
        mantissa: Its bits.
        lowest: Exponent of the smallest normal number.
        top: Largest finite value.
    """

    mantissa: int
    lowest: int
    top: float

    @property
    def step(self) -> float:
        """The smallest distance of two numbers."""
        return 2.0 ** (self.lowest - self.mantissa)

    @property
    def relative_error(self) -> float:
        """The largest that rounding to nearest makes of a normal number: u / (1 + u), at 1 + u half a step above 1."""
        return 1 / (2 ** (self.mantissa + 1) + 1)

    def numbers(self) -> np.ndarray:
        """All that are not negative, ascending."""
        normal = np.arange(2**self.mantissa, 2 ** (self.mantissa + 1)) * self.step
        powers = np.ldexp(1.0, np.arange(int(np.log2(self.top)) - self.lowest + 2))
        found = np.concatenate([np.arange(2**self.mantissa) * self.step, np.outer(powers, normal).ravel()])
        return found[found <= self.top]


def nearest(x: torch.Tensor, form: Format) -> torch.Tensor:
    """The nearest multiple of the step at each place, ties to even."""
    values = x.double().numpy()
    exponent = np.maximum(np.frexp(values)[1] - 1, form.lowest)
    step = np.ldexp(1.0, exponent - form.mantissa)
    return torch.from_numpy(np.rint(values / step) * step)


def turning_points(form: Format) -> torch.Tensor:
    """float32 of both signs: every number of the format, middles, powers of two, and their neighbours."""
    numbers = form.numbers()
    powers = np.ldexp(1.0, np.arange(-149, int(np.log2(form.top))))
    points = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2, powers]).astype(np.float32)
    above, below = np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(0))
    points = np.unique(np.concatenate([points, above, below]))
    points = points[points <= form.top]
    return torch.from_numpy(np.concatenate([points, -points]))
