"""Files that `torch.save` writes, read without torch: tensors are memory-mapped NumPy arrays.

Importing torch takes two seconds, and its reader that executes no code unpickles in Python, a hundred times slower than
this one. The format is an uncompressed zip archive of ``data.pkl`` and ``data/<key>``, the numbers of each storage.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwire.base.errors import BadInput

STORAGES = {  # numbers are little-endian
    "DoubleStorage": "<f8",
    "FloatStorage": "<f4",
    "HalfStorage": "<f2",
    "ByteStorage": "u1",
    "CharStorage": "i1",
    "BoolStorage": "?",
    "ShortStorage": "<i2",
    "IntStorage": "<i4",
    "LongStorage": "<i8",
}


class Place(NamedTuple):
    """Where a storage is in its file: the offset of its first byte, and its size in bytes."""

    offset: int
    size: int


def read(path: Path) -> Any:
    """Read what a file holds, without executing code.

    Raises:
        Exception: Of any type if the file is missing or damaged, or holds anything but plain objects and CPU tensors of
            `STORAGES`.
    """
    places = storages(path)
    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        with archive.open(name) as stream:
            return _Contents(stream, path, places).load()


def storages(path: Path) -> dict[str, Place]:
    """Return the places of a file's storages by their keys; errors as for `read`."""
    places = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as stream:
        for entry in archive.infolist():
            _, inside, key = entry.filename.rpartition("/data/")
            if not inside:
                continue
            if entry.compress_type != zipfile.ZIP_STORED:
                raise BadInput(f"{path} holds a compressed tensor.")
            stream.seek(entry.header_offset + 26)  # two lengths at the end of the local header
            lengths = struct.unpack("<HH", stream.read(4))
            places[key] = Place(entry.header_offset + 30 + sum(lengths), entry.file_size)
    return places


class _Contents(pickle.Unpickler):
    """An unpickler that knows the constructors of plain tensors, and no other class or function."""

    def __init__(self, stream: Any, path: Path, places: Mapping[str, Place]) -> None:
        super().__init__(stream)
        self._path, self._places = path, places

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _array
        if (module, name) == ("collections", "OrderedDict"):
            return dict  # of hooks
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")

    def persistent_load(self, pid: Any) -> NDArray[Any]:
        _, numbers, key, device, count = pid
        if numbers not in STORAGES.values() or device != "cpu":  # of other types, numbers could be pointers
            raise pickle.UnpicklingError(f"its tensor {key} is not of a known type on the CPU")
        dtype, place = np.dtype(numbers), self._places[key]
        if count * dtype.itemsize != place.size:
            raise pickle.UnpicklingError(f"its tensor {key} has {place.size} bytes, not {count} numbers")
        if not count:
            return np.empty(0, dtype)
        return np.memmap(self._path, dtype, "c", place.offset, (count,))


def _array(
    storage: NDArray[Any],
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    requires_grad: bool,
    hooks: object,
    metadata: object = None,
) -> NDArray[Any]:
    """A tensor as an array; NumPy checks that it is within its storage."""
    if requires_grad or metadata:  # of a tensor that stands for the negative of its numbers, for example
        raise pickle.UnpicklingError("it has a tensor that is not plain: save `tensor.detach().clone()`")
    size = storage.itemsize
    return np.ndarray(shape, storage.dtype, storage, offset * size, [stride * size for stride in strides])
