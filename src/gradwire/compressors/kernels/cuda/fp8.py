"""fp8 on CUDA: one pass, each program a tile of whole blocks.

By integer arithmetic, since not every GPU has 8-bit floats, and the casts of those that have differ at the top.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.compressors.base import as_numbers, numel
from gradwire.compressors.kernels.cuda.shared import INFINITY, SIGNLESS, no_flag
from gradwire.compressors.methods.fp8 import SMALLEST_SCALE, Float8

TINY = tl.constexpr(SMALLEST_SCALE)
TILE = 4096  # elements of a program's blocks, or one block if that is larger
FORMATS = {"e4m3": (3, 7, 0x7F), "e5m2": (2, 15, 0x7C)}  # mantissa bits, bias, lowest code that is not finite


def covers(method: Float8) -> bool:
    """Blocks of a size that Triton has."""
    return 32 <= method.block <= 16384 and method.block & (method.block - 1) == 0


def to_wire(method: Float8, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """The wire, and whether a block's maximum is not finite."""
    mantissa, bias, _ = FORMATS[method.format]
    bad = no_flag(x)
    wire = torch.empty(method.wire_bytes(x.shape), dtype=torch.uint8, device=x.device)
    head = 4 * method.blocks(x.shape)
    rows = max(1, TILE // method.block)
    if x.numel():
        encode[(triton.cdiv(method.blocks(x.shape), rows),)](
            x, wire[:head].view(torch.float32), wire[head:], bad, x.numel(),
            BLOCK=method.block, ROWS=rows, TOP=method.top, MANTISSA=mantissa, BIAS=bias, enable_fp_fusion=False,
        )  # fmt: skip
    return wire, bad


def from_wire(method: Float8, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Multiply each value by its block's scale."""
    mantissa, bias, no_number = FORMATS[method.format]
    head = 4 * method.blocks(shape)
    out = torch.empty(numel(shape), device=wire.device)
    rows = max(1, TILE // method.block)
    if out.numel():
        decode[(triton.cdiv(method.blocks(shape), rows),)](
            as_numbers(wire[:head], torch.float32), wire[head:], out, out.numel(),
            BLOCK=method.block, ROWS=rows, MANTISSA=mantissa, UNIT=2.0 ** (127 - bias), NO_NUMBER=no_number,
        )  # fmt: skip
    return out


@triton.jit
def encode(
    x,
    scales,
    codes,
    bad,
    n,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TOP: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
):
    """The scales (float32) and codes of some blocks; sets ``bad`` where a scale is not finite."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(x + at, mask=at < n, other=0.0)
    most = tl.max(values.to(tl.int32, bitcast=True) & SIGNLESS, axis=1)
    if tl.max(most, axis=0) >= INFINITY:
        tl.store(bad, 1)
    scale = tl.maximum(tl.div_rn(most.to(tl.float32, bitcast=True), TOP), TINY, propagate_nan=tl.PropagateNan.ALL)
    tl.store(scales + rows, scale, mask=rows * BLOCK < n)
    level = tl.div_rn(values, tl.broadcast_to(scale[:, None], [ROWS, BLOCK]))
    tl.store(codes + at, narrow(level, MANTISSA, BIAS).to(tl.uint8), mask=at < n)


@triton.jit
def narrow(level, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """float32 below where the format overflows as its codes, int32; to nearest, ties to even.

    `gradwire.compressors.kernels.cpu.floats.narrow` says how.
    """
    DROPPED: tl.constexpr = 23 - MANTISSA
    LOWEST: tl.constexpr = (128 - BIAS) << 23
    bits = level.to(tl.int32, bitcast=True)
    power = tl.maximum(bits & INFINITY, LOWEST)
    steps = power + (DROPPED << 23)
    total = tl.abs(level) + steps.to(tl.float32, bitcast=True)
    count = total.to(tl.int32, bitcast=True) - steps
    return (count + ((power - LOWEST) >> DROPPED)) | ((bits >> 24) & 0x80)


@triton.jit
def decode(
    scales,
    codes,
    out,
    n,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    MANTISSA: tl.constexpr,
    UNIT: tl.constexpr,
    NO_NUMBER: tl.constexpr,
):
    """The numbers of some blocks: a code's bits, moved to where float32 has them, and a power of two, exactly."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    code = tl.load(codes + at, mask=at < n, other=0).to(tl.int32)
    magnitude = code & 0x7F
    bits = tl.where(magnitude < NO_NUMBER, magnitude << (23 - MANTISSA), (magnitude << (23 - MANTISSA)) | INFINITY)
    value = (bits | ((code & 0x80) << 24)).to(tl.float32, bitcast=True) * UNIT
    scale = tl.load(scales + rows, mask=rows * BLOCK < n, other=0.0)
    tl.store(out + at, value * tl.broadcast_to(scale[:, None], [ROWS, BLOCK]), mask=at < n)
