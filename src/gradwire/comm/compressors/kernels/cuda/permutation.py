"""`gradwire.comm.compressors.permutation` for kernels: the same numbers."""

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.comm.compressors.kernels.cuda.shared import random_words
from gradwire.comm.compressors.permutation import LAST_SHIFT, MIX, ROUNDS

FIRST, SECOND, LAST = tl.constexpr(MIX[0][0]), tl.constexpr(MIX[1][0]), tl.constexpr(LAST_SHIFT)
M0, M1 = tl.constexpr(MIX[0][1]), tl.constexpr(MIX[1][1])
CROSSINGS = tl.constexpr(ROUNDS)


@triton.jit
def mixed(word):
    """A hash of uint32."""
    word = (word ^ (word >> FIRST)) * M0
    word = (word ^ (word >> SECOND)) * M1
    return word ^ (word >> LAST)


@triton.jit
def word(words, r: tl.constexpr):
    """One of them."""
    return tl.sum(tl.where(tl.arange(0, CROSSINGS) == r, words, 0), axis=0).to(tl.uint32)


@triton.jit
def crossed(numbers, k0, k1, k2, k3, k4, k5, k6, k7, HIGH: tl.constexpr, LOW: tl.constexpr):
    """Once through the network with these round keys (uint32): int64."""
    HIGHS: tl.constexpr = (1 << HIGH) - 1
    LOWS: tl.constexpr = (1 << LOW) - 1
    upper, lower = (numbers >> LOW).to(tl.uint32), (numbers & LOWS).to(tl.uint32)
    upper ^= mixed(lower ^ k0) & HIGHS
    lower ^= mixed(upper ^ k1) & LOWS
    upper ^= mixed(lower ^ k2) & HIGHS
    lower ^= mixed(upper ^ k3) & LOWS
    upper ^= mixed(lower ^ k4) & HIGHS
    lower ^= mixed(upper ^ k5) & LOWS
    upper ^= mixed(lower ^ k6) & HIGHS
    lower ^= mixed(upper ^ k7) & LOWS
    return upper.to(tl.int64) << LOW | lower.to(tl.int64)


@triton.jit
def images(seed, numbers, n, HIGH: tl.constexpr, LOW: tl.constexpr):
    """The images of ``numbers`` (int64, below n) under the permutation of 0..n-1."""
    tl.static_assert(CROSSINGS == 8)
    words = random_words(seed, 0, CROSSINGS)
    k0, k1, k2, k3 = word(words, 0), word(words, 1), word(words, 2), word(words, 3)
    k4, k5, k6, k7 = word(words, 4), word(words, 5), word(words, 6), word(words, 7)
    found = crossed(numbers, k0, k1, k2, k3, k4, k5, k6, k7, HIGH, LOW)
    outside = found >= n
    while tl.max(outside.to(tl.int32), axis=0) > 0:
        found = tl.where(outside, crossed(found, k0, k1, k2, k3, k4, k5, k6, k7, HIGH, LOW), found)
        outside = found >= n
    return found
