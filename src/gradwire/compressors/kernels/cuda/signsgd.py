"""signsgd on CUDA: one pass, each program a tile of whole blocks that its warps hold in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.compressors.base import numel
from gradwire.compressors.kernels.cuda.shared import INFINITY, SIGNLESS, no_flag, store_packed
from gradwire.compressors.methods.signsgd import SignSGD

TILE = 4096  # elements that a program decodes
WARP = 2048  # elements that a warp encodes, or part of one block: blocks within a warp take the fewest shuffles to sum


def covers(method: SignSGD) -> bool:
    """Blocks that fill a tile evenly, and no blocks at all."""
    return method.scale == "none" or (32 <= method.block <= 16384 and method.block & (method.block - 1) == 0)


def to_wire(method: SignSGD, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """The wire, and whether x is not finite."""
    bad = no_flag(x)
    wire = torch.empty(method.wire_bytes(x.shape), dtype=torch.uint8, device=x.device)
    head, packed = wire.tensor_split([method.head_bytes(x.shape)])
    scaled = method.scale == "mean"
    block = method.block if scaled else WARP
    tile = max(WARP, block)
    if x.numel():
        encode[(triton.cdiv(x.numel(), tile),)](
            x, head.view(torch.float32) if scaled else head, packed, bad, x.numel(),
            BLOCK=block, TILE=tile, SCALED=scaled, num_warps=tile // WARP,
        )  # fmt: skip
    if not scaled:
        head.copy_(bad)
    return wire, bad


def from_wire(method: SignSGD, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Each sign times its block's scale."""
    head, packed = wire.tensor_split([method.head_bytes(shape)])
    scaled = method.scale == "mean"
    scales, _ = method.magnitudes(head, shape)
    out = torch.empty(numel(shape), device=wire.device)
    if out.numel():
        decode[(triton.cdiv(out.numel(), TILE),)](
            scales, packed, out, out.numel(), BLOCK=method.block if scaled else TILE, TILE=TILE, SCALED=scaled
        )
    return out


@triton.jit
def encode(x, scales, packed, bad, n, BLOCK: tl.constexpr, TILE: tl.constexpr, SCALED: tl.constexpr):
    """A tile's scales (float32, if SCALED) and signs; sets ``bad`` where an element is not finite."""
    ROWS: tl.constexpr = TILE // BLOCK
    tile = tl.program_id(0)
    at = tile * TILE + tl.arange(0, TILE)
    values = tl.load(x + at, mask=at < n, other=0.0)
    if SCALED:
        totals = tl.sum(tl.reshape(tl.abs(values), [ROWS, BLOCK]).to(tl.float64), axis=1)
        rows = tile * ROWS + tl.arange(0, ROWS)
        count = tl.maximum(tl.minimum(n - rows * BLOCK, BLOCK), 1)
        scale = (totals / count.to(tl.float64)).to(tl.float32)
        tl.store(scales + rows, scale, mask=rows * BLOCK < n)
        most = tl.max(scale.to(tl.int32, bitcast=True) & SIGNLESS, axis=0)
    else:
        most = tl.max(values.to(tl.int32, bitcast=True) & SIGNLESS, axis=0)
    if most >= INFINITY:
        tl.store(bad, 1)
    store_packed(packed, tile * (TILE // 8), (values < 0).to(tl.int32), n - tile * TILE, 1, TILE)


@triton.jit
def decode(scales, packed, out, n, BLOCK: tl.constexpr, TILE: tl.constexpr, SCALED: tl.constexpr):
    """A tile of numbers; a byte holds the signs of eight elements of one block."""
    bytes = tl.program_id(0) * (TILE // 8) + tl.arange(0, TILE // 8)
    there = bytes < (n + 7) // 8
    signs = tl.load(packed + bytes, mask=there, other=0).to(tl.int32)
    if SCALED:
        scale = tl.load(scales + bytes * 8 // BLOCK, mask=there, other=0.0)
    else:
        scale = tl.load(scales + bytes * 0)
    lanes = tl.arange(0, 8)
    negative = (signs[:, None] >> lanes[None, :]) & 1
    at = bytes[:, None] * 8 + lanes[None, :]
    tl.store(out + at, tl.where(negative == 1, -scale[:, None], scale[:, None]), mask=at < n)
