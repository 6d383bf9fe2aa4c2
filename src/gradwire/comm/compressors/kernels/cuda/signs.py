"""signsgd and onebit on CUDA: one pass, each program a tile of blocks that its warps hold in registers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gradwire.comm.compressors.kernels.cuda import (
    INFINITY,
    SIGNLESS,
    Segmented,
    fills_tiles,
    load_floats,
    past,
    place,
    put,
    store_floats,
    store_packed,
)
from gradwire.comm.compressors.methods.onebit import OneBit
from gradwire.comm.compressors.methods.signsgd import SignSGD
from gradwire.comm.compressors.segments import Segments

TILE = 4096  # elements that a program decodes
WARP = 2048  # elements that a warp encodes, or part of one block: blocks within a warp take the fewest shuffles to sum


def encoding_signsgd(method: SignSGD) -> dict:
    """The constants of `encode_signsgd`."""
    scaled = method.scale == "mean"
    tile = max(WARP, method.block) if scaled else WARP
    return {"BLOCK": method.block if scaled else WARP, "TILE": tile, "SCALED": scaled, "num_warps": tile // WARP}


def decoding_signsgd(method: SignSGD) -> dict:
    """The constants of `decode_signsgd`."""
    scaled = method.scale == "mean"
    return {"BLOCK": method.block if scaled else TILE, "TILE": TILE, "SCALED": scaled}


def finish_signsgd(method: SignSGD, segments: Segments, wire: Tensor, bad: Tensor) -> None:
    """Without scales: the byte before the signs."""
    if method.scale == "none":
        wire[segments.table(wire.device)[:, 2]] = bad


@triton.jit
def encode_signsgd(
    x, table, tiles, seeds, wire, bad, ALIGN: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """A tile's scales (float32, if SCALED) and signs; sets ``bad`` where an element is not finite."""
    ROWS: tl.constexpr = TILE // BLOCK
    segment, tile, start, left, n, head = place(table, tiles, ALIGN, TILE)
    offsets = tl.arange(0, TILE)
    values = tl.load(x + start + offsets, mask=offsets < left, other=0.0)
    if SCALED:
        totals = tl.sum(tl.reshape(tl.abs(values), [ROWS, BLOCK]).to(tl.float64), axis=1)
        rows = tl.arange(0, ROWS)
        count = tl.maximum(tl.minimum(left - rows * BLOCK, BLOCK), 1)
        scale = (totals / count.to(tl.float64)).to(tl.float32)
        store_floats(wire + head + 4 * ROWS * tile, rows, scale, rows * BLOCK < left, ALIGN)
        most = tl.max(scale.to(tl.int32, bitcast=True) & SIGNLESS, axis=0)
        packed = wire + past(head, 4 * tl.cdiv(n, BLOCK), ALIGN)
    else:
        most = tl.max(values.to(tl.int32, bitcast=True) & SIGNLESS, axis=0)
        packed = wire + past(head, 1, ALIGN)
    if most >= INFINITY:
        tl.store(bad + segment, 1)
    store_packed(packed, tile * (TILE // 8), (values < 0).to(tl.int32), left, 1, TILE)


@triton.jit
def decode_signsgd(
    wire, table, tiles, out, ALIGN: tl.constexpr, ONTO: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """A tile of numbers; a byte holds the signs of eight elements of one block."""
    _, tile, start, left, n, head = place(table, tiles, ALIGN, TILE)
    bytes = tl.arange(0, TILE // 8)
    there = bytes < (left + 7) // 8
    if SCALED:
        packed = wire + past(head, 4 * tl.cdiv(n, BLOCK), ALIGN)
        scale = load_floats(wire + head + 4 * (tile * TILE // BLOCK), bytes * 8 // BLOCK, there, ALIGN)
    else:
        packed = wire + past(head, 1, ALIGN)
        scale = tl.where(tl.load(wire + head + bytes * 0) == 0, 1.0, float("nan"))
    signs = tl.load(packed + tile * (TILE // 8) + bytes, mask=there, other=0).to(tl.int32)
    lanes = tl.arange(0, 8)
    negative = (signs[:, None] >> lanes[None, :]) & 1
    offsets = bytes[:, None] * 8 + lanes[None, :]
    put(out + start, offsets, tl.where(negative == 1, -scale[:, None], scale[:, None]), offsets < left, ONTO)


def encoding_onebit(method: OneBit) -> dict:
    """The constants of `encode_onebit`."""
    warp = WARP // 2  # as it holds two sums, too
    tile = max(warp, method.block)
    return {"BLOCK": method.block, "TILE": tile, "num_warps": tile // warp}


def decoding_onebit(method: OneBit) -> dict:
    """The constants of `decode_onebit`."""
    return {"BLOCK": method.block, "TILE": TILE}


@triton.jit
def encode_onebit(x, table, tiles, seeds, wire, bad, ALIGN: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
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
def decode_onebit(
    wire, table, tiles, out, ALIGN: tl.constexpr, ONTO: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr
):
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


KERNELS = {
    "signsgd": Segmented(
        encode_signsgd,
        decode_signsgd,
        lambda method, n: method.head_bytes(n),
        encoding_signsgd,
        decoding_signsgd,
        finish=finish_signsgd,
    ).kernel(covers=lambda method: method.scale == "none" or fills_tiles(method.block)),
    "onebit": Segmented(
        encode_onebit, decode_onebit, lambda method, n: 8 * method.blocks(n), encoding_onebit, decoding_onebit
    ).kernel(covers=lambda method: fills_tiles(method.block)),
}
