"""The bytes of a JSON file in UTF-8, without what ijson replaces, misreads or does not survive.

Its parser turns half of a surrogate pair into ``?`` or joins it with the next character, an integer of more digits than
Python converts ends the process, and deep nesting takes memory by the square of the depth.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from itertools import chain
from typing import BinaryIO

PIECE = 65_536  # bytes read at once
LONGEST_NUMBER = 4300  # digits that Python converts to an integer
DEEPEST = 1000  # arrays and objects in one another

DIGITS, SPACES, QUOTE, BACKSLASH = b"0123456789", b" \t\r\n", b'"', ord("\\")
NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (LONGEST_NUMBER + 1))
PAIRED = re.compile(rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])|\\u[dD][89abAB]..\\u[dD][c-fC-F]..)*+", re.S)


class Unfit(ValueError):
    """Bytes that are refused; the message goes after the words "document 3 has"."""


class Checked:
    """A stream that ijson reads: the bytes of a JSON file in UTF-8, whatever Unicode encoding the file has.

    Everything before a fault is given out first, so the reader knows in which document the fault is.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._pieces: Iterator[bytes] = filter(None, _checked(_in_utf8(stream)))

    def read(self, size: int) -> bytes:
        """Return the next bytes, of any number; none at the end, or if ``size`` is 0.

        Raises:
            Unfit: If the file holds half of a surrogate pair, a number of more than ``LONGEST_NUMBER`` digits, or more
                than ``DEEPEST`` nested values.
            UnicodeDecodeError: If it is not in the encoding that it begins in.
        """
        return next(self._pieces, b"") if size else b""

    def first(self) -> bytes:
        """Return the first byte that is not white space, and keep all for `read`; none in a blank file."""
        for piece in self._pieces:
            if start := piece.lstrip(SPACES):
                self._pieces = chain([piece], self._pieces)
                return start[:1]
        return b""


# Why: docs/decisions.md, "A check in front of ijson".
def _in_utf8(stream: BinaryIO) -> Callable[[int], bytes]:
    """Return the function that reads on, without a byte order mark."""
    encoding = json.detect_encoding(stream.read(4))
    stream.seek(3 if encoding == "utf-8-sig" else 0)
    if encoding.startswith("utf-8"):
        return stream.read
    text = io.TextIOWrapper(stream, encoding, newline="")
    return lambda size: text.read(size).encode()


def _checked(read: Callable[[int], bytes]) -> Iterator[bytes]:
    """Yield strings and what is between them; errors as in `Checked.read`."""
    data, depth = b"", 0
    while more := read(max(PIECE, len(data))):
        data, end = data + more, 0
        while (opening := data.find(QUOTE, end)) >= 0 and (closing := _closing(data, opening + 1)) >= 0:
            depth = _checked_depth(data[end:opening], depth)
            yield data[end:opening]
            _check_pairs(data[opening + 1 : closing])
            yield data[opening : closing + 1]
            end = closing + 1
        data = data[end:]
        if opening < 0:
            between = data.rstrip(DIGITS)
            depth = _checked_depth(between, depth)
            yield between
            data = data[len(between) :]
            _check_number(data)
    yield data


def _closing(data: bytes, start: int) -> int:
    """The quote that ends the string from ``start``; -1 if it is not in the data."""
    quote = data.find(QUOTE, start)
    while quote >= 0:
        first = quote
        while first > start and data[first - 1] == BACKSLASH:
            first -= 1
        if (quote - first) % 2 == 0:
            break
        quote = data.find(QUOTE, quote + 1)
    return quote


def _checked_depth(between: bytes, depth: int) -> int:
    """Check what is between two strings; return how many arrays and objects are open after it."""
    _check_number(between)
    for bracket in between.translate(None, NO_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth > DEEPEST:
            raise Unfit(f"more than {DEEPEST} values in one another")
    return depth


def _check_number(between: bytes) -> None:
    if len(between) > LONGEST_NUMBER and LONG_NUMBER.search(between):
        raise Unfit(f"a number of more than {LONGEST_NUMBER} digits: write it as a string, or remove it")


def _check_pairs(string: bytes) -> None:
    if b"\\ud" in string or b"\\uD" in string:
        end = PAIRED.match(string).end()  # type: ignore[union-attr]
        if end < len(string):
            half = string[end : end + 6].decode(errors="replace")
            raise Unfit(f"{half}, half of a surrogate pair: write the whole character, or remove it")
