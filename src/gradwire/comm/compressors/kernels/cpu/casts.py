"""fp16 and bf16 on a CPU core: cast and check in one pass."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gradwire.comm.compressors.kernels import Kernel
from gradwire.comm.compressors.kernels.cpu import INFINITY, SIGNLESS, compiled
from gradwire.comm.compressors.kernels.cpu.segments import Chunk, Segmented
from gradwire.comm.compressors.methods.bf16 import BF16
from gradwire.comm.compressors.methods.fp16 import FP16

HALF = np.uint32(16)  # bits that are dropped
BF16_OVERFLOW = np.float32(BF16.overflow).view(np.uint32)
BF16_NAN = np.uint16(0x7FC0)


@compiled
def encode_bf16(chunk: Chunk) -> bool:
    """Round to nearest, ties to even."""
    bits, out = chunk.x.view(np.uint32), chunk.wire.view(np.uint16)[chunk.first :]
    worst = np.uint32(0)
    for i in range(bits.size):
        worst = max(worst, np.uint32(bits[i] & SIGNLESS))
        odd = np.uint32((bits[i] >> HALF) & np.uint32(1))
        out[i] = np.uint32(bits[i] + np.uint32(0x7FFF) + odd) >> HALF
    if worst > INFINITY:
        put_nan(bits, out, BF16_NAN)
    return bool(worst >= BF16_OVERFLOW)


@compiled
def put_nan(bits: np.ndarray, out: np.ndarray, nan: np.uint16) -> None:
    """Write ``nan`` where there is one, which rounding may have carried over into something else."""
    for i in range(bits.size):
        if np.uint32(bits[i] & SIGNLESS) > INFINITY:
            out[i] = nan


@compiled
def decode_bf16(chunk: Chunk) -> bool:
    """Cast back to float32, exactly."""
    halves, bits = chunk.wire.view(np.uint16)[chunk.first :], chunk.x.view(np.uint32)
    for i in range(bits.size):
        bits[i] = np.uint32(halves[i]) << HALF
    return True


DROPPED = np.uint32(13)  # bits of float32's mantissa that float16's lacks
STEPS = np.uint32(DROPPED << 23)
FP16_OVERFLOW = np.float32(FP16.overflow).view(np.uint32)
TOP, FP16_NAN = np.uint32(0x7C00), np.uint16(0x7E00)  # infinity, and a NaN
SMALLEST = np.uint32(0x0400)  # the smallest normal magnitude
SHIFT = np.uint32((127 - 15) << 23)  # what float32's exponents are larger by
LEAST, LEAST_BITS = np.float32(2.0**-14), np.uint32((127 - 14) << 23)  # the smallest normal magnitude


@compiled
def narrow(magnitude: np.uint32) -> np.uint32:
    """Convert the bits of a float32 magnitude to float16; round to nearest, ties to even.

    The neighbours of a number are one step apart: 2^10 steps make its power of two, or the smallest normal number. A
    sum with 2^23 steps rounds to whole ones, and their count is left in its lowest bits.
    """
    power = max(np.uint32(magnitude & INFINITY), LEAST_BITS)
    steps = np.uint32(power + STEPS)
    total = np.float32(np.uint32(magnitude).view(np.float32) + np.uint32(steps).view(np.float32))
    count = np.uint32(np.float32(total).view(np.uint32) - steps)
    return np.uint32(count + np.uint32(np.uint32(power - LEAST_BITS) >> DROPPED))


@compiled
def encode_fp16(chunk: Chunk) -> bool:
    """Round to nearest, ties to even."""
    bits, out = chunk.x.view(np.uint32), chunk.wire.view(np.uint16)[chunk.first :]
    worst = np.uint32(0)
    for i in range(bits.size):
        magnitude = np.uint32(bits[i] & SIGNLESS)
        worst = max(worst, magnitude)
        sign = np.uint32((bits[i] >> np.uint32(16)) & np.uint32(0x8000))
        out[i] = min(narrow(min(magnitude, FP16_OVERFLOW)), TOP) | sign
    if worst > INFINITY:
        put_nan(bits, out, FP16_NAN)
    return bool(worst >= FP16_OVERFLOW)


@compiled
def decode_fp16(chunk: Chunk) -> bool:
    """Cast back to float32, exactly: the bits move to where float32 has them, and the exponent grows.

    Below 2^-14 a value is the difference of two normal numbers: a processor takes a hundred times as long for others.
    """
    halves, bits = chunk.wire.view(np.uint16)[chunk.first :], chunk.x.view(np.uint32)
    for i in range(bits.size):
        half = np.uint32(halves[i])
        magnitude = np.uint32(half & np.uint32(0x7FFF))
        moved = np.uint32(magnitude << DROPPED)
        small = np.float32(np.uint32(moved + LEAST_BITS).view(np.float32) - LEAST).view(np.uint32)
        finite = np.uint32(moved + SHIFT) if magnitude >= SMALLEST else small
        sign = np.uint32(np.uint32(half & np.uint32(0x8000)) << np.uint32(16))
        bits[i] = (np.uint32(moved | INFINITY) if magnitude >= TOP else finite) | sign
    return True


def kernel(name: str, encode: Callable, decode: Callable) -> Kernel:
    """The fused form of a method without settings: numba keeps no machine code for an empty tuple."""
    form = Segmented(name, encode, decode, lambda method: (0,), lambda method: 1)
    return Kernel(encode_many=form.encode_many, decode_add=form.decode_add)


KERNELS = {"bf16": kernel("bf16", encode_bf16, decode_bf16), "fp16": kernel("fp16", encode_fp16, decode_fp16)}
