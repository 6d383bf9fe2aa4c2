"""onebit on CUDA, by blocks: one pass, each program a tile of whole blocks that its warps hold in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.compressors.base import as_numbers, numel
from gradwire.compressors.kernels.cuda.shared import INFINITY, SIGNLESS, no_flag, store_packed
from gradwire.compressors.methods.onebit import OneBit

TILE = 4096  # elements that a program decodes
WARP = 2048  # elements that a warp encodes, or part of one block: blocks within a warp take the fewest shuffles to sum


def covers(method: OneBit) -> bool:
    """Blocks that fill a tile evenly."""
    return method.means == "block" and 32 <= method.block <= 16384 and method.block & (method.block - 1) == 0


def to_wire(method: OneBit, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """The wire, and whether a mean is not finite."""
    bad = no_flag(x)
    wire = torch.empty(method.wire_bytes(x.shape), dtype=torch.uint8, device=x.device)
    head, packed = wire.tensor_split([8 * method.groups(x.shape)])
    tile = max(WARP, method.block)
    if x.numel():
        encode[(triton.cdiv(x.numel(), tile),)](
            x, head.view(torch.float32), packed, bad, x.numel(), BLOCK=method.block, TILE=tile, num_warps=tile // WARP
        )
    return wire, bad


def from_wire(method: OneBit, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Give each element its side's mean."""
    head, packed = wire.tensor_split([8 * method.groups(shape)])
    out = torch.empty(numel(shape), device=wire.device)
    if out.numel():
        decode[(triton.cdiv(out.numel(), TILE),)](
            as_numbers(head, torch.float32), packed, out, out.numel(), BLOCK=method.block, TILE=TILE
        )
    return out


@triton.jit
def encode(x, means, packed, bad, n, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """A tile's means (float32, in pairs) and signs; sets ``bad`` where a mean is not finite."""
    ROWS: tl.constexpr = TILE // BLOCK
    tile = tl.program_id(0)
    at = tile * TILE + tl.arange(0, TILE)
    values = tl.load(x + at, mask=at < n, other=0.0)
    below = (values < 0).to(tl.int32)
    blocks = tl.reshape(values, [ROWS, BLOCK])
    rows = tile * ROWS + tl.arange(0, ROWS)
    negatives = tl.sum(tl.reshape(below, [ROWS, BLOCK]), axis=1)
    others = tl.minimum(n - rows * BLOCK, BLOCK) - negatives
    low = mean_of(tl.minimum(blocks, 0.0, propagate_nan=tl.PropagateNan.ALL), negatives)
    high = mean_of(tl.maximum(blocks, 0.0, propagate_nan=tl.PropagateNan.ALL), others)
    tl.store(means + 2 * rows, high, mask=rows * BLOCK < n)
    tl.store(means + 2 * rows + 1, low, mask=rows * BLOCK < n)
    marks = tl.maximum(low.to(tl.int32, bitcast=True) & SIGNLESS, high.to(tl.int32, bitcast=True) & SIGNLESS)
    if tl.max(marks, axis=0) >= INFINITY:
        tl.store(bad, 1)
    store_packed(packed, tile * (TILE // 8), below, n - tile * TILE, 1, TILE)


@triton.jit
def mean_of(blocks, count):
    """Each row's float64 sum by its count, as float32; 0 where there is none."""
    return (tl.sum(blocks.to(tl.float64), axis=1) / tl.maximum(count, 1).to(tl.float64)).to(tl.float32)


@triton.jit
def decode(means, packed, out, n, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """A tile of numbers; a byte holds the signs of eight elements of one block."""
    bytes = tl.program_id(0) * (TILE // 8) + tl.arange(0, TILE // 8)
    there = bytes < (n + 7) // 8
    signs = tl.load(packed + bytes, mask=there, other=0).to(tl.int32)
    pair = bytes * 8 // BLOCK * 2
    high = tl.load(means + pair, mask=there, other=0.0)
    low = tl.load(means + pair + 1, mask=there, other=0.0)
    lanes = tl.arange(0, 8)
    negative = (signs[:, None] >> lanes[None, :]) & 1
    at = bytes[:, None] * 8 + lanes[None, :]
    tl.store(out + at, tl.where(negative == 1, low[:, None], high[:, None]), mask=at < n)
