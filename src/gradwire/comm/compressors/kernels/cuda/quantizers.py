"""int8, qsgd, fp16 and bf16 on CUDA: one pass, each program a tile of whole blocks."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from gradwire.comm.compressors.base import SMALLEST_SCALE
from gradwire.comm.compressors.kernels.cuda import (
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
from gradwire.comm.compressors.methods.bf16 import BF16
from gradwire.comm.compressors.methods.fp16 import FP16
from gradwire.comm.compressors.methods.int8 import Int8
from gradwire.comm.compressors.methods.qsgd import QSGD

TINY = tl.constexpr(SMALLEST_SCALE)
TILE = 4096  # elements in a program's tile, or one block if that is larger
HALF = tl.constexpr(2)  # bytes
UNIT = tl.constexpr(2.0**112)  # what float32's exponents are larger by than float16's


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


def decoding(method: Int8 | QSGD) -> dict[str, Any]:
    """The constants of `decode`."""
    shape = {"BLOCK": method.block, "TILE": max(TILE, method.block), "BITS": method.num_bits}
    if isinstance(method, Int8):
        return {**shape, "TOP": method.top, "STEPS": True}
    return {**shape, "TOP": method.levels, "STEPS": False}


def encoding(method: Int8 | QSGD) -> dict[str, Any]:
    """The constants of `encode`."""
    norm = isinstance(method, QSGD) and method.norm
    return {**decoding(method), "STOCHASTIC": draws(method), "L2": norm == "l2", "enable_fp_fusion": False}


def draws(method: Int8 | QSGD) -> bool:
    """Whether the method takes seeds."""
    return isinstance(method, QSGD) or method.rounding == "stochastic"


# bf16 and fp16


@triton.jit
def encode_cast(x, table, tiles, seeds, wire, bad, ALIGN: tl.constexpr, TILE: tl.constexpr, BRAIN: tl.constexpr):
    """Round a tile to nearest, ties to even; sets ``bad`` where a number is not finite, or no longer is."""
    segment, tile, start, left, _, head = place(table, tiles, ALIGN, TILE)
    offsets = tl.arange(0, TILE)
    mask = offsets < left
    values = tl.load(x + start + offsets, mask=mask, other=0.0)
    bits = values.to(tl.int32, bitcast=True)
    if BRAIN:
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        worst = tl.max(tl.where((bits & SIGNLESS) >= INFINITY, INFINITY, rounded & SIGNLESS), axis=0) >= INFINITY
        codes = (rounded >> 16) & 0xFFFF
        codes = tl.where((bits & SIGNLESS) > INFINITY, 0x7FC0, codes)  # rounding may carry a NaN over
    else:
        codes = values.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        worst = tl.max(codes & 0x7FFF, axis=0) >= 0x7C00
    if worst:
        tl.store(bad + segment, 1)
    out = wire + head + HALF * (tile * TILE + offsets)
    if ALIGN >= HALF:
        tl.store(out.to(tl.pointer_type(tl.int16)), codes.to(tl.int16), mask=mask)
    else:
        tl.store(out, codes.to(tl.uint8), mask=mask)
        tl.store(out + 1, (codes >> 8).to(tl.uint8), mask=mask)


@triton.jit
def decode_cast(
    wire, table, tiles, out, ALIGN: tl.constexpr, ONTO: tl.constexpr, TILE: tl.constexpr, BRAIN: tl.constexpr
):  # fmt: skip
    """Cast a tile back to float32, exactly."""
    _, tile, start, left, _, head = place(table, tiles, ALIGN, TILE)
    offsets = tl.arange(0, TILE)
    mask = offsets < left
    places = wire + head + HALF * (tile * TILE + offsets)
    if ALIGN >= HALF:
        codes = tl.load(places.to(tl.pointer_type(tl.int16)), mask=mask, other=0).to(tl.int32) & 0xFFFF
    else:
        codes = tl.load(places, mask=mask, other=0).to(tl.int32)
        codes = codes | (tl.load(places + 1, mask=mask, other=0).to(tl.int32) << 8)
    if BRAIN:
        bits = codes << 16
    else:  # the bits move to where float32 has them, and a power of two moves the exponent; a cast would need memory
        moved = (codes & 0x7FFF) << 13
        scaled = moved.to(tl.float32, bitcast=True) * UNIT
        bits = tl.where(moved >= 0x7C00 << 13, moved | INFINITY, scaled.to(tl.int32, bitcast=True))
        bits = bits | ((codes & 0x8000) << 16)
    values = bits.to(tl.float32, bitcast=True)
    put(out, start + offsets, values, mask, ONTO)


def constants(method: BF16 | FP16) -> dict[str, Any]:
    """The constants of both kernels."""
    return {"TILE": TILE, "BRAIN": isinstance(method, BF16)}


blocks = Segmented(encode, decode, lambda method, n: 4 * method.blocks(n), encoding, decoding, draws).kernel(
    covers=lambda method: fills_tiles(method.block) and method.num_bits in (8, 4, 2)
)
cast = Segmented(encode_cast, decode_cast, lambda method, n: 0, constants, constants).kernel()
KERNELS = {**dict.fromkeys(("int8", "qsgd"), blocks), **dict.fromkeys(("bf16", "fp16"), cast)}
