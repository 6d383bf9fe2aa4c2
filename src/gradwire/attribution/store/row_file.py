"""Chunked reading and writing of files of rows.

`torch_files.read` maps such a file, but every page it touches counts as resident, and `torch.save` cannot write a
tensor larger than memory. The format is torch's own: a zip archive with one uncompressed tensor.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gradwire.attribution.store import store
from gradwire.attribution.store.row_types import Float32, RowCodec
from gradwire.base import torch_files
from gradwire.base.errors import BadInput
from gradwire.base.files import atomic_write, write_back

if TYPE_CHECKING:
    from gradwire.attribution.store.provenance import Provenance

NORESERVE = 0x4000  # Linux: address space without backing memory
SPARSE = 4  # read up to this many times the requested rows at once rather than row by row


class RowFile:
    """Rows in a file, read as float32.

    Args:
        path: A file that `store.read_stored` accepts.

    Attributes:
        shape: The number of rows, and D.
        codec: The codec of the rows.

    Raises:
        BadInput: If the file is invalid.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        stored, self.codec = store.read_stored(path)
        self.shape = len(stored), self.codec.dim
        self._start = _place(path).offset

    def take(self, positions: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float32]:
        """Read the rows at ``positions``, in that order."""
        return self.decoded(self.take_stored(positions))

    def take_stored(self, positions: Sequence[int] | NDArray[np.int64]) -> NDArray[Any]:
        """Read the rows at ``positions`` as they are stored."""
        wanted = np.asarray(positions, dtype=np.int64)
        first, last = int(wanted.min()), int(wanted.max()) + 1
        if last - first <= SPARSE * len(wanted):
            rows = self.stored(first, last)
            return rows if np.array_equal(wanted, np.arange(first, last)) else rows[wanted - first]
        return np.concatenate([self.stored(int(row), int(row) + 1) for row in wanted])

    def read(self, first: int, last: int) -> NDArray[np.float32]:
        """The rows of ``range(first, last)``."""
        return self.decoded(self.stored(first, last))

    def decoded(self, stored: NDArray[Any]) -> NDArray[np.float32]:
        """Decode stored rows."""
        if isinstance(self.codec, Float32):
            return stored
        import torch

        return self.codec.decode(torch.from_numpy(stored)).numpy()

    def stored(self, first: int, last: int) -> NDArray[Any]:
        """The rows of ``range(first, last)`` as they are stored."""
        count, offset = (last - first) * self.codec.width, self._start + first * self.codec.row_bytes
        numbers = np.fromfile(self.path, dtype=self.codec.dtype, count=count, offset=offset)
        return numbers.reshape(last - first, self.codec.width)

    def read_into(self, rows: Sequence[memoryview], positions: Sequence[int]) -> None:
        """Read the rows at ``positions``, as they are stored and unverified, each into one of ``rows``."""
        ends = [*(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), len(positions)]  # of runs of consecutive rows
        with self.path.open("rb", buffering=0) as stream:
            for start, end in pairwise([0, *ends]):
                os.preadv(stream.fileno(), rows[start:end], self._start + positions[start] * self.codec.row_bytes)

    def chunks(self, rows: int) -> Iterator[NDArray[np.float32]]:
        """Yield all rows, at most ``rows`` at a time; the next ones take the place of those before."""
        return map(self.decoded, self.stored_chunks(rows))

    def stored_chunks(self, rows: int) -> Iterator[NDArray[Any]]:
        """As `chunks`, as they are stored."""
        space = np.empty((min(rows, self.shape[0]), self.codec.width), self.codec.dtype)
        with self.path.open("rb") as stream:  # buffered: a raw read may return a part
            stream.seek(self._start)
            for first in range(0, self.shape[0], rows):
                block = space[: self.shape[0] - first]
                if stream.readinto(block.data) != block.nbytes:
                    raise BadInput(f"{self.path} ended before its last row: it changed while it was read.")
                yield block


