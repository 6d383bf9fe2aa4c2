"""fp8 on CUDA: one pass, each program a tile of whole blocks.

By integer arithmetic, since not every GPU has 8-bit floats, and the casts of those that have differ at the top.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gradwire.comm.compressors.kernels import Kernel
from gradwire.comm.compressors.kernels.cuda.segments import (
    Segmented,
    fills_tiles,
    load_floats,
    past,
    place,
    put,
    store_floats,
)
from gradwire.comm.compressors.kernels.cuda.shared import INFINITY, SIGNLESS
from gradwire.comm.compressors.methods.fp8 import FP8, SMALLEST_SCALE

TINY = tl.constexpr(SMALLEST_SCALE)
TILE = 4096  # elements of a program's blocks, or one block if that is larger
FORMATS = {"e4m3": (3, 7, 0x7F), "e5m2": (2, 15, 0x7C)}  # mantissa bits, bias, lowest code that is not finite


def covers(method: FP8) -> bool:
    """Blocks of a size that Triton has."""
    return fills_tiles(method.block)


def tile(method: FP8) -> int:
    """Elements of a program."""
    return max(TILE, method.block)


def encoding(method: FP8, x: Tensor) -> dict:
    """The constants of `encode`."""
    mantissa, bias, _ = FORMATS[method.format]
    constants = {"BLOCK": method.block, "TILE": tile(method), "TOP": method.top, "MANTISSA": mantissa, "BIAS": bias}
    return {**constants, "enable_fp_fusion": False}


def decoding(method: FP8) -> dict:
    """The constants of `decode`."""
    mantissa, bias, no_number = FORMATS[method.format]
    constants = {"BLOCK": method.block, "TILE": tile(method), "MANTISSA": mantissa}
    return {**constants, "UNIT": 2.0 ** (127 - bias), "NO_NUMBER": no_number}


@triton.jit
def encode(
    x, table, tiles, seeds, wire, bad, ALIGN: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    TOP: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """The scales (float32) and codes of some blocks; sets ``bad`` where a scale is not finite."""
    ROWS: tl.constexpr = TILE // BLOCK
    segment, tile, start, left, n, head = place(table, tiles, ALIGN, TILE)
    rows = tl.arange(0, ROWS)
    offsets = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(x + start + offsets, mask=offsets < left, other=0.0)
    most = tl.max(values.to(tl.int32, bitcast=True) & SIGNLESS, axis=1)
    if tl.max(most, axis=0) >= INFINITY:
        tl.store(bad + segment, 1)
    scale = tl.maximum(tl.div_rn(most.to(tl.float32, bitcast=True), TOP), TINY, propagate_nan=tl.PropagateNan.ALL)
    store_floats(wire + head + 4 * ROWS * tile, rows, scale, rows * BLOCK < left, ALIGN)
    level = tl.div_rn(values, tl.broadcast_to(scale[:, None], [ROWS, BLOCK]))
    codes = wire + past(head, 4 * tl.cdiv(n, BLOCK), ALIGN) + tile * TILE
    tl.store(codes + offsets, narrow(level, MANTISSA, BIAS).to(tl.uint8), mask=offsets < left)


@triton.jit
def narrow(level, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """float32 below where the format overflows as its codes, int32; to nearest, ties to even.

    As `gradwire.comm.compressors.kernels.cpu.shared.narrow`.
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
    wire, table, tiles, out, ALIGN: tl.constexpr, ONTO: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    MANTISSA: tl.constexpr, UNIT: tl.constexpr, NO_NUMBER: tl.constexpr,
):  # fmt: skip
    """The numbers of some blocks: a code's bits, moved to where float32 has them, and a power of two, exactly."""
    ROWS: tl.constexpr = TILE // BLOCK
    _, tile, start, left, n, head = place(table, tiles, ALIGN, TILE)
    rows = tl.arange(0, ROWS)
    offsets = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    codes = wire + past(head, 4 * tl.cdiv(n, BLOCK), ALIGN) + tile * TILE
    code = tl.load(codes + offsets, mask=offsets < left, other=0).to(tl.int32)
    magnitude = code & 0x7F
    bits = tl.where(magnitude < NO_NUMBER, magnitude << (23 - MANTISSA), (magnitude << (23 - MANTISSA)) | INFINITY)
    value = (bits | ((code & 0x80) << 24)).to(tl.float32, bitcast=True) * UNIT
    scale = load_floats(wire + head + 4 * ROWS * tile, rows, rows * BLOCK < left, ALIGN)
    put(out + start, offsets, value * tl.broadcast_to(scale[:, None], [ROWS, BLOCK]), offsets < left, ONTO)


form = Segmented(encode, decode, lambda method, n: 4 * method.blocks(n), encoding, decoding)
KERNEL = Kernel(covers, encode_many=form.encode_many, decode_add=form.decode_add)
