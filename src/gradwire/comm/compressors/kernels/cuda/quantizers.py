"""Methods whose blocks share a number, on CUDA: one pass, each program a tile of whole blocks.

fp8 does integer arithmetic, since not every GPU has 8-bit floats, and the casts of those that have differ at the top.
For terngrad in base 3, a second pass packs five digits to a byte.
"""

from __future__ import annotations

from typing import Any

import torch
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
    launch,
    load_floats,
    load_packed,
    past,
    place,
    put,
    random_words,
    rounded,
    store_floats,
    store_packed,
    uniforms,
)
from gradwire.comm.compressors.methods import natural
from gradwire.comm.compressors.methods.fp8 import FP8
from gradwire.comm.compressors.methods.int8 import Int8
from gradwire.comm.compressors.methods.natural import Natural
from gradwire.comm.compressors.methods.qsgd import QSGD
from gradwire.comm.compressors.methods.terngrad import TernGrad
from gradwire.comm.compressors.packing import TRITS
from gradwire.comm.compressors.segments import Segments

TINY = tl.constexpr(SMALLEST_SCALE)
TILE = 4096  # elements in a program's tile, or one block if that is larger


def tiled(method: Any) -> dict:
    """The block and the tile of a method's kernels."""
    return {"BLOCK": method.block, "TILE": max(TILE, method.block)}


def whole_blocks(method: Any) -> bool:
    """Whether blocks fill a tile evenly."""
    return fills_tiles(method.block)


# int8 and qsgd, and the decoder of terngrad


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
    BITS: tl.constexpr, TOP: tl.constexpr, STEPS: tl.constexpr, BASE3: tl.constexpr,
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
    if BASE3:
        code = load_digits(packed, tile * TILE, offsets, offsets < left)
    else:
        code = (load_packed(packed, tile * TILE, left, BITS, TILE) ^ SIGN) - SIGN
    values = tl.reshape(code.to(tl.float32), [ROWS, BLOCK]) * step[:, None]
    put(out + start, offsets, tl.reshape(values, [TILE]), offsets < left, ONTO)


def decoding_int8(method: Int8) -> dict:
    """The constants of `decode`."""
    return {**tiled(method), "BITS": method.num_bits, "TOP": method.top, "STEPS": True, "BASE3": False}


def encoding_int8(method: Int8, x: Tensor) -> dict:
    """The constants of `encode`."""
    rounding = {"STOCHASTIC": method.rounding == "stochastic", "L2": False, "enable_fp_fusion": False}
    return {**without_base3(decoding_int8(method)), **rounding}


def decoding_qsgd(method: QSGD) -> dict:
    """The constants of `decode`."""
    return {**tiled(method), "BITS": method.num_bits, "TOP": method.levels, "STEPS": False, "BASE3": False}


def encoding_qsgd(method: QSGD, x: Tensor) -> dict:
    """The constants of `encode`."""
    rounding = {"STOCHASTIC": True, "L2": method.norm == "l2", "enable_fp_fusion": False}
    return {**without_base3(decoding_qsgd(method)), **rounding}


def without_base3(constants: dict) -> dict:
    """The constants that `encode` and `decode` share."""
    return {name: value for name, value in constants.items() if name != "BASE3"}


# terngrad

LANES = tl.constexpr(TRITS)
BYTES = 1024  # bytes of five digits in a program's tile


def decoding_terngrad(method: TernGrad) -> dict:
    """The constants of `decode`."""
    return {**tiled(method), "BITS": 2, "TOP": 1, "STEPS": True, "BASE3": method.packing == "base3"}


def encoding_terngrad(method: TernGrad, x: Tensor) -> dict:
    """The constants of `encode_terngrad`; the clip as a tensor, because numbers are given to a GPU as float32."""
    base3 = method.packing == "base3"
    clip = torch.full((1,), method.clip or 0.0, dtype=torch.float64, device=x.device)
    digits = torch.empty(x.numel() if base3 else 0, dtype=torch.uint8, device=x.device)
    extra = {"clip": clip, "digits": digits, "CLIP": method.clip is not None}
    return {**extra, **tiled(method), "BASE3": base3, "enable_fp_fusion": False}


