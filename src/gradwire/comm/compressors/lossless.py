"""Lossless code of a message: each kind of its bytes goes through the range coder with a separate table.

Bytes of one kind are alike: exponents of bfloat16 numbers, those of float32 scales, packed codes, gaps of indices. A
message is given as sections of numbers of 1, 2 or 4 bytes. A section longer than 65,536 bytes counts as several,
so that the frequencies follow the data. Numbers of 2 and 4 bytes are rotated left by a bit, which brings a float's sign
behind its mantissa and an 8-bit exponent into one byte; then the i-th bytes of a section's numbers are one kind.

Wire, in int64 (little-endian): the CRC-32 of all that follows; the number of sections; for each section the width of
its numbers, negative where they are indices, its bytes, and the bytes of the code of each kind. Then the codes
(`gradwire.comm.compressors.rans`), where one as long as its bytes is those bytes themselves; then zeros up to the least
length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple
from zlib import crc32

import numpy as np

from gradwire.comm.compressors import rans
from gradwire.comm.compressors.base import Section

WORD = 8  # bytes of a number in the head
CHECKED = WORD  # where the bytes begin that the check covers
MOST = 2**16  # bytes of a section with separate tables


class Part(NamedTuple):
    """A section as the head describes it, and the bytes of its codes."""

    section: Section
    codes: tuple[int, ...]


def encode(message: np.ndarray, sections: Sequence[Section], least: int = 0) -> np.ndarray:
    """The code of a message, perhaps longer than it.

    Args:
        message: uint8 [b].
        sections: Its runs of numbers; their bytes add up to b.
        least: The code's least length; zeros fill it up.

    Returns:
        uint8 vector.
    """
    head, codes, position = [0], [], 0
    for section in divided(sections):
        coded = [rans.encode(kind) for kind in kinds(message[position : position + section.nbytes], section.width)]
        head += [
            -section.width if section.indices else section.width,
            section.nbytes,
            *(code.size for code in coded),
        ]
        head[0] += 1
        codes += coded
        position += section.nbytes
    parts = [np.array(head, "<i8").view(np.uint8), *codes]
    filling = np.zeros(max(0, least - CHECKED - sum(part.size for part in parts)), np.uint8)
    body = np.concatenate([*parts, filling])
    return np.concatenate([check(body), body])


def decode(code: np.ndarray, nbytes: int | None) -> np.ndarray:
    """The message that `encode` was given.

    Args:
        code: uint8 vector, contiguous.
        nbytes: The message's bytes; None where they are not known.

    Returns:
        uint8 [nbytes].

    Raises:
        ValueError: If these bytes are not the code of such a message.
    """
    if not np.array_equal(code[:CHECKED], check(code[CHECKED:])):
        raise ValueError(f"invalid payload: the checksum of a lossless code of {code.size} bytes does not match")
    parts, position = described(code)
    size = sum(part.section.nbytes for part in parts)
    if nbytes not in (None, size):
        raise ValueError(f"invalid payload: a lossless code of {size} bytes, expected one of {nbytes}")
    message = []
    for section, codes in parts:
        coded = []
        for used in codes:
            coded.append(rans.decode(code[position : position + used], section.nbytes // section.width))
            position += used
        message.append(together(coded, section.width))
    return np.concatenate([np.empty(0, np.uint8), *message])


def check(body: np.ndarray) -> np.ndarray:
    """The CRC-32 of what follows it, as int64: uint8 [8]."""
    return np.array([crc32(body.data)], "<i8").view(np.uint8)


def index_bytes(code: np.ndarray) -> int:
    """How many bytes of a code are those of indices."""
    return sum(sum(part.codes) for part in described(code)[0] if part.section.indices)


def described(code: np.ndarray) -> tuple[list[Part], int]:
    """Read the head: the parts, and the place of the first code.

    Raises:
        ValueError: If it is not there, or does not describe what follows.
    """
    words = map(int, code[CHECKED : code.size - code.size % WORD].view("<i8"))
    parts, used = [], 2  # the check, and the number of sections
    try:
        for _ in range(next(words)):
            width, nbytes = next(words), next(words)
            parts.append(Part(Section(nbytes, abs(width), width < 0), tuple(islice(words, abs(width)))))
            used += 2 + abs(width)
    except StopIteration:
        raise ValueError(f"invalid payload: the head of a lossless code is longer than its {code.size} bytes") from None
    sizes = [part.section.nbytes for part in parts] + [size for part in parts for size in part.codes]
    total = used * WORD + sum(sum(part.codes) for part in parts)
    whole = all(width in (1, 2, 4) and nbytes % width == 0 and nbytes <= MOST for (nbytes, width, _), _ in parts)
    if not whole or min(sizes, default=0) < 0 or total > code.size or code[total:].any():
        raise ValueError(f"invalid payload: the head of a lossless code does not describe its {code.size} bytes")
    return parts, used * WORD


def divided(sections: Sequence[Section]) -> list[Section]:
    """The sections in pieces of at most `MOST` bytes."""
    return [
        section._replace(nbytes=min(section.nbytes - position, MOST))
        for section in sections
        for position in range(0, section.nbytes, MOST)
    ]


def kinds(numbers: np.ndarray, width: int) -> list[np.ndarray]:
    """The i-th bytes of rotated numbers (uint8 [n * width]), for each i: uint8 [n]."""
    if width == 1:
        return [numbers]
    values = numbers.view(f"<u{width}")
    rotated = (values << 1 | values >> (8 * width - 1)).view(np.uint8)
    return [np.ascontiguousarray(rotated[i::width]) for i in range(width)]


def together(kinds_of_bytes: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Undo `kinds`."""
    if width == 1:
        return kinds_of_bytes[0]
    numbers = np.empty(width * kinds_of_bytes[0].size, np.uint8)
    for i, kind in enumerate(kinds_of_bytes):
        numbers[i::width] = kind
    values = numbers.view(f"<u{width}")
    return (values >> 1 | values << (8 * width - 1)).view(np.uint8)
