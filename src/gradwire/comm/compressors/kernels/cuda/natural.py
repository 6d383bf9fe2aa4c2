"""natural on CUDA: one pass, each program a tile of whole blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.comm.compressors.kernels import Kernel
from gradwire.comm.compressors.kernels.cuda.segments import Segmented, fills_tiles, past, place, put
from gradwire.comm.compressors.kernels.cuda.shared import SIGNLESS, load_packed, random_words, store_packed
from gradwire.comm.compressors.methods import natural
from gradwire.comm.compressors.methods.natural import Natural

MANTISSA = tl.constexpr(natural.MANTISSA)
NOISE = tl.constexpr(32 - natural.MANTISSA)
POWERS = tl.constexpr(natural.POWERS)
NOT_FINITE = tl.constexpr(natural.NOT_FINITE)
HIGHEST = tl.constexpr(254 << natural.MANTISSA)  # 2^127, the largest magnitude that stays finite
TILE = 4096  # elements in a program's tile, or one block if that is larger


def covers(method: Natural) -> bool:
    """Blocks that fill a tile evenly; 9 bits have none."""
    return method.bits == 9 or fills_tiles(method.block)


def head(method: Natural, n: int) -> int:
    """A byte per block, or per element."""
    return n if method.bits == 9 else method.blocks(n)


def constants(method: Natural) -> dict:
    """Of both kernels; 9 bits have no blocks, and tiles do."""
    block = TILE if method.bits == 9 else method.block
    return {"BLOCK": block, "TILE": max(TILE, block), "NINE": method.bits == 9}


@triton.jit
def exponents(magnitudes, seed, tile, TILE: tl.constexpr):
    """Exponents of the randomly rounded magnitudes, float32 bits as int32 [TILE] without NaN above infinity's."""
    noise = (random_words(tl.load(seed), (tile * (TILE // 4)).to(tl.int32), TILE) >> NOISE).to(tl.int32)
    return (magnitudes + noise) >> MANTISSA


@triton.jit
def encode(
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
def decode(
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


form = Segmented(encode, decode, head, lambda method, x: constants(method), constants, draws=lambda method: True)
KERNEL = Kernel(covers, encode_many=form.encode_many, decode_add=form.decode_add)
