"""The count-sketch on a CPU core: a tile's columns are computed first, then its elements are added or looked up."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.comm.compressors.kernels.cpu import compiled
from gradwire.comm.compressors.kernels.cpu.philox import fill_words
from gradwire.comm.compressors.kernels.cpu.selection import largest_places
from gradwire.comm.compressors.methods.sketch import Sketch

TILE = 1024
HALF = np.uint64(32)
FIRST_BIT = np.uint32(0x80000000)


def covers(method: Sketch) -> bool:
    """All options."""
    return True


def to_wire(method: Sketch, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """The wire, and whether the table is not finite."""
    return method.write(table, x, generator)


def from_wire(method: Sketch, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The largest estimates."""
    return method.read(largest, wire, shape)


def table(method: Sketch, x: Tensor, seed: Tensor) -> Tensor:
    """The sketch of ``x``: float32 [rows, columns]."""
    sums = torch.zeros(method.rows, method.columns(x.shape), dtype=torch.float64)
    add(x.view(-1).numpy(), multipliers(method, seed), sums.numpy())
    return sums.to(torch.float32)


def largest(method: Sketch, table: Tensor, seed: Tensor, count: int, keep: int) -> tuple[Tensor, Tensor]:
    """Where the estimates of ``count`` elements are largest, rising (int64 [keep]), and what they are there."""
    estimates = torch.empty(count)
    estimate(table.numpy(), multipliers(method, seed), estimates.numpy())
    places = torch.from_numpy(largest_places(estimates.numpy().view(np.int32), keep)[0])
    return places, estimates[places]


def multipliers(method: Sketch, seed: Tensor) -> np.ndarray:
    """The method's: uint64 [rows, 4]."""
    numbers = np.empty(8 * method.rows, np.uint32)
    fill_words(seed.item(), 0, numbers)
    return numbers.view(np.uint64).reshape(-1, 4)


@compiled
def hash_tile(numbers: np.ndarray, start: int, columns: np.uint64, column: np.ndarray, flip: np.ndarray) -> None:
    """A row's columns (uint32) of the elements from ``start`` on, and the first bit (uint32) where the sign is -1."""
    a, b, c, d = numbers[0], numbers[1], numbers[2], numbers[3]
    for i in range(column.size):
        key = np.uint64(start + i)
        column[i] = np.uint32((np.uint64((a * key + b) >> HALF) * columns) >> HALF)
        flip[i] = np.uint32((c * key + d) >> HALF) & FIRST_BIT


@compiled
def add(x: np.ndarray, numbers: np.ndarray, sums: np.ndarray) -> None:
    """Add each of ``x`` (float32 [n]) to one column of every row of ``sums`` (float64 [rows, columns])."""
    column, flip, signed = np.empty(TILE, np.uint32), np.empty(TILE, np.uint32), np.empty(TILE, np.float32)
    for row in range(sums.shape[0]):
        for start in range(0, x.size, TILE):
            size = min(TILE, x.size - start)
            hash_tile(numbers[row], start, np.uint64(sums.shape[1]), column[:size], flip[:size])
            flip_tile(x[start : start + size].view(np.uint32), flip, signed.view(np.uint32))
            add_tile(signed[:size], column, sums[row])


@compiled
def flip_tile(x: np.ndarray, flip: np.ndarray, out: np.ndarray) -> None:
    """Change the signs of a tile's numbers, given as bits."""
    for i in range(x.size):
        out[i] = x[i] ^ flip[i]


@compiled
def add_tile(signed: np.ndarray, column: np.ndarray, sums: np.ndarray) -> None:
    """Add each element to its column, in order."""
    for i in range(signed.size):
        sums[column[i]] += np.float64(signed[i])


@compiled
def estimate(table: np.ndarray, numbers: np.ndarray, estimates: np.ndarray) -> None:
    """Fill ``estimates`` (float32 [n]) with medians over rows."""
    rows = table.shape[0]
    column, flip = np.empty(TILE, np.uint32), np.empty(TILE, np.uint32)
    says = np.empty((rows, TILE), np.float32)
    for start in range(0, estimates.size, TILE):
        size = min(TILE, estimates.size - start)
        for row in range(rows):
            hash_tile(numbers[row], start, np.uint64(table.shape[1]), column[:size], flip[:size])
            look_up(table[row].view(np.uint32), column[:size], flip[:size], says[row].view(np.uint32))
        for last in range(rows - 1, rows // 2 - 1, -1):  # the largest of rows 0 to last moves to row last
            for row in range(last):
                exchange(says[row], says[row + 1])
        estimates[start : start + size] = says[rows // 2, :size]


@compiled
def look_up(table: np.ndarray, column: np.ndarray, flip: np.ndarray, out: np.ndarray) -> None:
    """What one row says of a tile's elements; all as bits."""
    for i in range(column.size):
        out[i] = table[column[i]] ^ flip[i]


@compiled
def exchange(low: np.ndarray, high: np.ndarray) -> None:
    """Put the smaller of each pair into ``low`` and the larger into ``high``."""
    for i in range(low.size):
        a, b = low[i], high[i]
        swapped = a > b
        low[i] = b if swapped else a
        high[i] = a if swapped else b
