"""Elias's recursive code, for the sparse small integers of QSGD: one stream of bits whose length depends on the data.

A number k >= 1 is written as in Elias, "Universal codeword sets and representations of the integers" (IEEE Trans. Inf.
Theory, 1975; there the code omega): a closing 0; before it, as long as k > 1, k in binary, and on with the number of
its digits less 1. So 1, 2, 4, 16 take 1, 3, 6, 11 bits.

A vector is written as Alistarh et al., "QSGD" (NeurIPS 2017), section 3, write it: for each number that is not 0, the
distance from the previous one (the first counts from before the vector), its sign (1 for minus), its magnitude. The
distance to the place after the vector closes the stream; zero bits fill its last byte. The first bit of a byte is the
lowest one.

Such a stream can only be read from its start, one code after the other: it is written and read on the host, whatever
the device of the tensor.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.comm.compressors.kernels.cpu import compiled

LONGEST = 48  # binary digits in a number that may be read; a stream of fewer than 2^48 numbers has no longer one


def encode(levels: Tensor) -> Tensor:
    """The stream of ``levels``, int16 [n] (not -2^15): uint8 [bytes], on the same device."""
    numbers = levels.cpu().numpy()
    bits = write_stream(numbers, np.empty(0, np.uint8))
    stream = np.zeros(-(-bits // 8), np.uint8)
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
        raise ValueError(
            f"invalid payload: {stream.numel()} bytes cannot encode {count} numbers up to {top} by Elias's code"
        )
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
def write_stream(numbers: np.ndarray, stream: np.ndarray) -> int:
    """Write the stream of ``numbers`` (int16 [n]) as far as ``stream`` (uint8, zeros) reaches; return its bits."""
    position, last = 0, -1
    for i in range(numbers.size):
        if numbers[i]:
            position = append(*code(i - last), position, stream)
            position = append(np.uint64(numbers[i] < 0), 1, position, stream)
            position = append(*code(abs(np.int64(numbers[i]))), position, stream)
            last = i
    return append(*code(numbers.size - last), position, stream)


@compiled
def append(bits: np.uint64, length: int, position: int, stream: np.ndarray) -> int:
    """Write bits from bit ``at`` on, the lowest first; return the bit after them."""
    for bit in range(length):
        if position >> 3 < stream.size:
            stream[position >> 3] |= np.uint8((bits >> np.uint64(bit)) & np.uint64(1)) << (position & 7)
        position += 1
    return position


@compiled
def read_code(stream: np.ndarray, position: int) -> tuple[np.int64, int]:
    """The number whose code begins at bit ``at``, 0 if there is none, and the bit after it."""
    end = 8 * stream.size
    number = np.int64(1)
    while position < end:
        if not stream[position >> 3] >> (position & 7) & 1:
            return number, position + 1
        digits = int(number) + 1
        if digits > min(LONGEST, end - position):
            break
        number = np.int64(0)
        for k in range(position, position + digits):
            number = number << 1 | np.int64(stream[k >> 3] >> (k & 7) & 1)
        position += digits
    return np.int64(0), end


@compiled
def read_stream(stream: np.ndarray, top: int, numbers: np.ndarray) -> bool:
    """Fill ``numbers`` (int16 [n], zeros); whether ``stream`` (uint8) is one of n numbers up to ``top``."""
    i, position = -1, 0
    while True:
        distance, position = read_code(stream, position)
        if not 1 <= distance <= numbers.size - i:
            return False
        i += int(distance)
        if i == numbers.size:
            break
        if position >= 8 * stream.size:
            return False
        minus = stream[position >> 3] >> (position & 7) & 1
        magnitude, position = read_code(stream, position + 1)
        if not 1 <= magnitude <= top:
            return False
        numbers[i] = -magnitude if minus else magnitude
    return stream.size == (position + 7) >> 3 and (position & 7 == 0 or stream[position >> 3] >> (position & 7) == 0)