class BoundRows(RowFile):
    """The rows of a complete block, each verified against its digest when read.

    Args:
        names: The block's files.
        dim: The width of the rows.
        origin: Provenance of the collection.

    Attributes:
        ids: The rows' ids.
        meta: The rows' metadata.

    Raises:
        BadInput: If a file is missing, damaged or of a different width or type, or if a row read does not match its
            digest.
    """

    def __init__(self, names: store.Names, dim: int, origin: Provenance) -> None:
        super().__init__(names.rows)
        self.names, self.identity = names, origin.identity
        self.ids, self.meta = store.read_ids(names.ids), store.read_meta(names.meta)
        store.check_counts(names, [self.shape[0], len(self.ids), len(self.meta)])
        store.check_type(names.rows, self.codec, origin, dim)

    def stored(self, first: int, last: int) -> NDArray[Any]:
        """The rows of ``range(first, last)`` as they are stored."""
        rows = super().stored(first, last)
        self.check(rows, self.meta.slice(first, last - first), range(first, last))
        return rows

    def stored_chunks(self, rows: int) -> Iterator[NDArray[Any]]:
        """Yield all rows as they are stored, at most ``rows`` at a time."""
        for number, block in enumerate(super().stored_chunks(rows)):
            first = number * rows
            self.check(block, self.meta.slice(first, len(block)), range(first, first + len(block)))
            yield block

    def block(self, first: int, last: int) -> store.Block:
        """The rows of ``range(first, last)`` with their ids and metadata, unverified."""
        import torch

        rows = torch.from_numpy(super().stored(first, last))
        return store.Block(rows, self.ids[first:last], self.meta.slice(first, last - first), self.codec)

    def verify(self, height: int) -> None:
        """Check all rows against their digests, ``height`` at a time."""
        for _ in self.stored_chunks(height):
            pass

    def check(self, rows: NDArray[Any], meta: pa.Table, positions: Sequence[int]) -> None:
        """Check rows as they are stored, which are at ``positions`` and have this metadata, against their digests."""
        ids = [self.ids[position] for position in positions]
        if wrong := [positions[row] for row in store.mismatched(self.identity, ids, meta, rows)]:
            problem, *_ = store.unbound(self.names, self.ids, wrong, len(positions))
            raise BadInput(f"{problem}; delete these files and collect again.")


class Raw:
    """Appends raw numbers of one type.

    Attributes:
        sha256: Hash of the head and the numbers.
    """

    def __init__(self, stream: BinaryIO, head: bytes, dtype: np.dtype[Any]) -> None:
        self._stream, self._dtype, self.sha256 = stream, dtype, hashlib.sha256(head)

    def append(self, rows: NDArray[Any]) -> None:
        """Write rows behind those that are there."""
        numbers = np.ascontiguousarray(rows, dtype=self._dtype)
        self.sha256.update(numbers.data)
        self._stream.write(numbers.data)
        write_back(self._stream)


@contextmanager
def tensor_writer(path: Path, shape: tuple[int, int], row_type: str = "float32") -> Iterator[Raw]:
    """Open a writer of stored rows for `store.read_stored`; the file appears atomically, on success.

    Args:
        path: The file.
        shape: The number of rows, and D.
        row_type: How the rows are stored.
    """
    codec = store.codec_of(row_type, shape[1])
    with atomic_write(path) as part:
        _allocate(part, shape[0], codec)
        with part.open("r+b") as stream:
            writer = Raw(stream, stream.read(_place(part).offset), codec.dtype)
            yield writer
            writer.sha256.update(stream.read())  # the archive's directory


@contextmanager
def npy_writer(path: Path, shape: tuple[int, int]) -> Iterator[Raw]:
    """Open a writer of a NumPy file with one float32 matrix; the file appears atomically, on success."""
    with atomic_write(path) as part, part.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": shape})
        yield Raw(stream, b"", Float32.dtype)


def _allocate(path: Path, rows: int, codec: RowCodec) -> None:
    """Write the archive with torch, leaving a hole for the rows."""
    import torch

    with ExitStack() as stack:
        space: bytearray | mmap.mmap = bytearray()
        if rows:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (NORESERVE if sys.platform == "linux" else 0)
            space = mmap.mmap(-1, rows * codec.row_bytes, flags=flags)
            stack.enter_context(torch.serialization.skip_data())
        stored = torch.from_numpy(np.frombuffer(space, codec.dtype).reshape(rows, codec.width))
        with path.open("wb") as stream:
            torch.save(store.contents(stored, codec), stream)


def _place(path: Path) -> torch_files.Place:
    """Return the place of the archive's single tensor.

    Raises:
        BadInput: If the archive has several tensors.
    """
    place, *others = torch_files.storages(path).values()
    if others:
        raise BadInput(f"{path} holds more than one tensor.")
    return place
