"""`gradwire.comm.compressors.indices` on a CPU core."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.comm.compressors import indices
from gradwire.comm.compressors.indices import (
    CODES,
    HEADER,
    CodeName,
    choose,
    rice_planes,
    without_header,
)
from gradwire.comm.compressors.kernels.cpu import compiled

WIDEST = 32  # low bits that the loops' 64-bit buffers have room for
INT32, RICE = (list(CODES).index(code) for code in ("int32", "rice"))


def encode(places: Tensor, n: int, code: CodeName) -> Tensor:
    """The same bytes as `indices.encode`."""
    chosen, low, lower, size = fixed(n, places.numel(), code)
    if low > WIDEST:
        return indices.encode(places, n, code)
    wire = torch.empty(size, dtype=torch.uint8, device="cpu")
    write(places.numpy(), chosen, low, lower, wire.numpy())
    return wire


def decode(wire: Tensor, n: int, k: int, code: CodeName) -> tuple[Tensor, int]:
    """The same indices as `indices.decode`, or its errors."""
    chosen, low, lower, size = fixed(n, k, code)
    without_header(wire, n, k, code)
    if low > WIDEST:
        return indices.decode(wire, n, k, code)
    places = torch.empty(k, dtype=torch.int64, device="cpu")
    if not read(wire[:size].numpy(), chosen, low, lower, n, places.numpy()):
        raise ValueError(f"invalid payload: the indices are not ascending, distinct and below {n}, or not {k}")
    return places, size


@compiled
def write_rice(places: np.ndarray, low: int, lower: np.ndarray, upper: np.ndarray) -> None:
    """Fill both planes (uint8, zeros)."""
    mask = (1 << low) - 1
    pending, bits, position = 0, 0, 0
    for i in range(places.size):
        unary = i + (places[i] >> low)
        upper[unary >> 3] |= np.uint8(1 << (unary & 7))
        pending |= (places[i] & mask) << bits
        bits += low
        while bits >= 8:
            lower[position] = pending & 255
            position += 1
            pending >>= 8
            bits -= 8
    if bits:
        lower[position] = pending


@compiled
def read_rice(lower: np.ndarray, upper: np.ndarray, low: int, n: int, places: np.ndarray) -> int:
    """Fill ``places``; how many there are, up to the first that is out of order, or more than there is room for."""
    mask = (1 << low) - 1
    pending, bits, position = np.int64(0), 0, 0
    count = 0
    for byte in range(upper.size):
        marks = upper[byte]
        bit = 8 * byte
        while marks:
            if marks & 1:
                if count == places.size:
                    return count + 1
                while bits < low:
                    pending |= np.int64(lower[position]) << bits
                    position += 1
                    bits += 8
                place = (bit - count) << low | (pending & mask)
                if place >= n or (count and place <= places[count - 1]):
                    return count
                places[count] = place
                count += 1
                pending >>= low
                bits -= low
            marks >>= 1
            bit += 1
    return count


def fixed(n: int, k: int, code: CodeName) -> tuple[int, int, int, int]:
    """The arguments of `write` and `read` for k indices below n: the code, `rice_planes`' first two, and all bytes."""
    chosen = choose(n, k, code)
    low, lower, _ = rice_planes(n, k)
    return list(CODES).index(chosen), low, lower, HEADER + CODES[chosen].size(n, k)


@compiled
def write(places: np.ndarray, code: int, low: int, lower: int, wire: np.ndarray) -> None:
    """Fill ``wire`` (uint8) with header and body."""
    wire[0] = code
    body = wire[HEADER:]
    if code == INT32:
        numbers = body.view(np.int32)
        for i in range(places.size):
            numbers[i] = places[i]
        return
    body[:] = 0
    if code == RICE:
        write_rice(places, low, body[:lower], body[lower:])
    else:
        for i in range(places.size):
            body[places[i] >> 3] |= np.uint8(1 << (places[i] & 7))


@compiled
def read(wire: np.ndarray, code: int, low: int, lower: int, n: int, places: np.ndarray) -> bool:
    """Fill ``places`` (int64 [k]); whether ``wire`` encodes that many, ascending, distinct and below ``n``."""
    body = wire[HEADER:]
    if wire[0] != code:
        return False
    if code == INT32:
        numbers, last = body.view(np.int32), -1
        for i in range(places.size):
            places[i] = numbers[i]
            if places[i] <= last or places[i] >= n:
                return False
            last = places[i]
        return True
    if code == RICE:
        return read_rice(body[:lower], body[lower:], low, n, places) == places.size
    count = 0
    for place in range(n):
        if body[place >> 3] >> (place & 7) & 1:
            if count == places.size:
                return False
            places[count] = place
            count += 1
    return count == places.size
