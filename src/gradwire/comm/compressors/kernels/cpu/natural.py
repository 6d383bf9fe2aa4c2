"""natural on a CPU core: integer arithmetic on the bits, a tile at a time."""

from __future__ import annotations

import numpy as np

from gradwire.comm.compressors.kernels import Kernel
from gradwire.comm.compressors.kernels.cpu import SIGNLESS, compiled, largest
from gradwire.comm.compressors.kernels.cpu.segments import NUMEL, Segmented, always, blocks_and
from gradwire.comm.compressors.kernels.cpu.shared import TILE, fill_words, pack_tile, unpack_tile
from gradwire.comm.compressors.methods import natural
from gradwire.comm.compressors.methods.natural import Natural

MANTISSA, NOISE = np.uint32(natural.MANTISSA), np.uint32(32 - natural.MANTISSA)
POWERS, NOT_FINITE = np.uint32(natural.POWERS), np.uint32(natural.NOT_FINITE)
SIGN, BYTE_SIGN = np.uint32(31), np.uint32(7)  # where floats, and codes of 8 bits, have it
HIGHEST = np.uint32(254) << MANTISSA  # 2^127, the largest magnitude that stays finite
SCALES = np.array(natural.SCALES, np.float32)


def settings(method: Natural) -> tuple[int, int]:
    """Bits and block."""
    return method.bits, method.block


@compiled
def encode(settings: tuple, row: np.ndarray, first: int, x: np.ndarray, seed: int, wire: np.ndarray) -> bool:
    """Fill lowest exponents and codes, or exponents and packed signs; not representable is a magnitude above 2^127."""
    bits, block = settings
    n = row[NUMEL]
    if bits == 9:
        return encode9(first, x.view(np.uint32), seed, wire[:n], wire[n:])
    blocks = (n + block - 1) // block
    return encode8(first, x, block, seed, wire[:blocks], wire[blocks:])


@compiled
def decode(settings: tuple, row: np.ndarray, first: int, wire: np.ndarray, out: np.ndarray) -> bool:
    """Put exponents and signs where float32 has them."""
    bits, block = settings
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
            multiply(x[position:stop], SCALES[lowest[owner]], scaled[position - start :])
            position = stop
        add_noise(scaled.view(np.uint32), words, codes[first + start : first + end])
    return bool(worst > HIGHEST)


@compiled
def multiply(x: np.ndarray, scale: np.float32, scaled: np.ndarray) -> None:
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
def decode9(exponents: np.ndarray, signs: np.ndarray, out: np.ndarray) -> None:
    """Fill ``out`` (uint32, bits of floats)."""
    minus = np.empty(TILE, np.uint8)
    for start in range(0, out.size, TILE):
        tile = out[start : start + TILE]
        unpack_tile(signs[start // 8 :], tile.size, 1, minus)
        put9(exponents[start : start + TILE], minus, tile)


@compiled
def put9(exponents: np.ndarray, minus: np.ndarray, out: np.ndarray) -> None:
    """A tile's floats, as bits."""
    for i in range(out.size):
        out[i] = np.uint32(np.uint32(exponents[i]) << MANTISSA) | np.uint32(np.uint32(minus[i]) << SIGN)


form = Segmented(__name__, encode, decode, settings, blocks_and(TILE), always)
KERNEL = Kernel(encode_many=form.encode_many, decode_add=form.decode_add)
