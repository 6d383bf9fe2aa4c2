"""Elias's recursive code, for the sparse small integers of QSGD: one stream of bits whose length depends on the data.

A number k >= 1 is written as in Elias, "Universal codeword sets and representations of the integers" (IEEE Trans. Inf.
Theory, 1975; there the code omega): a closing 0; before it, as long as k > 1, k in binary, and on with the number of
its digits less 1. So 1, 2, 4, 16 take 1, 3, 6, 11 bits.

A vector is written as Alistarh et al., "QSGD" (NeurIPS 2017), section 3, write it: for each number that is not 0, the
distance from the previous one (the first counts from before the vector), its sign (1 for minus), its magnitude. The
distance to the place after the vector closes the stream; zero bits fill its last byte. The first bit of a byte is the
lowest one.

Such a stream can only be read from its start, one code after the other: it is written and read on the host, wherever
the tensor lies.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.comm.compressors.kernels.cpu import compiled

LONGEST = 48  # binary digits in a number that may be read; a stream of fewer than 2^48 numbers has no longer one
SHORT = 256  # numbers below it have their codes in a table
WINDOW = 12  # bits in which a table finds short codes; with 7 more they still lie in three bytes


def encode(levels: Tensor) -> Tensor:
    """The stream of ``levels``, int16 [n] (not -2^15): uint8 [bytes], on the same device."""
    numbers = levels.cpu().numpy()
    stream = np.empty(-(-stream_bits(numbers) // 8), np.uint8)
    write_stream(numbers, stream)
    return torch.from_numpy(stream).to(levels.device)


def decode(stream: Tensor, count: int, top: int) -> Tensor:
    """The numbers of a stream, int16 [count], on the same device.

    Args:
        stream: uint8 [bytes].
        count: How many numbers were encoded.
        top: The largest magnitude that one of them may have.

    Raises:
        ValueError: If these bytes are not a stream of ``count`` such numbers.
    """
    numbers = np.zeros(count, np.int16)
    if not read_stream(stream.cpu().numpy(), top, numbers):
        raise ValueError(f"{stream.numel()} bytes are not an Elias-coded stream of {count} numbers up to {top}")
    return torch.from_numpy(numbers).to(stream.device)


@compiled
def code(number: int | np.int64) -> tuple[np.uint64, int]:
    """The code of ``number``: its bits, the first one lowest, and how many there are."""
    bits, length = np.uint64(0), 1
    while number > 1:
        digits = 0
        rest = number
        while rest:  # turns the digits around, and puts them before what is there
            bits = np.uint64(bits << np.uint64(1) | np.uint64(rest & 1))
            rest >>= 1
            digits += 1
        length += digits
        number = digits - 1
    return bits, length


@compiled
def short_codes() -> tuple[np.ndarray, np.ndarray]:
    """The codes of the numbers below SHORT: bits (uint64) and lengths (int64), by number."""
    bits, lengths = np.zeros(SHORT, np.uint64), np.zeros(SHORT, np.int64)
    for number in range(1, SHORT):
        bits[number], lengths[number] = code(number)
    return bits, lengths


@compiled
def look_up(number: int | np.int64, bits: np.ndarray, lengths: np.ndarray) -> tuple[np.uint64, int]:
    """`code`, from the table where it is short."""
    return (bits[number], lengths[number]) if number < SHORT else code(number)


@compiled
def stream_bits(numbers: np.ndarray) -> int:
    """Bits of the stream of ``numbers`` (int16 [n])."""
    table = short_codes()
    total, last = 0, -1
    for i in range(numbers.size):
        if numbers[i]:
            total += look_up(i - last, *table)[1] + 1 + look_up(abs(np.int64(numbers[i])), *table)[1]
            last = i
    return total + look_up(numbers.size - last, *table)[1]


@compiled
def write_stream(numbers: np.ndarray, stream: np.ndarray) -> None:
    """Fill ``stream`` (uint8, as many as `stream_bits` says)."""
    table = short_codes()
    held, filled, at, last = np.uint64(0), 0, 0, -1  # the bits not yet stored, how many, and where they go
    for i in range(numbers.size):
        if numbers[i]:
            bits, length = look_up(i - last, *table)
            held, filled, at = append(bits, length, held, filled, at, stream)
            bits, length = look_up(abs(np.int64(numbers[i])), *table)
            signed = np.uint64(bits << np.uint64(1) | np.uint64(numbers[i] < 0))
            held, filled, at = append(signed, length + 1, held, filled, at, stream)
            last = i
    bits, length = look_up(numbers.size - last, *table)
    held, filled, at = append(bits, length, held, filled, at, stream)
    if filled:
        stream[at] = held


@compiled
def append(
    bits: np.uint64, length: int, held: np.uint64, filled: int, at: int, stream: np.ndarray
) -> tuple[np.uint64, int, int]:
    """Put bits behind the ones held, and store whole bytes: what is then held, how many bits, and where they go."""
    held |= bits << np.uint64(filled)
    filled += length
    while filled >= 8:
        stream[at] = held & np.uint64(0xFF)
        held, filled, at = held >> np.uint64(8), filled - 8, at + 1
    return held, filled, at


@compiled
def read_code(stream: np.ndarray, at: int) -> tuple[np.int64, int]:
    """The number whose code begins at bit ``at``, 0 if there is none, and the bit after it."""
    end = 8 * stream.size
    number = np.int64(1)
    while at < end:
        if not stream[at >> 3] >> (at & 7) & 1:
            return number, at + 1
        digits = int(number) + 1
        if digits > min(LONGEST, end - at):
            break
        number = np.int64(0)
        for k in range(at, at + digits):
            number = number << 1 | np.int64(stream[k >> 3] >> (k & 7) & 1)
        at += digits
    return np.int64(0), end


@compiled
def short_readings() -> tuple[np.ndarray, np.ndarray]:
    """The number that a stream begins with, and its code's length, by its first WINDOW bits; 0 if it is longer."""
    numbers, lengths = np.zeros(1 << WINDOW, np.int64), np.zeros(1 << WINDOW, np.int64)
    for number in range(1, SHORT):
        bits, length = code(number)
        if length <= WINDOW:
            for window in range(np.int64(bits), 1 << WINDOW, 1 << length):
                numbers[window], lengths[window] = number, length
    return numbers, lengths


