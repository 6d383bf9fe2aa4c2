"""Choosing elements by magnitude on CUDA, exactly and in order, x read once; magnitudes as in `sparse.magnitudes`.

`sieve` keeps what reaches a bound: each tile's places and magnitudes in one piece, the tiles as they come. What follows
reads those pieces, in the order of the tiles where it matters. Where the sieve overflows, or holds too few (top-k's
bound is guessed from a sample), it reads x itself instead: the device decides, nothing synchronises, and the result is
the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.comm.compressors.base import Shape, numel
from gradwire.comm.compressors.kernels.cuda.shared import INFINITY, SIGNLESS, no_flag
from gradwire.comm.compressors.sparse import Sparsifier

LIMIT = 2**30  # elements; offsets are 32 bits wide
TILE = 4096
CHUNK = 128  # elements of a piece that are read at once
SAMPLE = 8192  # elements from which top-k's bound is guessed
COUNTERS = 512  # programs that count digits
DIGITS = ((20, 11), (10, 10), (0, 10))  # shift and bits of the digits of a magnitude, from the top
PREFIX, REST = tl.constexpr(0), tl.constexpr(1)  # what `state` holds: the digits known, and how many are to come


class Sieve(NamedTuple):
    """What `sieve` kept.

    Attributes:
        x: What was read.
        places: Within the tile: int16 [room].
        keys: Their magnitudes: int32 [room].
        starts: Where each tile's piece begins: int32 [tiles].
        counts: And how long it is: int32 [tiles].
        found: The sum of the counts: int32 [1].
        bad: Whether x holds what is not finite: int32 [1].
    """

    x: Tensor
    places: Tensor
    keys: Tensor
    starts: Tensor
    counts: Tensor
    found: Tensor
    bad: Tensor

    @property
    def tiles(self) -> int:
        """How many there are."""
        return self.counts.numel()

    @property
    def room(self) -> int:
        """How many elements fit."""
        return self.keys.numel()


def largest_places(x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where the k >= 1 largest magnitudes are, ascending, of equals the first; their values; whether x is not finite.

    Radix select over what the sieve kept. x is a vector of fewer than LIMIT elements.
    """
    n = x.numel()
    sampled = min(n, SAMPLE)
    expected = k * sampled / n
    rank = min(sampled, int(expected + 4 * expected**0.5) + 5)  # lest the sieve hold fewer than k
    least, state = (
        torch.empty(1, dtype=torch.int32, device=x.device),
        torch.empty(2, dtype=torch.int32, device=x.device),
    )
    guess[(1,)](x, least, state, n, sampled, rank, k, SAMPLE=SAMPLE, num_warps=8)
    kept = sieved(x, least, min(n // 4, 2 * n * rank // sampled) + 1)
    tables = torch.zeros(len(DIGITS), 2048, dtype=torch.int32, device=x.device)
    for table, (shift, width) in zip(tables, DIGITS, strict=True):
        count_digits[(min(COUNTERS, kept.tiles),)](
            x, kept.keys, kept.found, state, table, n, kept.room, k, min(COUNTERS, kept.tiles) * TILE,
            SHIFT=shift, WIDTH=width, TILE=TILE, num_warps=8,
        )  # fmt: skip
        locate[(1,)](table, state, WIDTH=width)
    above, equal = torch.empty(2, kept.tiles, dtype=torch.int32, device=x.device)
    compare[(kept.tiles,)](
        x, kept.keys, kept.starts, kept.counts, kept.found, state, above, equal, n, kept.room, k,
        TILE=TILE, CHUNK=CHUNK,
    )  # fmt: skip
    return *collected(kept, state, above, equal, k, k), kept.bad


def reaching_places(x: Tensor, least: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where magnitudes reach ``least`` (int32 [1], at least 1), ascending; their values; whether x is not finite.

    The host waits once, to know how many they are. x is a vector of fewer than LIMIT elements.
    """
    kept = sieved(x, least, x.numel() // 16 + 1)
    state = torch.cat([least - 1, torch.zeros_like(least)])  # all above, none that equals it
    return *collected(kept, state, kept.counts, torch.zeros_like(kept.counts), 0, int(kept.found)), kept.bad


def sieved(x: Tensor, least: Tensor, room: int) -> Sieve:
    """What reaches ``least`` (int32 [1])."""
    tiles = triton.cdiv(x.numel(), TILE)
    places = torch.empty(room, dtype=torch.int16, device=x.device)
    keys = torch.empty(room, dtype=torch.int32, device=x.device)
    starts, counts = torch.empty(2, tiles, dtype=torch.int32, device=x.device)
    kept = Sieve(x, places, keys, starts, counts, no_flag(x), no_flag(x))
    sieve[(tiles,)](x, least, *kept[1:], x.numel(), room, TILE=TILE, num_warps=8)
    return kept


def collected(kept: Sieve, state: Tensor, above: Tensor, equal: Tensor, k: int, count: int) -> tuple[Tensor, Tensor]:
    """The places and values above the state's prefix, and the first of those that equal it, ``count`` in all.

    Args:
        kept: The sieve, which must hold k of them to be read.
        state: The prefix, and how many of those that equal it are taken.
        above: How many each tile holds above the prefix.
        equal: And how many equal it.
        k: See ``kept``.
        count: How many there are.
    """
    ends = torch.cumsum(torch.stack([above, equal]), dim=1, dtype=torch.int32)
    places = torch.empty(count, dtype=torch.int64, device=kept.x.device)
    values = torch.empty(count, dtype=torch.float32, device=kept.x.device)
    collect[(kept.tiles,)](
        *kept[:6], state, above, equal, ends, places, values, kept.x.numel(), kept.tiles, kept.room, k,
        TILE=TILE, CHUNK=CHUNK,
    )  # fmt: skip
    return places, values


def place(method: Sparsifier, values: Tensor, places: Tensor, shape: Shape) -> Tensor:
    """Zeros, and the values times the gain at their places, which are known to be below the number of elements."""
    out = torch.zeros(numel(shape), device=values.device)
    k = places.numel()
    if k:
        scatter[(triton.cdiv(k, 1024),)](values, places, out, float(method.gain(shape)), k, TILE=1024)
    return out


@triton.jit
def scatter(values, places, out, gain, k, TILE: tl.constexpr):
    """A tile of values times ``gain`` to its places."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < k
    value = tl.load(values + at, mask=inside, other=0.0)
    tl.store(out + tl.load(places + at, mask=inside, other=0), value * gain, mask=inside)


@triton.jit
def magnitudes_at(x, at, n):
    """The magnitudes at ``at``, 0 from n on: int32."""
    return tl.load(x + at, mask=at < n, other=0.0).to(tl.int32, bitcast=True) & SIGNLESS


@triton.jit
def highest(table, k, BINS: tl.constexpr):
    """The digit of the k-th largest number by how often each digit occurs (int32 [BINS]), and how many are larger."""
    reaching = tl.sum(table, axis=0) - tl.cumsum(table, axis=0) + table
    digit = tl.max(tl.where(reaching >= k, tl.arange(0, BINS), 0), axis=0)
    return digit, tl.sum(tl.where(tl.arange(0, BINS) > digit, table, 0), axis=0)


@triton.jit
def guess(x, least, state, n, sampled, rank, k, SAMPLE: tl.constexpr):
    """A bound that about ``rank`` of ``sampled`` elements all over x reach, of their first two digits; the state."""
    i = tl.arange(0, SAMPLE)
    within = (i * 40503 & 65535) % (n // sampled)  # no fixed distance, lest columns of a matrix fall into step with it
    inside = i < sampled
    bits = magnitudes_at(x, tl.where(inside, i.to(tl.int64) * n // sampled + within, n), n)
    first, above = highest(tl.histogram(bits >> 20, 2048, mask=inside), rank, 2048)
    inside = inside & (bits >> 20 == first)
    second, _ = highest(tl.histogram(bits >> 10 & 1023, 1024, mask=inside), rank - above, 1024)
    tl.store(least, first << 20 | second << 10)
    tl.store(state + PREFIX, 0)
    tl.store(state + REST, k)


@triton.jit
def sieve(x, least, places, keys, starts, counts, total, bad, n, room, TILE: tl.constexpr):
    """A tile's piece of what reaches ``least``."""
    tile = tl.program_id(0)
    local = tl.arange(0, TILE)
    bits = magnitudes_at(x, tile * TILE + local, n)
    if tl.max(bits, axis=0) >= INFINITY:
        tl.store(bad, 1)
    hit = (bits >= tl.load(least)) & (tile * TILE + local < n)
    found = tl.sum(hit.to(tl.int32), axis=0)
    start = tl.atomic_add(total, found, sem="relaxed")
    tl.store(starts + tile, start)
    tl.store(counts + tile, found)
    to = start + tl.cumsum(hit.to(tl.int32), axis=0) - 1
    fits = hit & (to < room)
    tl.store(places + to, local.to(tl.int16), mask=fits)
    tl.store(keys + to, bits, mask=fits)


@triton.jit
def misled(found, room, k):
    """Whether the sieve overflowed, or holds fewer than k."""
    return (tl.load(found) > room) | (tl.load(found) < k)


@triton.jit
def digits(bits, inside, prefix, SHIFT: tl.constexpr, BINS: tl.constexpr):
    """How often each digit at SHIFT occurs among those ``inside`` with ``prefix`` above it: int32 [BINS]."""
    digit = bits >> SHIFT
    return tl.histogram(digit & (BINS - 1), BINS, mask=inside & (digit // BINS == prefix))


@triton.jit
def count_digits(
    x, keys, found, state, table, n, room, k, step, SHIFT: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Add how often each digit occurs, in every so many tiles, among the magnitudes with the state's prefix above."""
    BINS: tl.constexpr = 1 << WIDTH
    prefix = tl.load(state + PREFIX)
    first = tl.program_id(0) * TILE
    seen = tl.zeros([BINS], dtype=tl.int32)
    if misled(found, room, k):
        for start in range(first, n, step):
            at = start + tl.arange(0, TILE)
            seen += digits(magnitudes_at(x, at, n), at < n, prefix, SHIFT, BINS)
    else:
        held = tl.load(found)
        for start in range(first, held, step):
            i = start + tl.arange(0, TILE)
            seen += digits(tl.load(keys + i, mask=i < held, other=0), i < held, prefix, SHIFT, BINS)
    tl.atomic_add(table + tl.arange(0, BINS), seen, mask=seen > 0, sem="relaxed")


@triton.jit
def locate(table, state, WIDTH: tl.constexpr):
    """Add the k-th largest's digit to the state's prefix."""
    BINS: tl.constexpr = 1 << WIDTH
    rest = tl.load(state + REST)
    digit, above = highest(tl.load(table + tl.arange(0, BINS)), rest, BINS)
    tl.store(state + PREFIX, tl.load(state + PREFIX) << WIDTH | digit)
    tl.store(state + REST, rest - above)


@triton.jit
def compare(
    x, keys, starts, counts, found, state, above, equal, n, room, k, TILE: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """How many of a tile's magnitudes lie above the state's prefix, and how many equal it."""
    tile = tl.program_id(0)
    kth = tl.load(state + PREFIX)
    if misled(found, room, k):
        at = tile * TILE + tl.arange(0, TILE)
        bits = tl.where(at < n, magnitudes_at(x, at, n), -1)
        tl.store(above + tile, tl.sum((bits > kth).to(tl.int32), axis=0))
        tl.store(equal + tile, tl.sum((bits == kth).to(tl.int32), axis=0))
    else:
        piece, count = keys + tl.load(starts + tile), tl.load(counts + tile)
        greater = tl.zeros([CHUNK], dtype=tl.int32)
        equals = tl.zeros([CHUNK], dtype=tl.int32)
        for start in range(0, count, CHUNK):
            i = start + tl.arange(0, CHUNK)
            key = tl.load(piece + i, mask=i < count, other=-1)
            greater += (key > kth).to(tl.int32)
            equals += (key == kth).to(tl.int32)
        tl.store(above + tile, tl.sum(greater, axis=0))
        tl.store(equal + tile, tl.sum(equals, axis=0))


@triton.jit
def collect(
    x, offsets, keys, starts, counts, found, state, above, equal, ends, places, values, n, tiles, room, k,
    TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write what a tile contributes; ``ends`` are the running sums of ``above`` and ``equal``, int32 [2, tiles]."""
    tile = tl.program_id(0)
    kth, ties = tl.load(state + PREFIX), tl.load(state + REST)
    greater = tl.load(ends + tile) - tl.load(above + tile)
    equals = tl.load(ends + tiles + tile) - tl.load(equal + tile)
    if misled(found, room, k):
        at = tile * TILE + tl.arange(0, TILE)
        bits = tl.where(at < n, magnitudes_at(x, at, n), -1)
        write(x, bits, at, kth, ties, greater, equals, places, values)
    else:
        begin, count = tl.load(starts + tile), tl.load(counts + tile)
        for start in range(0, count, CHUNK):
            i = start + tl.arange(0, CHUNK)
            key = tl.load(keys + begin + i, mask=i < count, other=-1)
            key_at = tile * TILE + tl.load(offsets + begin + i, mask=i < count, other=0).to(tl.int32)
            write(x, key, key_at, kth, ties, greater, equals, places, values)
            greater += tl.sum((key > kth).to(tl.int32), axis=0)
            equals += tl.sum((key == kth).to(tl.int32), axis=0)


@triton.jit
def write(x, bits, at, kth, ties, greater, equals, places, values):
    """Write those of the magnitudes ``bits`` of elements ``at`` that are sent, behind what is sent of those before.

    Those before hold ``greater`` above the k-th and ``equals`` that equal it, of which the first ``ties`` are sent.
    """
    equal = (bits == kth).to(tl.int32)
    before = equals + tl.cumsum(equal, axis=0) - equal
    sent = (bits > kth) | ((equal > 0) & (before < ties))
    to = greater + tl.minimum(equals, ties) + tl.cumsum(sent.to(tl.int32), axis=0) - 1
    tl.store(places + to, at.to(tl.int64), mask=sent)
    tl.store(values + to, tl.load(x + at, mask=sent, other=0.0), mask=sent)
