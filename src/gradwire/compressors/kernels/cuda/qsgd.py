"""qsgd on CUDA: one pass, each program a tile of whole buckets."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.compressors.base import as_numbers, numel
from gradwire.compressors.kernels.cuda.shared import (
    INFINITY,
    SIGNLESS,
    load_packed,
    no_flag,
    store_packed,
    uniforms,
)
from gradwire.compressors.methods.qsgd import SMALLEST_STEP, Qsgd
from gradwire.compressors.philox import draw_seed

TINY = tl.constexpr(SMALLEST_STEP)
TILE = 4096  # elements in a program's tile, or one bucket if that is larger


def covers(method: Qsgd) -> bool:
    """Numbers of 8, 4 or 2 bits in buckets that fill a tile evenly; Elias coding happens on the host."""
    fits = 32 <= method.block <= 16384 and method.block & (method.block - 1) == 0
    return fits and method.coding == "dense" and method.num_bits in (8, 4, 2)


def to_wire(method: Qsgd, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """The wire, and whether a bucket's norm is not finite."""
    bad = no_flag(x)
    seed = draw_seed(generator, x.device, method.name)
    wire = torch.empty(method.wire_bytes(x.shape), dtype=torch.uint8, device=x.device)
    head = 4 * method.blocks(x.shape)
    tile = max(TILE, method.block)
    if x.numel():
        encode[(triton.cdiv(x.numel(), tile),)](
            x, seed, wire[:head].view(torch.float32), wire[head:], bad, x.numel(), BLOCK=method.block, TILE=tile,
            BITS=method.num_bits, LEVELS=method.levels, L2=method.norm == "l2", enable_fp_fusion=False,
        )  # fmt: skip
    return wire, bad


def from_wire(method: Qsgd, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Multiply each number by its bucket's step."""
    head = 4 * method.blocks(shape)
    out = torch.empty(numel(shape), device=wire.device)
    if out.numel():
        steps = method.steps(as_numbers(wire[:head], torch.float32))
        decode[(triton.cdiv(out.numel(), TILE),)](
            steps, wire[head:], out, out.numel(), BLOCK=method.block, TILE=TILE, BITS=method.num_bits
        )  # fmt: skip
    return out


@triton.jit
def encode(
    x,
    seed,
    norms,
    packed,
    bad,
    n,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
    LEVELS: tl.constexpr,
    L2: tl.constexpr,
):
    """A tile's norms (float32) and numbers; sets ``bad`` where a norm is not finite."""
    ROWS: tl.constexpr = TILE // BLOCK
    tile = tl.program_id(0)
    at = tile * TILE + tl.arange(0, TILE)
    values = tl.reshape(tl.load(x + at, mask=at < n, other=0.0), [ROWS, BLOCK])
    if L2:
        wide = values.to(tl.float64)
        norm = tl.sqrt(tl.sum(wide * wide, axis=1)).to(tl.float32)
        marks = norm.to(tl.int32, bitcast=True) & SIGNLESS
    else:
        marks = tl.max(values.to(tl.int32, bitcast=True) & SIGNLESS, axis=1)
        norm = marks.to(tl.float32, bitcast=True)
    if tl.max(marks, axis=0) >= INFINITY:
        tl.store(bad, 1)
    rows = tile * ROWS + tl.arange(0, ROWS)
    tl.store(norms + rows, norm, mask=rows * BLOCK < n)
    step = tl.maximum(tl.div_rn(norm, 1.0 * LEVELS), TINY, propagate_nan=tl.PropagateNan.ALL)
    level = tl.div_rn(values, tl.broadcast_to(step[:, None], [ROWS, BLOCK]))
    low = tl.floor(level)
    draw = tl.reshape(uniforms(tl.load(seed), tile * (TILE // 4), TILE), [ROWS, BLOCK])
    number = tl.minimum(tl.maximum(low + (draw < level - low).to(tl.float32), -LEVELS), LEVELS)
    fields = tl.reshape(number.to(tl.int32), [TILE]) & ((1 << BITS) - 1)
    store_packed(packed, tile * (TILE * BITS // 8), fields, n - tile * TILE, BITS, TILE)


@triton.jit
def decode(steps, packed, out, n, BLOCK: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr):
    """A tile of numbers."""
    SIGN: tl.constexpr = 1 << (BITS - 1)
    start = tl.program_id(0) * TILE
    at = start + tl.arange(0, TILE)
    number = (load_packed(packed, start, n - start, BITS, TILE) ^ SIGN) - SIGN
    step = tl.load(steps + at // BLOCK, mask=at < n, other=0.0)
    tl.store(out + at, number.to(tl.float32) * step, mask=at < n)
