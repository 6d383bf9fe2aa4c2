"""The loops over a table of segments, compiled once for each method with that method's `encode` and `decode`.

A segment is encoded and decoded in chunks, between which nothing is shared but the segment's bytes. Where a decoded
chunk is added to a sum, or subtracted for error feedback, it never leaves the cache. Encodings begin at any byte: no
number in them need be aligned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradwire.comm.compressors.kernels.cpu import compiled
from gradwire.comm.compressors.philox import draw_seeds
from gradwire.comm.compressors.segments import Buffers, Segments

START, NUMEL, AT, SIZE = range(4)  # columns of the table; a method's own numbers follow
CHUNK = 4096  # elements, about
WHOLE = 2**62  # a chunk that is never full
BLANK, ZERO, SUM = range(3)
ONTO = {"blank": BLANK, "zero": ZERO, "sum": SUM}
HERE = torch.device("cpu")


class Chunk(NamedTuple):
    """A chunk of one segment, as a method's functions get it.

    Attributes:
        settings: Numbers from the method's options.
        row: The segment's row of the table.
        first: Index in the segment of the chunk's first element, a multiple of the method's chunk.
        x: The chunk's elements: float32 [c].
        seed: The segment's, to encode.
        wire: All of the segment's bytes: uint8.
    """

    settings: tuple
    row: np.ndarray
    first: int
    x: np.ndarray
    seed: int
    wire: np.ndarray


def encode(chunk: Chunk) -> bool:
    """The place of a method's function, which encodes ``x`` into its part of ``wire``; True if not representable."""
    raise NotImplementedError


def decode(chunk: Chunk) -> bool:
    """The place of a method's function, which fills ``x`` from ``wire``; False if the bytes are not an encoding."""
    raise NotImplementedError


@compiled
def add(values: np.ndarray, out: np.ndarray) -> None:
    """Add ``values`` to ``out``."""
    for i in range(out.size):
        out[i] += values[i]


@compiled
def add_to_zero(out: np.ndarray) -> None:
    """Set ``out`` to the sum of 0 and itself, in which no zero is negative."""
    for i in range(out.size):
        out[i] = np.float32(0) + out[i]


@compiled
def subtract(values: np.ndarray, out: np.ndarray) -> None:
    """Subtract ``values`` from ``out``."""
    for i in range(out.size):
        out[i] -= values[i]


def encode_all(
    settings: tuple,
    table: np.ndarray,
    chunk: int,
    seeds: np.ndarray,
    values: np.ndarray,
    residual: np.ndarray,
    feedback: bool,
    wire: np.ndarray,
    bad: np.ndarray,
) -> None:
    """Encode all segments; with ``feedback``, of ``residual + values``, leaving what was not sent in ``residual``."""
    sent = np.empty(chunk if feedback else 0, np.float32)
    for s in range(len(table)):
        row = table[s]
        x = values[row[START] : row[START] + row[NUMEL]]
        encoding = wire[row[AT] : row[AT] + row[SIZE]]
        if not feedback:
            bad[s] = encode(Chunk(settings, row, 0, x, seeds[s], encoding))
            continue
        kept = residual[row[START] : row[START] + row[NUMEL]]
        for first in range(0, max(x.size, 1), chunk):
            numbers = kept[first : first + chunk]
            add(x[first : first + chunk], numbers)
            bad[s] |= encode(Chunk(settings, row, first, numbers, seeds[s], encoding))
            decode(Chunk(settings, row, first, sent[: numbers.size], 0, encoding))
            subtract(sent, numbers)
        if bad[s]:
            kept[:] = 0


