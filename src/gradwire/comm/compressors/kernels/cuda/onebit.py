"""onebit on CUDA, by blocks: one pass, each program a tile of whole blocks that its warps hold in registers."""

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
from gradwire.comm.compressors.kernels.cuda.shared import INFINITY, SIGNLESS, store_packed
from gradwire.comm.compressors.methods.onebit import OneBit

TILE = 4096  # elements that a program decodes
WARP = 2048  # elements that a warp encodes, or part of one block: blocks within a warp take the fewest shuffles to sum


def covers(method: OneBit) -> bool:
    """Blocks that fill a tile evenly."""
    return method.means == "block" and fills_tiles(method.block)


def encoding(method: OneBit, x: Tensor) -> dict:
    """The constants of `encode`."""
    tile = max(WARP, method.block)
    return {"BLOCK": method.block, "TILE": tile, "num_warps": tile // WARP}


def decoding(method: OneBit) -> dict:
    """The constants of `decode`."""
    return {"BLOCK": method.block, "TILE": TILE}


@triton.jit
def encode(x, table, tiles, seeds, wire, bad, ALIGN: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """A tile's means (float32, in pairs) and signs; sets ``bad`` where a mean is not finite."""
    ROWS: tl.constexpr = TILE // BLOCK
    segment, tile, start, left, n, head = place(table, tiles, ALIGN, TILE)
    offsets = tl.arange(0, TILE)
    values = tl.load(x + start + offsets, mask=offsets < left, other=0.0)
    below = (values < 0).to(tl.int32)
    blocks = tl.reshape(values, [ROWS, BLOCK])
    rows = tl.arange(0, ROWS)
    negatives = tl.sum(tl.reshape(below, [ROWS, BLOCK]), axis=1)
    others = tl.minimum(left - rows * BLOCK, BLOCK) - negatives
    low = mean_of(tl.minimum(blocks, 0.0, propagate_nan=tl.PropagateNan.ALL), negatives)
    high = mean_of(tl.maximum(blocks, 0.0, propagate_nan=tl.PropagateNan.ALL), others)
    means = wire + head + 8 * ROWS * tile
    store_floats(means, 2 * rows, high, rows * BLOCK < left, ALIGN)
    store_floats(means, 2 * rows + 1, low, rows * BLOCK < left, ALIGN)
    marks = tl.maximum(low.to(tl.int32, bitcast=True) & SIGNLESS, high.to(tl.int32, bitcast=True) & SIGNLESS)
    if tl.max(marks, axis=0) >= INFINITY:
        tl.store(bad + segment, 1)
    packed = wire + past(head, 8 * tl.cdiv(n, BLOCK), ALIGN)
    store_packed(packed, tile * (TILE // 8), below, left, 1, TILE)


@triton.jit
def mean_of(blocks, count):
    """Each row's float64 sum by its count, as float32; 0 where there is none."""
    return (tl.sum(blocks.to(tl.float64), axis=1) / tl.maximum(count, 1).to(tl.float64)).to(tl.float32)


@triton.jit
def decode(wire, table, tiles, out, ALIGN: tl.constexpr, ONTO: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """A tile of numbers; a byte holds the signs of eight elements of one block."""
    _, tile, start, left, n, head = place(table, tiles, ALIGN, TILE)
    bytes = tl.arange(0, TILE // 8)
    there = bytes < (left + 7) // 8
    packed = wire + past(head, 8 * tl.cdiv(n, BLOCK), ALIGN) + tile * (TILE // 8)
    signs = tl.load(packed + bytes, mask=there, other=0).to(tl.int32)
    means, pair = wire + head + 8 * (tile * TILE // BLOCK), bytes * 8 // BLOCK * 2
    high = load_floats(means, pair, there, ALIGN)
    low = load_floats(means, pair + 1, there, ALIGN)
    lanes = tl.arange(0, 8)
    negative = (signs[:, None] >> lanes[None, :]) & 1
    offsets = bytes[:, None] * 8 + lanes[None, :]
    put(out + start, offsets, tl.where(negative == 1, low[:, None], high[:, None]), offsets < left, ONTO)


form = Segmented(encode, decode, lambda method, n: 8 * method.groups(n), encoding, decoding)
KERNEL = Kernel(covers, encode_many=form.encode_many, decode_add=form.decode_add)
