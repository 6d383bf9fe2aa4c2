"""Methods that send every element, on a CPU core: int8 and qsgd, fp16 and bf16, and hadamard, which comes before them.

int8 and qsgd have one loop, compiled with each method's `measure`, `quantize` and `dequantize`; it reads a block twice,
the second time from the cache. A cast and its check are one pass. A group of hadamard's stays in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.comm.compressors.base import SMALLEST_SCALE
from gradwire.comm.compressors.kernels import Kernel
from gradwire.comm.compressors.kernels.cpu import (
    INFINITY,
    NUMEL,
    SIGNLESS,
    START,
    TILE,
    Chunk,
    Segmented,
    blocks_and,
    bound,
    compiled,
    fill_words,
    inlined,
    largest,
    pack_tile,
    uniform,
    unpack_tile,
)
from gradwire.comm.compressors.methods.bf16 import BF16
from gradwire.comm.compressors.methods.fp16 import FP16
from gradwire.comm.compressors.methods.hadamard import GROUP, Hadamard
from gradwire.comm.compressors.segments import Segments

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


# bf16 and fp16

HALF = np.uint32(16)  # bits that are dropped
BF16_OVERFLOW = np.float32(BF16.overflow).view(np.uint32)
BF16_NAN = np.uint16(0x7FC0)


@compiled
def encode_bf16(chunk: Chunk) -> bool:
    """Round to nearest, ties to even."""
    bits, out = chunk.x.view(np.uint32), chunk.wire.view(np.uint16)[chunk.first :]
    worst = np.uint32(0)
    for i in range(bits.size):
        worst = max(worst, np.uint32(bits[i] & SIGNLESS))
        odd = np.uint32((bits[i] >> HALF) & np.uint32(1))
        out[i] = np.uint32(bits[i] + np.uint32(0x7FFF) + odd) >> HALF
    if worst > INFINITY:
        put_nan(bits, out, BF16_NAN)
    return bool(worst >= BF16_OVERFLOW)


@compiled
def put_nan(bits: np.ndarray, out: np.ndarray, nan: np.uint16) -> None:
    """Write ``nan`` where there is one, which rounding may have carried over into something else."""
    for i in range(bits.size):
        if np.uint32(bits[i] & SIGNLESS) > INFINITY:
            out[i] = nan


@compiled
def decode_bf16(chunk: Chunk) -> bool:
    """Cast back to float32, exactly."""
    halves, bits = chunk.wire.view(np.uint16)[chunk.first :], chunk.x.view(np.uint32)
    for i in range(bits.size):
        bits[i] = np.uint32(halves[i]) << HALF
    return True


DROPPED = np.uint32(13)  # bits of float32's mantissa that float16's lacks
STEPS = np.uint32(DROPPED << 23)
FP16_OVERFLOW = np.float32(FP16.overflow).view(np.uint32)
TOP, FP16_NAN = np.uint32(0x7C00), np.uint16(0x7E00)  # infinity, and a NaN
SMALLEST = np.uint32(0x0400)  # the smallest normal magnitude
SHIFT = np.uint32((127 - 15) << 23)  # what float32's exponents are larger by
LEAST, LEAST_BITS = np.float32(2.0**-14), np.uint32((127 - 14) << 23)  # the smallest normal magnitude


@compiled
def narrow(magnitude: np.uint32) -> np.uint32:
    """Convert the bits of a float32 magnitude to float16; round to nearest, ties to even.

    The neighbours of a number are one step apart: 2^10 steps make its power of two, or the smallest normal number. A
    sum with 2^23 steps rounds to whole ones, and their count is left in its lowest bits.
    """
    power = max(np.uint32(magnitude & INFINITY), LEAST_BITS)
    steps = np.uint32(power + STEPS)
    total = np.float32(np.uint32(magnitude).view(np.float32) + np.uint32(steps).view(np.float32))
    count = np.uint32(np.float32(total).view(np.uint32) - steps)
    return np.uint32(count + np.uint32(np.uint32(power - LEAST_BITS) >> DROPPED))


@compiled
def encode_fp16(chunk: Chunk) -> bool:
    """Round to nearest, ties to even."""
    bits, out = chunk.x.view(np.uint32), chunk.wire.view(np.uint16)[chunk.first :]
    worst = np.uint32(0)
    for i in range(bits.size):
        magnitude = np.uint32(bits[i] & SIGNLESS)
        worst = max(worst, magnitude)
        sign = np.uint32((bits[i] >> np.uint32(16)) & np.uint32(0x8000))
        out[i] = min(narrow(min(magnitude, FP16_OVERFLOW)), TOP) | sign
    if worst > INFINITY:
        put_nan(bits, out, FP16_NAN)
    return bool(worst >= FP16_OVERFLOW)


@compiled
def decode_fp16(chunk: Chunk) -> bool:
    """Cast back to float32, exactly: the bits move to where float32 has them, and the exponent grows.

    Below 2^-14 a value is the difference of two normal numbers: a processor takes a hundred times as long for others.
    """
    halves, bits = chunk.wire.view(np.uint16)[chunk.first :], chunk.x.view(np.uint32)
    for i in range(bits.size):
        half = np.uint32(halves[i])
        magnitude = np.uint32(half & np.uint32(0x7FFF))
        moved = np.uint32(magnitude << DROPPED)
        small = np.float32(np.uint32(moved + LEAST_BITS).view(np.float32) - LEAST).view(np.uint32)
        finite = np.uint32(moved + SHIFT) if magnitude >= SMALLEST else small
        sign = np.uint32(np.uint32(half & np.uint32(0x8000)) << np.uint32(16))
        bits[i] = (np.uint32(moved | INFINITY) if magnitude >= TOP else finite) | sign
    return True


# hadamard


@compiled
def group(x: np.ndarray, room: np.ndarray, y: np.ndarray) -> None:
    """Fill ``y`` with the transform of ``x``, whose length is a power of two up to `GROUP`; float64 in ``room``."""
    size = x.size
    for i in range(size):
        room[i] = x[i]
    h = 1
    while h < size:
        for start in range(0, size, 2 * h):
            for i in range(start, start + h):
                a, b = room[i], room[i + h]
                room[i] = a + b
                room[i + h] = a - b
        h *= 2
    factor = size**-0.5
    for i in range(size):
        y[i] = np.float32(room[i] * factor)


@compiled
def transform(x: np.ndarray, y: np.ndarray) -> None:
    """Fill ``y`` with the transform of ``x``."""
    room = np.empty(GROUP, np.float64)
    start, size = 0, GROUP
    while start < x.size:
        while size > x.size - start:
            size //= 2
        group(x[start : start + size], room, y[start : start + size])
        start += size


@compiled
def transform_all(table: np.ndarray, values: np.ndarray, out: np.ndarray) -> None:
    """`transform` for every row of the table."""
    for row in table:
        end = row[START] + row[NUMEL]
        transform(values[row[START] : end], out[row[START] : end])


def rotate_many(method: Hadamard, values: Tensor, segments: Segments) -> Tensor:
    """See `Rotation.rotated_many`."""
    out = torch.empty_like(values)
    transform_all(segments.table(values.device).numpy(), values.numpy(), out.numpy())
    return out


def kernel(name: str, settings: Callable, covers: Callable[[Any], bool], **names: Callable) -> Kernel:
    """The kernel of a method: `encode` and `decode` bound to ``names``; ``settings`` are those of `encode`."""
    form = Segmented(
        name,
        bound(encode, name, **names),
        bound(decode, name, **names),
        settings,
        blocks_and(TILE),
        lambda method: settings(method)[2],
    )
    return form.kernel(covers=covers)


def cast(name: str, encode: Callable, decode: Callable) -> Kernel:
    """The kernel of a method without settings: numba keeps no machine code for an empty tuple."""
    return Segmented(name, encode, decode, lambda method: (0,), lambda method: 1).kernel()


KERNELS = {
    "bf16": cast("bf16", encode_bf16, decode_bf16),
    "fp16": cast("fp16", encode_fp16, decode_fp16),
    "hadamard": Kernel(rotate_many=rotate_many),
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