@compiled
def read_short(stream: np.ndarray, at: int, numbers: np.ndarray, lengths: np.ndarray) -> tuple[np.int64, int]:
    """`read_code` from the table; 0 and ``at``, where the code is not short or the end of the stream is near."""
    byte = at >> 3
    if byte + 3 <= stream.size:
        three = np.int64(stream[byte]) | np.int64(stream[byte + 1]) << 8 | np.int64(stream[byte + 2]) << 16
        window = three >> (at & 7) & ((1 << WINDOW) - 1)
        return numbers[window], at + lengths[window]
    return np.int64(0), at


@compiled
def read_stream(stream: np.ndarray, top: int, numbers: np.ndarray) -> bool:
    """Fill ``numbers`` (int16 [n], zeros); whether ``stream`` (uint8) is one of n numbers up to ``top``."""
    table = short_readings()
    i, at = -1, 0
    while True:
        distance, at = read_short(stream, at, *table)
        if not distance:
            distance, at = read_code(stream, at)
        if not 1 <= distance <= numbers.size - i:
            return False
        i += int(distance)
        if i == numbers.size:
            break
        if at >= 8 * stream.size:
            return False
        minus = stream[at >> 3] >> (at & 7) & 1
        magnitude, at = read_short(stream, at + 1, *table)
        if not magnitude:
            magnitude, at = read_code(stream, at)
        if not 1 <= magnitude <= top:
            return False
        numbers[i] = -magnitude if minus else magnitude
    return stream.size == (at + 7) >> 3 and (at & 7 == 0 or stream[at >> 3] >> (at & 7) == 0)
