"""Chunked reading and writing of float32 tensor files ``[n, D]``.

`torch.load` can map such a file, but every page it touches counts as resident, and `torch.save` cannot write a tensor
larger than memory. The format is torch's own: a zip archive with one uncompressed tensor.
"""

from __future__ import annotations

import json
import mmap
import struct
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from gradwire.errors import BadInput
from gradwire.files import whole
from gradwire.gradients import store

if TYPE_CHECKING:
    from gradwire.gradients.provenance import Provenance

FLOAT = 4  # bytes
NORESERVE = 0x4000  # Linux: address space without backing memory
SPARSE = 4  # read up to this many times the requested rows at once rather than row by row


class RowFile:
    """Rows in a tensor file.

    Args:
        path: A file that `store.read_rows` accepts.

    Raises:
        BadInput: If the file is invalid.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        rows = store.read_rows(path)
        self.shape = len(rows), rows.shape[1]
        self._start = _data_offset(path)

    def take(self, positions: Sequence[int]) -> NDArray[np.float32]:
        """Read the rows at ``positions``, in that order."""
        wanted = np.asarray(positions, dtype=np.int64)
        first, last = int(wanted.min()), int(wanted.max()) + 1
        if last - first <= SPARSE * len(wanted):
            return self.read(first, last)[wanted - first]
        return np.concatenate([self.read(int(row), int(row) + 1) for row in wanted])

    def read(self, first: int, last: int) -> NDArray[np.float32]:
        """The rows of ``range(first, last)``."""
        width = self.shape[1]
        found = np.fromfile(
            self.path, dtype="<f4", count=(last - first) * width, offset=self._start + first * width * FLOAT
        )
        return found.reshape(last - first, width)

    def chunks(self, rows: int) -> Iterator[NDArray[np.float32]]:
        """Yield all rows, at most ``rows`` at a time."""
        for first in range(0, self.shape[0], rows):
            yield self.read(first, min(first + rows, self.shape[0]))


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
        BadInput: If a file is missing, damaged or of a different width, or if a row read does not match its digest.
    """

    def __init__(self, names: store.Names, dim: int, origin: Provenance) -> None:
        super().__init__(names.rows)
        self.names, self.identity = names, origin.identity
        self.ids, self.meta = store.read_ids(names.ids), store.read_meta(names.meta)
        store.check_counts(names, [self.shape[0], len(self.ids), len(self.meta)])
        if self.shape[1] != dim:
            raise BadInput(f"{names.rows} has rows of {self.shape[1]} columns, not {dim}.")

    def read(self, first: int, last: int) -> NDArray[np.float32]:
        """The rows of ``range(first, last)``."""
        rows = super().read(first, last)
        block = store.Block(torch.from_numpy(rows), self.ids[first:last], self.meta.slice(first, last - first))
        store.check_bound(self.names, block, self.identity, first)
        return rows


class Writer(Protocol):
    """Appends rows to a file."""

    def append(self, rows: NDArray[np.float32]) -> None:
        """Write rows behind those that are there."""


class Raw(NamedTuple):
    """Appends raw numbers."""

    stream: BinaryIO

    def append(self, rows: NDArray[np.float32]) -> None:
        """Write rows behind those that are there."""
        self.stream.write(np.ascontiguousarray(rows, dtype="<f4").data)


class Columns:
    """Appends to a Parquet file with the columns ``sample_id`` and ``row``."""

    def __init__(self, stream: pq.ParquetWriter, ids: Sequence[str]) -> None:
        self._stream, self._ids, self._done = stream, ids, 0

    def append(self, rows: NDArray[np.float32]) -> None:
        """Write rows behind those that are there."""
        ids = pa.array(self._ids[self._done : self._done + len(rows)], pa.string())
        lists = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows.shape[1])
        self._stream.write_table(pa.Table.from_arrays([ids, lists], schema=self._stream.schema))
        self._done += len(rows)


@contextmanager
def tensor_writer(path: Path, shape: tuple[int, int]) -> Iterator[Writer]:
    """Open a writer of float32 rows for `torch.load`; the file appears atomically, on success."""
    with whole(path) as part:
        _allocate(part, shape)
        with part.open("r+b") as stream:
            stream.seek(_data_offset(part))
            yield Raw(stream)


@contextmanager
def safetensors_writer(path: Path, shape: tuple[int, int]) -> Iterator[Writer]:
    """Open a writer of a safetensors file with one tensor ``rows``."""
    nbytes = shape[0] * shape[1] * FLOAT
    header = json.dumps({"rows": {"dtype": "F32", "shape": list(shape), "data_offsets": [0, nbytes]}}).encode()
    header += b" " * (-len(header) % 8)
    with whole(path) as part, part.open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        yield Raw(stream)


@contextmanager
def parquet_writer(path: Path, shape: tuple[int, int], ids: Sequence[str]) -> Iterator[Writer]:
    """Open a writer of a Parquet file with one row per sample: its id and a list of numbers."""
    schema = pa.schema([("sample_id", pa.string()), ("row", pa.list_(pa.float32(), shape[1]))])
    with whole(path) as part, pq.ParquetWriter(part, schema) as stream:
        yield Columns(stream, ids)


def normalized(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale rows to norm 1; zero rows stay zero."""
    norms = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return (rows / np.where(norms == 0, 1, norms)).astype(np.float32)


def _allocate(path: Path, shape: tuple[int, int]) -> None:
    """Write the archive with torch, leaving a hole for the numbers."""
    nbytes = shape[0] * shape[1] * FLOAT
    if not nbytes:
        with path.open("wb") as stream:
            torch.save(torch.empty(shape), stream)
        return
    with ExitStack() as stack:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (NORESERVE if sys.platform == "linux" else 0)
        space = mmap.mmap(-1, nbytes, flags=flags)
        rows = torch.frombuffer(space, dtype=torch.float32).view(shape)
        stack.enter_context(torch.serialization.skip_data())
        with path.open("wb") as stream:
            torch.save(rows, stream)


def _data_offset(path: Path) -> int:
    """Return the byte offset of the archive's single tensor.

    Raises:
        BadInput: If the archive has several tensors, or a compressed one.
    """
    with zipfile.ZipFile(path) as archive, path.open("rb") as stream:
        entry, *others = [info for info in archive.infolist() if "/data/" in info.filename]
        if others or entry.compress_type != zipfile.ZIP_STORED:
            raise BadInput(f"{path} holds more than one tensor, or a compressed one.")
        stream.seek(entry.header_offset + 26)  # two lengths at the end of the local header
        name, extra = struct.unpack("<HH", stream.read(4))
    return entry.header_offset + 30 + name + extra
