"""terngrad on CUDA: one pass, each program a tile of whole blocks; for base 3, a second one packs five to a byte."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.comm.compressors.kernels import Kernel
from gradwire.comm.compressors.kernels.cuda.segments import (
    Segmented,
    fills_tiles,
    launch,
    load_floats,
    past,
    place,
    put,
    store_floats,
)
from gradwire.comm.compressors.kernels.cuda.shared import INFINITY, SIGNLESS, load_packed, store_packed, uniforms
from gradwire.comm.compressors.methods.terngrad import SMALLEST_SCALE, TernGrad
from gradwire.comm.compressors.packing import TRITS
from gradwire.comm.compressors.segments import Segments

TINY = tl.constexpr(SMALLEST_SCALE)
LANES = tl.constexpr(TRITS)
TILE = 4096  # elements in a program's tile, or one block if that is larger
BYTES = 1024  # bytes of five digits in a program's tile


def covers(method: TernGrad) -> bool:
    """Blocks that fill a tile evenly."""
    return fills_tiles(method.block)


def constants(method: TernGrad) -> dict:
    """Of both kernels."""
    return {"BLOCK": method.block, "TILE": max(TILE, method.block), "BASE3": method.packing == "base3"}


def encoding(method: TernGrad, x: Tensor) -> dict:
    """The constants of `encode`; the clip as a tensor, because numbers are given to a GPU as float32."""
    clip = torch.full((1,), method.clip or 0.0, dtype=torch.float64, device=x.device)
    digits = torch.empty(x.numel() if method.packing == "base3" else 0, dtype=torch.uint8, device=x.device)
    extra = {"clip": clip, "digits": digits, "CLIP": method.clip is not None}
    return {**extra, **constants(method), "enable_fp_fusion": False}


def finish(method: TernGrad, segments: Segments, wire: Tensor, bad: Tensor, options: dict) -> None:
    """Pack five digits to a byte."""
    if method.packing == "base3":
        launch(pack_trits, segments, BYTES * TRITS, options["digits"], wire, BLOCK=method.block, BYTES=BYTES)


@triton.jit
def encode(
    x, table, tiles, seeds, wire, bad, clip, digits, ALIGN: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    CLIP: tl.constexpr, BASE3: tl.constexpr,
):  # fmt: skip
    """A tile's scales (float32) and digits, two's complement; sets ``bad`` where a block is not finite."""
    ROWS: tl.constexpr = TILE // BLOCK
    segment, tile, start, left, n, head = place(table, tiles, ALIGN, TILE)
    offsets = tl.arange(0, TILE)
    values = tl.reshape(tl.load(x + start + offsets, mask=offsets < left, other=0.0), [ROWS, BLOCK])
    most = tl.max(values.to(tl.int32, bitcast=True) & SIGNLESS, axis=1)
    if tl.max(most, axis=0) >= INFINITY:
        tl.store(bad + segment, 1)
    rows = tl.arange(0, ROWS)
    scale = most.to(tl.float32, bitcast=True)
    if CLIP:
        wide = values.to(tl.float64)
        sizes = tl.minimum(tl.maximum(left - rows * BLOCK, 1), BLOCK).to(tl.float64)
        sigma = tl.sqrt(tl.sum(wide * wide, axis=1) / sizes)
        scale = tl.minimum(scale, (sigma * tl.load(clip)).to(tl.float32), propagate_nan=tl.PropagateNan.ALL)
    scale = tl.maximum(scale, TINY, propagate_nan=tl.PropagateNan.ALL)
    store_floats(wire + head + 4 * ROWS * tile, rows, scale, rows * BLOCK < left, ALIGN)
    level = tl.div_rn(values, tl.broadcast_to(scale[:, None], [ROWS, BLOCK]))
    draw = tl.reshape(uniforms(tl.load(seeds + segment), (tile * (TILE // 4)).to(tl.int32), TILE), [ROWS, BLOCK])
    digit = tl.reshape(tl.where(draw < tl.abs(level), tl.where(level > 0.0, 1, -1), 0), [TILE])
    if BASE3:
        tl.store(digits + start + offsets, (digit & 255).to(tl.uint8), mask=offsets < left)
    else:
        packed = wire + past(head, 4 * tl.cdiv(n, BLOCK), ALIGN)
        store_packed(packed, tile * (TILE // 4), digit & 3, left, 2, TILE)


@triton.jit
def pack_trits(digits, table, tiles, wire, BLOCK: tl.constexpr, TILE: tl.constexpr, BYTES: tl.constexpr):
    """A tile of bytes from five digits each (-1, 0, 1 as signed bytes), what is beyond the last one as -1."""
    _, tile, start, left, n, head = place(table, tiles, 1, TILE)
    j = tl.arange(0, BYTES)
    byte = tl.zeros([BYTES], tl.int32)
    for lane in tl.static_range(LANES):
        offsets = j * LANES + (LANES - 1 - lane)
        byte = byte * 3 + ((tl.load(digits + start + offsets, mask=offsets < left, other=255).to(tl.int32) + 1) & 3)
    tl.store(wire + head + 4 * tl.cdiv(n, BLOCK) + tile * BYTES + j, byte.to(tl.uint8), mask=j * LANES < left)


@triton.jit
def decode(
    wire, table, tiles, out, ALIGN: tl.constexpr, ONTO: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    BASE3: tl.constexpr,
):  # fmt: skip
    """A tile of numbers."""
    ROWS: tl.constexpr = TILE // BLOCK
    _, tile, start, left, n, head = place(table, tiles, ALIGN, TILE)
    offsets, rows = tl.arange(0, TILE), tl.arange(0, ROWS)
    packed = wire + past(head, 4 * tl.cdiv(n, BLOCK), ALIGN)
    if BASE3:
        index = tile * TILE + offsets
        rest = tl.load(packed + index // LANES, mask=offsets < left, other=0).to(tl.int32)
        lane = index % LANES
        rest = tl.where(lane >= 2, rest // 9, rest)
        rest = tl.where(lane == 4, rest // 9, rest)
        rest = tl.where(lane % 2 == 1, rest // 3, rest)
        digit = rest % 3 - 1
    else:
        digit = (load_packed(packed, tile * TILE, left, 2, TILE) ^ 2) - 2
    scale = load_floats(wire + head + 4 * ROWS * tile, rows, rows * BLOCK < left, ALIGN)
    values = tl.reshape(digit.to(tl.float32), [ROWS, BLOCK]) * scale[:, None]
    put(out + start, offsets, tl.reshape(values, [TILE]), offsets < left, ONTO)


form = Segmented(
    encode,
    decode,
    lambda method, n: 4 * method.blocks(n),
    encoding,
    constants,
    draws=lambda method: True,
    finish=finish,
)
KERNEL = Kernel(covers, encode_many=form.encode_many, decode_add=form.decode_add)
