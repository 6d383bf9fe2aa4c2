"""Fused forms for one CPU core, a file for each family of methods, and the parts that several of their loops share.

`compiled` keeps numba's machine code on disk.

They give the plain forms' bits: float32 arithmetic stays float32 (a bare literal would make it float64; numba makes
integer arithmetic 64 bits wide) and is neither reassociated nor contracted; sums are float64 (`summing`). Magnitudes
are compared as integers: their order is that of their bits, with NaN above infinity. Inner loops run from 0 over
slices, or they do not vectorize.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numba
import numpy as np
from numba import config

from gradwire.comm.compressors.philox import KEY_STEPS, MULTIPLIERS, ROUNDS

Function = TypeVar("Function", bound=Callable)

SIGNLESS = np.uint32(0x7FFFFFFF)
INFINITY = np.uint32(0x7F800000)  # the bits from which on a magnitude is not finite
M0, M1 = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
K0, K1 = np.uint32(KEY_STEPS[0]), np.uint32(KEY_STEPS[1])
HALF = np.uint64(32)
ULP = np.float32(2.0**-24)
TILE = 1024  # elements in a tile: whole calls of Philox, and whole bytes of codes; only a tensor's last has fewer
LOWEST = np.uint64(0x0101010101010101)  # the lowest bit of each of eight bytes
GATHER = np.uint64(0x0102040810204080)  # a product with it has these bits side by side in its highest byte


def cache_folder() -> str:
    """Where compiled kernels are kept: a folder of the user's that goes by the digest of this folder's source.

    numba notices an edit of a function's own file only, not of what it calls; the digest covers both.
    """
    source = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "gradwire" / "numba" / hashlib.sha256(source).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    return str(folder) if writable else tempfile.mkdtemp(prefix="gradwire-numba-")


CACHE = cache_folder()


def compiled(function: Function, reassociate: bool = False, inline: str = "never") -> Function:
    """Compile ``function`` at its first call, or take it from the disk; it releases the GIL."""
    before, config.CACHE_DIR = config.CACHE_DIR, CACHE
    try:
        fastmath = {"reassoc"} if reassociate else False
        return numba.njit(function, cache=True, nogil=True, error_model="numpy", fastmath=fastmath, inline=inline)
    finally:
        config.CACHE_DIR = before


def summing(function: Function) -> Function:
    """`compiled`, with sums in whatever order vectorizes: for float64 sums that are rounded to float32 later."""
    return compiled(function, reassociate=True)


def inlined(function: Function) -> Function:
    """`compiled` into its callers: a call with arrays takes as long as some dozens of elements."""
    return compiled(function, inline="always")


@compiled
def largest(bits: np.ndarray) -> np.uint32:
    """The largest magnitude among float32 numbers given as uint32 bits, as bits; any NaN is larger than infinity."""
    most = np.uint32(0)
    for i in range(bits.size):
        most = max(most, np.uint32(bits[i] & SIGNLESS))
    return most


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
