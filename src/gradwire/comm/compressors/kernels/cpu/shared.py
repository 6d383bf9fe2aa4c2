"""Parts of several compiled loops: Philox's words, packing in tiles of codes, and floats of fewer bits."""

from __future__ import annotations

import numpy as np

from gradwire.comm.compressors.kernels.cpu import INFINITY, compiled
from gradwire.comm.compressors.philox import KEY_STEPS, MULTIPLIERS, ROUNDS

M0, M1 = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
K0, K1 = np.uint32(KEY_STEPS[0]), np.uint32(KEY_STEPS[1])
HALF = np.uint64(32)
ULP = np.float32(2.0**-24)
TILE = 1024  # codes in a tile; only the last one of a tensor may hold fewer
LOWEST = np.uint64(0x0101010101010101)  # the lowest bit of each of eight bytes
GATHER = np.uint64(0x0102040810204080)  # a product with it has these bits side by side in its highest byte
ONE = np.uint32(1)
FRACTION = np.uint32(23)  # bits of float32's mantissa
BIAS = np.uint32(127)


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


@compiled
def pack_tile(codes: np.ndarray, count: int, bits: int, out: np.ndarray) -> None:
    """Pack ``count`` codes (uint8, whose lowest ``bits`` bits count; bits divides 8) into the first bytes of ``out``.

    ``codes`` is a whole tile; what follows the last code is overwritten.
    """
    lanes = 8 // bits
    filled = (count + lanes - 1) // lanes
    mask = np.uint8((1 << bits) - 1)
    codes[count : filled * lanes] = 0
    if bits == 8:
        for i in range(filled):
            out[i] = codes[i]
    elif bits == 4:
        for i in range(filled):
            out[i] = (codes[2 * i] & mask) | codes[2 * i + 1] << 4
    elif bits == 2:
        for i in range(filled):
            low = (codes[4 * i] & mask) | (codes[4 * i + 1] & mask) << 2
            out[i] = low | (codes[4 * i + 2] & mask) << 4 | codes[4 * i + 3] << 6
    else:
        eights = codes.view(np.uint64)
        for i in range(filled):
            out[i] = np.uint8(((eights[i] & LOWEST) * GATHER) >> np.uint64(56))


@compiled
def unpack_tile(packed: np.ndarray, count: int, bits: int, codes: np.ndarray) -> None:
    """The first ``count`` codes of ``packed`` into ``codes``, a whole tile."""
    lanes = 8 // bits
    whole = count // lanes
    if bits == 8:
        for i in range(count):
            codes[i] = packed[i]
    elif bits == 4:
        for i in range(whole):
            codes[2 * i], codes[2 * i + 1] = packed[i] & 15, packed[i] >> 4
    elif bits == 2:
        for i in range(whole):
            byte = packed[i]
            codes[4 * i], codes[4 * i + 1] = byte & 3, byte >> 2 & 3
            codes[4 * i + 2], codes[4 * i + 3] = byte >> 4 & 3, byte >> 6
    else:
        for i in range(whole):
            for lane in range(8):
                codes[8 * i + lane] = packed[i] >> lane & 1
    for i in range(whole * lanes, count):
        codes[i] = packed[i // lanes] >> (i % lanes * bits) & ((1 << bits) - 1)


@compiled
def narrow(magnitude: np.uint32, mantissa: np.uint32, bias: np.uint32) -> np.uint32:
    """A float32 magnitude, given as its bits, as the bits of a format with fewer exponents; to nearest, ties to even.

    The format's neighbours of a number are one step apart: 2^mantissa steps make its power of two, or the smallest
    normal number. A sum with 2^23 steps rounds to whole ones, and their count is left in its lowest bits.

    Args:
        magnitude: Below where the format overflows.
        mantissa: Bits of the format's mantissa.
        bias: The format's exponent of 1.0; its normal numbers start at ``2^(1 - bias)``.
    """
    dropped = np.uint32(FRACTION - mantissa)
    lowest = np.uint32(np.uint32(BIAS + ONE - bias) << FRACTION)
    power = max(np.uint32(magnitude & INFINITY), lowest)
    steps = np.uint32(power + np.uint32(dropped << FRACTION))
    total = np.float32(np.uint32(magnitude).view(np.float32) + np.uint32(steps).view(np.float32))
    count = np.uint32(np.float32(total).view(np.uint32) - steps)
    return np.uint32(count + np.uint32(np.uint32(power - lowest) >> dropped))
