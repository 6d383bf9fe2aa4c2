"""Parts of several kernels: random words, rounding, the flag. Programs work on tiles of a multiple of 4 elements."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gradwire.comm.compressors.philox import ROUNDS

PHILOX_ROUNDS = tl.constexpr(ROUNDS)
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to an integer, ties to even
INFINITY = tl.constexpr(0x7F800000)
SIGNLESS = tl.constexpr(0x7FFFFFFF)


@triton.jit
def random_words(seed, first_block, TILE: tl.constexpr):
    """Words ``4 * first_block`` and the following of the seed's stream: uint32 [TILE]."""
    w0, w1, w2, w3 = tl.randint4x(seed, first_block + tl.arange(0, TILE // 4), n_rounds=PHILOX_ROUNDS)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [TILE])


@triton.jit
def uniforms(seed, first_block, TILE: tl.constexpr):
    """The same as numbers in [0, 1): float32 [TILE]."""
    return (random_words(seed, first_block, TILE) >> 8).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def rounded(x):
    """``x`` rounded to the nearest integer, ties to even, for magnitudes below 2^22."""
    return (x + ROUNDER) - ROUNDER


def no_flag(x: torch.Tensor) -> torch.Tensor:
    """int32 [1] of 0, for a kernel to set where x is not representable."""
    return torch.zeros(1, dtype=torch.int32, device=x.device)


@triton.jit
def store_packed(out, start, codes, count, BITS: tl.constexpr, TILE: tl.constexpr):
    """Pack a tile of codes (int32 [TILE], below 2^BITS, 0 from ``count`` on) and store the bytes from ``start`` on.

    BITS is 1, 2, 4 or 8; ``out`` holds the bytes of ``count`` codes from there.
    """
    packed = codes
    BYTES: tl.constexpr = TILE * BITS // 8
    if BITS <= 4:
        low, high = tl.split(tl.reshape(packed, [TILE // 2, 2]))
        packed = low | high << BITS
    if BITS <= 2:
        low, high = tl.split(tl.reshape(packed, [TILE // 4, 2]))
        packed = low | high << (2 * BITS)
    if BITS == 1:
        low, high = tl.split(tl.reshape(packed, [TILE // 8, 2]))
        packed = low | high << 4
    offsets = tl.arange(0, BYTES)
    if count >= TILE:  # without a mask, wide stores
        tl.store(out + start + offsets, packed.to(tl.uint8))
    else:
        tl.store(out + start + offsets, packed.to(tl.uint8), mask=offsets < (count * BITS + 7) // 8)


@triton.jit
def load_packed(wire, first, count, BITS: tl.constexpr, TILE: tl.constexpr):
    """Codes ``first`` (a multiple of TILE) to ``first + TILE`` of the packed run at ``wire``: int32 [TILE].

    Only the first ``count`` are codes; after them come the last byte's other bits, and 0.
    """
    BYTES: tl.constexpr = TILE * BITS // 8
    LANES: tl.constexpr = 8 // BITS
    offsets = tl.arange(0, BYTES)
    start = wire + first // TILE * BYTES
    if count >= TILE:  # without a mask, wide loads
        codes = tl.load(start + offsets).to(tl.int32)
    else:
        codes = tl.load(start + offsets, mask=offsets < (count * BITS + 7) // 8, other=0).to(tl.int32)
    if BITS < 8:
        shifts = tl.arange(0, LANES) * BITS
        codes = tl.reshape((codes[:, None] >> shifts[None, :]) & ((1 << BITS) - 1), [TILE])
    return codes
