"""The count-sketch on CUDA: one pass over x adds to all rows, one pass estimates; torch selects the largest."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.comm.compressors.kernels.cuda.shared import random_words
from gradwire.comm.compressors.methods.sketch import Sketch, where_largest

TILE = 1024


def covers(method: Sketch) -> bool:
    """Rows whose median is written out below."""
    return method.rows <= 5


def to_wire(method: Sketch, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """The wire, and whether the table is not finite."""
    return method.write(table, x, generator)


def from_wire(method: Sketch, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The largest estimates."""
    return method.read(largest, wire, shape)


def table(method: Sketch, x: Tensor, seed: Tensor) -> Tensor:
    """The sketch of ``x``: float32 [rows, columns]."""
    columns = method.columns(x.shape)
    sums = torch.zeros(method.rows, columns, dtype=torch.float64, device=x.device)
    add[(triton.cdiv(x.numel(), TILE),)](
        x, multipliers(method, seed), sums, x.numel(), columns, ROWS=method.rows, TILE=TILE
    )
    return sums.to(torch.float32)


def largest(method: Sketch, table: Tensor, seed: Tensor, count: int, keep: int) -> tuple[Tensor, Tensor]:
    """Where the estimates of ``count`` elements are largest, rising (int64 [keep]), and what they are there."""
    estimates = torch.empty(count, device=table.device)
    estimate[(triton.cdiv(count, TILE),)](
        table, multipliers(method, seed), estimates, count, table.shape[1], ROWS=method.rows, TILE=TILE
    )
    return where_largest(estimates, keep)


def multipliers(method: Sketch, seed: Tensor) -> Tensor:
    """The method's, by one launch: int64 [rows, 4]."""
    numbers = torch.empty(method.rows, 4, dtype=torch.int64, device=seed.device)
    draw[(1,)](seed, numbers, numbers.numel(), COUNT=triton.next_power_of_2(numbers.numel()))
    return numbers


@triton.jit
def draw(seed, numbers, count, COUNT: tl.constexpr):
    """Pairs of words as 64-bit numbers, the lower word first."""
    at = tl.arange(0, COUNT)
    low, high = tl.split(tl.reshape(random_words(tl.load(seed), 0, 2 * COUNT), [COUNT, 2]))
    tl.store(numbers + at, high.to(tl.int64) << 32 | low.to(tl.int64), mask=at < count)


@triton.jit
def column_of(numbers, at, columns):
    """The column of elements ``at`` in the row with these numbers: int64."""
    upper = ((tl.load(numbers) * at + tl.load(numbers + 1)) >> 32).to(tl.uint32)
    return upper.to(tl.int64) * columns >> 32


@triton.jit
def signed(numbers, at, x):
    """``x`` times the sign of elements ``at`` in the row with these numbers."""
    return tl.where(tl.load(numbers + 2) * at + tl.load(numbers + 3) < 0, -x, x)


@triton.jit
def add(x, numbers, sums, n, columns, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Add a tile to all rows."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    value = tl.load(x + at, mask=at < n, other=0.0)
    for row in tl.static_range(ROWS):
        column = column_of(numbers + 4 * row, at, columns)
        exact = signed(numbers + 4 * row, at, value).to(tl.float64)
        tl.atomic_add(sums + row * columns + column, exact, mask=at < n, sem="relaxed")


@triton.jit
def say(table, numbers, at, columns, n, ROW: tl.constexpr):
    """What a row says of elements ``at``."""
    column = column_of(numbers + 4 * ROW, at, columns)
    return signed(numbers + 4 * ROW, at, tl.load(table + ROW * columns + column, mask=at < n, other=0.0))


@triton.jit
def median(a, b, c):
    """The middle one of three."""
    return tl.maximum(tl.minimum(a, b), tl.minimum(tl.maximum(a, b), c))


@triton.jit
def estimate(table, numbers, out, n, columns, ROWS: tl.constexpr, TILE: tl.constexpr):
    """The medians of a tile."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    result = say(table, numbers, at, columns, n, 0)
    if ROWS >= 3:
        b = say(table, numbers, at, columns, n, 1)
        c = say(table, numbers, at, columns, n, 2)
        if ROWS == 3:
            result = median(result, b, c)
        else:
            d = say(table, numbers, at, columns, n, 3)
            e = say(table, numbers, at, columns, n, 4)
            low = tl.maximum(tl.minimum(result, b), tl.minimum(c, d))
            high = tl.minimum(tl.maximum(result, b), tl.maximum(c, d))
            result = median(low, high, e)
    tl.store(out + at, result, mask=at < n)
