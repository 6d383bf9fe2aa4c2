"""randomk on a CPU core: the permutation a tile at a time."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.comm.compressors.base import Shape, numel
from gradwire.comm.compressors.kernels import Kernel
from gradwire.comm.compressors.kernels.cpu import INFINITY, compiled, largest
from gradwire.comm.compressors.kernels.cpu.selection import place
from gradwire.comm.compressors.kernels.cpu.shared import fill_words
from gradwire.comm.compressors.methods.randomk import LAST_SHIFT, MIX, ROUNDS, SEED, RandomK, halves
from gradwire.comm.compressors.philox import draw_seed

TILE = 1024
FIRST, SECOND, LAST = np.uint32(MIX[0][0]), np.uint32(MIX[1][0]), np.uint32(LAST_SHIFT)
M0, M1 = np.uint32(MIX[0][1]), np.uint32(MIX[1][1])


def pick(method: RandomK, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
    """Seed, values, and whether x is not finite, which takes all of x to know."""
    seed = draw_seed(generator, x.device, method.name)
    chosen = permuted(int(seed), x.numel(), method.kept(x.numel()))
    bad = largest(x.view(-1).numpy().view(np.uint32)) >= INFINITY
    return seed.view(torch.uint8), x.view(-1).index_select(0, chosen), torch.tensor([bool(bad)])


def places(method: RandomK, wire: Tensor, shape: Shape) -> tuple[Tensor, int]:
    """The places drawn from the seed."""
    return permuted(int(method.seed(wire)), numel(shape), method.kept(shape)), SEED


def permuted(seed: int, n: int, k: int) -> Tensor:
    """The images of 0..k-1: int64 [k]."""
    out = torch.empty(k, dtype=torch.int64)
    if k:
        fill_images(seed, n, *halves(n), out.numpy())
    return out


@compiled
def fill_images(seed: int, n: int, high: int, low: int, out: np.ndarray) -> None:
    """Fill ``out`` (int64 [k])."""
    keys = np.empty(ROUNDS, np.uint32)
    fill_words(seed, 0, keys)
    numbers, slots = np.empty(TILE, np.int64), np.empty(TILE, np.int64)
    upper, lower = np.empty(TILE, np.uint32), np.empty(TILE, np.uint32)
    for start in range(0, out.size, TILE):
        count = min(TILE, out.size - start)
        for i in range(count):
            numbers[i] = slots[i] = start + i
        while count:
            cross(numbers[:count], keys, high, low, upper[:count], lower[:count])
            outside = 0
            for i in range(count):
                number, slot = numbers[i], slots[i]
                out[slot] = number
                numbers[outside], slots[outside] = number, slot
                outside += number >= n
            count = outside


@compiled
def cross(numbers: np.ndarray, keys: np.ndarray, high: int, low: int, upper: np.ndarray, lower: np.ndarray) -> None:
    """Once through the network, in place; ``upper`` and ``lower`` are room for the halves."""
    upper_mask, lower_mask = np.uint32((1 << high) - 1), np.uint32((1 << low) - 1)
    for i in range(numbers.size):
        upper[i], lower[i] = numbers[i] >> low, numbers[i] & lower_mask
    for r in range(0, ROUNDS, 2):
        stir(lower, keys[r], upper_mask, upper)
        stir(upper, keys[r + 1], lower_mask, lower)
    for i in range(numbers.size):
        numbers[i] = np.int64(upper[i]) << low | np.int64(lower[i])


@compiled
def stir(source: np.ndarray, key: np.uint32, mask: np.uint32, target: np.ndarray) -> None:
    """One round: change one half by a hash of the other."""
    for i in range(source.size):
        word = np.uint32(source[i] ^ key)
        word = np.uint32(np.uint32(word ^ (word >> FIRST)) * M0)
        word = np.uint32(np.uint32(word ^ (word >> SECOND)) * M1)
        target[i] ^= np.uint32(word ^ (word >> LAST)) & mask


KERNEL = Kernel(pick=pick, places=places, place=place)
