"""A keyed pseudo-random permutation of 0..n-1: any part of it costs what that part holds, and a seed says it all.

A Feistel network over the next power of two, of at least 2^6, whose two halves may differ by a bit; what falls outside
0..n-1 goes through it again until it lies inside ("cycle walking"), less than twice on average beyond n = 32. Compare
Mitchell, Stokes, Frank and Holmes, "Bandwidth-Optimal Random Shuffling for GPUs" (ACM TOPC 2022). Round r changes one
half by a hash of the other half and word r of the seed's stream (`gradwire.comm.compressors.philox`); the hash is the
mixer of 32 bits "16-21f0aaad-15-735a2d97-15" found by Wellons' hash prospector.

In a network of random round functions one element's image is uniform, and a pair's differs from a uniform pair's by
2^-3 to the power of the rounds at most, which is 2^-24 here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.comm.compressors.philox import words

ROUNDS = 8
LEAST_BITS = 6  # halves of 3 bits: with fewer, 8 rounds would not mix enough
MIX = ((16, 0x21F0AAAD), (15, 0x735A2D97))  # below 2^31, so that a product fits int64
LAST_SHIFT = 15
WORD = 0xFFFFFFFF


def halves(n: int) -> tuple[int, int]:
    """Bits of the upper and the lower half of a number below the power of two that holds n."""
    bits = max(LEAST_BITS, (n - 1).bit_length())
    return bits // 2, bits - bits // 2


def permuted(seed: Tensor, n: int, k: int) -> Tensor:
    """The images of 0..k-1, which are k distinct numbers below n, each k-subset as likely as any other.

    Args:
        seed: int64 [1].
        n: Size of the permuted range, below 2^63.
        k: At most n.

    Returns:
        int64 [k] on the seed's device.
    """
    keys = words(seed, ROUNDS)
    found = crossed(torch.arange(k, device=seed.device), keys, n)
    while (outside := (found >= n).nonzero().view(-1)).numel():
        found[outside] = crossed(found[outside], keys, n)
    return found


def crossed(numbers: Tensor, keys: Tensor, n: int) -> Tensor:
    """Once through the network."""
    high, low = halves(n)
    upper, lower = numbers >> low, numbers & ((1 << low) - 1)
    for r in range(0, ROUNDS, 2):
        upper = upper ^ mixed(lower ^ keys[r]) & ((1 << high) - 1)
        lower = lower ^ mixed(upper ^ keys[r + 1]) & ((1 << low) - 1)
    return upper << low | lower


def mixed(word: Tensor) -> Tensor:
    """A hash of 32 bits."""
    for shift, factor in MIX:
        word = (word ^ word >> shift) * factor & WORD
    return word ^ word >> LAST_SHIFT
