"""int8 on a CPU core: a block is read twice, the second time from the cache."""

from __future__ import annotations

import numpy as np

from gradwire.comm.compressors.kernels import Kernel
from gradwire.comm.compressors.kernels.cpu import INFINITY, compiled, largest
from gradwire.comm.compressors.kernels.cpu.segments import NUMEL, Segmented, blocks_and
from gradwire.comm.compressors.kernels.cpu.shared import TILE, fill_words, pack_tile, uniform, unpack_tile
from gradwire.comm.compressors.methods.int8 import SMALLEST_SCALE, Int8

TINY = np.float32(SMALLEST_SCALE)
ROUNDER = np.float32(1.5 * 2**23)  # adding and subtracting it rounds to an integer, ties to even


def draws(method: Int8) -> bool:
    """Only stochastic rounding does."""
    return method.rounding == "stochastic"


def settings(method: Int8) -> tuple[int, int, bool]:
    """Block, bits, and whether rounding is stochastic."""
    return method.block, method.num_bits, draws(method)


@compiled
def encode(settings: tuple, row: np.ndarray, first: int, x: np.ndarray, seed: int, wire: np.ndarray) -> bool:
    """Fill scales (float32) and packed codes."""
    block, bits, stochastic = settings
    head = 4 * ((row[NUMEL] + block - 1) // block)
    scales, packed = wire[:head].view(np.float32), wire[head:]
    marks = scales.view(np.uint32)
    top = np.float32((1 << (bits - 1)) - 1)
    codes, words = np.empty(TILE, np.uint8), np.empty(TILE, np.uint32)
    worst = np.uint32(0)
    for start in range(0, x.size, TILE):
        end = min(start + TILE, x.size)
        if stochastic:
            fill_words(seed, first + start, words)
        position = start
        while position < end:
            owner = (first + position) // block
            stop = min((owner + 1) * block - first, end)
            if first + position == owner * block:
                marks[owner] = largest(x[position : position + block].view(np.uint32))
                worst = max(worst, marks[owner])
                scales[owner] = max(scales[owner] / top, TINY)
            if stochastic:
                round_randomly(
                    x[position:stop], scales[owner], top, words[position - start :], codes[position - start :]
                )
            else:
                round_nearest(x[position:stop], scales[owner], codes[position - start :])
            position = stop
        pack_tile(codes, end - start, bits, packed[(first + start) * bits // 8 :])
    return bool(worst >= INFINITY)


@compiled
def round_nearest(x: np.ndarray, scale: np.float32, codes: np.ndarray) -> None:
    """Codes of ``x`` as signed bytes, ties to even."""
    for i in range(x.size):
        codes[i] = np.int32((x[i] / scale + ROUNDER) - ROUNDER)


@compiled
def round_randomly(x: np.ndarray, scale: np.float32, top: np.float32, words: np.ndarray, codes: np.ndarray) -> None:
    """Codes of ``x`` as signed bytes, up with the probability of the fractional part."""
    for i in range(x.size):
        level = x[i] / scale
        low = np.floor(level)
        code = low + np.float32(uniform(words[i]) < level - low)
        codes[i] = np.int32(min(max(code, -top), top))


@compiled
def decode(settings: tuple, row: np.ndarray, first: int, wire: np.ndarray, out: np.ndarray) -> bool:
    """Multiply each code by its block's scale."""
    block, bits, _ = settings
    head = 4 * ((row[NUMEL] + block - 1) // block)
    scales, packed = wire[:head].view(np.float32), wire[head:]
    codes = np.empty(TILE, np.uint8)
    for start in range(0, out.size, TILE):
        end = min(start + TILE, out.size)
        unpack_tile(packed[(first + start) * bits // 8 :], end - start, bits, codes)
        position = start
        while position < end:
            owner = (first + position) // block
            stop = min((owner + 1) * block - first, end)
            multiply(codes[position - start :], np.int32(8 - bits), scales[owner], out[position:stop])
            position = stop
    return True


@compiled
def multiply(codes: np.ndarray, unused: np.int32, scale: np.float32, out: np.ndarray) -> None:
    """Codes, whose upper ``unused`` bits are 0, as signed numbers times ``scale``."""
    for i in range(out.size):
        out[i] = np.float32(np.int32(np.int8(codes[i] << unused)) >> unused) * scale


form = Segmented(__name__, encode, decode, settings, blocks_and(TILE), draws)
KERNEL = Kernel(encode_many=form.encode_many, decode_add=form.decode_add)
