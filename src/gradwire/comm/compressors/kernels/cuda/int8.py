"""int8 on CUDA: one pass, each program a tile of whole blocks."""

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
from gradwire.comm.compressors.kernels.cuda.shared import (
    INFINITY,
    SIGNLESS,
    load_packed,
    rounded,
    store_packed,
    uniforms,
)
from gradwire.comm.compressors.methods.int8 import SMALLEST_SCALE, Int8

TINY = tl.constexpr(SMALLEST_SCALE)
TILE = 4096  # elements in a program's tile, or one block if that is larger


def covers(method: Int8) -> bool:
    """Blocks that fill a tile evenly."""
    return fills_tiles(method.block)


def draws(method: Int8) -> bool:
    """Only stochastic rounding does."""
    return method.rounding == "stochastic"


def constants(method: Int8) -> dict:
    """Of both kernels."""
    return {"BLOCK": method.block, "TILE": max(TILE, method.block), "BITS": method.num_bits}


def encoding(method: Int8, x: Tensor) -> dict:
    """Of `encode`."""
    return {**constants(method), "STOCHASTIC": draws(method), "enable_fp_fusion": False}


@triton.jit
def encode(
    x, table, tiles, seeds, wire, bad, ALIGN: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    BITS: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """A tile's scales (float32) and codes; sets ``bad`` where a scale is not finite."""
    ROWS: tl.constexpr = TILE // BLOCK
    TOP: tl.constexpr = (1 << (BITS - 1)) - 1
    segment, tile, start, left, n, head = place(table, tiles, ALIGN, TILE)
    offsets = tl.arange(0, TILE)
    values = tl.reshape(tl.load(x + start + offsets, mask=offsets < left, other=0.0), [ROWS, BLOCK])
    most = tl.max(values.to(tl.int32, bitcast=True) & SIGNLESS, axis=1)
    if tl.max(most, axis=0) >= INFINITY:
        tl.store(bad + segment, 1)
    scale = tl.maximum(tl.div_rn(most.to(tl.float32, bitcast=True), 1.0 * TOP), TINY, propagate_nan=tl.PropagateNan.ALL)
    rows = tl.arange(0, ROWS)
    store_floats(wire + head + 4 * ROWS * tile, rows, scale, rows * BLOCK < left, ALIGN)
    level = tl.div_rn(values, tl.broadcast_to(scale[:, None], [ROWS, BLOCK]))
    if STOCHASTIC:
        low = tl.floor(level)
        draw = tl.reshape(uniforms(tl.load(seeds + segment), (tile * (TILE // 4)).to(tl.int32), TILE), [ROWS, BLOCK])
        code = tl.minimum(tl.maximum(low + (draw < level - low).to(tl.float32), -TOP), TOP)
    else:
        code = rounded(level)
    fields = tl.reshape(code.to(tl.int32), [TILE]) & ((1 << BITS) - 1)
    packed = wire + past(head, 4 * tl.cdiv(n, BLOCK), ALIGN)
    store_packed(packed, tile * (TILE * BITS // 8), fields, left, BITS, TILE)


@triton.jit
def decode(
    wire, table, tiles, out, ALIGN: tl.constexpr, ONTO: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """A tile of numbers."""
    ROWS: tl.constexpr = TILE // BLOCK
    SIGN: tl.constexpr = 1 << (BITS - 1)
    _, tile, start, left, n, head = place(table, tiles, ALIGN, TILE)
    offsets, rows = tl.arange(0, TILE), tl.arange(0, ROWS)
    scale = load_floats(wire + head + 4 * ROWS * tile, rows, rows * BLOCK < left, ALIGN)
    packed = wire + past(head, 4 * tl.cdiv(n, BLOCK), ALIGN)
    code = (load_packed(packed, tile * TILE, left, BITS, TILE) ^ SIGN) - SIGN
    values = tl.reshape(code.to(tl.float32), [ROWS, BLOCK]) * scale[:, None]
    put(out + start, offsets, tl.reshape(values, [TILE]), offsets < left, ONTO)


form = Segmented(encode, decode, lambda method, n: 4 * method.blocks(n), encoding, constants, draws)
KERNEL = Kernel(covers, encode_many=form.encode_many, decode_add=form.decode_add)
