"""onebit on a CPU core: x is read from memory once, a tile at a time, whether its groups are blocks or columns."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.compressors.base import Shape, as_numbers, numel
from gradwire.compressors.kernels.cpu import compiled, summing
from gradwire.compressors.kernels.cpu.packing import TILE, pack_tile, unpack_tile
from gradwire.compressors.kernels.cpu.signsgd import choose, mark_negative
from gradwire.compressors.methods.onebit import OneBit, columns


def covers(method: OneBit) -> bool:
    """All options."""
    return True


def to_wire(method: OneBit, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """The wire, and whether a mean is not finite."""
    wire = torch.empty(method.wire_bytes(x.shape), dtype=torch.uint8)
    head, packed = wire.tensor_split([8 * method.groups(x.shape)])
    values, means = x.view(-1).numpy(), head.view(torch.float32).numpy()
    if in_columns(method, x.shape):
        bad = encode_columns(values, means, packed.numpy())
    else:
        bad = encode_blocks(values, block(method, x.shape), means, packed.numpy())
    return wire, torch.tensor([bad])


def from_wire(method: OneBit, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Give each element its side's mean."""
    head, packed = wire.tensor_split([8 * method.groups(shape)])
    means, out = as_numbers(head, torch.float32), torch.empty(numel(shape))
    if in_columns(method, shape):
        rest, negative = means.view(-1, 2).t().repeat(1, rows_at_once(columns(shape))).numpy()
        decode_columns(rest, negative, packed.numpy(), out.numpy())
    else:
        decode_blocks(means.numpy(), packed.numpy(), block(method, shape), out.numpy())
    return out


def in_columns(method: OneBit, shape: Shape) -> bool:
    """Whether there is more than one column to average; a single one is a block."""
    return method.means == "column" and columns(shape) > 1


def block(method: OneBit, shape: Shape) -> int:
    """Elements of a block."""
    return max(1, numel(shape)) if method.means == "column" else method.block


@compiled
def rows_at_once(width: int) -> int:
    """How many rows of that width are taken as one: short loops would be slow."""
    return max(1, TILE // width)


@compiled
def encode_blocks(x: np.ndarray, block: int, means: np.ndarray, packed: np.ndarray) -> bool:
    """Fill ``means`` (float32 [2 g]) and ``packed`` (uint8); whether a mean of ``x`` (float32 [n]) is not finite."""
    means[:] = 0  # the group of an empty tensor too
    codes = np.empty(TILE, np.uint8)
    rest, negative, negatives, finite = 0.0, 0.0, 0, True
    for start in range(0, x.size, TILE):
        end = min(start + TILE, x.size)
        mark_negative(x[start:end], codes)
        pack_tile(codes, end - start, 1, packed[start // 8 :])
        at = start
        while at < end:
            owner = at // block
            last = min((owner + 1) * block, x.size)
            stop = min(last, end)
            more_rest, more_negative, more = sides(x[at:stop])
            rest, negative, negatives = rest + more_rest, negative + more_negative, negatives + more
            if stop == last:
                means[2 * owner] = np.float32(rest / max(1, last - owner * block - negatives))
                means[2 * owner + 1] = np.float32(negative / max(1, negatives))
                finite &= np.isfinite(rest - negative)
                rest, negative, negatives = 0.0, 0.0, 0
            at = stop
    return not finite


@summing
def sides(x: np.ndarray) -> tuple[float, float, int]:
    """Sum of the elements that are not negative, sum of those that are, and how many these are."""
    rest, negative, negatives = 0.0, 0.0, 0
    for i in range(x.size):
        below = x[i] < np.float32(0)
        value = np.float64(x[i])
        rest += 0.0 if below else value
        negative += value if below else 0.0
        negatives += below
    return rest, negative, negatives


@compiled
def encode_columns(x: np.ndarray, means: np.ndarray, packed: np.ndarray) -> bool:
    """As `encode_blocks`, where ``x`` (float32 [n]) holds the rows of a matrix and every column is a group."""
    groups = means.size // 2
    width = groups * rows_at_once(groups)
    codes = np.empty(TILE, np.uint8)
    rest, negative, negatives = np.zeros(width), np.zeros(width), np.zeros(width)
    for start in range(0, x.size, TILE):
        end = min(start + TILE, x.size)
        mark_negative(x[start:end], codes)
        pack_tile(codes, end - start, 1, packed[start // 8 :])
        at = start
        while at < end:
            column = at % width
            stop = min(at - column + width, end)
            add_sides(x[at:stop], rest[column:], negative[column:], negatives[column:])
            at = stop
    for column in range(groups, width):
        rest[column % groups] += rest[column]
        negative[column % groups] += negative[column]
        negatives[column % groups] += negatives[column]
    rows, finite = x.size // groups, True
    for group in range(groups):
        means[2 * group] = np.float32(rest[group] / max(1.0, rows - negatives[group]))
        means[2 * group + 1] = np.float32(negative[group] / max(1.0, negatives[group]))
        finite &= np.isfinite(rest[group] - negative[group])
    return not finite


@compiled
def add_sides(x: np.ndarray, rest: np.ndarray, negative: np.ndarray, negatives: np.ndarray) -> None:
    """Add each element to its column's sum on its side (float64)."""
    for i in range(x.size):
        below = x[i] < np.float32(0)
        value = np.float64(x[i])
        rest[i] += 0.0 if below else value
        negative[i] += value if below else 0.0
        negatives[i] += 1.0 if below else 0.0


@compiled
def decode_blocks(means: np.ndarray, packed: np.ndarray, block: int, out: np.ndarray) -> None:
    """Fill ``out`` (float32 [n])."""
    codes = np.empty(TILE, np.uint8)
    for start in range(0, out.size, TILE):
        end = min(start + TILE, out.size)
        unpack_tile(packed[start // 8 :], end - start, 1, codes)
        at = start
        while at < end:
            owner = at // block
            stop = min((owner + 1) * block, end)
            choose(codes[at - start :], means[2 * owner], means[2 * owner + 1], out[at:stop])
            at = stop


@compiled
def decode_columns(rest: np.ndarray, negative: np.ndarray, packed: np.ndarray, out: np.ndarray) -> None:
    """As `decode_blocks`, with the means of a row, or of several rows taken as one."""
    codes = np.empty(TILE, np.uint8)
    for start in range(0, out.size, TILE):
        end = min(start + TILE, out.size)
        unpack_tile(packed[start // 8 :], end - start, 1, codes)
        at = start
        while at < end:
            column = at % rest.size
            stop = min(at - column + rest.size, end)
            choose_each(codes[at - start :], rest[column:], negative[column:], out[at:stop])
            at = stop


@compiled
def choose_each(codes: np.ndarray, zero: np.ndarray, one: np.ndarray, out: np.ndarray) -> None:
    """Each column's ``one`` where the code is not 0, else its ``zero``."""
    for i in range(out.size):
        a, b = zero[i], one[i]
        out[i] = b if codes[i] else a
