"""fp16 on a CPU core: cast and check in one pass."""

from __future__ import annotations

import numpy as np

from gradwire.comm.compressors.kernels import Kernel
from gradwire.comm.compressors.kernels.cpu import INFINITY, SIGNLESS, compiled
from gradwire.comm.compressors.kernels.cpu.bf16 import put_nan, settings
from gradwire.comm.compressors.kernels.cpu.segments import Segmented
from gradwire.comm.compressors.kernels.cpu.shared import narrow
from gradwire.comm.compressors.methods.fp16 import FP16

MANTISSA, BIAS = np.uint32(10), np.uint32(15)
DROPPED = np.uint32(23 - MANTISSA)
OVERFLOW = np.float32(FP16.overflow).view(np.uint32)
TOP, NAN = np.uint32(0x7C00), np.uint16(0x7E00)  # infinity, and a NaN
UNIT = np.float32(2.0**112)  # what float32's exponents are larger by


@compiled
def encode(settings: tuple, row: np.ndarray, first: int, x: np.ndarray, seed: int, wire: np.ndarray) -> bool:
    """Round to nearest, ties to even."""
    bits, out = x.view(np.uint32), wire.view(np.uint16)[first:]
    worst = np.uint32(0)
    for i in range(bits.size):
        magnitude = np.uint32(bits[i] & SIGNLESS)
        worst = max(worst, magnitude)
        sign = np.uint32((bits[i] >> np.uint32(16)) & np.uint32(0x8000))
        out[i] = min(narrow(min(magnitude, OVERFLOW), MANTISSA, BIAS), TOP) | sign
    if worst > INFINITY:
        put_nan(bits, out, NAN)
    return bool(worst >= OVERFLOW)


@compiled
def decode(settings: tuple, row: np.ndarray, first: int, wire: np.ndarray, out: np.ndarray) -> bool:
    """Cast back to float32, exactly: the bits move to where float32 has them, and a power of two moves the exponent."""
    halves, bits = wire.view(np.uint16)[first:], out.view(np.uint32)
    for i in range(bits.size):
        half = np.uint32(halves[i])
        magnitude = np.uint32(half & np.uint32(0x7FFF))
        moved = np.uint32(magnitude << DROPPED)
        scaled = np.float32(moved.view(np.float32) * UNIT).view(np.uint32)
        sign = np.uint32(np.uint32(half & np.uint32(0x8000)) << np.uint32(16))
        bits[i] = (np.uint32(moved | INFINITY) if magnitude >= TOP else scaled) | sign
    return True


form = Segmented(__name__, encode, decode, settings, lambda method: 1)
KERNEL = Kernel(encode_many=form.encode_many, decode_add=form.decode_add)
