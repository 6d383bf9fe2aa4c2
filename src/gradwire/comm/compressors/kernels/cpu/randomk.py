"""randomk on a CPU core."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.comm.compressors.base import Shape, numel
from gradwire.comm.compressors.kernels.cpu import INFINITY, largest
from gradwire.comm.compressors.kernels.cpu.permutation import permuted
from gradwire.comm.compressors.kernels.cpu.selection import place
from gradwire.comm.compressors.methods.randomk import SEED, RandomK
from gradwire.comm.compressors.philox import draw_seed

__all__ = ["covers", "pick", "place", "places"]


def covers(method: RandomK) -> bool:
    """All options."""
    return True


def pick(method: RandomK, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
    """Seed, values, and whether x is not finite, which takes all of x to know."""
    seed = draw_seed(generator, x.device, method.name)
    chosen = permuted(int(seed), x.numel(), method.kept(x.numel()))
    bad = largest(x.view(-1).numpy().view(np.uint32)) >= INFINITY
    return seed.view(torch.uint8), x.view(-1).index_select(0, chosen), torch.tensor([bool(bad)])


def places(method: RandomK, wire: Tensor, shape: Shape) -> tuple[Tensor, int]:
    """What the seed says."""
    return permuted(int(method.seed(wire)), numel(shape), method.kept(shape)), SEED
