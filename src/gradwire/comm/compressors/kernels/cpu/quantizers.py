"""Methods whose blocks share a number, on a CPU core: a block is read twice, the second time from the cache.

int8, qsgd and terngrad have one loop, compiled with each method's `measure`, `quantize` and `dequantize`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

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
    narrow,
    pack_tile,
    uniform,
    unpack_tile,
)
from gradwire.comm.compressors.kernels.cpu.segments import NUMEL, Segmented, blocks_and, bound
from gradwire.comm.compressors.methods import natural
from gradwire.comm.compressors.methods.fp8 import FP8
from gradwire.comm.compressors.packing import TRITS

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


@inlined
def pack(settings: tuple, codes: np.ndarray, count: int, first: int, packed: np.ndarray) -> None:
    """Pack a tile of codes, whose first is the segment's element ``first``."""
    pack_tile(codes, count, settings[1], packed[first * settings[1] // 8 :])


@inlined
def unpack(settings: tuple, packed: np.ndarray, first: int, count: int, codes: np.ndarray) -> None:
    """Undo `pack`."""
    unpack_tile(packed[first * settings[1] // 8 :], count, settings[1], codes)


def encode(settings: tuple, row: np.ndarray, first: int, x: np.ndarray, seed: int, wire: np.ndarray) -> bool:
    """Fill the blocks' numbers and the packed codes; ``settings`` are block, bits, whether it draws, and others."""
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
            pack(settings, codes, end - start, first + start, packed)
    return bool(worst >= INFINITY)


def decode(settings: tuple, row: np.ndarray, first: int, wire: np.ndarray, out: np.ndarray) -> bool:
    """Undo `encode`."""
    block = settings[0]
    head = 4 * ((row[NUMEL] + block - 1) // block)
    numbers, packed = wire[:head].view(np.float32), wire[head:]
    codes = np.empty(TILE, np.uint8)
    for start in range(0, out.size, TILE):
        end = min(start + TILE, out.size)
        unpack(settings, packed, first + start, end - start, codes)
        position = start
        while position < end:
            owner = (first + position) // block
            stop = min((owner + 1) * block - first, end)
            dequantize(settings, codes[position - start :], numbers[owner], out[position:stop])
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


# terngrad

DIGITS = 1280  # in a tile, which ends with a byte of either packing
VALUES = np.array([[byte // 3**lane % 3 - 1 for lane in range(TRITS)] for byte in range(256)], np.int8).view(np.uint8)


@inlined
def measure_terngrad(settings: tuple, block: np.ndarray) -> tuple[np.float32, np.uint32]:
    """Its scale, clipped if so set."""
    most, clip = largest(block.view(np.uint32)), settings[3]
    scale = np.uint32(most).view(np.float32)
    if clip:
        scale = min(scale, np.float32(clip * np.sqrt(square_sum(block) / block.size)))
    return max(scale, TINY), most


@compiled
def quantize_terngrad(settings: tuple, x: np.ndarray, scale: np.float32, words: np.ndarray, digits: np.ndarray) -> None:
    """Signs of ``x`` as signed bytes, or 0."""
    for i in range(x.size):
        level = x[i] / scale
        sign = np.int32(1) if level > np.float32(0) else np.int32(-1)
        digits[i] = sign if uniform(words[i]) < abs(level) else np.int32(0)


@compiled
def pack_digits(settings: tuple, digits: np.ndarray, count: int, first: int, packed: np.ndarray) -> None:
    """`pack`, or five digits to a byte, what follows them as -1."""
    if not settings[4]:
        pack_tile(digits, count, 2, packed[first // 4 :])
        return
    out, filled = packed[first // TRITS :], -(-count // TRITS)
    digits[count : filled * TRITS] = 255
    for i in range(filled):
        byte = np.uint8(0)
        for lane in range(TRITS - 1, -1, -1):
            byte = np.uint8(3 * byte + np.uint8(digits[TRITS * i + lane] + 1))
        out[i] = byte


@compiled
def unpack_digits(settings: tuple, packed: np.ndarray, first: int, count: int, digits: np.ndarray) -> None:
    """Undo `pack_digits`."""
    if not settings[4]:
        unpack_tile(packed[first // 4 :], count, 2, digits)
        return
    for i in range(-(-count // TRITS)):
        byte = packed[first // TRITS + i]
        for lane in range(TRITS):
            digits[TRITS * i + lane] = VALUES[byte, lane]


# natural

MANTISSA, NOISE = np.uint32(natural.MANTISSA), np.uint32(32 - natural.MANTISSA)
POWERS, NOT_FINITE = np.uint32(natural.POWERS), np.uint32(natural.NOT_FINITE)
SIGN, BYTE_SIGN = np.uint32(31), np.uint32(7)  # where floats, and codes of 8 bits, have it
HIGHEST = np.uint32(254) << MANTISSA  # 2^127, the largest magnitude that stays finite
SCALES = np.array(natural.SCALES, np.float32)


@compiled
def encode_natural(settings: tuple, row: np.ndarray, first: int, x: np.ndarray, seed: int, wire: np.ndarray) -> bool:
    """Fill lowest exponents and codes, or exponents and packed signs; not representable is a magnitude above 2^127."""
    block, bits = settings[0], settings[1]
    n = row[NUMEL]
    if bits == 9:
        return encode9(first, x.view(np.uint32), seed, wire[:n], wire[n:])
    blocks = (n + block - 1) // block
    return encode8(first, x, block, seed, wire[:blocks], wire[blocks:])


@compiled
def decode_natural(settings: tuple, row: np.ndarray, first: int, wire: np.ndarray, out: np.ndarray) -> bool:
    """Put exponents and signs where float32 has them."""
    block, bits = settings[0], settings[1]
    n = row[NUMEL]
    if bits == 9:
        decode9(wire[first:n], wire[n + first // 8 :], out.view(np.uint32))
    else:
        blocks = (n + block - 1) // block
        decode8(wire[first // block : blocks], wire[blocks + first :], block, out.view(np.uint32))
    return True


@compiled
def encode8(first: int, x: np.ndarray, block: int, seed: int, lowest: np.ndarray, codes: np.ndarray) -> bool:
    """Fill ``lowest`` (uint8 [b]) and ``codes`` (uint8 [n]) from ``first`` on; whether ``x`` (float32) does not fit."""
    words, scaled = np.empty(TILE, np.uint32), np.empty(TILE, np.float32)
    worst = np.uint32(0)
    for start in range(0, x.size, TILE):
        end = min(start + TILE, x.size)
        fill_words(seed, first + start, words)
        position = start
        while position < end:
            owner = (first + position) // block
            stop = min((owner + 1) * block - first, end)
            if first + position == owner * block:
                most = largest(x[position : position + block].view(np.uint32))
                worst = max(worst, most)
                lowest[owner] = max(np.int64(most >> MANTISSA) + 2 - np.int64(POWERS), 1)
            rescale(x[position:stop], SCALES[lowest[owner]], scaled[position - start :])
            position = stop
        add_noise(scaled.view(np.uint32), words, codes[first + start : first + end])
    return bool(worst > HIGHEST)


@compiled
def rescale(x: np.ndarray, scale: np.float32, scaled: np.ndarray) -> None:
    """``x`` times a power of two."""
    for i in range(x.size):
        scaled[i] = x[i] * scale


@compiled
def add_noise(bits: np.ndarray, words: np.ndarray, codes: np.ndarray) -> None:
    """Sign and exponent, in a byte, of the randomly rounded floats that are given as uint32 bits."""
    for i in range(codes.size):
        power = np.uint32(np.uint32(bits[i] & SIGNLESS) + np.uint32(words[i] >> NOISE)) >> MANTISSA
        codes[i] = min(np.uint32(power), POWERS) | np.uint32(np.uint32(bits[i] >> SIGN) << BYTE_SIGN)


@compiled
def decode8(lowest: np.ndarray, codes: np.ndarray, block: int, out: np.ndarray) -> None:
    """Fill ``out`` (uint32, bits of floats)."""
    for start in range(0, out.size, block):
        put8(codes[start:], np.int32(lowest[start // block]), out[start : start + block])


@compiled
def put8(codes: np.ndarray, lowest: np.int32, out: np.ndarray) -> None:
    """A block's floats, as bits."""
    for i in range(out.size):
        code = np.int32(codes[i] & np.uint8(127))
        power = min(max(np.int32(code + lowest - np.int32(1)), np.int32(0)), np.int32(255)) if code else np.int32(0)
        out[i] = np.uint32(np.uint32(power) << MANTISSA) | np.uint32(np.uint32(codes[i] >> BYTE_SIGN) << SIGN)


@compiled
def encode9(first: int, bits: np.ndarray, seed: int, exponents: np.ndarray, signs: np.ndarray) -> bool:
    """Fill ``exponents`` (uint8 [n]) and ``signs`` (packed) from ``first`` on; whether ``bits`` (uint32) do not fit."""
    words, minus = np.empty(TILE, np.uint32), np.empty(TILE, np.uint8)
    worst = np.uint32(0)
    for start in range(0, bits.size, TILE):
        tile = bits[start : start + TILE]
        fill_words(seed, first + start, words)
        worst = max(worst, largest(tile))
        split(tile, words, exponents[first + start :], minus)
        pack_tile(minus, tile.size, 1, signs[(first + start) // 8 :])
    return bool(worst > HIGHEST)


@compiled
def split(bits: np.ndarray, words: np.ndarray, exponents: np.ndarray, minus: np.ndarray) -> None:
    """The exponents of the randomly rounded floats, and their signs."""
    for i in range(bits.size):
        power = np.uint32(np.uint32(bits[i] & SIGNLESS) + np.uint32(words[i] >> NOISE)) >> MANTISSA
        exponents[i] = min(np.uint32(power), NOT_FINITE)
        minus[i] = np.uint32(bits[i] >> SIGN)


@compiled
def decode9(exponents: np.ndarray, signs: np.ndarray, out: np.ndarray) -> None:
    """Fill ``out`` (uint32, bits of floats)."""
    minus = np.empty(TILE, np.uint8)
    for start in range(0, out.size, TILE):
        tile = out[start : start + TILE]
        unpack_tile(signs[start // 8 :], tile.size, 1, minus)
        join(exponents[start : start + TILE], minus, tile)


@compiled
def join(exponents: np.ndarray, minus: np.ndarray, out: np.ndarray) -> None:
    """A tile's floats, as bits."""
    for i in range(out.size):
        out[i] = np.uint32(np.uint32(exponents[i]) << MANTISSA) | np.uint32(np.uint32(minus[i]) << SIGN)


# fp8

FORMATS = {"e4m3": (np.uint32(3), np.uint32(7)), "e5m2": (np.uint32(2), np.uint32(15))}  # mantissa bits, bias


def settings_fp8(method: FP8) -> tuple:
    """Then the largest value, mantissa bits, bias, and the number that each byte represents (float32 [256])."""
    values = torch.arange(256, dtype=torch.uint8).view(method.dtype).to(torch.float32).numpy()
    return method.block, 8, False, np.float32(method.top), *FORMATS[method.format], values


@compiled
def encode_fp8(settings: tuple, row: np.ndarray, first: int, x: np.ndarray, seed: int, wire: np.ndarray) -> bool:
    """Fill scales (float32) and codes."""
    block, _, _, top, mantissa, bias, _ = settings
    head = 4 * ((row[NUMEL] + block - 1) // block)
    scales, codes = wire[:head].view(np.float32), wire[head:]
    marks = scales.view(np.uint32)
    worst = np.uint32(0)
    for position in range(0, x.size, block):
        numbers, owner = x[position : position + block], (first + position) // block
        marks[owner] = largest(numbers.view(np.uint32))
        worst = max(worst, marks[owner])
        scales[owner] = max(scales[owner] / top, TINY)
        cast(numbers, scales[owner], mantissa, bias, codes[first + position :])
    return bool(worst >= INFINITY)


@compiled
def cast(x: np.ndarray, scale: np.float32, mantissa: np.uint32, bias: np.uint32, codes: np.ndarray) -> None:
    """Codes of one block."""
    for i in range(x.size):
        bits = np.float32(x[i] / scale).view(np.uint32)
        sign = np.uint32((bits >> np.uint32(24)) & np.uint32(0x80))
        codes[i] = narrow(np.uint32(bits & SIGNLESS), mantissa, bias) | sign


@compiled
def decode_fp8(settings: tuple, row: np.ndarray, first: int, wire: np.ndarray, out: np.ndarray) -> bool:
    """Multiply each value by its block's scale."""
    block, values = settings[0], settings[6]
    head = 4 * ((row[NUMEL] + block - 1) // block)
    scales, codes = wire[:head].view(np.float32), wire[head:]
    for position in range(0, out.size, block):
        look_up(
            codes[first + position :], values, scales[(first + position) // block], out[position : position + block]
        )
    return True


@compiled
def look_up(codes: np.ndarray, values: np.ndarray, scale: np.float32, out: np.ndarray) -> None:
    """Numbers of one block."""
    for i in range(out.size):
        out[i] = values[codes[i]] * scale


def kernel(name: str, settings: Callable, covers: Callable | None = None, **names: Any) -> Kernel:
    """The fused form of a method: `encode` and `decode` bound to ``names``; ``settings`` are those of `encode`."""
    form = Segmented(
        name,
        names.get("encode") or bound(encode, name, **names),
        names.get("decode") or bound(decode, name, **names),
        settings,
        blocks_and(names.get("TILE", TILE)),
        lambda method: settings(method)[2],
    )
    return Kernel(covers or (lambda method: True), encode_many=form.encode_many, decode_add=form.decode_add)


KERNELS = {
    "int8": kernel(
        "int8",
        lambda method: (method.block, method.num_bits, method.rounding == "stochastic", np.float32(method.top)),
        measure=measure_int8,
        quantize=quantize_int8,
        dequantize=dequantize_int8,
    ),
    "fp8": kernel("fp8", settings_fp8, encode=encode_fp8, decode=decode_fp8),
    "qsgd": kernel(
        "qsgd",
        lambda method: (method.block, method.num_bits, True, np.float32(method.levels), method.norm == "l2"),
        lambda method: method.num_bits in (8, 4, 2),
        measure=measure_qsgd,
        quantize=quantize_qsgd,
        dequantize=dequantize_qsgd,
    ),
    "terngrad": kernel(
        "terngrad",
        lambda method: (method.block, 2, True, method.clip or 0.0, method.packing == "base3"),
        measure=measure_terngrad,
        quantize=quantize_terngrad,
        dequantize=dequantize_int8,
        pack=pack_digits,
        unpack=unpack_digits,
        TILE=DIGITS,
    ),
    "natural": kernel(
        "natural",
        lambda method: (method.block, method.bits, True),
        encode=encode_natural,
        decode=decode_natural,
    ),
}
