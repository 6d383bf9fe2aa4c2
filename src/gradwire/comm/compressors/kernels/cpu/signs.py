"""signsgd and onebit on a CPU core: x is read from memory once, a tile at a time."""

from __future__ import annotations

import numpy as np

from gradwire.comm.compressors.kernels.cpu import (
    INFINITY,
    NUMEL,
    TILE,
    WHOLE,
    Chunk,
    Segmented,
    blocks_and,
    compiled,
    largest,
    pack_tile,
    summing,
    unpack_tile,
)


@compiled
def encode_signsgd(chunk: Chunk) -> bool:
    """Fill the head and the packed signs."""
    settings, row, first, x, _, wire = chunk
    scaled, block = settings
    if not scaled:
        bad = encode_plain(x, wire[1:])
        wire[0] = bad
        return bad
    head = 4 * ((row[NUMEL] + block - 1) // block)
    return encode_scaled(first, x, row[NUMEL], block, wire[:head].view(np.float32), wire[head:])


@compiled
def decode_signsgd(chunk: Chunk) -> bool:
    """Each sign times its block's scale."""
    settings, row, first, x, _, wire = chunk
    scaled, block = settings
    if not scaled:
        scales = np.full(1, np.nan if wire[0] else 1.0, np.float32)
        decode_sides(scales, -scales, wire[1:], max(1, x.size), x)
    else:
        head = 4 * ((row[NUMEL] + block - 1) // block)
        scales = wire[:head].view(np.float32)[first // block : (first + x.size + block - 1) // block]
        decode_sides(scales, -scales, wire[head + first // 8 :], block, x)
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
def decode_sides(zero: np.ndarray, one: np.ndarray, packed: np.ndarray, block: int, out: np.ndarray) -> None:
    """Fill ``out`` (float32), whose first element is a block's first, with the values of its blocks' bits."""
    codes = np.empty(TILE, np.uint8)
    for start in range(0, out.size, TILE):
        end = min(start + TILE, out.size)
        unpack_tile(packed[start // 8 :], end - start, 1, codes)
        position = start
        while position < end:
            owner = position // block
            stop = min((owner + 1) * block, end)
            choose(codes[position - start :], zero[owner], one[owner], out[position:stop])
            position = stop


@compiled
def choose(codes: np.ndarray, zero: np.float32, one: np.float32, out: np.ndarray) -> None:
    """``one`` where the code is not 0, else ``zero``."""
    for i in range(out.size):
        out[i] = one if codes[i] else zero


@compiled
def encode_onebit(chunk: Chunk) -> bool:
    """Fill means and packed signs."""
    settings, row, first, x, _, wire = chunk
    block = settings[0]
    head = 8 * ((row[NUMEL] + block - 1) // block)
    return encode_blocks(first, x, row[NUMEL], block, wire[:head].view(np.float32), wire[head:])


@compiled
def decode_onebit(chunk: Chunk) -> bool:
    """Give each element its side's mean."""
    settings, row, first, x, _, wire = chunk
    block = settings[0]
    head = 8 * ((row[NUMEL] + block - 1) // block)
    means = wire[:head].view(np.float32)[first // block * 2 :]
    decode_sides(means[::2], means[1::2], wire[head + first // 8 :], block, x)
    return True


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


KERNELS = {
    "signsgd": Segmented(
        "signsgd",
        encode_signsgd,
        decode_signsgd,
        settings=lambda method: (method.scale == "mean", method.block),
        chunk=lambda method: blocks_and(TILE)(method) if method.scale == "mean" else WHOLE,  # the first byte is of all
    ).kernel(),
    "onebit": Segmented(
        "onebit", encode_onebit, decode_onebit, settings=lambda method: (method.block,), chunk=blocks_and(TILE)
    ).kernel(),
}
