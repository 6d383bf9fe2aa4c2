"""topk on a CPU core: x is read twice."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.compressors.base import Shape, numel
from gradwire.compressors.kernels.cpu import indices
from gradwire.compressors.kernels.cpu.selection import largest_places, place
from gradwire.compressors.methods.topk import TopK

__all__ = ["covers", "pick", "place", "places"]


def covers(method: TopK) -> bool:
    """All options."""
    return True


def pick(method: TopK, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
    """Head, values, and whether x is not finite."""
    k = method.kept(x.numel())
    bits = x.view(-1).numpy().view(np.int32)
    chosen, bad = largest_places(bits, k) if k else (torch.empty(0, dtype=torch.int64), False)
    return indices.encode(chosen, x.numel(), method.indices), x.view(-1)[chosen], torch.tensor([bad])


def places(method: TopK, wire: Tensor, shape: Shape) -> tuple[Tensor, int]:
    """Read the code of the places."""
    return indices.decode(wire, numel(shape), method.kept(shape), method.indices)
