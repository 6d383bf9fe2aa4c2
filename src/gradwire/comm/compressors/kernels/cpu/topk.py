"""topk on a CPU core: x is read twice."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.comm.compressors.base import Shape, numel
from gradwire.comm.compressors.kernels import Kernel
from gradwire.comm.compressors.kernels.cpu import compiled, indices
from gradwire.comm.compressors.kernels.cpu.indices import read, write
from gradwire.comm.compressors.kernels.cpu.segments import (
    AT,
    BLANK,
    COLUMNS,
    NUMEL,
    SIZE,
    START,
    SUM,
    WHOLE,
    Segmented,
)
from gradwire.comm.compressors.kernels.cpu.selection import largest_places, place
from gradwire.comm.compressors.methods.topk import TopK

KEPT, CODE, LOW, LOWER, HEAD = range(COLUMNS + 1, COLUMNS + 6)  # of a row: k, and the results of `indices.fixed`


def pick(method: TopK, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
    """Head, values, and whether x is not finite."""
    largest, bad = largest_places(x.view(-1).numpy().view(np.int32), method.kept(x.numel()))
    kept = torch.from_numpy(largest)
    return indices.encode(kept, x.numel(), method.indices), x.view(-1)[kept], torch.tensor([bad])


def places(method: TopK, wire: Tensor, shape: Shape) -> tuple[Tensor, int]:
    """Read the code of the places."""
    return indices.decode(wire, numel(shape), method.kept(shape), method.indices)


def row(method: TopK, n: int) -> tuple[int, ...]:
    """`KEPT` to `HEAD`."""
    k = method.kept(n)
    return k, *indices.fixed(n, k, method.indices)


@compiled
def encode(settings: tuple, row: np.ndarray, first: int, x: np.ndarray, seed: int, wire: np.ndarray) -> bool:
    """Fill the places' code and the values."""
    places, bad = largest_places(x.view(np.int32), row[KEPT])
    write(places, row[CODE], row[LOW], row[LOWER], wire[: row[HEAD]])
    values = wire[row[HEAD] :].view(np.float32)
    for i in range(places.size):
        values[i] = x[places[i]]
    return bad


@compiled
def decode(settings: tuple, row: np.ndarray, first: int, wire: np.ndarray, out: np.ndarray) -> bool:
    """Zeros, and the values at their places."""
    out[:] = 0
    return place_values(row, wire, False, out)


@compiled
def place_values(row: np.ndarray, wire: np.ndarray, adding: bool, out: np.ndarray) -> bool:
    """Put the values to their places, or add them; False if the bytes are not an encoding."""
    places = np.empty(row[KEPT], np.int64)
    if not read(wire[: row[HEAD]], row[CODE], row[LOW], row[LOWER], row[NUMEL], places):
        return False
    values = wire[row[HEAD] :].view(np.float32)
    for i in range(places.size):
        out[places[i]] = out[places[i]] + values[i] if adding else values[i]
    return True


@compiled
def decode_all(settings: tuple, table: np.ndarray, chunk: int, wires: np.ndarray, onto: int, out: np.ndarray) -> int:
    """`segments.decode_all` that leaves the other elements of a sum alone."""
    for s in range(len(table)):
        row = table[s]
        sums = out[row[START] : row[START] + row[NUMEL]]
        if onto != SUM:
            sums[:] = 0
        for message in range(len(wires)):
            adding = onto != BLANK or message > 0
            if not place_values(row, wires[message, row[AT] : row[AT] + row[SIZE]], adding, sums):
                return s
    return -1


form = Segmented(__name__, encode, decode, lambda method: (0,), lambda method: WHOLE, row=row, decoder=decode_all)
KERNEL = Kernel(encode_many=form.encode_many, decode_add=form.decode_add, pick=pick, places=places, place=place)
