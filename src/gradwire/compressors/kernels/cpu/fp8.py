"""fp8 on a CPU core: a block is read twice, the second time from the cache."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from gradwire.compressors.base import as_numbers, numel
from gradwire.compressors.kernels.cpu import INFINITY, SIGNLESS, compiled, largest
from gradwire.compressors.kernels.cpu.floats import narrow
from gradwire.compressors.methods.fp8 import SMALLEST_SCALE, Float8

TINY = np.float32(SMALLEST_SCALE)
FORMATS = {"e4m3": (np.uint32(3), np.uint32(7)), "e5m2": (np.uint32(2), np.uint32(15))}  # mantissa bits, bias


def covers(method: Float8) -> bool:
    """All options."""
    return True


def to_wire(method: Float8, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """The wire, and whether a block's maximum is not finite."""
    wire = torch.empty(method.wire_bytes(x.shape), dtype=torch.uint8)
    head = 4 * method.blocks(x.shape)
    scales, codes = wire[:head].view(torch.float32).numpy(), wire[head:].numpy()
    bad = encode(x.view(-1).numpy(), method.block, np.float32(method.top), *FORMATS[method.format], scales, codes)
    return wire, torch.tensor([bad])


def from_wire(method: Float8, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Multiply each value by its block's scale."""
    head = 4 * method.blocks(shape)
    out = torch.empty(numel(shape))
    scales, codes = as_numbers(wire[:head], torch.float32).numpy(), wire[head:].numpy()
    decode(scales, codes, method.block, values(method.dtype), out.numpy())
    return out


@cache
def values(dtype: torch.dtype) -> np.ndarray:
    """The number that each byte stands for: float32 [256]."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32).numpy()


@compiled
def encode(
    x: np.ndarray,
    block: int,
    top: np.float32,
    mantissa: np.uint32,
    bias: np.uint32,
    scales: np.ndarray,
    codes: np.ndarray,
) -> bool:
    """Fill ``scales`` (float32 [b]) and ``codes`` (uint8 [n]); whether a block of ``x`` (float32 [n]) is not finite."""
    marks = scales.view(np.uint32)
    worst = np.uint32(0)
    for owner in range(scales.size):
        part = x[owner * block : (owner + 1) * block]
        marks[owner] = largest(part.view(np.uint32))
        worst = max(worst, marks[owner])
        scales[owner] = max(scales[owner] / top, TINY)
        cast(part, scales[owner], mantissa, bias, codes[owner * block :])
    return bool(worst >= INFINITY)


@compiled
def cast(x: np.ndarray, scale: np.float32, mantissa: np.uint32, bias: np.uint32, codes: np.ndarray) -> None:
    """Codes of one block."""
    for i in range(x.size):
        bits = np.float32(x[i] / scale).view(np.uint32)
        sign = np.uint32((bits >> np.uint32(24)) & np.uint32(0x80))
        codes[i] = narrow(np.uint32(bits & SIGNLESS), mantissa, bias) | sign


@compiled
def decode(scales: np.ndarray, codes: np.ndarray, block: int, values: np.ndarray, out: np.ndarray) -> None:
    """Fill ``out`` (float32 [n])."""
    for owner in range(scales.size):
        look_up(codes[owner * block :], values, scales[owner], out[owner * block : (owner + 1) * block])


@compiled
def look_up(codes: np.ndarray, values: np.ndarray, scale: np.float32, out: np.ndarray) -> None:
    """Numbers of one block."""
    for i in range(out.size):
        out[i] = values[codes[i]] * scale
