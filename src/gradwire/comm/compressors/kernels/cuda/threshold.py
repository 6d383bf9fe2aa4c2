"""threshold on CUDA: x is read for its unit and to collect what reaches the threshold."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.comm.compressors.base import Shape, numel
from gradwire.comm.compressors.kernels.cuda import indices
from gradwire.comm.compressors.kernels.cuda.selection import LIMIT, place, reaching_places
from gradwire.comm.compressors.methods.threshold import COUNT, Threshold

__all__ = ["covers", "pick", "place", "places"]

TILE = 4096


def covers(method: Threshold) -> bool:
    """All options."""
    return True


def pick(method: Threshold, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
    """Head, values, and whether x is not finite."""
    n = x.numel()
    if not 0 < n < LIMIT:
        return *method.pick(x, generator), method.not_representable(x)
    chosen, values, bad = reaching_places(x.view(-1), method.least_for(unit(method, x)).view(1))
    return method.head(indices.encode(chosen, n, method.indices), chosen.numel()), values, bad


def unit(method: Threshold, x: Tensor) -> Tensor:
    """The unit of the threshold: float64 []."""
    if method.scale == "rms":
        sums = torch.empty(triton.cdiv(x.numel(), TILE), dtype=torch.float64, device=x.device)
        energies[(sums.numel(),)](x, sums, x.numel(), TILE=TILE)
        return (sums.sum() / x.numel()).sqrt_()
    if method.scale == "max":
        low, high = torch.aminmax(x)
        return torch.maximum(-low, high).to(torch.float64)
    return torch.ones((), dtype=torch.float64, device=x.device)


def places(method: Threshold, wire: Tensor, shape: Shape) -> tuple[Tensor, int]:
    """Read the number and the code of the places; the host waits for the number."""
    found, used = indices.decode(wire[COUNT:], numel(shape), method.count(wire, shape), method.indices)
    return found, COUNT + used


@triton.jit
def energies(x, sums, n, TILE: tl.constexpr):
    """The sum of the squares of a tile (float64)."""
    tile = tl.program_id(0).to(tl.int64)
    at = tile * TILE + tl.arange(0, TILE)
    value = tl.load(x + at, mask=at < n, other=0.0).to(tl.float64)
    tl.store(sums + tile, tl.sum(value * value, axis=0))
