"""Methods whose blocks share a number, on CUDA: one pass, each program a tile of whole blocks."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from gradwire.comm.compressors.base import SMALLEST_SCALE
from gradwire.comm.compressors.kernels import Kernel
from gradwire.comm.compressors.kernels.cuda.segments import (
    INFINITY,
    SIGNLESS,
    Segmented,
    fills_tiles,
    load_floats,
    load_packed,
    past,
    place,
    put,
    rounded,
    store_floats,
    store_packed,
    uniforms,
)
from gradwire.comm.compressors.methods.int8 import Int8
from gradwire.comm.compressors.methods.qsgd import QSGD

TINY = tl.constexpr(SMALLEST_SCALE)
TILE = 4096  # elements in a program's tile, or one block if that is larger


def tiled(method: Any) -> dict:
    """The block and the tile of a method's kernels."""
    return {"BLOCK": method.block, "TILE": max(TILE, method.block)}


def whole_blocks(method: Any) -> bool:
    """Whether blocks fill a tile evenly."""
    return fills_tiles(method.block)


# int8 and qsgd


@triton.jit
def step_of(norm, TOP: tl.constexpr):
    """The step of each block, whose multiples its numbers are."""
    return tl.maximum(tl.div_rn(norm, 1.0 * TOP), TINY, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def encode(
    x, table, tiles, seeds, wire, bad, ALIGN: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    BITS: tl.constexpr, TOP: tl.constexpr, STEPS: tl.constexpr, L2: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """A tile's steps if STEPS, else norms (float32), and codes; sets ``bad`` where one is not finite."""
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
    step = step_of(norm, TOP)
    store_floats(wire + head + 4 * ROWS * tile, rows, step if STEPS else norm, rows * BLOCK < left, ALIGN)
    level = tl.div_rn(values, tl.broadcast_to(step[:, None], [ROWS, BLOCK]))
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
    BITS: tl.constexpr, TOP: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """A tile of numbers: codes times their block's step."""
    ROWS: tl.constexpr = TILE // BLOCK
    SIGN: tl.constexpr = 1 << (BITS - 1)
    _, tile, start, left, n, head = place(table, tiles, ALIGN, TILE)
    offsets, rows = tl.arange(0, TILE), tl.arange(0, ROWS)
    step = load_floats(wire + head + 4 * ROWS * tile, rows, rows * BLOCK < left, ALIGN)
    if not STEPS:
        step = step_of(step, TOP)
    packed = wire + past(head, 4 * tl.cdiv(n, BLOCK), ALIGN)
    code = (load_packed(packed, tile * TILE, left, BITS, TILE) ^ SIGN) - SIGN
    values = tl.reshape(code.to(tl.float32), [ROWS, BLOCK]) * step[:, None]
    put(out + start, offsets, tl.reshape(values, [TILE]), offsets < left, ONTO)


def decoding_int8(method: Int8) -> dict:
    """The constants of `decode`."""
    return {**tiled(method), "BITS": method.num_bits, "TOP": method.top, "STEPS": True}


def encoding_int8(method: Int8, x: Tensor) -> dict:
    """The constants of `encode`."""
    rounding = {"STOCHASTIC": method.rounding == "stochastic", "L2": False, "enable_fp_fusion": False}
    return {**decoding_int8(method), **rounding}


def decoding_qsgd(method: QSGD) -> dict:
    """The constants of `decode`."""
    return {**tiled(method), "BITS": method.num_bits, "TOP": method.levels, "STEPS": False}


def encoding_qsgd(method: QSGD, x: Tensor) -> dict:
    """The constants of `encode`."""
    rounding = {"STOCHASTIC": True, "L2": method.norm == "l2", "enable_fp_fusion": False}
    return {**decoding_qsgd(method), **rounding}


def kernel(covers: Any, *form: Any, **options: Any) -> Kernel:
    """The fused form of a method, from the arguments of `Segmented`."""
    segmented = Segmented(*form, **options)
    return Kernel(covers, encode_many=segmented.encode_many, decode_add=segmented.decode_add)


def scales(method: Any, n: int) -> int:
    """Bytes of a float32 per block."""
    return 4 * method.blocks(n)


KERNELS = {
    "int8": kernel(
        whole_blocks, encode, decode, scales, encoding_int8, decoding_int8, lambda m: m.rounding == "stochastic"
    ),
    "qsgd": kernel(
        lambda m: fills_tiles(m.block) and m.num_bits in (8, 4, 2),
        encode,
        decode,
        scales,
        encoding_qsgd,
        decoding_qsgd,
        lambda m: True,
    ),
}
