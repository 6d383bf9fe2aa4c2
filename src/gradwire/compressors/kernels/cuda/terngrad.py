"""terngrad on CUDA: one pass, each program a tile of whole blocks; for base 3, a second one packs five to a byte."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.compressors.base import as_numbers, numel
from gradwire.compressors.kernels.cuda.shared import INFINITY, SIGNLESS, load_packed, no_flag, store_packed, uniforms
from gradwire.compressors.methods.terngrad import SMALLEST_SCALE, Terngrad
from gradwire.compressors.packing import TRITS
from gradwire.compressors.philox import draw_seed

TINY = tl.constexpr(SMALLEST_SCALE)
LANES = tl.constexpr(TRITS)
TILE = 4096  # elements in a program's tile, or one block if that is larger
BYTES = 1024  # bytes of five digits in a program's tile


def covers(method: Terngrad) -> bool:
    """Blocks that fill a tile evenly."""
    return 32 <= method.block <= 16384 and method.block & (method.block - 1) == 0


def to_wire(method: Terngrad, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """The wire, and whether a block's maximum is not finite."""
    bad, n, base3 = no_flag(x), x.numel(), method.packing == "base3"
    seed = draw_seed(generator, x.device, method.name)
    clip = torch.full((1,), method.clip or 0.0, dtype=torch.float64, device=x.device)
    wire = torch.empty(method.wire_bytes(x.shape), dtype=torch.uint8, device=x.device)
    head = 4 * method.blocks(x.shape)
    codes = torch.empty(n, dtype=torch.uint8, device=x.device) if base3 else wire[head:]
    tile = max(TILE, method.block)
    if n:
        encode[(triton.cdiv(n, tile),)](
            x, seed, clip, wire[:head].view(torch.float32), codes, bad, n, BLOCK=method.block, TILE=tile,
            CLIP=method.clip is not None, BITS=8 if base3 else 2, enable_fp_fusion=False,
        )  # fmt: skip
    if n and base3:
        pack_trits[(triton.cdiv(n, BYTES * TRITS),)](codes, wire[head:], n, BYTES=BYTES)
    return wire, bad


def from_wire(method: Terngrad, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Multiply each digit by its block's scale."""
    head = 4 * method.blocks(shape)
    out = torch.empty(numel(shape), device=wire.device)
    if out.numel():
        decode[(triton.cdiv(out.numel(), TILE),)](
            as_numbers(wire[:head], torch.float32), wire[head:], out, out.numel(), BLOCK=method.block, TILE=TILE,
            BASE3=method.packing == "base3",
        )  # fmt: skip
    return out


@triton.jit
def encode(
    x,
    seed,
    clip,
    scales,
    packed,
    bad,
    n,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    CLIP: tl.constexpr,
    BITS: tl.constexpr,
):
    """A tile's scales (float32) and digits, two's complement of BITS; sets ``bad`` where a block is not finite."""
    ROWS: tl.constexpr = TILE // BLOCK
    tile = tl.program_id(0)
    at = tile * TILE + tl.arange(0, TILE)
    values = tl.reshape(tl.load(x + at, mask=at < n, other=0.0), [ROWS, BLOCK])
    most = tl.max(values.to(tl.int32, bitcast=True) & SIGNLESS, axis=1)
    if tl.max(most, axis=0) >= INFINITY:
        tl.store(bad, 1)
    rows = tile * ROWS + tl.arange(0, ROWS)
    scale = most.to(tl.float32, bitcast=True)
    if CLIP:
        wide = values.to(tl.float64)
        sizes = tl.minimum(tl.maximum(n - rows * BLOCK, 1), BLOCK).to(tl.float64)
        sigma = tl.sqrt(tl.sum(wide * wide, axis=1) / sizes)
        scale = tl.minimum(scale, (sigma * tl.load(clip)).to(tl.float32), propagate_nan=tl.PropagateNan.ALL)
    scale = tl.maximum(scale, TINY, propagate_nan=tl.PropagateNan.ALL)
    tl.store(scales + rows, scale, mask=rows * BLOCK < n)
    level = tl.div_rn(values, tl.broadcast_to(scale[:, None], [ROWS, BLOCK]))
    draw = tl.reshape(uniforms(tl.load(seed), tile * (TILE // 4), TILE), [ROWS, BLOCK])
    digit = tl.where(draw < tl.abs(level), tl.where(level > 0.0, 1, -1), 0)
    fields = tl.reshape(digit, [TILE]) & ((1 << BITS) - 1)
    store_packed(packed, tile * (TILE * BITS // 8), fields, n - tile * TILE, BITS, TILE)


@triton.jit
def pack_trits(digits, packed, n, BYTES: tl.constexpr):
    """A tile of bytes from five digits each (-1, 0, 1 as signed bytes), what is beyond the last one as -1."""
    j = tl.program_id(0) * BYTES + tl.arange(0, BYTES)
    byte = tl.zeros([BYTES], tl.int32)
    for lane in tl.static_range(LANES):
        at = j * LANES + (LANES - 1 - lane)
        byte = byte * 3 + ((tl.load(digits + at, mask=at < n, other=255).to(tl.int32) + 1) & 3)
    tl.store(packed + j, byte.to(tl.uint8), mask=j * LANES < n)


@triton.jit
def decode(scales, packed, out, n, BLOCK: tl.constexpr, TILE: tl.constexpr, BASE3: tl.constexpr):
    """A tile of numbers."""
    start = tl.program_id(0) * TILE
    at = start + tl.arange(0, TILE)
    if BASE3:
        rest = tl.load(packed + at // LANES, mask=at < n, other=0).to(tl.int32)
        lane = at % LANES
        rest = tl.where(lane >= 2, rest // 9, rest)
        rest = tl.where(lane == 4, rest // 9, rest)
        rest = tl.where(lane % 2 == 1, rest // 3, rest)
        digit = rest % 3 - 1
    else:
        digit = (load_packed(packed, start, n - start, 2, TILE) ^ 2) - 2
    scale = tl.load(scales + at // BLOCK, mask=at < n, other=0.0)
    tl.store(out + at, digit.to(tl.float32) * scale, mask=at < n)
