"""topk and threshold on CUDA; magnitudes as in `sparse.magnitudes`. topk takes all tensors at once, and reads x once.

A bound is guessed from a sample of each tensor. `sieve` keeps what reaches it, each tile by itself, so that nothing
waits for the tiles before; where a tensor keeps too few, everything of it. What is kept, a few elements in a hundred,
has its digits counted from the top (radix select), which gives the least magnitude that is sent. Sizes are known from
the forms, so the host waits for nothing.

threshold knows its bound and sends all that `sieve` keeps: one tensor at a time, as the host waits for their number, on
which the size depends.

The codes of places are one: LOW bits of each place, packed, then bits of a plane, set at ``STEP * i + (place >> LOW)``.
``bitmap`` has no low bits, and no step; ``int32`` has 32 low bits, and no plane.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.comm.compressors.base import Shape, as_numbers, numel
from gradwire.comm.compressors.indices import CODES, HEADER, CodeName, choose, rice_planes, unary_bits, without_header
from gradwire.comm.compressors.kernels import Kernel, alone
from gradwire.comm.compressors.kernels.cuda.segments import (
    COLUMNS,
    INFINITY,
    ONTO,
    SIGNLESS,
    TILE,
    Form,
    launch,
    load_floats,
    place,
    put,
    store_floats,
    tiles_of,
)
from gradwire.comm.compressors.methods.threshold import COUNT, Threshold
from gradwire.comm.compressors.methods.topk import TopK
from gradwire.comm.compressors.packing import packed_bytes
from gradwire.comm.compressors.segments import Segment, Segments

SAMPLE = 4096  # elements of a tensor from which its bound is guessed
GUESSED = tl.constexpr(20)  # bits of the bound, from the top
BYTES, BITS = 256, 2048  # of a head that a program writes, and of a plane that it reads
CHUNK = 128  # kept elements of a tile that are read at once
WIDTH, ROUNDS = tl.constexpr(8), tl.constexpr(4)  # bits of a digit, and digits of a magnitude
BINS = tl.constexpr(256)
LOW_BYTES = tl.constexpr(5)  # hold a place's low bits wherever they begin: up to 33 of them
FIELDS = tl.constexpr(8)  # of a tensor in `Plan.fields`
KEPT, FIRST, RANK, HEAD, CODE, LOW, LOWER, STEP = (tl.constexpr(column) for column in range(8))
LISTED = tl.constexpr(list(CODES).index("int32"))


# The least magnitude that is sent


@triton.jit
def magnitudes_at(x, offsets, mask):
    """Bits of magnitudes; -1 without the mask."""
    return tl.where(mask, tl.load(x + offsets, mask=mask, other=0.0).to(tl.int32, bitcast=True) & SIGNLESS, -1)


@triton.jit
def guess(x, table, fields, bounds, SAMPLE: tl.constexpr):
    """A bound that RANK of a sample reach, to GUESSED bits."""
    segment = tl.program_id(0).to(tl.int64)
    fields += FIELDS * segment
    start, n = tl.load(table + COLUMNS * segment), tl.load(table + COLUMNS * segment + 1)
    i = tl.arange(0, SAMPLE).to(tl.int64)
    sampled = tl.minimum(n, SAMPLE)
    stride = tl.maximum(n // tl.maximum(sampled, 1), 1)
    within = ((i * 40503) & 65535) % stride  # no fixed distance, lest columns of a matrix fall into step with it
    bits = magnitudes_at(x, start + i * n // tl.maximum(sampled, 1) + within, i < sampled)
    rank = tl.load(fields + RANK)
    bound = tl.zeros([1], tl.int32)
    for j in range(GUESSED):
        trial = bound | (1 << (30 - j))
        bound = tl.where(tl.sum((bits >= trial).to(tl.int32), axis=0) >= rank, trial, bound)
    tl.store(bounds + segment + tl.zeros([1], tl.int32), bound)


@triton.jit
def square(x, table, tiles, sums, ALIGN: tl.constexpr, TILE: tl.constexpr):
    """The sum of a tile's squares, in float64."""
    _, _, start, left, _, _ = place(table, tiles, ALIGN, TILE)
    offsets = tl.arange(0, TILE)
    values = tl.load(x + start + offsets, mask=offsets < left, other=0.0).to(tl.float64)
    tl.store(sums + tl.program_id(0), tl.sum(values * values, axis=0))


