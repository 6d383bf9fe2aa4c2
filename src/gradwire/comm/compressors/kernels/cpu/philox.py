"""`gradwire.comm.compressors.philox` for compiled loops: the same words."""

from __future__ import annotations

import numpy as np

from gradwire.comm.compressors.kernels.cpu import compiled
from gradwire.comm.compressors.philox import KEY_STEPS, MULTIPLIERS, ROUNDS

M0, M1 = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
K0, K1 = np.uint32(KEY_STEPS[0]), np.uint32(KEY_STEPS[1])
HALF = np.uint64(32)
ULP = np.float32(2.0**-24)


@compiled
def fill_words(seed: int, start: int, out: np.ndarray) -> None:
    """Words ``start`` to ``start + out.size`` of the seed's stream into uint32 ``out``; both are multiples of 4."""
    key0, key1 = np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)
    for block in range(out.size // 4):
        c0, c1, c2, c3 = np.uint32(start // 4 + block), np.uint32(0), np.uint32(0), np.uint32(0)
        k0, k1 = key0, key1
        for _ in range(ROUNDS):
            p0 = np.uint64(c0) * M0
            p1 = np.uint64(c2) * M1
            c0 = np.uint32(np.uint32(p1 >> HALF) ^ c1 ^ k0)
            c2 = np.uint32(np.uint32(p0 >> HALF) ^ c3 ^ k1)
            c1, c3 = np.uint32(p1), np.uint32(p0)
            k0, k1 = np.uint32(k0 + K0), np.uint32(k1 + K1)
        out[4 * block], out[4 * block + 1], out[4 * block + 2], out[4 * block + 3] = c0, c1, c2, c3


@compiled
def uniform(word: np.uint32) -> np.float32:
    """The number in [0, 1) that a word represents."""
    return np.float32(np.int32(word >> np.uint32(8))) * ULP
