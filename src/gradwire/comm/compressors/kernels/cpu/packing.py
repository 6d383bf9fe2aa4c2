"""`gradwire.comm.compressors.packing` for compiled loops, a tile of codes at a time."""

from __future__ import annotations

import numpy as np

from gradwire.comm.compressors.kernels.cpu import compiled

TILE = 1024  # codes in a tile; only the last one of a tensor may hold fewer
LOWEST = np.uint64(0x0101010101010101)  # the lowest bit of each of eight bytes
GATHER = np.uint64(0x0102040810204080)  # a product with it has these bits side by side in its highest byte


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
