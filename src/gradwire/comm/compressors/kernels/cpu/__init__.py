"""Kernels for one CPU core: a file for each family of methods, and here what several of their loops share.

`compiled` keeps numba's machine code on disk; of several processes one compiles, and the others wait and read.

They give the bits of the reference implementations: float32 arithmetic stays float32 (a bare literal would make it
float64; numba makes integer arithmetic 64 bits wide) and is neither reassociated nor contracted; sums are float64
(`summing`). Magnitudes are compared as integers: their order is that of their bits, with NaN above infinity. Inner
loops run from 0 over slices, or they do not vectorize.

The loops over a table of segments are compiled once for each method with that method's `encode` and `decode`. A segment
is encoded and decoded in chunks, between which nothing is shared but the segment's bytes. Where a decoded chunk is
added to a sum, or subtracted for error feedback, it never leaves the cache. Encodings begin at any byte: no number in
them need be aligned.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Timer, current_thread, main_thread
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np
import torch
from numba import config
from numba.core.compiler_lock import global_compiler_lock
from torch import Tensor

from gradwire.comm.compressors.kernels import COMPILING, Kernel
from gradwire.comm.compressors.philox import KEY_STEPS, MULTIPLIERS, ROUNDS, draw_seeds
from gradwire.comm.compressors.segments import Buffers, Segments

Function = TypeVar("Function", bound=Callable)

SIGNLESS = np.uint32(0x7FFFFFFF)
INFINITY = np.uint32(0x7F800000)  # the bits from which on a magnitude is not finite
M0, M1 = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
K0, K1 = np.uint32(KEY_STEPS[0]), np.uint32(KEY_STEPS[1])
HALF = np.uint64(32)
ULP = np.float32(2.0**-24)
TILE = 1024  # elements in a tile: whole calls of Philox, and whole bytes of codes; only a tensor's last has fewer
LOWEST = np.uint64(0x0101010101010101)  # the lowest bit of each of eight bytes
GATHER = np.uint64(0x0102040810204080)  # a product with it has these bits side by side in its highest byte

START, NUMEL, AT, SIZE = range(4)  # columns of the table; a method's own numbers follow
CHUNK = 4096  # elements, about
WHOLE = 2**62  # a chunk that is never full
BLANK, ZERO, SUM = range(3)
ONTO = {"blank": BLANK, "zero": ZERO, "sum": SUM}
HERE = torch.device("cpu")


def cache_folder() -> str:
    """Where compiled kernels are kept: a folder of the user's that goes by the digest of this folder's source.

    numba notices an edit of a function's own file only, not of what it calls; the digest covers both. Where the user's
    cache cannot be written, ranks on a machine share a folder for temporary files.
    """
    source = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    digest = hashlib.sha256(source).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradwire"
    temporary = Path(tempfile.gettempdir()) / f"gradwire-{os.getuid()}"
    for root in (cache, temporary):
        folder = root / "numba" / digest
        with suppress(OSError):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK) and (root == cache or is_own(root)):
                return str(folder)
    return tempfile.mkdtemp(prefix="gradwire-numba-")


def is_own(folder: Path) -> bool:
    """Whether a folder belongs to this user, and nobody else may put code there."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


CACHE = cache_folder()
SILENT_S = 2.0  # what takes longer is announced


def compiled(function: Function, reassociate: bool = False, inline: str = "never") -> Function:
    """Compile ``function`` at its first call, or take it from the disk; it releases the GIL."""
    before, config.CACHE_DIR = config.CACHE_DIR, CACHE
    try:
        fastmath = {"reassoc"} if reassociate else False
        loop = numba.njit(function, cache=True, nogil=True, error_model="numpy", fastmath=fastmath, inline=inline)
    finally:
        config.CACHE_DIR = before
    if not config.DISABLE_JIT:
        loop.compile = partial(compile_alone, loop.compile, function.__qualname__)
    return loop


_compiling = False  # in this process; numba's lock guards it
os.register_at_fork(  # a child would find numba's lock taken by a thread that it does not have
    before=global_compiler_lock.acquire,
    after_in_parent=global_compiler_lock.release,
    after_in_child=global_compiler_lock.release,
)


def compile_alone(compile_here: Callable[[Any], Any], name: str, signature: Any) -> Any:
    """Compile a function with all that it calls, or take it from the disk, while no other process does so.

    Of W ranks one compiles, and the others find the result on the disk. What takes longer than `SILENT_S` is announced.

    Raises:
        SystemExit: In a thread of `COMPILING`, when the main thread has ended, which waits for it.
    """
    global _compiling
    if current_thread() in COMPILING and not main_thread().is_alive():
        raise SystemExit
    with global_compiler_lock:
        if _compiling:
            return compile_here(signature)
        _compiling = True
        try:
            with announced(name), locked(name):
                return compile_here(signature)
        finally:
            _compiling = False


@contextmanager
def announced(name: str) -> Iterator[None]:
    """Print a line on rank 0's stderr if the block takes longer than `SILENT_S`; a process prints one at most."""
    timer = Timer(SILENT_S, announce, [name])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


_announced = False


