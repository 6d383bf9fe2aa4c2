"""Floats of fewer bits for compiled loops, by integer arithmetic: numba has no float16 and no 8-bit floats."""

from __future__ import annotations

import numpy as np

from gradwire.comm.compressors.kernels.cpu import INFINITY, compiled

ONE = np.uint32(1)
FRACTION = np.uint32(23)  # bits of float32's mantissa
BIAS = np.uint32(127)


@compiled
def narrow(magnitude: np.uint32, mantissa: np.uint32, bias: np.uint32) -> np.uint32:
    """A float32 magnitude, given as its bits, as the bits of a format with fewer exponents; to nearest, ties to even.

    The format's neighbours of a number lie one step apart: 2^mantissa steps make its power of two, or the smallest
    normal number. A sum with 2^23 steps rounds to whole ones, and their count is left in its lowest bits.

    Args:
        magnitude: Below where the format overflows.
        mantissa: Bits of the format's mantissa.
        bias: The format's exponent of 1.0; its normal numbers start at ``2^(1 - bias)``.
    """
    dropped = np.uint32(FRACTION - mantissa)
    lowest = np.uint32(np.uint32(BIAS + ONE - bias) << FRACTION)
    power = max(np.uint32(magnitude & INFINITY), lowest)
    steps = np.uint32(power + np.uint32(dropped << FRACTION))
    total = np.float32(np.uint32(magnitude).view(np.float32) + np.uint32(steps).view(np.float32))
    count = np.uint32(np.float32(total).view(np.uint32) - steps)
    return np.uint32(count + np.uint32(np.uint32(power - lowest) >> dropped))
