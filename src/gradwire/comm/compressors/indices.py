"""Lossless codes for the places of a sparse message: k ascending, distinct indices below n.

The first byte names the code, its body follows:

- ``int32`` (0): each index in 32 bits.
- ``bitmap`` (1): one bit per element, set where it is sent, the first element in the lowest bit.
- ``rice`` (2): Golomb-Rice with remainders and quotients in separate planes, over the indices themselves: the low
  ``l`` bits of each, packed; then the rest in unary: of ``k + ((n - 1) >> l)`` bits, those at ``i + (index[i] >> l)``
  are set. That is the Elias-Fano code (Elias, "Efficient Storage and Retrieval by Content and Address of Static
  Files", JACM 1974). n and k give its size and the best l; it takes about half a bit per index more than the entropy
  of a random subset, and can be written and read without going through the indices one by one.

``auto`` is the smallest of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gradwire.base.errors import BadInput
from gradwire.comm.compressors.base import as_numbers
from gradwire.comm.compressors.packing import pack, packed_bytes, unpack

CodeName = Literal["auto", "int32", "bitmap", "rice"]
HEADER = 1  # the byte that names the code


class Code(NamedTuple):
    """One code's body.

    Attributes:
        size: Its bytes by n and k.
        encode: Indices and n to bytes.
        decode: Bytes (`size` of them, or more), n and k to indices that may still be out of order, and the
            bytes used.
    """

    size: Callable[[int, int], int]
    encode: Callable[[Tensor, int], Tensor]
    decode: Callable[[Tensor, int, int], tuple[Tensor, int]]


# Why: docs/decisions.md, "Places of sparse values".
def choose(n: int, k: int, code: CodeName) -> str:
    """The code that ``code`` represents.

    Raises:
        BadInput: If it cannot encode an index below n.
    """
    if code == "int32" and n > 2**31:
        raise BadInput(f"indices of 32 bits reach below {2**31:,}, not below {n:,}; use rice or auto.")
    return smallest(n, k) if code == "auto" else code


@lru_cache(1024)
def smallest(n: int, k: int) -> str:
    """The code with the fewest bytes; of equals, the one simplest to read."""
    known = ("int32", "bitmap", "rice") if n <= 2**31 else ("bitmap", "rice")
    return min(known, key=lambda code: CODES[code].size(n, k))


def coded_bytes(n: int, k: int, code: CodeName = "auto") -> int:
    """Bytes of an encoding of k indices below n."""
    return HEADER + CODES[choose(n, k, code)].size(n, k)


def encode(indices: Tensor, n: int, code: CodeName = "auto") -> Tensor:
    """The bytes that represent ``indices``.

    Args:
        indices: int64 [k], ascending, distinct, below n.
        n: Number of elements.
        code: Which code.

    Returns:
        uint8 [coded_bytes] on the indices' device.

    Raises:
        BadInput: If the code cannot encode an index below n.
    """
    chosen = choose(n, indices.numel(), code)
    return with_header(chosen, CODES[chosen].encode(indices, n))


def with_header(code: str, body: Tensor) -> Tensor:
    """``body`` behind the byte that names the code."""
    return torch.cat([body.new_full((HEADER,), list(CODES).index(code)), body])


def decode(wire: Tensor, n: int, k: int, code: CodeName = "auto") -> tuple[Tensor, int]:
    """Read what `encode` wrote.

    Args:
        wire: uint8 [b] with the encoding at its start.
        n: Number of elements.
        k: Number of indices.
        code: As given to `encode`.

    Returns:
        int64 [k], and the bytes of the encoding.

    Raises:
        ValueError: If these bytes do not encode k ascending, distinct indices below n. On CUDA nothing synchronises to
            see that: what is corrupt decodes to some indices below n.
    """
    chosen, body = without_header(wire, n, k, code)
    indices, used = CODES[chosen].decode(body, n, k)
    return checked(indices, n), HEADER + used


def without_header(wire: Tensor, n: int, k: int, code: CodeName) -> tuple[str, Tensor]:
    """The code and what follows the header, if they are those of k indices below n."""
    chosen = choose(n, k, code)
    if not 0 <= k <= n or wire.numel() < HEADER + CODES[chosen].size(n, k):
        raise ValueError(f"invalid payload: {wire.numel()} bytes cannot encode {k} indices below {n} as {chosen}")
    if not wire.is_cuda and wire[0] != list(CODES).index(chosen):
        raise ValueError(f"invalid payload: the indices are in code {int(wire[0])}, expected {chosen}")
    return chosen, wire[HEADER:]


def checked(indices: Tensor, n: int) -> Tensor:
    """``indices``, if they are ascending, distinct and below n; on CUDA forced below n."""
    if indices.is_cuda:
        return indices.clamp_(0, max(n - 1, 0))
    if indices.numel() and not (indices[0] >= 0 and indices[-1] < n and (indices[1:] > indices[:-1]).all()):
        raise ValueError(f"invalid payload: the indices are not ascending, distinct and below {n}")
    return indices


def set_bits(packed: Tensor, count: int, k: int) -> Tensor:
    """Where the k bits are set among the first ``count``: int64 [k]."""
    bits = unpack(packed, 1, count)
    if packed.is_cuda:
        return bits.nonzero_static(size=k, fill_value=0).view(-1)
    places = bits.nonzero().view(-1)
    if places.numel() != k:
        raise ValueError(f"invalid payload: {places.numel()} bits are set for {k} indices")
    return places


def bits_at(places: Tensor, count: int) -> Tensor:
    """``count`` bits, packed, set at ``places``."""
    bits = torch.zeros(count, dtype=torch.uint8, device=places.device)
    bits[places] = 1
    return pack(bits, 1)


def _decode_int32(body: Tensor, n: int, k: int) -> tuple[Tensor, int]:
    return as_numbers(body[: 4 * k], torch.int32).to(torch.int64), 4 * k


def _decode_bitmap(body: Tensor, n: int, k: int) -> tuple[Tensor, int]:
    used = packed_bytes(n, 1)
    return set_bits(body[:used], n, k), used


@lru_cache(1024)
def low_bits(n: int, k: int) -> int:
    """How many low bits of each index ``rice`` packs: the number with the fewest bits in all."""
    return min(range(n.bit_length() + 1), key=lambda low: k * low + unary_bits(n, k, low))


def unary_bits(n: int, k: int, low: int) -> int:
    """Bits of the upper plane of ``rice``."""
    return k + (max(n - 1, 0) >> low)


def rice_planes(n: int, k: int) -> tuple[int, int, int]:
    """The low bits of an index, and the bytes of the lower and the upper plane."""
    low = low_bits(n, k)
    return low, packed_bytes(k, low), packed_bytes(unary_bits(n, k, low), 1)


def _encode_rice(indices: Tensor, n: int) -> Tensor:
    k = indices.numel()
    low = low_bits(n, k)
    upper = bits_at((indices >> low) + torch.arange(k, dtype=torch.int64, device=indices.device), unary_bits(n, k, low))
    return torch.cat([pack(indices & ((1 << low) - 1), low), upper]) if low else upper


def _decode_rice(body: Tensor, n: int, k: int) -> tuple[Tensor, int]:
    low, lower, upper = rice_planes(n, k)
    quotients = set_bits(body[lower : lower + upper], unary_bits(n, k, low), k) - torch.arange(
        k, dtype=torch.int64, device=body.device
    )
    remainders = unpack(body[:lower], low, k).to(torch.int64) if low else 0
    return quotients << low | remainders, lower + upper


CODES = {
    "int32": Code(lambda n, k: 4 * k, lambda indices, n: indices.to(torch.int32).view(torch.uint8), _decode_int32),
    "bitmap": Code(lambda n, k: packed_bytes(n, 1), bits_at, _decode_bitmap),
    "rice": Code(lambda n, k: sum(rice_planes(n, k)[1:]), _encode_rice, _decode_rice),
}
"""The codes by name, in the order of their numbers on the wire."""