def announce(name: str) -> None:
    """Say what takes long: to compile a kernel, to read it, or to wait for the rank that compiles it."""
    global _announced
    if not _announced and os.environ.get("RANK", "0") == "0":
        _announced = True
        print(
            f"gradwire: preparing kernels for this processor, {name} first: compiled once, then read from {CACHE}",
            file=sys.stderr,
            flush=True,
        )


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Wait until no other process compiles that function; where files cannot be locked, several may do so."""
    with Path(CACHE, f"{name}.lock").open("a") as stream:
        with suppress(OSError):
            fcntl.flock(stream, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(stream, fcntl.LOCK_UN)  # closing is not enough where a worker was forked meanwhile


def summing(function: Function) -> Function:
    """`compiled`, with sums in whatever order vectorizes: for float64 sums that are rounded to float32 later."""
    return compiled(function, reassociate=True)


def inlined(function: Function) -> Function:
    """`compiled` into its callers: a call with arrays takes as long as some dozens of elements."""
    return compiled(function, inline="always")


@compiled
def largest(bits: np.ndarray) -> np.uint32:
    """The largest magnitude among float32 numbers given as uint32 bits, as bits; any NaN is larger than infinity."""
    most = np.uint32(0)
    for i in range(bits.size):
        most = max(most, np.uint32(bits[i] & SIGNLESS))
    return most


@compiled
def fill_words(seed: int, start: int, out: np.ndarray) -> None:
    """Words ``start`` to ``start + out.size`` of the seed's stream into uint32 ``out``; both are multiples of 4."""
    key0, key1 = np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)
    for block in range(out.size // 4):
        c0, c1, c2, c3 = np.uint32(start // 4 + block), np.uint32(0), np.uint32(0), np.uint32(0)
        k0, k1 = key0, key1
        for _ in range(ROUNDS):
            p0 = np.uint64(c0) * M0
            p1 = np.uint64(c2) * M1
            c0 = np.uint32(np.uint32(p1 >> HALF) ^ c1 ^ k0)
            c2 = np.uint32(np.uint32(p0 >> HALF) ^ c3 ^ k1)
            c1, c3 = np.uint32(p1), np.uint32(p0)
            k0, k1 = np.uint32(k0 + K0), np.uint32(k1 + K1)
        out[4 * block], out[4 * block + 1], out[4 * block + 2], out[4 * block + 3] = c0, c1, c2, c3


@compiled
def uniform(word: np.uint32) -> np.float32:
    """The number in [0, 1) that a word represents."""
    return np.float32(np.int32(word >> np.uint32(8))) * ULP


@compiled
def pack_tile(codes: np.ndarray, count: int, bits: int, out: np.ndarray) -> None:
    """Pack ``count`` codes (uint8, whose lowest ``bits`` bits count; bits divides 8) into the first bytes of ``out``.

    ``codes`` is a whole tile; what follows the last code is overwritten.
    """
    lanes = 8 // bits
    filled = (count + lanes - 1) // lanes
    mask = np.uint8((1 << bits) - 1)
    codes[count : filled * lanes] = 0
    if bits == 8:
        for i in range(filled):
            out[i] = codes[i]
    elif bits == 4:
        for i in range(filled):
            out[i] = (codes[2 * i] & mask) | codes[2 * i + 1] << 4
    elif bits == 2:
        for i in range(filled):
            low = (codes[4 * i] & mask) | (codes[4 * i + 1] & mask) << 2
            out[i] = low | (codes[4 * i + 2] & mask) << 4 | codes[4 * i + 3] << 6
    else:
        eights = codes.view(np.uint64)
        for i in range(filled):
            out[i] = np.uint8(((eights[i] & LOWEST) * GATHER) >> np.uint64(56))


@compiled
def unpack_tile(packed: np.ndarray, count: int, bits: int, codes: np.ndarray) -> None:
    """The first ``count`` codes of ``packed`` into ``codes``, a whole tile."""
    lanes = 8 // bits
    whole = count // lanes
    if bits == 8:
        for i in range(count):
            codes[i] = packed[i]
    elif bits == 4:
        for i in range(whole):
            codes[2 * i], codes[2 * i + 1] = packed[i] & 15, packed[i] >> 4
    elif bits == 2:
        for i in range(whole):
            byte = packed[i]
            codes[4 * i], codes[4 * i + 1] = byte & 3, byte >> 2 & 3
            codes[4 * i + 2], codes[4 * i + 3] = byte >> 4 & 3, byte >> 6
    else:
        for i in range(whole):
            for lane in range(8):
                codes[8 * i + lane] = packed[i] >> lane & 1
    for i in range(whole * lanes, count):
        codes[i] = packed[i // lanes] >> (i % lanes * bits) & ((1 << bits) - 1)


# Loops over a table of segments


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
    """A method's calls for many tensors: one compiled call for all segments.

    Args:
        method: Its name.
        encode: The method's `encode`, compiled.
        decode: Its `decode`, compiled.
        settings: The options of a method that both take.
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
        row: Callable[[Any, int], tuple[int, ...]] = lambda method, numel: (),
        decoder: Callable | None = None,
    ) -> None:
        self._encode_all = bound(encode_all, method, encode=encode, decode=decode)
        self._decode_all = decoder or bound(decode_all, method, decode=decode)
        self._settings, self._chunk, self._draws, self._row = settings, chunk, draws, row

    def kernel(self, **others: Any) -> Kernel:
        """The method's kernel, with what else it has."""
        return Kernel(encode_many=self.encode_many, decode_add=self.decode_add, **others)

    def encode_many(self, method: Any, buffers: Buffers) -> None:
        """See `gradwire.comm.compressors.kernels`."""
        values, segments, wire, generators, bad, residual = buffers
        settings, table, chunk = self._plan(method, segments)
        count = len(segments)
        seeds = draw_seeds(generators, HERE, method.name).numpy() if self._draws(method) else np.zeros(count, np.int64)
        kept, feedback = (values, False) if residual is None else (residual, True)
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

        def make() -> tuple[tuple, np.ndarray, int]:
            rows = [(*row, *self._row(method, row[NUMEL])) for row in segments.rows]
            table = np.array(rows, np.int64).reshape(len(rows), -1)
            least, longest = self._chunk(method), max((segment.numel for segment in segments), default=0)
            return self._settings(method), table, max(1, min(-(-CHUNK // least) * least, longest))

        return segments.derive(method, make)
