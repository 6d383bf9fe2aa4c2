"""fp8 on a CPU core: a block is read twice, the second time from the cache."""

from __future__ import annotations

import numpy as np
import torch

from gradwire.comm.compressors.kernels import Kernel
from gradwire.comm.compressors.kernels.cpu import INFINITY, SIGNLESS, compiled, largest
from gradwire.comm.compressors.kernels.cpu.segments import NUMEL, Segmented, blocks_and
from gradwire.comm.compressors.kernels.cpu.shared import narrow
from gradwire.comm.compressors.methods.fp8 import FP8, SMALLEST_SCALE

TINY = np.float32(SMALLEST_SCALE)
FORMATS = {"e4m3": (np.uint32(3), np.uint32(7)), "e5m2": (np.uint32(2), np.uint32(15))}  # mantissa bits, bias


def settings(method: FP8) -> tuple:
    """Block, largest value, mantissa bits, bias, and the number that each byte represents (float32 [256])."""
    values = torch.arange(256, dtype=torch.uint8).view(method.dtype).to(torch.float32).numpy()
    return method.block, np.float32(method.top), *FORMATS[method.format], values


@compiled
def encode(settings: tuple, row: np.ndarray, first: int, x: np.ndarray, seed: int, wire: np.ndarray) -> bool:
    """Fill scales (float32) and codes."""
    block, top, mantissa, bias, _ = settings
    head = 4 * ((row[NUMEL] + block - 1) // block)
    scales, codes = wire[:head].view(np.float32), wire[head:]
    marks = scales.view(np.uint32)
    worst = np.uint32(0)
    for position in range(0, x.size, block):
        numbers, owner = x[position : position + block], (first + position) // block
        marks[owner] = largest(numbers.view(np.uint32))
        worst = max(worst, marks[owner])
        scales[owner] = max(scales[owner] / top, TINY)
        cast(numbers, scales[owner], mantissa, bias, codes[first + position :])
    return bool(worst >= INFINITY)


@compiled
def cast(x: np.ndarray, scale: np.float32, mantissa: np.uint32, bias: np.uint32, codes: np.ndarray) -> None:
    """Codes of one block."""
    for i in range(x.size):
        bits = np.float32(x[i] / scale).view(np.uint32)
        sign = np.uint32((bits >> np.uint32(24)) & np.uint32(0x80))
        codes[i] = narrow(np.uint32(bits & SIGNLESS), mantissa, bias) | sign


@compiled
def decode(settings: tuple, row: np.ndarray, first: int, wire: np.ndarray, out: np.ndarray) -> bool:
    """Multiply each value by its block's scale."""
    block, values = settings[0], settings[4]
    head = 4 * ((row[NUMEL] + block - 1) // block)
    scales, codes = wire[:head].view(np.float32), wire[head:]
    for position in range(0, out.size, block):
        look_up(
            codes[first + position :], values, scales[(first + position) // block], out[position : position + block]
        )
    return True


@compiled
def look_up(codes: np.ndarray, values: np.ndarray, scale: np.float32, out: np.ndarray) -> None:
    """Numbers of one block."""
    for i in range(out.size):
        out[i] = values[codes[i]] * scale


form = Segmented(__name__, encode, decode, settings, blocks_and(1))
KERNEL = Kernel(encode_many=form.encode_many, decode_add=form.decode_add)
