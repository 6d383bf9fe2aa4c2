"""bf16 on a CPU core: cast and check in one pass."""

from __future__ import annotations

import numpy as np

from gradwire.comm.compressors.kernels import Kernel
from gradwire.comm.compressors.kernels.cpu import INFINITY, SIGNLESS, compiled
from gradwire.comm.compressors.kernels.cpu.segments import Segmented
from gradwire.comm.compressors.methods.bf16 import BF16

HALF = np.uint32(16)  # bits that are dropped
OVERFLOW = np.float32(BF16.overflow).view(np.uint32)
NAN = np.uint16(0x7FC0)


def settings(method: BF16) -> tuple[int]:
    """Nothing: numba keeps no machine code for an empty tuple."""
    return (0,)


@compiled
def encode(settings: tuple, row: np.ndarray, first: int, x: np.ndarray, seed: int, wire: np.ndarray) -> bool:
    """Round to nearest, ties to even."""
    bits, out = x.view(np.uint32), wire.view(np.uint16)[first:]
    worst = np.uint32(0)
    for i in range(bits.size):
        worst = max(worst, np.uint32(bits[i] & SIGNLESS))
        odd = np.uint32((bits[i] >> HALF) & np.uint32(1))
        out[i] = np.uint32(bits[i] + np.uint32(0x7FFF) + odd) >> HALF
    if worst > INFINITY:
        put_nan(bits, out, NAN)
    return bool(worst >= OVERFLOW)


@compiled
def put_nan(bits: np.ndarray, out: np.ndarray, nan: np.uint16) -> None:
    """Write ``nan`` where there is one, which rounding may have carried over into something else."""
    for i in range(bits.size):
        if np.uint32(bits[i] & SIGNLESS) > INFINITY:
            out[i] = nan


@compiled
def decode(settings: tuple, row: np.ndarray, first: int, wire: np.ndarray, out: np.ndarray) -> bool:
    """Cast back to float32, exactly."""
    halves, bits = wire.view(np.uint16)[first:], out.view(np.uint32)
    for i in range(bits.size):
        bits[i] = np.uint32(halves[i]) << HALF
    return True


form = Segmented(__name__, encode, decode, settings, lambda method: 1)
KERNEL = Kernel(encode_many=form.encode_many, decode_add=form.decode_add)
