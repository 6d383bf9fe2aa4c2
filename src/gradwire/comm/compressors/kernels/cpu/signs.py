"""signsgd and onebit on a CPU core: x is read from memory once, a tile at a time."""

from __future__ import annotations

import numpy as np

from gradwire.comm.compressors.kernels import Kernel
from gradwire.comm.compressors.kernels.cpu import (
    INFINITY,
    TILE,
    compiled,
    largest,
    pack_tile,
    summing,
    unpack_tile,
)
from gradwire.comm.compressors.kernels.cpu.segments import COLUMNS, NUMEL, WHOLE, Segmented, blocks_and


@compiled
def encode_signsgd(settings: tuple, row: np.ndarray, first: int, x: np.ndarray, seed: int, wire: np.ndarray) -> bool:
    """Fill the head and the packed signs."""
    scaled, block = settings
    if not scaled:
        bad = encode_plain(x, wire[1:])
        wire[0] = bad
        return bad
    head = 4 * ((row[NUMEL] + block - 1) // block)
    return encode_scaled(first, x, row[NUMEL], block, wire[:head].view(np.float32), wire[head:])


@compiled
def decode_signsgd(settings: tuple, row: np.ndarray, first: int, wire: np.ndarray, out: np.ndarray) -> bool:
    """Each sign times its block's scale."""
    scaled, block = settings
    if not scaled:
        decode_signs(np.full(1, np.nan if wire[0] else 1.0, np.float32), wire[1:], max(1, out.size), out)
    else:
        head = 4 * ((row[NUMEL] + block - 1) // block)
        scales = wire[:head].view(np.float32)[first // block :]
        decode_signs(scales, wire[head + first // 8 :], block, out)
    return True


@compiled
def encode_scaled(first: int, x: np.ndarray, n: int, block: int, scales: np.ndarray, packed: np.ndarray) -> bool:
    """Fill ``scales`` (float32 [b]) and ``packed`` from element ``first`` of ``n`` on; whether ``x`` is not finite."""
    codes = np.empty(TILE, np.uint8)
    total, finite = 0.0, True
    for start in range(0, x.size, TILE):
        end = min(start + TILE, x.size)
        mark_negative(x[start:end], codes)
        pack_tile(codes, end - start, 1, packed[(first + start) // 8 :])
        position = start
        while position < end:
            owner = (first + position) // block
            last = min((owner + 1) * block, n) - first
            stop = min(last, end)
            total += magnitude_sum(x[position:stop])
            if stop == last:
                scales[owner] = np.float32(total / (first + last - owner * block))
                finite &= np.isfinite(total)
                total = 0.0
            position = stop
    return not finite


@compiled
def encode_plain(x: np.ndarray, packed: np.ndarray) -> bool:
    """Fill ``packed`` (uint8); whether ``x`` (float32 [n]) is not finite."""
    codes = np.empty(TILE, np.uint8)
    worst = np.uint32(0)
    for start in range(0, x.size, TILE):
        end = min(start + TILE, x.size)
        mark_negative(x[start:end], codes)
        pack_tile(codes, end - start, 1, packed[start // 8 :])
        worst = max(worst, largest(x[start:end].view(np.uint32)))
    return bool(worst >= INFINITY)


@compiled
def mark_negative(x: np.ndarray, codes: np.ndarray) -> None:
    """1 in ``codes`` (uint8) where ``x`` is below 0, else 0."""
    for i in range(x.size):
        codes[i] = np.uint8(np.int8(x[i] < np.float32(0)))  # the detour by int8 vectorizes


@summing
def magnitude_sum(x: np.ndarray) -> float:
    """Sum of |x|."""
    total = 0.0
    for i in range(x.size):
        total += np.float64(abs(x[i]))
    return total


@compiled
def decode_signs(scales: np.ndarray, packed: np.ndarray, block: int, out: np.ndarray) -> None:
    """Fill ``out`` (float32), whose first element is a block's first."""
    codes = np.empty(TILE, np.uint8)
    for start in range(0, out.size, TILE):
        end = min(start + TILE, out.size)
        unpack_tile(packed[start // 8 :], end - start, 1, codes)
        position = start
        while position < end:
            stop = min((position // block + 1) * block, end)
            choose(codes[position - start :], scales[position // block], -scales[position // block], out[position:stop])
            position = stop


@compiled
def choose(codes: np.ndarray, zero: np.float32, one: np.float32, out: np.ndarray) -> None:
    """``one`` where the code is not 0, else ``zero``."""
    for i in range(out.size):
        out[i] = one if codes[i] else zero


@compiled
def encode_onebit(settings: tuple, row: np.ndarray, first: int, x: np.ndarray, seed: int, wire: np.ndarray) -> bool:
    """Fill means and packed signs."""
    head, block = layout(settings, row)
    means, packed = wire[:head].view(np.float32), wire[head:]
    if row[COLUMNS] > 1 and settings[0]:
        return encode_columns(x, means, packed)
    if not x.size:
        means[:] = 0  # the group of an empty tensor
    return encode_blocks(first, x, row[NUMEL], block, means, packed)


@compiled
def decode_onebit(settings: tuple, row: np.ndarray, first: int, wire: np.ndarray, out: np.ndarray) -> bool:
    """Give each element its side's mean."""
    head, block = layout(settings, row)
    means = wire[:head].view(np.float32)
    if row[COLUMNS] > 1 and settings[0]:
        decode_columns(means, wire[head:], out)
    else:
        decode_blocks(means[first // block * 2 :], wire[head + first // 8 :], block, out)
    return True


@compiled
def layout(settings: tuple, row: np.ndarray) -> tuple[int, int]:
    """Bytes of the means, and elements of a block: all of them where there is one column."""
    by_column, block = settings
    if by_column:
        return 8 * row[COLUMNS], max(1, row[NUMEL])
    return 8 * ((row[NUMEL] + block - 1) // block), block


@compiled
def rows_at_once(width: int) -> int:
    """How many rows of that width are taken as one: short loops would be slow."""
    return max(1, TILE // width)


@compiled
def encode_blocks(first: int, x: np.ndarray, n: int, block: int, means: np.ndarray, packed: np.ndarray) -> bool:
    """Fill ``means`` (float32 [2 g]) and ``packed`` from element ``first`` of ``n`` on; whether ``x`` is not finite."""
    codes = np.empty(TILE, np.uint8)
    rest, negative, negatives, finite = 0.0, 0.0, 0, True
    for start in range(0, x.size, TILE):
        end = min(start + TILE, x.size)
        mark_negative(x[start:end], codes)
        pack_tile(codes, end - start, 1, packed[(first + start) // 8 :])
        position = start
        while position < end:
            owner = (first + position) // block
            last = min((owner + 1) * block, n) - first
            stop = min(last, end)
            more_rest, more_negative, more = sides(x[position:stop])
            rest, negative, negatives = rest + more_rest, negative + more_negative, negatives + more
            if stop == last:
                means[2 * owner] = np.float32(rest / max(1, first + last - owner * block - negatives))
                means[2 * owner + 1] = np.float32(negative / max(1, negatives))
                finite &= np.isfinite(rest - negative)
                rest, negative, negatives = 0.0, 0.0, 0
            position = stop
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
        position = start
        while position < end:
            column = position % width
            stop = min(position - column + width, end)
            add_sides(x[position:stop], rest[column:], negative[column:], negatives[column:])
            position = stop
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
    """Fill ``out`` (float32), whose first element is a block's first."""
    codes = np.empty(TILE, np.uint8)
    for start in range(0, out.size, TILE):
        end = min(start + TILE, out.size)
        unpack_tile(packed[start // 8 :], end - start, 1, codes)
        position = start
        while position < end:
            owner = position // block
            stop = min((owner + 1) * block, end)
            choose(codes[position - start :], means[2 * owner], means[2 * owner + 1], out[position:stop])
            position = stop


@compiled
def decode_columns(means: np.ndarray, packed: np.ndarray, out: np.ndarray) -> None:
    """As `decode_blocks`, with the means of a row, or of several rows taken as one."""
    codes = np.empty(TILE, np.uint8)
    groups = means.size // 2
    width = groups * rows_at_once(groups)
    rest, negative = np.empty(width, np.float32), np.empty(width, np.float32)
    for column in range(width):
        rest[column], negative[column] = means[column % groups * 2], means[column % groups * 2 + 1]
    for start in range(0, out.size, TILE):
        end = min(start + TILE, out.size)
        unpack_tile(packed[start // 8 :], end - start, 1, codes)
        position = start
        while position < end:
            column = position % rest.size
            stop = min(position - column + rest.size, end)
            choose_each(codes[position - start :], rest[column:], negative[column:], out[position:stop])
            position = stop


@compiled
def choose_each(codes: np.ndarray, zero: np.ndarray, one: np.ndarray, out: np.ndarray) -> None:
    """Each column's ``one`` where the code is not 0, else its ``zero``."""
    for i in range(out.size):
        a, b = zero[i], one[i]
        out[i] = b if codes[i] else a


signsgd = Segmented(
    "signsgd",
    encode_signsgd,
    decode_signsgd,
    settings=lambda method: (method.scale == "mean", method.block),
    chunk=lambda method: blocks_and(TILE)(method) if method.scale == "mean" else WHOLE,  # the first byte is of all
)
onebit = Segmented(
    "onebit",
    encode_onebit,
    decode_onebit,
    settings=lambda method: (method.means == "column", method.block),
    chunk=lambda method: blocks_and(TILE)(method) if method.means == "block" else WHOLE,  # columns go through all
)
KERNELS = {
    "signsgd": Kernel(encode_many=signsgd.encode_many, decode_add=signsgd.decode_add),
    "onebit": Kernel(encode_many=onebit.encode_many, decode_add=onebit.decode_add),
}
