"""natural on CUDA: one pass, each program a tile of whole blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.compressors.base import numel
from gradwire.compressors.kernels.cuda.shared import SIGNLESS, load_packed, no_flag, random_words, store_packed
from gradwire.compressors.methods import natural
from gradwire.compressors.methods.natural import Natural
from gradwire.compressors.philox import draw_seed

MANTISSA = tl.constexpr(natural.MANTISSA)
NOISE = tl.constexpr(32 - natural.MANTISSA)
POWERS = tl.constexpr(natural.POWERS)
NOT_FINITE = tl.constexpr(natural.NOT_FINITE)
HIGHEST = tl.constexpr(254 << natural.MANTISSA)  # 2^127, the largest magnitude that stays finite
SMALLEST = tl.constexpr(1 << natural.MANTISSA)  # 2^-126
TILE = 4096  # elements in a program's tile, or one block if that is larger


def covers(method: Natural) -> bool:
    """Blocks that fill a tile evenly; 9 bits have none."""
    return method.bits == 9 or (32 <= method.block <= 16384 and method.block & (method.block - 1) == 0)


def to_wire(method: Natural, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """The wire, and whether a magnitude is above 2^127."""
    bad = no_flag(x)
    seed = draw_seed(generator, x.device, method.name)
    wire = torch.empty(method.wire_bytes(x.shape), dtype=torch.uint8, device=x.device)
    n = x.numel()
    if n and method.bits == 9:
        encode9[(triton.cdiv(n, TILE),)](x, seed, wire[:n], wire[n:], bad, n, TILE=TILE)
    elif n:
        blocks, tile = method.blocks(n), max(TILE, method.block)
        encode8[(triton.cdiv(n, tile),)](
            x, seed, wire[:blocks], wire[blocks:], bad, n, BLOCK=method.block, TILE=tile
        )  # fmt: skip
    return wire, bad


def from_wire(method: Natural, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Put exponents and signs where float32 has them."""
    n = numel(shape)
    out = torch.empty(n, device=wire.device)
    grid = (triton.cdiv(n, TILE),)
    if n and method.bits == 9:
        decode9[grid](wire[:n], wire[n:], out, n, TILE=TILE)
    elif n:
        blocks = method.blocks(n)
        decode8[grid](wire[:blocks], wire[blocks:], out, n, BLOCK=method.block, TILE=TILE)
    return out


@triton.jit
def exponents(magnitudes, seed, tile, TILE: tl.constexpr):
    """Exponents of the randomly rounded magnitudes, float32 bits as int32 [TILE] without NaN above infinity's."""
    noise = (random_words(tl.load(seed), tile * (TILE // 4), TILE) >> NOISE).to(tl.int32)
    return (magnitudes + noise) >> MANTISSA


@triton.jit
def encode8(x, seed, lowest, codes, bad, n, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """A tile's lowest exponents and codes (uint8); sets ``bad`` where a magnitude is too large."""
    ROWS: tl.constexpr = TILE // BLOCK
    tile = tl.program_id(0)
    at = tile * TILE + tl.arange(0, TILE)
    values = tl.reshape(tl.load(x + at, mask=at < n, other=0.0), [ROWS, BLOCK])
    bits = values.to(tl.int32, bitcast=True)
    most = tl.max(bits & SIGNLESS, axis=1)
    if tl.max(most, axis=0) > HIGHEST:
        tl.store(bad, 1)
    low = tl.maximum((most >> MANTISSA) + 2 - POWERS, 1)
    rows = tile * ROWS + tl.arange(0, ROWS)
    tl.store(lowest + rows, low.to(tl.uint8), mask=rows * BLOCK < n)
    # the bits of 2^(1 - low), a denormal number from 2^-127 on
    scale = ((128 - tl.minimum(low, 127)) << MANTISSA) >> tl.maximum(low - 127, 0)
    scaled = values * tl.broadcast_to(scale.to(tl.float32, bitcast=True)[:, None], [ROWS, BLOCK])
    magnitudes = tl.reshape(scaled.to(tl.int32, bitcast=True) & SIGNLESS, [TILE])
    power = exponents(magnitudes, seed, tile, TILE)
    code = tl.where(power < 0, POWERS, tl.minimum(power, POWERS))  # a NaN may have carried over into the sign
    minus = (tl.reshape(bits, [TILE]) >> 31) & 1
    tl.store(codes + at, (minus << 7 | code).to(tl.uint8), mask=at < n)


@triton.jit
def encode9(x, seed, powers, signs, bad, n, TILE: tl.constexpr):
    """A tile's exponents (uint8) and signs; sets ``bad`` where a magnitude is too large."""
    tile = tl.program_id(0)
    at = tile * TILE + tl.arange(0, TILE)
    bits = tl.load(x + at, mask=at < n, other=0.0).to(tl.int32, bitcast=True)
    magnitudes = bits & SIGNLESS
    if tl.max(magnitudes, axis=0) > HIGHEST:
        tl.store(bad, 1)
    power = exponents(magnitudes, seed, tile, TILE)
    power = tl.where(power < 0, NOT_FINITE, tl.minimum(power, NOT_FINITE))
    tl.store(powers + at, power.to(tl.uint8), mask=at < n)
    store_packed(signs, tile * (TILE // 8), (bits >> 31) & 1, n - tile * TILE, 1, TILE)


@triton.jit
def decode8(lowest, codes, out, n, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """A tile of numbers."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    byte = tl.load(codes + at, mask=at < n, other=0).to(tl.int32)
    low = tl.load(lowest + at // BLOCK, mask=at < n, other=1).to(tl.int32)
    code = byte & POWERS
    power = tl.where(code > 0, tl.minimum(tl.maximum(code + low - 1, 0), NOT_FINITE), 0)
    tl.store(out + at, ((byte >> 7) << 31 | power << MANTISSA).to(tl.float32, bitcast=True), mask=at < n)


@triton.jit
def decode9(powers, signs, out, n, TILE: tl.constexpr):
    """A tile of numbers."""
    start = tl.program_id(0) * TILE
    at = start + tl.arange(0, TILE)
    power = tl.load(powers + at, mask=at < n, other=0).to(tl.int32)
    minus = load_packed(signs, start, n - start, 1, TILE)
    tl.store(out + at, (minus << 31 | power << MANTISSA).to(tl.float32, bitcast=True), mask=at < n)
