"""qsgd on CUDA: one pass, each program a tile of whole buckets."""

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
from gradwire.comm.compressors.kernels.cuda.shared import INFINITY, SIGNLESS, load_packed, store_packed, uniforms
from gradwire.comm.compressors.methods.qsgd import QSGD, SMALLEST_STEP

TINY = tl.constexpr(SMALLEST_STEP)
TILE = 4096  # elements in a program's tile, or one bucket if that is larger


def covers(method: QSGD) -> bool:
    """Numbers of 8, 4 or 2 bits in buckets that fill a tile evenly; Elias coding happens on the host."""
    return fills_tiles(method.block) and method.coding == "dense" and method.num_bits in (8, 4, 2)


def encoding(method: QSGD, x: Tensor) -> dict:
    """The constants of `encode`."""
    return {**decoding(method), "L2": method.norm == "l2", "enable_fp_fusion": False}


def decoding(method: QSGD) -> dict:
    """The constants of `decode`."""
    return {"BLOCK": method.block, "TILE": max(TILE, method.block), "BITS": method.num_bits, "LEVELS": method.levels}


@triton.jit
def encode(
    x, table, tiles, seeds, wire, bad, ALIGN: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    BITS: tl.constexpr, LEVELS: tl.constexpr, L2: tl.constexpr,
):  # fmt: skip
    """A tile's norms (float32) and numbers; sets ``bad`` where a norm is not finite."""
    ROWS: tl.constexpr = TILE // BLOCK
    segment, tile, start, left, n, head = place(table, tiles, ALIGN, TILE)
    offsets = tl.arange(0, TILE)
    values = tl.reshape(tl.load(x + start + offsets, mask=offsets < left, other=0.0), [ROWS, BLOCK])
    if L2:
        wide = values.to(tl.float64)
        norm = tl.sqrt(tl.sum(wide * wide, axis=1)).to(tl.float32)
        marks = norm.to(tl.int32, bitcast=True) & SIGNLESS
    else:
        marks = tl.max(values.to(tl.int32, bitcast=True) & SIGNLESS, axis=1)
        norm = marks.to(tl.float32, bitcast=True)
    if tl.max(marks, axis=0) >= INFINITY:
        tl.store(bad + segment, 1)
    rows = tl.arange(0, ROWS)
    store_floats(wire + head + 4 * ROWS * tile, rows, norm, rows * BLOCK < left, ALIGN)
    level = tl.div_rn(values, tl.broadcast_to(step_of(norm, LEVELS)[:, None], [ROWS, BLOCK]))
    low = tl.floor(level)
    draw = tl.reshape(uniforms(tl.load(seeds + segment), (tile * (TILE // 4)).to(tl.int32), TILE), [ROWS, BLOCK])
    number = tl.minimum(tl.maximum(low + (draw < level - low).to(tl.float32), -LEVELS), LEVELS)
    fields = tl.reshape(number.to(tl.int32), [TILE]) & ((1 << BITS) - 1)
    packed = wire + past(head, 4 * tl.cdiv(n, BLOCK), ALIGN)
    store_packed(packed, tile * (TILE * BITS // 8), fields, left, BITS, TILE)


@triton.jit
def step_of(norm, LEVELS: tl.constexpr):
    """The step of each bucket, whose multiples its numbers are."""
    return tl.maximum(tl.div_rn(norm, 1.0 * LEVELS), TINY, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def decode(
    wire, table, tiles, out, ALIGN: tl.constexpr, ONTO: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    BITS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """A tile of numbers."""
    ROWS: tl.constexpr = TILE // BLOCK
    SIGN: tl.constexpr = 1 << (BITS - 1)
    _, tile, start, left, n, head = place(table, tiles, ALIGN, TILE)
    offsets, rows = tl.arange(0, TILE), tl.arange(0, ROWS)
    norm = load_floats(wire + head + 4 * ROWS * tile, rows, rows * BLOCK < left, ALIGN)
    packed = wire + past(head, 4 * tl.cdiv(n, BLOCK), ALIGN)
    number = (load_packed(packed, tile * TILE, left, BITS, TILE) ^ SIGN) - SIGN
    values = tl.reshape(number.to(tl.float32), [ROWS, BLOCK]) * step_of(norm, LEVELS)[:, None]
    put(out + start, offsets, tl.reshape(values, [TILE]), offsets < left, ONTO)


form = Segmented(encode, decode, lambda method, n: 4 * method.blocks(n), encoding, decoding, draws=lambda method: True)
KERNEL = Kernel(covers, encode_many=form.encode_many, decode_add=form.decode_add)