def finish_terngrad(method: TernGrad, segments: Segments, wire: Tensor, bad: Tensor, options: dict) -> None:
    """Pack five digits to a byte."""
    if method.packing == "base3":
        launch(pack_trits, segments, BYTES * TRITS, options["digits"], wire, BLOCK=method.block, BYTES=BYTES)


@triton.jit
def encode_terngrad(
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
def load_digits(packed, first, offsets, mask):
    """Digits ``first + offsets`` of five to a byte, as -1, 0, 1."""
    digit = (first % LANES).to(tl.int32) + offsets
    byte = digit // LANES
    lane = digit - byte * LANES
    rest = tl.load(packed + first // LANES + byte, mask=mask, other=0).to(tl.int32)
    # 2^16 over a power of three, rounded up: the quotient is exact for a byte
    inverse = tl.where(lane == 0, 65536, tl.where(lane == 1, 21846, tl.where(lane == 2, 7282, 0)))
    inverse = tl.where(lane == 3, 2428, tl.where(lane == 4, 810, inverse))
    rest = (rest * inverse) >> 16
    return rest - 3 * ((rest * 21846) >> 16) - 1


# fp8

FORMATS = {"e4m3": (3, 7, 0x7F), "e5m2": (2, 15, 0x7C)}  # mantissa bits, bias, lowest code that is not finite


def encoding_fp8(method: FP8, x: Tensor) -> dict:
    """The constants of `encode_fp8`."""
    mantissa, bias, _ = FORMATS[method.format]
    constants = {**tiled(method), "TOP": method.top, "MANTISSA": mantissa, "BIAS": bias}
    return {**constants, "enable_fp_fusion": False}


def decoding_fp8(method: FP8) -> dict:
    """The constants of `decode_fp8`."""
    mantissa, bias, no_number = FORMATS[method.format]
    constants = {**tiled(method), "MANTISSA": mantissa}
    return {**constants, "UNIT": 2.0 ** (127 - bias), "NO_NUMBER": no_number}


@triton.jit
def encode_fp8(
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

    As `gradwire.comm.compressors.kernels.cpu.narrow`.
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
def decode_fp8(
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


# natural

MANTISSA = tl.constexpr(natural.MANTISSA)
NOISE = tl.constexpr(32 - natural.MANTISSA)
POWERS = tl.constexpr(natural.POWERS)
NOT_FINITE = tl.constexpr(natural.NOT_FINITE)
HIGHEST = tl.constexpr(254 << natural.MANTISSA)  # 2^127, the largest magnitude that stays finite


def constants_natural(method: Natural) -> dict:
    """Of both kernels; 9 bits have no blocks, and tiles do."""
    block = TILE if method.bits == 9 else method.block
    return {"BLOCK": block, "TILE": max(TILE, block), "NINE": method.bits == 9}


@triton.jit
def exponents(magnitudes, seed, tile, TILE: tl.constexpr):
    """Exponents of the randomly rounded magnitudes, float32 bits as int32 [TILE] without NaN above infinity's."""
    noise = (random_words(tl.load(seed), (tile * (TILE // 4)).to(tl.int32), TILE) >> NOISE).to(tl.int32)
    return (magnitudes + noise) >> MANTISSA


@triton.jit
def encode_natural(
    x, table, tiles, seeds, wire, bad, ALIGN: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    NINE: tl.constexpr,
):  # fmt: skip
    """A tile's lowest exponents and codes, or exponents and signs; sets ``bad`` where a magnitude is too large."""
    ROWS: tl.constexpr = TILE // BLOCK
    segment, tile, start, left, n, first = place(table, tiles, ALIGN, TILE)
    offsets = tl.arange(0, TILE)
    values = tl.load(x + start + offsets, mask=offsets < left, other=0.0)
    bits = values.to(tl.int32, bitcast=True)
    most = tl.max(tl.reshape(bits & SIGNLESS, [ROWS, BLOCK]), axis=1)
    if tl.max(most, axis=0) > HIGHEST:
        tl.store(bad + segment, 1)
    minus = (bits >> 31) & 1
    if NINE:
        power = exponents(bits & SIGNLESS, seeds + segment, tile, TILE)
        power = tl.where(power < 0, NOT_FINITE, tl.minimum(power, NOT_FINITE))
        tl.store(wire + first + tile * TILE + offsets, power.to(tl.uint8), mask=offsets < left)
        store_packed(wire + past(first, n, ALIGN), tile * (TILE // 8), minus, left, 1, TILE)
    else:
        low = tl.maximum((most >> MANTISSA) + 2 - POWERS, 1)
        rows = tl.arange(0, ROWS)
        tl.store(wire + first + ROWS * tile + rows, low.to(tl.uint8), mask=rows * BLOCK < left)
        # the bits of 2^(1 - low), a denormal number from 2^-127 on
        scale = ((128 - tl.minimum(low, 127)) << MANTISSA) >> tl.maximum(low - 127, 0)
        spread = tl.broadcast_to(scale.to(tl.float32, bitcast=True)[:, None], [ROWS, BLOCK])
        scaled = tl.reshape(values, [ROWS, BLOCK]) * spread
        magnitudes = tl.reshape(scaled.to(tl.int32, bitcast=True) & SIGNLESS, [TILE])
        power = exponents(magnitudes, seeds + segment, tile, TILE)
        code = tl.where(power < 0, POWERS, tl.minimum(power, POWERS))  # a NaN may have carried over into the sign
        codes = wire + past(first, tl.cdiv(n, BLOCK), ALIGN) + tile * TILE
        tl.store(codes + offsets, (minus << 7 | code).to(tl.uint8), mask=offsets < left)


@triton.jit
def decode_natural(
    wire, table, tiles, out, ALIGN: tl.constexpr, ONTO: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    NINE: tl.constexpr,
):  # fmt: skip
    """A tile of numbers."""
    ROWS: tl.constexpr = TILE // BLOCK
    _, tile, start, left, n, first = place(table, tiles, ALIGN, TILE)
    offsets = tl.arange(0, TILE)
    if NINE:
        power = tl.load(wire + first + tile * TILE + offsets, mask=offsets < left, other=0).to(tl.int32)
        minus = load_packed(wire + past(first, n, ALIGN), tile * TILE, left, 1, TILE)
    else:
        codes = wire + past(first, tl.cdiv(n, BLOCK), ALIGN) + tile * TILE
        byte = tl.load(codes + offsets, mask=offsets < left, other=0).to(tl.int32)
        low = tl.load(wire + first + ROWS * tile + offsets // BLOCK, mask=offsets < left, other=1).to(tl.int32)
        code = byte & POWERS
        power = tl.where(code > 0, tl.minimum(tl.maximum(code + low - 1, 0), NOT_FINITE), 0)
        minus = byte >> 7
    put(out + start, offsets, (minus << 31 | power << MANTISSA).to(tl.float32, bitcast=True), offsets < left, ONTO)


def kernel(covers: Any, *form: Any, **options: Any) -> Kernel:
    """The fused form of a method, from the arguments of `Segmented`."""
    segmented = Segmented(*form, **options)
    return Kernel(covers, encode_many=segmented.encode_many, decode_add=segmented.decode_add)


def scales(method: Any, n: int) -> int:
    """Bytes of a float32 per block."""
    return 4 * method.blocks(n)


def always(method: Any) -> bool:
    """For a method that draws random numbers with all its options."""
    return True


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
        always,
    ),
    "terngrad": kernel(
        whole_blocks,
        encode_terngrad,
        decode,
        scales,
        encoding_terngrad,
        decoding_terngrad,
        always,
        finish=finish_terngrad,
    ),
    "fp8": kernel(whole_blocks, encode_fp8, decode_fp8, scales, encoding_fp8, decoding_fp8),
    "natural": kernel(
        lambda m: m.bits == 9 or fills_tiles(m.block),  # 9 bits have no blocks
        encode_natural,
        decode_natural,
        lambda m, n: n if m.bits == 9 else m.blocks(n),
        lambda m, x: constants_natural(m),
        constants_natural,
        always,
    ),
}
