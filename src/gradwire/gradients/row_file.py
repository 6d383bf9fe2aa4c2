"""A tensor file ``[n, D]`` of float32, read and written piece by piece: no more of it is in memory than is asked for.

`torch.load` can map such a file, but every page that was touched then counts as resident; and it cannot write one
larger than the memory. The file is torch's own: a zip archive whose one tensor lies in it uncompressed.
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
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from gradwire.errors import BadInput
from gradwire.files import whole
from gradwire.gradients.store import read_rows

FLOAT = 4  # bytes
NORESERVE = 0x4000  # of Linux: address space without memory behind it
SPARSE = 4  # times more rows than asked for are read in one go rather than one by one


class RowFile:
    """Rows that lie in a file.

    Args:
        path: A file that `store.read_rows` accepts.

    Raises:
        BadInput: If it does not.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        rows = read_rows(path)
        self.shape = len(rows), rows.shape[1]
        if not rows.is_contiguous():
            raise BadInput(f"{path} holds a matrix that is not in row order.")
        self._start = _data_offset(path)
        del rows
        if path.stat().st_size < self._start + self.shape[0] * self.shape[1] * FLOAT:
            raise BadInput(f"{path} is cut off.")

    def take(self, positions: Sequence[int]) -> NDArray[np.float32]:
        """The rows at ``positions``, in that order."""
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
        """All rows, at most ``rows`` at a time."""
        for first in range(0, self.shape[0], rows):
            yield self.read(first, min(first + rows, self.shape[0]))


class Writer(Protocol):
    """Appends rows to a file."""

    def append(self, rows: NDArray[np.float32]) -> None:
        """Write rows behind those that are there."""


class Raw(NamedTuple):
    """Appends the numbers themselves."""

    stream: BinaryIO

    def append(self, rows: NDArray[np.float32]) -> None:
        """Write rows behind those that are there."""
        self.stream.write(np.ascontiguousarray(rows, dtype="<f4").data)


class Columns:
    """Appends to a Parquet file of the columns ``sample_id`` and ``row``."""

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
    """A file for `torch.load` of float32 rows of this shape, to be appended one after another; whole or not at all."""
    with whole(path) as part:
        _allocate(part, shape)
        with part.open("r+b") as stream:
            stream.seek(_data_offset(part))
            yield Raw(stream)


@contextmanager
def safetensors_writer(path: Path, shape: tuple[int, int]) -> Iterator[Writer]:
    """A file for safetensors with one tensor ``rows``."""
    nbytes = shape[0] * shape[1] * FLOAT
    header = json.dumps({"rows": {"dtype": "F32", "shape": list(shape), "data_offsets": [0, nbytes]}}).encode()
    header += b" " * (-len(header) % 8)
    with whole(path) as part, part.open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        yield Raw(stream)


@contextmanager
def parquet_writer(path: Path, shape: tuple[int, int], ids: Sequence[str]) -> Iterator[Writer]:
    """A Parquet file with a row per sample: its id, and a list of numbers."""
    schema = pa.schema([("sample_id", pa.string()), ("row", pa.list_(pa.float32(), shape[1]))])
    with whole(path) as part, pq.ParquetWriter(part, schema) as stream:
        yield Columns(stream, ids)


def normalized(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows of norm 1; zero rows stay."""
    norms = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return (rows / np.where(norms == 0, 1, norms)).astype(np.float32)


def _allocate(path: Path, shape: tuple[int, int]) -> None:
    """Let torch write the archive, with a hole where the numbers go."""
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
    """Where the numbers of the archive's one tensor begin."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as stream:
        entry = next(info for info in archive.infolist() if info.filename.endswith("/data/0"))
        stream.seek(entry.header_offset + 26)  # of the local header, whose two lengths come last
        name, extra = struct.unpack("<HH", stream.read(4))
    return entry.header_offset + 30 + name + extra
