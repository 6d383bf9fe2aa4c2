"""signsgd on a CPU core: x is read from memory once, a tile at a time."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.compressors.base import numel
from gradwire.compressors.kernels.cpu import INFINITY, compiled, largest, summing
from gradwire.compressors.kernels.cpu.packing import TILE, pack_tile, unpack_tile
from gradwire.compressors.methods.signsgd import SignSGD


def covers(method: SignSGD) -> bool:
    """All options."""
    return True


def to_wire(method: SignSGD, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """The wire, and whether x is not finite."""
    wire = torch.empty(method.wire_bytes(x.shape), dtype=torch.uint8)
    head, packed = wire.tensor_split([method.head_bytes(x.shape)])
    values = x.view(-1).numpy()
    if method.scale == "mean":
        bad = encode(values, method.block, head.view(torch.float32).numpy(), packed.numpy())
    else:
        bad = encode_plain(values, packed.numpy())
        head.fill_(bad)
    return wire, torch.tensor([bad])


def from_wire(method: SignSGD, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Each sign times its block's scale."""
    head, packed = wire.tensor_split([method.head_bytes(shape)])
    scales, block = method.magnitudes(head, shape)
    out = torch.empty(numel(shape))
    decode(scales.numpy(), packed.numpy(), block, out.numpy())
    return out


@compiled
def encode(x: np.ndarray, block: int, scales: np.ndarray, packed: np.ndarray) -> bool:
    """Fill ``scales`` (float32 [b]) and ``packed`` (uint8); whether a block of ``x`` (float32 [n]) is not finite."""
    codes = np.empty(TILE, np.uint8)
    total, finite = 0.0, True
    for start in range(0, x.size, TILE):
        end = min(start + TILE, x.size)
        mark_negative(x[start:end], codes)
        pack_tile(codes, end - start, 1, packed[start // 8 :])
        at = start
        while at < end:
            owner = at // block
            last = min((owner + 1) * block, x.size)
            stop = min(last, end)
            total += magnitude(x[at:stop])
            if stop == last:
                scales[owner] = np.float32(total / (last - owner * block))
                finite &= np.isfinite(total)
                total = 0.0
            at = stop
    return not finite


@compiled
def encode_plain(x: np.ndarray, packed: np.ndarray) -> bool:
    """Fill ``packed`` (uint8); whether ``x`` (float32 [n]) is not finite."""
    codes = np.empty(TILE, np.uint8)
    worst = np.uint32(0)
    for start in range(0, x.size, TILE):
        end = min(start + TILE, x.size)
        mark_negative(x[start:end], codes)
        pack_tile(codes, end - start, 1, packed[start // 8 :])
        worst = max(worst, largest(x[start:end].view(np.uint32)))
    return bool(worst >= INFINITY)


@compiled
def mark_negative(x: np.ndarray, codes: np.ndarray) -> None:
    """1 in ``codes`` (uint8) where ``x`` is below 0, else 0."""
    for i in range(x.size):
        codes[i] = np.uint8(np.int8(x[i] < np.float32(0)))  # the detour by int8 vectorizes


@summing
def magnitude(x: np.ndarray) -> float:
    """Sum of |x|."""
    total = 0.0
    for i in range(x.size):
        total += np.float64(abs(x[i]))
    return total


@compiled
def decode(scales: np.ndarray, packed: np.ndarray, block: int, out: np.ndarray) -> None:
    """Fill ``out`` (float32 [n])."""
    codes = np.empty(TILE, np.uint8)
    for start in range(0, out.size, TILE):
        end = min(start + TILE, out.size)
        unpack_tile(packed[start // 8 :], end - start, 1, codes)
        at = start
        while at < end:
            stop = min((at // block + 1) * block, end)
            choose(codes[at - start :], scales[at // block], -scales[at // block], out[at:stop])
            at = stop


@compiled
def choose(codes: np.ndarray, zero: np.float32, one: np.float32, out: np.ndarray) -> None:
    """``one`` where the code is not 0, else ``zero``."""
    for i in range(out.size):
        out[i] = one if codes[i] else zero
