"""Kernels for CUDA, in Triton. Without a GPU, Triton's interpreter runs them on CPU tensors (TRITON_INTERPRET=1).

They give the bits of the reference implementations: launched with ``enable_fp_fusion=False``, they divide by
``tl.div_rn``.

One launch takes a table of segments: each program takes one tile, of a multiple of 4 elements, of one segment.

A method has two kernels. ``encode(x, table, tiles, seeds, wire, bad, ALIGN, ...)`` and ``decode(wire, table,
tiles, out, ALIGN, ONTO, ...)`` begin with `place`, and ``decode`` ends with `put`; what follows are the method's own
constants. Encodings begin at any byte, and a GPU reads and writes numbers at multiples of their size only: ALIGN is a
divisor of all places in memory, and below 4 numbers travel byte by byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.comm.compressors.kernels import Kernel
from gradwire.comm.compressors.philox import ROUNDS, draw_seeds
from gradwire.comm.compressors.segments import Buffers, Segments

TILE = 4096
PHILOX_ROUNDS = tl.constexpr(ROUNDS)
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to an integer, ties to even
INFINITY = tl.constexpr(0x7F800000)
SIGNLESS = tl.constexpr(0x7FFFFFFF)
WORD = tl.constexpr(4)  # bytes
COLUMNS = tl.constexpr(4)  # of the table
BLANK, ZERO, SUM, LESS = (tl.constexpr(number) for number in range(4))
ONTO = {"blank": BLANK, "zero": ZERO, "sum": SUM, "less": LESS}


def fills_tiles(block: int) -> bool:
    """Whether blocks of that size fill a tile evenly."""
    return 32 <= block <= 16384 and block & (block - 1) == 0


@triton.jit
def place(table, tiles, ALIGN: tl.constexpr, TILE: tl.constexpr):
    """This program's segment, tile in it, first element, elements left (int32, at most TILE), and all elements.

    The last number is the segment's first byte.
    """
    segment = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    tile = tl.load(tiles + 2 * tl.program_id(0) + 1).to(tl.int64)
    start = tl.load(table + COLUMNS * segment)
    n = tl.load(table + COLUMNS * segment + 1)
    head = tl.load(table + COLUMNS * segment + 2)
    left = tl.minimum(n - tile * TILE, TILE).to(tl.int32)
    if ALIGN >= 16:
        start = tl.multiple_of(start, 4)
        left = tl.multiple_of(left, 4)
        head = tl.multiple_of(head, 16)
    return segment, tile, start + tile * TILE, left, n, head


@triton.jit
def past(head, size, ALIGN: tl.constexpr):
    """The byte after a head of ``size`` bytes."""
    if ALIGN >= 16:
        return tl.multiple_of(head + size, 16)
    return head + size


@triton.jit
def store_floats(base, index, values, mask, ALIGN: tl.constexpr):
    """float32 numbers ``index`` of those that begin at the byte ``base``."""
    if ALIGN >= WORD:
        tl.store(base.to(tl.pointer_type(tl.float32)) + index, values, mask=mask)
    else:
        bits = values.to(tl.int32, bitcast=True)
        for byte in tl.static_range(4):
            tl.store(base + 4 * index + byte, ((bits >> (8 * byte)) & 255).to(tl.uint8), mask=mask)


@triton.jit
def load_floats(base, index, mask, ALIGN: tl.constexpr):
    """The same numbers; 0 without the mask."""
    if ALIGN >= WORD:
        return tl.load(base.to(tl.pointer_type(tl.float32)) + index, mask=mask, other=0.0)
    bits = tl.load(base + 4 * index, mask=mask, other=0).to(tl.int32)
    for byte in tl.static_range(1, 4):
        bits = bits | (tl.load(base + 4 * index + byte, mask=mask, other=0).to(tl.int32) << (8 * byte))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def put(out, offsets, values, mask, ONTO: tl.constexpr):
    """Write a tile's values, or add them to what is there, or to 0, or subtract them."""
    if ONTO == SUM:
        values = tl.load(out + offsets, mask=mask, other=0.0) + values
    if ONTO == LESS:
        values = tl.load(out + offsets, mask=mask, other=0.0) - values
    if ONTO == ZERO:
        values = values + 0.0
    tl.store(out + offsets, values, mask=mask)


