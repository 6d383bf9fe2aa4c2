"""Methods whose blocks share a number, on a CPU core: a block is read twice, the second time from the cache.

int8 and qsgd have one loop, compiled with each method's `measure`, `quantize` and `dequantize`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gradwire.comm.compressors.base import SMALLEST_SCALE
from gradwire.comm.compressors.kernels import Kernel
from gradwire.comm.compressors.kernels.cpu import (
    INFINITY,
    SIGNLESS,
    TILE,
    compiled,
    fill_words,
    inlined,
    largest,
    pack_tile,
    uniform,
    unpack_tile,
)
from gradwire.comm.compressors.kernels.cpu.segments import NUMEL, Chunk, Segmented, blocks_and, bound

TINY = np.float32(SMALLEST_SCALE)


def measure(settings: tuple, block: np.ndarray) -> tuple[np.float32, np.uint32]:
    """The place of a method's function: a block's number, and the bits of its largest magnitude."""
    raise NotImplementedError


def quantize(settings: tuple, x: np.ndarray, number: np.float32, words: np.ndarray, codes: np.ndarray) -> None:
    """The place of a method's function, which fills ``codes`` (uint8) for ``x`` by its block's number."""
    raise NotImplementedError


def dequantize(settings: tuple, codes: np.ndarray, number: np.float32, out: np.ndarray) -> None:
    """The place of a method's function, which fills ``out`` (float32)."""
    raise NotImplementedError


