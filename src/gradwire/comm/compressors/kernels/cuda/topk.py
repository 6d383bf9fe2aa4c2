"""topk on CUDA: x is read once, but where a sample of it misleads."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.comm.compressors.base import Shape, numel
from gradwire.comm.compressors.kernels.cuda import indices
from gradwire.comm.compressors.kernels.cuda.selection import LIMIT, largest_places, place
from gradwire.comm.compressors.methods.topk import TopK

__all__ = ["covers", "pick", "place", "places"]


def covers(method: TopK) -> bool:
    """All options."""
    return True


def pick(method: TopK, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
    """Head, values, and whether x is not finite."""
    n = x.numel()
    if not 0 < n < LIMIT:
        return *method.pick(x, generator), method.not_representable(x)
    chosen, values, bad = largest_places(x.view(-1), method.kept(n))
    return indices.encode(chosen, n, method.indices), values, bad


def places(method: TopK, wire: Tensor, shape: Shape) -> tuple[Tensor, int]:
    """Read the code of the places."""
    return indices.decode(wire, numel(shape), method.kept(shape), method.indices)
