"""`gradwire.comm.compressors.indices` on CUDA: both planes of ``rice`` at once; the others as they are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.comm.compressors import indices
from gradwire.comm.compressors.indices import (
    HEADER,
    CodeName,
    choose,
    rice_planes,
    unary_bits,
    with_header,
    without_header,
)

TILE = 1024
WIDEST = 32  # low bits that a gathered word of 64 bits has room for


def encode(places: Tensor, n: int, code: CodeName) -> Tensor:
    """The same bytes as `indices.encode`."""
    k = places.numel()
    low, lower, upper = rice_planes(n, k)
    if choose(n, k, code) != "rice" or low > WIDEST or not k:
        return indices.encode(places, n, code)
    remainders = torch.empty(lower, dtype=torch.uint8, device=places.device)
    if low:
        write_lower[(triton.cdiv(lower, TILE),)](places, remainders, k, lower, LOW=low, TILE=TILE)
    unary = torch.zeros(-(-upper // 4), dtype=torch.int32, device=places.device)
    write_upper[(triton.cdiv(k, TILE),)](places, unary, k, LOW=low, TILE=TILE)
    return with_header("rice", torch.cat([remainders, unary.view(torch.uint8)[:upper]]))


def decode(wire: Tensor, n: int, k: int, code: CodeName) -> tuple[Tensor, int]:
    """The same indices as `indices.decode`; what is corrupt gives indices below n."""
    low, lower, upper = rice_planes(n, k)
    chosen, body = without_header(wire, n, k, code)
    if chosen != "rice" or low > WIDEST or not k:
        return indices.decode(wire, n, k, code)
    remainders, unary = body[:lower], body[lower : lower + upper]
    tiles = triton.cdiv(upper, TILE)
    counts = torch.empty(tiles, dtype=torch.int32, device=wire.device)
    bits = unary_bits(n, k, low)
    count_bits[(tiles,)](unary, counts, bits, TILE=TILE)
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    places = torch.zeros(k, dtype=torch.int64, device=wire.device)
    read[(tiles,)](remainders, unary, counts, ends, places, n, k, lower, bits, LOW=low, TILE=TILE)
    return places, HEADER + lower + upper


@triton.jit
def write_lower(places, out, k, size, LOW: tl.constexpr, TILE: tl.constexpr):
    """A tile of bytes of the lower plane: bit b is bit ``b % LOW`` of index ``b // LOW``."""
    byte = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    packed = tl.zeros([TILE], dtype=tl.int32)
    for lane in tl.static_range(8):
        bit = byte * 8 + lane
        owner = bit // LOW
        place = tl.load(places + owner, mask=owner < k, other=0)
        packed |= ((place >> (bit - owner * LOW)) & 1).to(tl.int32) << lane
    tl.store(out + byte, packed.to(tl.uint8), mask=byte < size)


@triton.jit
def write_upper(places, words, k, LOW: tl.constexpr, TILE: tl.constexpr):
    """Set the bits of a tile of indices in the upper plane (int32 words of 0)."""
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = i < k
    bit = i + (tl.load(places + i, mask=inside, other=0) >> LOW)
    mark = tl.full([TILE], 1, tl.int32) << (bit & 31).to(tl.int32)
    tl.atomic_or(words + (bit >> 5), mark, mask=inside, sem="relaxed")


@triton.jit
def bits_of(unary, first, bits, TILE: tl.constexpr):
    """The bits of TILE bytes of the upper plane, from bit ``first`` on: int32 [8 * TILE], 0 beyond the plane."""
    byte = first // 8 + tl.arange(0, TILE)
    packed = tl.load(unary + byte, mask=byte * 8 < bits, other=0).to(tl.int32)
    lanes = (packed[:, None] >> tl.arange(0, 8)[None, :]) & 1
    return tl.where(first + tl.arange(0, 8 * TILE) < bits, tl.reshape(lanes, [8 * TILE]), 0)


@triton.jit
def count_bits(unary, counts, bits, TILE: tl.constexpr):
    """How many bits are set in a tile of the upper plane."""
    tile = tl.program_id(0).to(tl.int64)
    tl.store(counts + tile, tl.sum(bits_of(unary, tile * 8 * TILE, bits, TILE), axis=0))


@triton.jit
def read(remainders, unary, counts, ends, places, n, k, size, bits, LOW: tl.constexpr, TILE: tl.constexpr):
    """The indices whose bits lie in a tile of the upper plane."""
    tile = tl.program_id(0).to(tl.int64)
    first = tile * 8 * TILE
    mark = bits_of(unary, first, bits, TILE)
    i = (tl.load(ends + tile) - tl.load(counts + tile) + tl.cumsum(mark, axis=0) - mark).to(tl.int64)
    inside = (mark > 0) & (i < k)
    place = (first + tl.arange(0, 8 * TILE) - i) << LOW
    if LOW > 0:
        word = tl.zeros([8 * TILE], dtype=tl.int64)
        for lane in tl.static_range((LOW + 14) // 8):  # so many bytes hold LOW bits from any bit on
            byte = i * LOW // 8 + lane
            word |= tl.load(remainders + byte, mask=inside & (byte < size), other=0).to(tl.int64) << (8 * lane)
        place |= (word >> (i * LOW % 8)) & ((1 << LOW) - 1)
    tl.store(places + i, tl.minimum(place, n - 1), mask=inside)