def encode(chunk: Chunk) -> bool:
    """Fill the blocks' numbers and the packed codes; ``settings`` are block, bits, whether it draws, and others."""
    settings, row, first, x, seed, wire = chunk
    block, bits, draws = settings[0], settings[1], settings[2]
    head = 4 * ((row[NUMEL] + block - 1) // block)
    numbers, packed = wire[:head].view(np.float32), wire[head:]
    room, words = np.empty(TILE, np.uint8), np.empty(TILE, np.uint32)
    worst = np.uint32(0)
    for start in range(0, x.size, TILE):
        end = min(start + TILE, x.size)
        codes = packed[first + start :] if bits == 8 else room
        if draws:
            fill_words(seed, first + start, words)
        position = start
        while position < end:
            owner = (first + position) // block
            stop = min((owner + 1) * block - first, end)
            if first + position == owner * block:
                numbers[owner], most = measure(settings, x[position : position + block])
                worst = max(worst, most)
            quantize(settings, x[position:stop], numbers[owner], words[position - start :], codes[position - start :])
            position = stop
        if bits < 8:
            pack_tile(codes, end - start, bits, packed[(first + start) * bits // 8 :])
    return bool(worst >= INFINITY)


def decode(chunk: Chunk) -> bool:
    """Undo `encode`."""
    settings, row, first, x, _, wire = chunk
    block, bits = settings[0], settings[1]
    head = 4 * ((row[NUMEL] + block - 1) // block)
    numbers, packed = wire[:head].view(np.float32), wire[head:]
    codes = np.empty(TILE, np.uint8)
    for start in range(0, x.size, TILE):
        end = min(start + TILE, x.size)
        unpack_tile(packed[(first + start) * bits // 8 :], end - start, bits, codes)
        position = start
        while position < end:
            owner = (first + position) // block
            stop = min((owner + 1) * block - first, end)
            dequantize(settings, codes[position - start :], numbers[owner], x[position:stop])
            position = stop
    return True


# Scales and steps.


@compiled
def square_sum(x: np.ndarray) -> float:
    """The sum of squares in float64: four sums side by side, as one addition would wait for the other."""
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    whole = x.size // 4
    for i in range(whole):
        v, w, y, z = np.float64(x[4 * i]), np.float64(x[4 * i + 1]), np.float64(x[4 * i + 2]), np.float64(x[4 * i + 3])
        a, b, c, d = a + v * v, b + w * w, c + y * y, d + z * z
    for i in range(4 * whole, x.size):
        a += np.float64(x[i]) * np.float64(x[i])
    return (a + b) + (c + d)


@inlined
def scale_to(top: np.float32, block: np.ndarray) -> tuple[np.float32, np.uint32]:
    """The scale with which a block's largest magnitude becomes ``top``, and that magnitude's bits."""
    most = largest(block.view(np.uint32))
    return max(np.uint32(most).view(np.float32) / top, TINY), most


@compiled
def round_randomly(x: np.ndarray, step: np.float32, top: np.float32, words: np.ndarray, codes: np.ndarray) -> None:
    """Multiples of ``step`` as signed bytes, up with the probability of the fractional part."""
    for i in range(x.size):
        level = x[i] / step
        low = np.floor(level)
        code = low + np.float32(uniform(words[i]) < level - low)
        codes[i] = np.int32(min(max(code, -top), top))


@compiled
def multiply(codes: np.ndarray, unused: np.int32, step: np.float32, out: np.ndarray) -> None:
    """Codes, whose upper ``unused`` bits do not count, as signed numbers times ``step``."""
    for i in range(out.size):
        out[i] = np.float32(np.int32(np.int8(codes[i] << unused)) >> unused) * step


# int8

ROUNDER = np.float32(1.5 * 2**23)  # adding and subtracting it rounds to an integer, ties to even


@inlined
def measure_int8(settings: tuple, block: np.ndarray) -> tuple[np.float32, np.uint32]:
    """Its scale."""
    return scale_to(settings[3], block)


@inlined
def quantize_int8(settings: tuple, x: np.ndarray, scale: np.float32, words: np.ndarray, codes: np.ndarray) -> None:
    """Codes as signed bytes."""
    if settings[2]:
        round_randomly(x, scale, settings[3], words, codes)
    else:
        round_nearest(x, scale, codes)


@compiled
def round_nearest(x: np.ndarray, scale: np.float32, codes: np.ndarray) -> None:
    """Codes of ``x`` as signed bytes, ties to even."""
    for i in range(x.size):
        codes[i] = np.int32((x[i] / scale + ROUNDER) - ROUNDER)


@inlined
def dequantize_int8(settings: tuple, codes: np.ndarray, scale: np.float32, out: np.ndarray) -> None:
    """Each code times its block's scale."""
    multiply(codes, np.int32(8 - settings[1]), scale, out)


# qsgd


@inlined
def measure_qsgd(settings: tuple, block: np.ndarray) -> tuple[np.float32, np.uint32]:
    """The norm of a bucket."""
    if settings[4]:
        norm = np.float32(np.sqrt(square_sum(block)))
        return norm, np.uint32(norm.view(np.uint32) & SIGNLESS)
    most = largest(block.view(np.uint32))
    return np.uint32(most).view(np.float32), most


@inlined
def quantize_qsgd(settings: tuple, x: np.ndarray, norm: np.float32, words: np.ndarray, codes: np.ndarray) -> None:
    """Numbers as signed bytes."""
    round_randomly(x, max(norm / settings[3], TINY), settings[3], words, codes)


@inlined
def dequantize_qsgd(settings: tuple, codes: np.ndarray, norm: np.float32, out: np.ndarray) -> None:
    """Each number times its bucket's step."""
    multiply(codes, np.int32(8 - settings[1]), max(norm / settings[3], TINY), out)


def kernel(name: str, settings: Callable, covers: Callable[[Any], bool], **names: Callable) -> Kernel:
    """The fused form of a method: `encode` and `decode` bound to ``names``; ``settings`` are those of `encode`."""
    form = Segmented(
        name,
        bound(encode, name, **names),
        bound(decode, name, **names),
        settings,
        blocks_and(TILE),
        lambda method: settings(method)[2],
    )
    return Kernel(covers, encode_many=form.encode_many, decode_add=form.decode_add)


KERNELS = {
    "int8": kernel(
        "int8",
        lambda method: (method.block, method.num_bits, method.rounding == "stochastic", np.float32(method.top)),
        lambda method: True,
        measure=measure_int8,
        quantize=quantize_int8,
        dequantize=dequantize_int8,
    ),
    "qsgd": kernel(
        "qsgd",
        lambda method: (method.block, method.num_bits, True, np.float32(method.levels), method.norm == "l2"),
        lambda method: method.num_bits in (8, 4, 2),
        measure=measure_qsgd,
        quantize=quantize_qsgd,
        dequantize=dequantize_qsgd,
    ),
}