@triton.jit
def keep(x, start, left, bound, values, offsets, TILE: tl.constexpr):
    """Put what reaches the bound to the start of the tile's room; how many, and the largest magnitude."""
    local = tl.arange(0, TILE)
    value = tl.load(x + start + local, mask=local < left, other=0.0)
    bits = value.to(tl.int32, bitcast=True) & SIGNLESS
    kept = (bits >= bound) & (local < left)
    ends = tl.cumsum(kept.to(tl.int32), axis=0)
    room = tl.program_id(0).to(tl.int64) * TILE - 1
    tl.store(values + room + ends, value, mask=kept)
    tl.store(offsets + room + ends, local.to(tl.int16), mask=kept)
    return tl.sum(kept.to(tl.int32), axis=0), tl.max(bits, axis=0)


@triton.jit
def sieve(
    x, table, tiles, fields, bounds, totals, values, offsets, counts, bad,
    ALIGN: tl.constexpr, TILE: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Keep what reaches the bound; AGAIN: everything of the tensors of which fewer than KEPT do."""
    segment, _, start, left, _, _ = place(table, tiles, ALIGN, TILE)
    fields += FIELDS * segment
    if AGAIN:
        if tl.load(totals + segment) < tl.load(fields + KEPT):
            everything, most = keep(x, start, left, 0, values, offsets, TILE)
            tl.store(counts + tl.program_id(0), everything)
    else:
        count, most = keep(x, start, left, tl.load(bounds + segment), values, offsets, TILE)
        tl.store(counts + tl.program_id(0), count)
        tl.atomic_add(totals + segment, count.to(tl.int64), sem="relaxed")
        if most >= INFINITY:
            tl.store(bad + segment, 1)


@triton.jit
def least(digits, segment, rest, KNOWN: tl.constexpr):
    """The first KNOWN digits of the ``rest``-th largest magnitude, and which of those that begin alike it is."""
    bins = tl.arange(0, BINS)
    prefix = tl.zeros([1], tl.int32)
    for known in tl.static_range(KNOWN):
        occurring = tl.load(digits + (segment * ROUNDS + known) * BINS + bins)
        above = tl.sum(occurring, axis=0) - tl.cumsum(occurring, axis=0)
        digit = tl.max(tl.where(above + occurring >= rest, bins, 0), axis=0)
        prefix = prefix << WIDTH | digit
        rest -= tl.sum(tl.where(bins > digit, occurring, 0), axis=0)
    return prefix, rest


@triton.jit
def count_digits(
    values, table, tiles, fields, counts, digits, KNOWN: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Count the digits after the KNOWN ones of what a tile keeps."""
    tile = tl.program_id(0).to(tl.int64)
    segment, count = tl.load(tiles + 2 * tile).to(tl.int64), tl.load(counts + tile)
    fields += FIELDS * segment
    prefix, _ = least(digits, segment, tl.load(fields + KEPT), KNOWN)
    occurring = tl.zeros([BINS], tl.int32)
    for start in range(0, count, CHUNK):
        i = start + tl.arange(0, CHUNK)
        digit = magnitudes_at(values, tile * TILE + i, i < count) >> (WIDTH * (ROUNDS - 1 - KNOWN))
        alike = (i < count) & (digit >> WIDTH == prefix)
        occurring += tl.histogram(digit & (BINS - 1), BINS, mask=alike)
    bins = digits + (segment * ROUNDS + KNOWN) * BINS + tl.arange(0, BINS)
    tl.atomic_add(bins, occurring.to(tl.int64), mask=occurring > 0, sem="relaxed")


@triton.jit
def compare(values, table, tiles, fields, counts, digits, above, equal, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """How much of what a tile keeps is above the least magnitude, and how much equals it."""
    tile = tl.program_id(0).to(tl.int64)
    segment, count = tl.load(tiles + 2 * tile).to(tl.int64), tl.load(counts + tile)
    fields += FIELDS * segment
    bound, _ = least(digits, segment, tl.load(fields + KEPT), ROUNDS)
    greater, equals = tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32)
    for start in range(0, count, CHUNK):
        i = start + tl.arange(0, CHUNK)
        bits = magnitudes_at(values, tile * TILE + i, i < count)
        greater += (bits > bound).to(tl.int32)
        equals += (bits == bound).to(tl.int32)
    tl.store(above + tile, tl.sum(greater, axis=0))
    tl.store(equal + tile, tl.sum(equals, axis=0))


# Encoding


@triton.jit
def before(ends, counts, tile, first):
    """The sum of the counts of the tiles from ``first`` on before ``tile``, from their running sum."""
    return tl.load(ends + tile) - tl.load(counts + tile) - tl.load(ends + first) + tl.load(counts + first)


@triton.jit
def collect(
    values, table, tiles, fields, counts, digits, above, equal, ends, offsets, places, wire,
    ALIGN: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write what a tile sends, behind what the tiles before it do; of equal magnitudes the first ones are sent."""
    segment, of_segment, _, _, _, start = place(table, tiles, 1, TILE)
    fields += FIELDS * segment
    tile = tl.program_id(0).to(tl.int64)
    bound, ties = least(digits, segment, tl.load(fields + KEPT), ROUNDS)
    greater = before(ends, above, tile, tile - of_segment)
    equals = before(ends + tl.num_programs(0), equal, tile, tile - of_segment)
    first, head, count = tl.load(fields + FIRST), tl.load(fields + HEAD), tl.load(counts + tile)
    for begin in range(0, count, CHUNK):
        i = begin + tl.arange(0, CHUNK)
        inside = i < count
        value = tl.load(values + tile * TILE + i, mask=inside, other=0.0)
        offset = of_segment * TILE + tl.load(offsets + tile * TILE + i, mask=inside, other=0)
        bits = tl.where(inside, value.to(tl.int32, bitcast=True) & SIGNLESS, -1)
        tied = (bits == bound).to(tl.int64)
        sent = (bits > bound) | ((tied > 0) & (equals + tl.cumsum(tied, axis=0) <= ties))
        order = greater + tl.minimum(equals, ties) + tl.cumsum(sent.to(tl.int64), axis=0) - 1
        tl.store(places + first + order, offset, mask=sent)
        store_floats(wire + start + head, order, value, sent, ALIGN)
        greater += tl.sum((bits > bound).to(tl.int64), axis=0)
        equals += tl.sum(tied, axis=0)


@triton.jit
def write_places(places, table, tiles, fields, wire, TILE: tl.constexpr):
    """A tile of a head's bytes."""
    segment, tile, start, left, _, _ = place(table, tiles, 1, TILE)
    fields += FIELDS * segment
    k, low = tl.load(fields + KEPT), tl.load(fields + LOW)
    lower, step = tl.load(fields + LOWER), tl.load(fields + STEP)
    places += tl.load(fields + FIRST)
    byte = tile * TILE + tl.arange(0, TILE) - 1  # after the one that names the code
    inside = tl.arange(0, TILE) < left
    packed = tl.zeros([TILE], tl.int32)
    for lane in tl.static_range(8):
        bit = byte * 8 + lane
        owner = bit // tl.maximum(low, 1)
        taken = tl.load(places + owner, mask=inside & (byte >= 0) & (byte < lower) & (owner < k), other=0)
        packed |= ((taken >> (bit - owner * low)) & 1).to(tl.int32) << lane
    # positions of the plane's bits ascend: bisect for the first one in each byte, which holds eight at most
    bit = (byte - lower) * 8
    searched = inside & (bit >= 0)
    least, most = tl.zeros([TILE], tl.int64), tl.zeros([TILE], tl.int64) + k
    reach = k
    while reach > 0:
        middle = (least + most) // 2
        position = step * middle + (tl.load(places + middle, mask=searched & (middle < most), other=0) >> low)
        below = (middle < most) & (position < bit)
        most = tl.where(below, most, middle)
        least = tl.where(below, middle + 1, least)
        reach = reach // 2
    for lane in tl.static_range(8):
        i = least + lane
        there = searched & (i < k)
        position = step * i + (tl.load(places + i, mask=there, other=0) >> low) - bit
        packed |= tl.where(there & (position < 8), 1 << position.to(tl.int32), 0)
    packed = tl.where(byte < 0, tl.load(fields + CODE).to(tl.int32), packed)
    tl.store(wire + start + tl.arange(0, TILE), packed.to(tl.uint8), mask=inside)


# Decoding


@triton.jit
def clear(out, table, tiles, TILE: tl.constexpr):
    """Zeros in a tile."""
    _, _, start, left, _, _ = place(table, tiles, 1, TILE)
    tl.store(out + start + tl.arange(0, TILE), tl.zeros([TILE], tl.float32), mask=tl.arange(0, TILE) < left)


@triton.jit
def plane(wire, table, tiles, fields, TILE: tl.constexpr):
    """A tile of a plane's bits, int32 [TILE], all of them set where there is none; its segment and first bit."""
    segment, tile, start, left, _, _ = place(table, tiles, 1, TILE)
    fields += FIELDS * segment
    offsets = tl.arange(0, TILE)
    byte = start - tile * TILE + (tile * TILE + offsets) // 8
    listed = tl.load(fields + CODE) == LISTED
    inside = offsets < left
    packed = tl.load(wire + byte, mask=inside & (listed == 0), other=255).to(tl.int32)
    return tl.where(inside, (packed >> (offsets & 7)) & 1, 0), segment, tile


@triton.jit
def count_bits(wire, table, tiles, fields, counts, TILE: tl.constexpr):
    """How many bits of a tile are set."""
    bits, _, _ = plane(wire, table, tiles, fields, TILE)
    tl.store(counts + tl.program_id(0), tl.sum(bits, axis=0))


@triton.jit
def find(wire, table, tiles, fields, counts, ends, tensors, TILE: tl.constexpr):
    """Of a tile's bits the order among the plane's set ones, whether each is a place's, and that place; the tensor."""
    bits, segment, tile = plane(wire, table, tiles, fields, TILE)
    fields += FIELDS * segment
    this = tl.program_id(0).to(tl.int64)
    i = before(ends, counts, this, this - tile) + tl.cumsum(bits, axis=0) - bits
    inside = (bits > 0) & (i < tl.load(fields + KEPT))
    n, head = tl.load(tensors + COLUMNS * segment + 1), tl.load(tensors + COLUMNS * segment + 2)
    low = tl.load(fields + LOW)
    word = tl.zeros([TILE], tl.int64)
    for lane in tl.static_range(LOW_BYTES):
        byte = i * low // 8 + lane
        there = inside & (byte < tl.load(fields + LOWER))
        word |= tl.load(wire + head + 1 + byte, mask=there, other=0).to(tl.int64) << (8 * lane)
    remainder = (word >> (i * low % 8)) & ((1 << low) - 1)
    quotient = tile * TILE + tl.arange(0, TILE) - tl.load(fields + STEP) * i
    return i, inside, tl.minimum(quotient << low | remainder, n - 1), segment


@triton.jit
def read(
    wire, table, tiles, fields, counts, ends, tensors, out,
    ALIGN: tl.constexpr, ONTO: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The values whose places have a bit in a tile of the plane; what is corrupt stays inside the tensor."""
    i, inside, offset, segment = find(wire, table, tiles, fields, counts, ends, tensors, TILE)
    start, head = tl.load(tensors + COLUMNS * segment), tl.load(tensors + COLUMNS * segment + 2)
    values = load_floats(wire + head + tl.load(fields + FIELDS * segment + HEAD), i, inside, ALIGN)
    put(out + start, offset, values, inside, ONTO)


@triton.jit
def read_places(wire, table, tiles, fields, counts, ends, tensors, places, TILE: tl.constexpr):
    """The places of a single tensor that have a bit in a tile of the plane."""
    i, inside, offset, _ = find(wire, table, tiles, fields, counts, ends, tensors, TILE)
    tl.store(places + i, offset, mask=inside)


# The host's part


class Plan(NamedTuple):
    """What the forms of the tensors give.

    Attributes:
        fields: Of each tensor KEPT to STEP: int64 [tensors, FIELDS].
        kept: The sum of KEPT.
        heads: The bytes of the heads.
        planes: Of each plane the first byte, and as elements its bits.
        numbers: A divisor of 16 and of the bytes at which tensors begin and end.
        values: The same of the bytes at which sent values begin.
    """

    fields: Tensor
    kept: int
    heads: Segments
    planes: Segments
    numbers: int
    values: int


def plan_of(method: TopK, segments: Segments, device: torch.device) -> Plan:
    """The plan of a table."""

    def make() -> Plan:
        return plan_for([method.kept(segment.numel) for segment in segments], method.indices, segments, device)

    return segments.derive(("plan", method, device), make)


def plan_for(kept: Sequence[int], named: CodeName, segments: Segments, device: torch.device) -> Plan:
    """The plan of tensors that send so many elements each."""
    fields, heads, planes, first = [], [], [], 0
    for segment, k in zip(segments, kept, strict=True):
        n = segment.numel
        code, low, lower, bits, step = code_of(n, k, named)
        head = HEADER + lower + packed_bytes(bits, 1) * (code != LISTED.value)
        fields.append((k, first, rank_of(k, n), head, code, low, lower, step))
        heads.append(Segment(segment.at, (head,), 0, 0))
        planes.append(Segment(segment.at + HEADER + lower, (bits,), 0, 0))
        first += k
    return Plan(
        torch.tensor(fields, dtype=torch.int64, device=device).view(-1, FIELDS.value),
        first,
        Segments(heads),
        Segments(planes),
        math.gcd(16, *(4 * number for segment in segments for number in (segment.start, segment.numel))),
        math.gcd(16, *(head.at + head.numel for head in heads)),
    )


def code_of(n: int, k: int, code: CodeName) -> tuple[int, int, int, int, int]:
    """The code of k places below n: its number, LOW, LOWER, the bits of the plane (of ``int32``: k), and STEP."""
    chosen = choose(n, k, code)
    number = list(CODES).index(chosen)
    if chosen == "int32":
        return number, 32, 4 * k, k, 1
    if chosen == "bitmap":
        return number, 0, 0, n, 0
    low, lower, _ = rice_planes(n, k)
    return number, low, lower, unary_bits(n, k, low), 1


def rank_of(k: int, n: int) -> int:
    """How many of a sample the bound is to let pass, lest fewer than ``k`` of ``n`` reach it."""
    sampled = min(n, SAMPLE)
    expected = k * sampled / max(n, 1)
    return min(sampled, int(expected + 4 * math.sqrt(expected)) + 5)


class Kept(NamedTuple):
    """Elements that passed a bound, those of each tile at the start of its room.

    Attributes:
        values: Of each tile TILE.
        offsets: Inside the tile: int16.
        counts: Of each tile: int32.
        sent: How many of each tile are above the least magnitude that is sent, and equal to it: int32 [2, tiles].
    """

    values: Tensor
    offsets: Tensor
    counts: Tensor
    sent: Tensor

    @classmethod
    def room(cls, segments: Segments, device: torch.device) -> Kept:
        """Room for all elements of a table."""
        tiles = len(tiles_of(segments, TILE, device))
        numbers = torch.empty(3, tiles, dtype=torch.int32, device=device)
        return cls(
            torch.empty(tiles * TILE, dtype=torch.float32, device=device),
            torch.empty(tiles * TILE, dtype=torch.int16, device=device),
            numbers[0],
            numbers[1:],
        )


def no_digits(segments: Segments, device: torch.device) -> Tensor:
    """Counts of digits before any is counted: the least magnitude is then 0."""
    return torch.zeros(len(segments), ROUNDS.value, BINS.value, dtype=torch.int64, device=device)


def write(kept: Kept, digits: Tensor, plan: Plan, segments: Segments, wire: Tensor) -> None:
    """Write the places and the values that are sent."""
    places = torch.empty(plan.kept, dtype=torch.int64, device=wire.device)
    ends = kept.sent.cumsum(1, dtype=torch.int64)
    launch(
        collect, segments, TILE, kept.values, plan.fields, kept.counts, digits, *kept.sent, ends, kept.offsets, places,
        wire, ALIGN=math.gcd(plan.values, wire.data_ptr()), CHUNK=CHUNK, num_warps=1,
    )  # fmt: skip
    launch(write_places, plan.heads, BYTES, places, plan.fields, wire)


def read_plane(kernel: Any, plan: Plan, segments: Segments, wire: Tensor, out: Tensor, **options: int) -> None:
    """Count the planes' bits and run `read` or `read_places`."""
    counts = torch.empty(len(tiles_of(plan.planes, BITS, wire.device)), dtype=torch.int32, device=wire.device)
    launch(count_bits, plan.planes, BITS, wire, plan.fields, counts)
    ends, table = counts.cumsum(0, dtype=torch.int64), segments.table(wire.device)
    launch(kernel, plan.planes, BITS, wire, plan.fields, counts, ends, table, out, num_warps=8, **options)


class Selecting(Form):
    """topk."""

    def encode(
        self,
        method: TopK,
        x: Tensor,
        segments: Segments,
        wire: Tensor,
        generators: Sequence[torch.Generator | None],
        bad: Tensor,
    ) -> None:
        """Ten launches, whatever the number of tensors."""
        device, tensors = x.device, len(segments)
        plan, kept = plan_of(method, segments, device), Kept.room(segments, device)
        fields = plan.fields
        bounds = torch.empty(tensors, dtype=torch.int32, device=device)
        totals = torch.zeros(tensors, dtype=torch.int64, device=device)
        digits = no_digits(segments, device)
        if tensors:
            guess[(tensors,)](x, segments.table(device), fields, bounds, SAMPLE=SAMPLE, num_warps=8)
        for again in (False, True):
            launch(
                sieve, segments, TILE, x, fields, bounds, totals, kept.values, kept.offsets, kept.counts, bad,
                ALIGN=math.gcd(plan.numbers, x.data_ptr()), AGAIN=again, num_warps=16,
            )  # fmt: skip
        for known in range(ROUNDS.value):
            launch(
                count_digits, segments, TILE, kept.values, fields, kept.counts, digits,
                KNOWN=known, CHUNK=CHUNK, num_warps=1,
            )  # fmt: skip
        launch(compare, segments, TILE, kept.values, fields, kept.counts, digits, *kept.sent, CHUNK=CHUNK, num_warps=1)
        write(kept, digits, plan, segments, wire)

    def decode(self, method: TopK, wire: Tensor, segments: Segments, out: Tensor, onto: str) -> None:
        """Zeros if nothing is added to, and the values at their places."""
        plan = plan_of(method, segments, wire.device)
        if onto in ("zero", "blank"):
            launch(clear, segments, TILE, out)
        read_plane(read, plan, segments, wire, out, ALIGN=math.gcd(plan.values, wire.data_ptr()), ONTO=ONTO[onto].value)

    def pick(self, method: TopK, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
        """Head, values, and whether x is not finite."""
        segments = alone(method, tuple(x.shape))
        wire = torch.empty(segments.nbytes or 0, dtype=torch.uint8, device=x.device)
        bad = torch.zeros(1, dtype=torch.uint8, device=x.device)
        self.encode(method, x.view(-1), segments, wire, [generator], bad)
        values = wire.numel() - 4 * method.kept(x.numel())
        return wire[:values], as_numbers(wire[values:], torch.float32), bad


# threshold


@lru_cache(4096)
def counted(n: int) -> Segments:
    """A table of one tensor, encoded behind the number of its places."""
    return Segments([Segment(0, (n,), COUNT, None)])


def least_of(method: Threshold, x: Tensor, align: int) -> Tensor:
    """`Threshold.least`, for which the squares of x are read once: int32 [1]."""
    if method.scale != "rms" or not x.numel():
        return method.least(x).view(1)
    segments = counted(x.numel())
    sums = torch.empty(len(tiles_of(segments, TILE, x.device)), dtype=torch.float64, device=x.device)
    launch(square, segments, TILE, x, sums, ALIGN=align)
    return method.least_for((sums.sum() / x.numel()).sqrt_()).view(1)


def pick_threshold(method: Threshold, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
    """Head, values, and whether x is not finite; the host waits once, for how many are sent."""
    segments, align = counted(x.numel()), math.gcd(16, 4 * x.numel(), x.data_ptr())
    kept, bounds = Kept.room(segments, x.device), least_of(method, x, align)
    total = torch.zeros(1, dtype=torch.int64, device=x.device)
    bad = torch.zeros(1, dtype=torch.uint8, device=x.device)
    launch(
        sieve, segments, TILE, x, bounds, bounds, total, kept.values, kept.offsets, kept.counts, bad,
        ALIGN=align, AGAIN=False, num_warps=16,
    )  # fmt: skip
    kept.sent[0], kept.sent[1] = kept.counts, 0
    plan = plan_for([int(total)], method.indices, segments, x.device)
    head = COUNT + plan.heads[0].numel
    wire = torch.empty(head + 4 * plan.kept, dtype=torch.uint8, device=x.device)
    wire[:COUNT] = total.view(torch.uint8)
    write(kept, no_digits(segments, x.device), plan, segments, wire)
    return wire[:head], as_numbers(wire[head:], torch.float32), bad


def threshold_places(method: Threshold, wire: Tensor, shape: Shape) -> tuple[Tensor, int]:
    """Read the number and the code of the places."""
    n, k = numel(shape), method.count(wire, shape)
    without_header(wire[COUNT:], n, k, method.indices)  # refuses too few bytes
    plan = plan_for([k], method.indices, counted(n), wire.device)
    places = torch.zeros(k, dtype=torch.int64, device=wire.device)
    read_plane(read_places, plan, counted(n), wire, places)
    return places, COUNT + plan.heads[0].numel


selecting = Selecting()
KERNELS = {
    "topk": Kernel(
        lambda method: True,
        encode_many=selecting.encode_many,
        decode_add=selecting.decode_add,
        pick=selecting.pick,
    ),
    "threshold": Kernel(
        lambda method: True,
        pick=pick_threshold,
        places=threshold_places,
    ),
}