def decode_all(settings: tuple, table: np.ndarray, chunk: int, wires: np.ndarray, onto: int, out: np.ndarray) -> int:
    """Decode all segments of ``wires`` (uint8 [messages, b]) into ``out``; return the first that is none, or -1."""
    if onto == BLANK and len(wires) == 1:
        chunk = WHOLE  # nothing is added
    room = np.empty(0 if chunk == WHOLE else chunk, np.float32)
    for s in range(len(table)):
        row = table[s]
        sums = out[row[START] : row[START] + row[NUMEL]]
        for first in range(0, max(sums.size, 1), chunk):
            numbers = sums[first : first + chunk]
            for message in range(len(wires)):
                encoding = wires[message, row[AT] : row[AT] + row[SIZE]]
                if message == 0 and onto != SUM:
                    fits = decode(Chunk(settings, row, first, numbers, 0, encoding))
                    if onto == ZERO:
                        add_to_zero(numbers)
                else:
                    fits = decode(Chunk(settings, row, first, room[: numbers.size], 0, encoding))
                    add(room, numbers)
                if not fits:
                    return s
    return -1


def blocks_and(tile: int) -> Callable[[Any], int]:
    """Chunks of whole blocks and whole tiles."""
    return lambda method: math.lcm(method.block, tile)


def bound(template: Callable, method: str, **names: Any) -> Callable:
    """Compile ``template`` for a method, with other functions and numbers in the place of its globals ``names``."""
    function = FunctionType(template.__code__, {**template.__globals__, **names}, template.__name__)  # type: ignore[attr-defined]
    function.__qualname__ = f"{method}.{template.__name__}"  # under which numba keeps the machine code
    return compiled(function)


class Segmented:
    """The fused form of one method: one compiled call for all segments.

    Args:
        method: Its name.
        encode: The method's `encode`, compiled.
        decode: Its `decode`, compiled.
        settings: What both take of a method.
        chunk: Elements after which blocks, bytes and tiles all begin; chunks are multiples of that.
        draws: Whether the method takes a seed.
        row: A segment's own numbers by method and elements, for the columns after `SIZE`.
        decoder: In the place of `decode_all`, compiled.
    """

    def __init__(
        self,
        method: str,
        encode: Callable,
        decode: Callable,
        settings: Callable[[Any], tuple],
        chunk: Callable[[Any], int],
        draws: Callable[[Any], bool] = lambda method: False,
        row: Callable[[Any, int], tuple[int, ...]] | None = None,
        decoder: Callable | None = None,
    ) -> None:
        self._encode_all = bound(encode_all, method, encode=encode, decode=decode)
        self._decode_all = decoder or bound(decode_all, method, decode=decode)
        self._settings, self._chunk, self._draws, self._row = settings, chunk, draws, row

    def encode_many(self, method: Any, buffers: Buffers) -> None:
        """See `gradwire.comm.compressors.kernels`."""
        values, segments, wire, generators, bad, residual = buffers
        settings, table, chunk = self._plan(method, segments)
        count = len(segments)
        seeds = draw_seeds(generators, HERE, method.name).numpy() if self._draws(method) else np.zeros(count, np.int64)
        feedback = residual is not None
        kept = values if residual is None else residual
        self._encode_all(
            settings, table, chunk, seeds, values.numpy(), kept.numpy(), feedback, wire.numpy(), bad.numpy()
        )

    def decode_add(self, method: Any, wires: Tensor, segments: Segments, out: Tensor, onto: str) -> None:
        """See `gradwire.comm.compressors.kernels`."""
        failed = self._decode_all(*self._plan(method, segments), wires.numpy(), ONTO[onto], out.numpy())
        if failed >= 0:
            raise ValueError(
                f"invalid payload: the bytes of segment {failed} cannot encode shape {segments[failed].form}"
            )

    def _plan(self, method: Any, segments: Segments) -> tuple[tuple, np.ndarray, int]:
        """The settings, the table with the method's own columns, and the elements of a chunk."""
        return segments.derive(method, lambda: self._planned(method, segments))

    def _planned(self, method: Any, segments: Segments) -> tuple[tuple, np.ndarray, int]:
        rows = segments.rows
        if self._row is not None:
            rows = [(*row, *self._row(method, row[NUMEL])) for row in rows]
        table = np.array(rows, np.int64).reshape(len(rows), -1)
        least = self._chunk(method)
        longest = max((segment.numel for segment in segments), default=0)
        return self._settings(method), table, max(1, min(-(-CHUNK // least) * least, longest))
