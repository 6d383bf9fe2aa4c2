"""threshold on a CPU core: x is read for its unit, to count what reaches the threshold, and to collect it."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from gradwire.comm.compressors.base import Shape, numel
from gradwire.comm.compressors.kernels import Kernel
from gradwire.comm.compressors.kernels.cpu import INFINITY, indices, largest, summing
from gradwire.comm.compressors.kernels.cpu.selection import collected, count, place
from gradwire.comm.compressors.methods.threshold import COUNT, Threshold


def pick(method: Threshold, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
    """Head, values, and whether x is not finite."""
    numbers = x.view(-1).numpy()
    bits = numbers.view(np.int32)
    unit, finite = measure(method, numbers)
    least = int(method.least_for(torch.tensor(unit, dtype=torch.float64)))
    chosen = collected(bits, least, count(bits, np.int32(least)))
    head = method.head(indices.encode(chosen, x.numel(), method.indices), chosen.numel())
    return head, x.view(-1)[chosen], torch.tensor([not finite])


def measure(method: Threshold, x: np.ndarray) -> tuple[float, bool]:
    """The unit of the threshold, and whether x is finite."""
    if method.scale == "rms" and x.size:
        unit = math.sqrt(energy(x) / x.size)
        return unit, math.isfinite(unit)
    most = largest(x.view(np.uint32))
    return float(np.uint32(most).view(np.float32)) if method.scale == "max" else 1.0, bool(most < INFINITY)


@summing
def energy(x: np.ndarray) -> np.float64:
    """The sum of squares."""
    total = np.float64(0)
    for i in range(x.size):
        value = np.float64(x[i])
        total += value * value
    return total


def places(method: Threshold, wire: Tensor, shape: Shape) -> tuple[Tensor, int]:
    """Read the number and the code of the places."""
    found, used = indices.decode(wire[COUNT:], numel(shape), method.count(wire, shape), method.indices)
    return found, COUNT + used


KERNEL = Kernel(pick=pick, places=places, place=place)
