"""signsgd on CUDA: one pass, each program a tile of whole blocks that its warps hold in registers."""

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
from gradwire.comm.compressors.methods.signsgd import SignSGD
from gradwire.comm.compressors.segments import Segments

TILE = 4096  # elements that a program decodes
WARP = 2048  # elements that a warp encodes, or part of one block: blocks within a warp take the fewest shuffles to sum


def covers(method: SignSGD) -> bool:
    """Blocks that fill a tile evenly, and no blocks at all."""
    return method.scale == "none" or fills_tiles(method.block)


def encoding(method: SignSGD, x: Tensor) -> dict:
    """The constants of `encode`."""
    scaled = method.scale == "mean"
    tile = max(WARP, method.block) if scaled else WARP
    return {"BLOCK": method.block if scaled else WARP, "TILE": tile, "SCALED": scaled, "num_warps": tile // WARP}


def decoding(method: SignSGD) -> dict:
    """The constants of `decode`."""
    scaled = method.scale == "mean"
    return {"BLOCK": method.block if scaled else TILE, "TILE": TILE, "SCALED": scaled}


def finish(method: SignSGD, segments: Segments, wire: Tensor, bad: Tensor, options: dict) -> None:
    """Without scales: the byte before the signs."""
    if method.scale == "none":
        wire[segments.table(wire.device)[:, 2]] = bad


@triton.jit
def encode(
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
def decode(
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


form = Segmented(encode, decode, lambda method, n: method.head_bytes(n), encoding, decoding, finish=finish)
KERNEL = Kernel(covers, encode_many=form.encode_many, decode_add=form.decode_add)