@triton.jit
def add(values, table, tiles, residual, TILE: tl.constexpr):
    """Add a tile of the values to the residual."""
    _, _, start, left, _, _ = place(table, tiles, 1, TILE)
    mask = tl.arange(0, TILE) < left
    offsets = start + tl.arange(0, TILE)
    put(residual, offsets, tl.load(values + offsets, mask=mask, other=0.0), mask, SUM)


@triton.jit
def drop(bad, table, tiles, residual, TILE: tl.constexpr):
    """Clear a tile of the residual where its segment is not representable."""
    segment, _, start, left, _, _ = place(table, tiles, 1, TILE)
    if tl.load(bad + segment) != 0:
        tl.store(residual + start + tl.arange(0, TILE), tl.zeros([TILE], tl.float32), mask=tl.arange(0, TILE) < left)


@triton.jit
def random_words(seed, first_block, TILE: tl.constexpr):
    """Words ``4 * first_block`` and the following of the seed's stream: uint32 [TILE]."""
    w0, w1, w2, w3 = tl.randint4x(seed, first_block + tl.arange(0, TILE // 4), n_rounds=PHILOX_ROUNDS)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [TILE])


@triton.jit
def uniforms(seed, first_block, TILE: tl.constexpr):
    """The same as numbers in [0, 1): float32 [TILE]."""
    return (random_words(seed, first_block, TILE) >> 8).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def rounded(x):
    """``x`` rounded to the nearest integer, ties to even, for magnitudes below 2^22."""
    return (x + ROUNDER) - ROUNDER


@triton.jit
def store_packed(out, start, codes, count, BITS: tl.constexpr, TILE: tl.constexpr):
    """Pack a tile of codes (int32 [TILE], below 2^BITS, 0 from ``count`` on) and store the bytes from ``start`` on.

    BITS is 1, 2, 4 or 8; ``out`` holds the bytes of ``count`` codes from there.
    """
    packed = codes
    BYTES: tl.constexpr = TILE * BITS // 8
    if BITS <= 4:
        low, high = tl.split(tl.reshape(packed, [TILE // 2, 2]))
        packed = low | high << BITS
    if BITS <= 2:
        low, high = tl.split(tl.reshape(packed, [TILE // 4, 2]))
        packed = low | high << (2 * BITS)
    if BITS == 1:
        low, high = tl.split(tl.reshape(packed, [TILE // 8, 2]))
        packed = low | high << 4
    offsets = tl.arange(0, BYTES)
    if count >= TILE:  # without a mask, wide stores
        tl.store(out + start + offsets, packed.to(tl.uint8))
    else:
        tl.store(out + start + offsets, packed.to(tl.uint8), mask=offsets < (count * BITS + 7) // 8)


@triton.jit
def load_packed(wire, first, count, BITS: tl.constexpr, TILE: tl.constexpr):
    """Codes ``first`` (a multiple of TILE) to ``first + TILE`` of the packed run at ``wire``: int32 [TILE].

    Only the first ``count`` are codes; after them come the last byte's other bits, and 0.
    """
    BYTES: tl.constexpr = TILE * BITS // 8
    LANES: tl.constexpr = 8 // BITS
    offsets = tl.arange(0, BYTES)
    start = wire + first // TILE * BYTES
    if count >= TILE:  # without a mask, wide loads
        codes = tl.load(start + offsets).to(tl.int32)
    else:
        codes = tl.load(start + offsets, mask=offsets < (count * BITS + 7) // 8, other=0).to(tl.int32)
    if BITS < 8:
        shifts = tl.arange(0, LANES) * BITS
        codes = tl.reshape((codes[:, None] >> shifts[None, :]) & ((1 << BITS) - 1), [TILE])
    return codes


class Segmented:
    """A method whose blocks are independent of each other: a launch to encode, and one to decode.

    Args:
        encode: Its kernel.
        decode: Its kernel.
        head: Bytes before the packed codes, by method and elements.
        encoding: The constants of `encode` by method, its TILE among them.
        decoding: Those of `decode`.
        draws: Whether the method takes seeds.
        finish: The work after `encode`, on method, segments, wire and flags.
    """

    def __init__(
        self,
        encode: Any,
        decode: Any,
        head: Callable[[Any, int], int],
        encoding: Callable[[Any], dict[str, Any]],
        decoding: Callable[[Any], dict[str, Any]],
        draws: Callable[[Any], bool] = lambda method: False,
        finish: Callable[[Any, Segments, Tensor, Tensor], None] = lambda *given: None,
    ) -> None:
        self._encode, self._decode, self._head, self._draws = encode, decode, head, draws
        self._encoding, self._decoding, self._finish = encoding, decoding, finish

    def kernel(self, **others: Any) -> Kernel:
        """The method's kernel, with what else it has."""
        return Kernel(encode_many=self.encode_many, decode_add=self.decode_add, **others)

    def encode_many(self, method: Any, buffers: Buffers) -> None:
        """See `gradwire.comm.compressors.kernels`; error feedback takes two launches and a decoding."""
        values, segments, wire, _, bad, residual = buffers
        if residual is None:
            self._encode_all(method, buffers)
            return
        launch(add, segments, TILE, values, residual)
        self._encode_all(method, buffers._replace(values=residual))
        self._decode_one(method, wire, segments, residual, "less")
        launch(drop, segments, TILE, bad, residual)

    def decode_add(self, method: Any, wires: Tensor, segments: Segments, out: Tensor, onto: str) -> None:
        """See `gradwire.comm.compressors.kernels`; one message after the other."""
        for message, wire in enumerate(wires):
            self._decode_one(method, wire, segments, out, "sum" if message else onto)

    def _encode_all(self, method: Any, buffers: Buffers) -> None:
        """Encode all tensors in one launch, and run `finish`."""
        x, segments, wire, generators, bad, _ = buffers
        seeds = draw_seeds(generators, x.device, method.name) if self._draws(method) else bad
        options = self._encoding(method)
        align = self._alignment(method, segments, x, wire)
        launch(self._encode, segments, options["TILE"], x, seeds, wire, bad, ALIGN=align, **options)
        self._finish(method, segments, wire, bad)

    def _decode_one(self, method: Any, wire: Tensor, segments: Segments, out: Tensor, onto: str) -> None:
        """Decode one message in one launch; ``onto`` is a key of `ONTO`."""
        options = self._decoding(method)
        align = self._alignment(method, segments, out, wire)
        # without fusion: a product that is added to a sum must be rounded first
        launch(
            self._decode, segments, options["TILE"], wire, out,
            ALIGN=align, ONTO=ONTO[onto].value, enable_fp_fusion=False, **options,
        )  # fmt: skip

    def _alignment(self, method: Any, segments: Segments, numbers: Tensor, wire: Tensor) -> int:
        """A divisor of 16 and of all places in memory at which numbers and codes begin, and numbers end."""
        places = segments.derive(
            ("alignment", method), lambda: math.gcd(16, *(place for segment in segments for place in (
                4 * segment.start, 4 * segment.numel, segment.at, segment.at + self._head(method, segment.numel)
            )))
        )  # fmt: skip
        return math.gcd(places, wire.data_ptr(), numbers.data_ptr())


def launch(kernel: Any, segments: Segments, tile: int, first: Tensor, *rest: Any, **options: Any) -> None:
    """Run ``kernel(first, table, tiles, ...)`` for every tile of every segment."""
    table, tiles = segments.table(first.device), tiles_of(segments, tile, first.device)
    if len(tiles):
        kernel[(len(tiles),)](first, table, tiles, *rest, **{"TILE": tile, **options})


def tiles_of(segments: Segments, tile: int, device: torch.device) -> Tensor:
    """Every tile's segment and index in it: int32 [tiles, 2]."""

    def make() -> Tensor:
        counts = torch.tensor(
            [triton.cdiv(segment.numel, tile) for segment in segments], dtype=torch.int64, device="cpu"
        )
        owners = torch.repeat_interleave(counts)
        indices = torch.arange(len(owners), dtype=torch.int64, device="cpu") - (counts.cumsum(0) - counts)[owners]
        return torch.stack([owners, indices], dim=1).to(torch.int32).to(device)

    return segments.derive(("tiles", tile, device), make)
