"""randomk on CUDA: one pass that checks x and takes the chosen elements."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.comm.compressors.base import Shape, numel
from gradwire.comm.compressors.kernels.cuda.permutation import images
from gradwire.comm.compressors.kernels.cuda.selection import magnitudes_at, place
from gradwire.comm.compressors.kernels.cuda.shared import INFINITY, no_flag
from gradwire.comm.compressors.methods.randomk import SEED, RandomK
from gradwire.comm.compressors.permutation import halves
from gradwire.comm.compressors.philox import draw_seed

__all__ = ["covers", "pick", "place", "places"]

TILE = 4096  # elements that a program checks
DRAWN = 1024  # places that a program draws


def covers(method: RandomK) -> bool:
    """All options."""
    return True


def pick(method: RandomK, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
    """Seed, values, and whether x is not finite, which takes all of x to know."""
    n, k = x.numel(), method.kept(x.numel())
    seed, bad = draw_seed(generator, x.device, method.name), no_flag(x)
    values = torch.empty(k, dtype=torch.float32, device=x.device)
    if k:
        high, low = halves(n)
        take[(max(triton.cdiv(n, TILE), triton.cdiv(k, DRAWN)),)](
            seed, x, values, bad, n, k, HIGH=high, LOW=low, TILE=TILE, DRAWN=DRAWN
        )
    return seed.view(torch.uint8), values, bad


def places(method: RandomK, wire: Tensor, shape: Shape) -> tuple[Tensor, int]:
    """What the seed says."""
    n, k = numel(shape), method.kept(shape)
    seed = method.seed(wire)
    found = torch.empty(k, dtype=torch.int64, device=wire.device)
    if k:
        high, low = halves(n)
        draw[(triton.cdiv(k, DRAWN),)](seed, found, n, k, HIGH=high, LOW=low, DRAWN=DRAWN)
    return found, SEED


@triton.jit
def drawn(seed, first, n, k, HIGH: tl.constexpr, LOW: tl.constexpr, DRAWN: tl.constexpr):
    """Places ``first`` to ``first + DRAWN`` of k; those from k on repeat the last."""
    return images(tl.load(seed), tl.minimum(first + tl.arange(0, DRAWN), k - 1).to(tl.int64), n, HIGH, LOW)


@triton.jit
def take(
    seed, x, values, bad, n, k, HIGH: tl.constexpr, LOW: tl.constexpr, TILE: tl.constexpr, DRAWN: tl.constexpr
):  # fmt: skip
    """Check a tile of x, and take a part of the chosen elements."""
    program = tl.program_id(0).to(tl.int64)
    if program * TILE < n and tl.max(magnitudes_at(x, program * TILE + tl.arange(0, TILE), n), axis=0) >= INFINITY:
        tl.store(bad, 1)
    first = program * DRAWN
    if first < k:
        value = tl.load(x + drawn(seed, first, n, k, HIGH, LOW, DRAWN))
        to = first + tl.arange(0, DRAWN)
        tl.store(values + to, value, mask=to < k)


@triton.jit
def draw(seed, places, n, k, HIGH: tl.constexpr, LOW: tl.constexpr, DRAWN: tl.constexpr):
    """A part of the places."""
    first = tl.program_id(0).to(tl.int64) * DRAWN
    to = first + tl.arange(0, DRAWN)
    tl.store(places + to, drawn(seed, first, n, k, HIGH, LOW, DRAWN), mask=to < k)
