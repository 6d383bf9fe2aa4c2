import os
import pickle
import zipfile

import numpy as np
import pytest
import torch

from gradwire.base import torch_files
from gradwire.base.errors import BadInput


class Code:
    """An object whose unpickling runs a command."""

    def __reduce__(self):
        return os.system, ("false",)


class Pointers(pickle.Pickler):
    """A pickler of a tensor whose numbers are said to be Python objects."""

    def persistent_id(self, value):
        return ("storage", "O", "0", "cpu", 2) if value == "tensor" else None


def rewritten(path, change, compression=zipfile.ZIP_STORED):
    """Write an archive again, with entries that ``change`` gives."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in entries.items():
            archive.writestr(name, change(name, data))


TYPES = "float64 float32 float16 uint8 int8 bool int16 int32 int64"


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in TYPES.split()], ids=str)
def test_tensors_are_read_as_torch_reads_them(tmp_path, dtype):
    wide = (torch.randn(7, 11, generator=torch.Generator().manual_seed(3)) * 9).to(dtype)
    held = {
        "whole": wide,
        "transposed": wide.t(),
        "part": wide[2:5, 1::3],
        "again": wide,
        "empty": wide[:0],
        "number": wide[3, 4],
        "others": [1, 2.5, None, True, "é", (3,)],
    }
    torch.save(held, tmp_path / "a.pt")
    read, expected = torch_files.read(tmp_path / "a.pt"), torch.load(tmp_path / "a.pt", weights_only=True)
    assert read.keys() == expected.keys() and read["others"] == expected["others"]
    for name in held.keys() - {"others"}:
        assert read[name].dtype == expected[name].numpy().dtype
        np.testing.assert_array_equal(read[name], expected[name].numpy())
    place, *others = torch_files.storages(tmp_path / "a.pt").values()
    assert not others and (tmp_path / "a.pt").read_bytes()[place.offset :][: place.size] == wide.numpy().tobytes()


@pytest.mark.parametrize(
    ("held", "problem"),
    [
        (Code(), "refers to .*system"),
        (torch.nn.Parameter(torch.ones(3)), "refers to torch._utils._rebuild_parameter"),
        (torch.ones(3, dtype=torch.bfloat16), "refers to torch.BFloat16Storage"),
        (torch.ones(3).to_sparse(), "refers to torch._utils._rebuild_sparse_tensor"),
        (torch.ones(3, device="meta"), "refers to "),
    ],
)
def test_other_objects_are_refused(tmp_path, held, problem):
    torch.save(held, tmp_path / "a.pt")
    with pytest.raises(pickle.UnpicklingError, match=problem):
        torch_files.read(tmp_path / "a.pt")


def test_a_file_cannot_say_that_its_numbers_are_pointers(tmp_path):
    torch.save(torch.ones(2, dtype=torch.int64), tmp_path / "a.pt")
    with (tmp_path / "pickled").open("wb") as stream:
        Pointers(stream, 2).dump("tensor")
    pointers = (tmp_path / "pickled").read_bytes()
    rewritten(tmp_path / "a.pt", lambda name, data: pointers if name.endswith("data.pkl") else data)
    with pytest.raises(pickle.UnpicklingError, match="not of a known type"):
        torch_files.read(tmp_path / "a.pt")


def test_a_tensor_beyond_its_storage_or_compressed_is_refused(tmp_path):
    for name in ("short.pt", "strides.pt", "compressed.pt"):
        torch.save(torch.arange(12, dtype=torch.int32).view(3, 4), tmp_path / name)
    rewritten(tmp_path / "short.pt", lambda name, data: data[:-4] if "/data/" in name else data)
    with pytest.raises(pickle.UnpicklingError, match="44 bytes, not 12 numbers"):
        torch_files.read(tmp_path / "short.pt")
    shape = b"K\x03K\x04\x86"  # BININT1 3, BININT1 4, TUPLE2
    rewritten(tmp_path / "strides.pt", lambda name, data: data.replace(shape, b"K\x04K\x04\x86"))
    with pytest.raises((TypeError, ValueError)):
        torch_files.read(tmp_path / "strides.pt")
    rewritten(tmp_path / "compressed.pt", lambda name, data: data, zipfile.ZIP_DEFLATED)
    with pytest.raises(BadInput, match=r"compressed.pt holds a compressed tensor"):
        torch_files.read(tmp_path / "compressed.pt")
