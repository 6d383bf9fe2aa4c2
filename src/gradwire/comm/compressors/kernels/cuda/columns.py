"""onebit by columns, on CUDA: x is read once, by strips of lanes; a lane holds elements of one column.

A matrix of w columns is taken as rows of lcm(w, LANES) lanes, so that strips begin at whole bytes of signs, and narrow
matrices fill them. A strip is LANES wide and DEPTH rows deep; its lanes' sums are added up by columns, in one order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.comm.compressors.kernels.cuda.segments import (
    INFINITY,
    ONTO,
    SIGNLESS,
    Form,
    launch,
    load_floats,
    place,
    put,
    store_floats,
)
from gradwire.comm.compressors.methods.onebit import OneBit
from gradwire.comm.compressors.segments import Segment, Segments

LANES, ROWS = 128, 16  # that a program reads at once; the signs of eight lanes are a byte
DEPTH, STRIPS = 256, 1024  # rows of a strip (more in a high matrix), and most strips one below the other
AVERAGED, SUMS = 8, 256  # columns that a program averages, and sums of each that it reads at once
FIELDS = tl.constexpr(5)  # of a tensor in `Plan.fields`
NUMEL, WIDTH, PERIOD, DEEP, HELD = (tl.constexpr(column) for column in range(5))


@triton.jit
def strip(table, tiles, fields, ALIGN: tl.constexpr, TILE: tl.constexpr):
    """A tensor's first element, byte of signs, period, width; a strip's first element in it, how many follow, rows."""
    segment, tile, start, _, _, signs = place(table, tiles, ALIGN, TILE)
    fields += FIELDS * segment
    period, depth = tl.multiple_of(tl.load(fields + PERIOD), TILE), tl.load(fields + DEEP)
    across = period // TILE
    first = tile // across * depth * period + tile % across * TILE
    left = tl.load(fields + NUMEL) - first
    if ALIGN >= 16:
        left = tl.multiple_of(left, 4)
    rows = tl.minimum(tl.cdiv(left, period), depth)
    return start - tile * TILE, signs, period, tl.load(fields + WIDTH), first, left, rows


@triton.jit
def encode(
    x, table, tiles, fields, sums, total, wire,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A strip's signs; of each lane the sums (float64) of both sides, and the number of negative elements."""
    start, signs, period, _, first, left, rows = strip(table, tiles, fields, ALIGN, TILE)
    high, low = tl.zeros([ROWS, TILE], tl.float64), tl.zeros([ROWS, TILE], tl.float64)
    negatives = tl.zeros([ROWS, TILE], tl.int32)
    for row in range(0, rows, ROWS):
        begins = (row + tl.arange(0, ROWS))[:, None] * period
        i, bytes = begins + tl.arange(0, TILE)[None, :], begins // 8 + tl.arange(0, TILE // 8)[None, :]
        values = tl.load(x + start + first + i, mask=i < left, other=0.0)
        below = (values < 0).to(tl.int32)
        wide = values.to(tl.float64)
        high += tl.where(below == 1, 0.0, wide)
        low += tl.where(below == 1, wide, 0.0)
        negatives += below
        bits = tl.reshape(below, [ROWS, TILE // 8, 8]) << tl.arange(0, 8)[None, None, :]
        tl.store(wire + signs + first // 8 + bytes, tl.sum(bits, axis=2).to(tl.uint8), mask=bytes * 8 < left)
    sums += tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(sums, tl.sum(high, axis=0))
    tl.store(sums + total, tl.sum(low, axis=0))
    tl.store(sums + 2 * total, tl.sum(negatives, axis=0).to(tl.float64))


@triton.jit
def average(sums, table, tiles, fields, total, wire, bad, ALIGN: tl.constexpr, SUMS: tl.constexpr, TILE: tl.constexpr):
    """The means of a tile of columns (float32, in pairs, 0 for an empty side); sets ``bad`` where one is not finite."""
    segment, tile, start, left, width, head = place(table, tiles, 1, TILE)
    fields += FIELDS * segment
    columns, held = tl.arange(0, TILE), tl.load(fields + HELD) - tile * TILE
    for side in tl.static_range(2):
        side_sums, negatives = tl.zeros([SUMS, TILE], tl.float64), tl.zeros([SUMS, TILE], tl.float64)
        for row in range(0, tl.cdiv(held, width), SUMS):
            i = (row + tl.arange(0, SUMS))[:, None] * width + columns[None, :]
            mask = (i < held) & (columns < left)[None, :]
            side_sums += tl.load(sums + side * total + start + i, mask=mask, other=0.0)
            negatives += tl.load(sums + 2 * total + start + i, mask=mask, other=0.0)
        count = tl.sum(negatives, axis=0)
        if side == 0:
            count = tl.load(fields + NUMEL) // width - count
        mean = (tl.sum(side_sums, axis=0) / tl.maximum(count, 1.0)).to(tl.float32)
        store_floats(wire + head + 8 * tile * TILE, 2 * columns + side, mean, columns < left, ALIGN)
        if tl.max(mean.to(tl.int32, bitcast=True) & SIGNLESS, axis=0) >= INFINITY:
            tl.store(bad + segment, 1)


@triton.jit
def decode(
    wire, table, tiles, fields, out,
    ALIGN: tl.constexpr, ONTO: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A strip of numbers, whose means stay in registers."""
    start, signs, period, width, first, left, rows = strip(table, tiles, fields, ALIGN, TILE)
    lanes = tl.arange(0, TILE)
    pairs = 2 * ((first + lanes) % width)
    rest = load_floats(wire + signs - 8 * width, pairs, lanes < left, ALIGN)[None, :]
    negative = load_floats(wire + signs - 8 * width, pairs + 1, lanes < left, ALIGN)[None, :]
    for row in range(0, rows, ROWS):
        begins = (row + tl.arange(0, ROWS))[:, None] * period
        i, bytes = begins + lanes[None, :], begins // 8 + tl.arange(0, TILE // 8)[None, :]
        packed = tl.load(wire + signs + first // 8 + bytes, mask=bytes * 8 < left, other=0).to(tl.int32)
        below = tl.reshape((packed[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1, [ROWS, TILE])
        put(out + start + first, i, tl.where(below == 1, negative, rest), i < left, ONTO)


class Plan(NamedTuple):
    """What the forms of the tensors give.

    Attributes:
        fields: Of each tensor NUMEL to HELD: int64 [tensors, FIELDS].
        strips: Of each tensor first element and byte of signs; as elements the sums that its lanes' strips hold.
        means: Of each tensor first sum, columns, and first byte.
        align: A divisor of 16 and of the bytes at which tensors begin and end, means and signs begin.
    """

    fields: Tensor
    strips: Segments
    means: Segments
    align: int


def plan_of(segments: Segments, device: torch.device) -> Plan:
    """The plan of a table."""

    def make() -> Plan:
        fields, strips, means, first, edges = [], [], [], 0, [16]
        for start, n, at, _, width in segments.rows:
            period = min(math.lcm(width, LANES), max(1, triton.cdiv(n, LANES)) * LANES)
            depth = max(DEPTH, triton.cdiv(n, period * STRIPS * ROWS) * ROWS)
            held = period * triton.cdiv(n, period * depth)
            fields.append((n, width, period, depth, held))
            strips.append(Segment(start, (held,), at + 8 * width, 0))
            means.append(Segment(first, (width,), at, 0))
            edges += [4 * start, 4 * n, at, 8 * width]
            first += held
        numbers = torch.tensor(fields, dtype=torch.int64, device=device).view(-1, FIELDS.value)
        return Plan(numbers, Segments(strips), Segments(means), math.gcd(*edges))

    return segments.derive(("columns", device), make)


class ByColumns(Form):
    """onebit by columns: two launches to encode, one to decode."""

    def encode(
        self, method: OneBit, x: Tensor, segments: Segments, wire: Tensor, generators: Sequence[Any], bad: Tensor
    ) -> None:
        """Signs and sums of strips, then the means."""
        plan = plan_of(segments, x.device)
        total = sum(strip.numel for strip in plan.strips)
        sums = torch.empty(3 * total, dtype=torch.float64, device=x.device)
        align = math.gcd(plan.align, x.data_ptr(), wire.data_ptr())
        launch(encode, plan.strips, LANES, x, plan.fields, sums, total, wire, ALIGN=align, ROWS=ROWS)
        launch(average, plan.means, AVERAGED, sums, plan.fields, total, wire, bad, ALIGN=align, SUMS=SUMS)

    def decode(self, method: OneBit, wire: Tensor, segments: Segments, out: Tensor, onto: str) -> None:
        """Means by signs."""
        plan = plan_of(segments, wire.device)
        launch(
            decode, plan.strips, LANES, wire, plan.fields, out,
            ALIGN=math.gcd(plan.align, out.data_ptr(), wire.data_ptr()), ONTO=ONTO[onto].value, ROWS=ROWS,
        )  # fmt: skip
