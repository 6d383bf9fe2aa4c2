"""hadamard on a CPU core: a group stays in registers through all stages."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.comm.compressors.kernels import Kernel
from gradwire.comm.compressors.kernels.cpu import compiled
from gradwire.comm.compressors.kernels.cpu.segments import NUMEL, START
from gradwire.comm.compressors.methods.hadamard import GROUP, Hadamard
from gradwire.comm.compressors.segments import Segments


@compiled
def group(x: np.ndarray, room: np.ndarray, y: np.ndarray) -> None:
    """Fill ``y`` with the transform of ``x``, whose length is a power of two up to `GROUP`; float64 in ``room``."""
    size = x.size
    for i in range(size):
        room[i] = x[i]
    h = 1
    while h < size:
        for start in range(0, size, 2 * h):
            for i in range(start, start + h):
                a, b = room[i], room[i + h]
                room[i] = a + b
                room[i + h] = a - b
        h *= 2
    factor = size**-0.5
    for i in range(size):
        y[i] = np.float32(room[i] * factor)


@compiled
def transform(x: np.ndarray, y: np.ndarray) -> None:
    """Fill ``y`` with the transform of ``x``."""
    room = np.empty(GROUP, np.float64)
    start, size = 0, GROUP
    while start < x.size:
        while size > x.size - start:
            size //= 2
        group(x[start : start + size], room, y[start : start + size])
        start += size


@compiled
def transform_all(table: np.ndarray, values: np.ndarray, out: np.ndarray) -> None:
    """`transform` for every row of the table."""
    for row in table:
        end = row[START] + row[NUMEL]
        transform(values[row[START] : end], out[row[START] : end])


def rotate_many(method: Hadamard, values: Tensor, segments: Segments) -> Tensor:
    """See `Rotation.rotated_many`."""
    out = torch.empty_like(values)
    transform_all(segments.table(values.device).numpy(), values.numpy(), out.numpy())
    return out


KERNELS = {"hadamard": Kernel(rotate_many=rotate_many)}
