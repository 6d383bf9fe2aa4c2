"""int8 on CUDA: one pass, each program a tile of whole blocks."""

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
    rounded,
    store_packed,
    uniforms,
)
from gradwire.compressors.methods.int8 import SMALLEST_SCALE, Int8
from gradwire.compressors.philox import draw_seed

TINY = tl.constexpr(SMALLEST_SCALE)
TILE = 4096  # elements in a program's tile, or one block if that is larger


def covers(method: Int8) -> bool:
    """Blocks that fill a tile evenly."""
    return 32 <= method.block <= 16384 and method.block & (method.block - 1) == 0


def to_wire(method: Int8, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """The wire, and whether a block's maximum is not finite."""
    stochastic = method.rounding == "stochastic"
    bad = no_flag(x)
    seed = draw_seed(generator, x.device, method.name) if stochastic else bad
    wire = torch.empty(method.wire_bytes(x.shape), dtype=torch.uint8, device=x.device)
    head = 4 * method.blocks(x.shape)
    tile = max(TILE, method.block)
    if x.numel():
        encode[(triton.cdiv(x.numel(), tile),)](
            x, seed, wire[:head].view(torch.float32), wire[head:], bad, x.numel(),
            BLOCK=method.block, TILE=tile, BITS=method.num_bits, STOCHASTIC=stochastic, enable_fp_fusion=False,
        )  # fmt: skip
    return wire, bad


def from_wire(method: Int8, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Multiply each code by its block's scale."""
    head = 4 * method.blocks(shape)
    out = torch.empty(numel(shape), device=wire.device)
    tile = max(TILE, method.block)
    if out.numel():
        decode[(triton.cdiv(out.numel(), tile),)](
            as_numbers(wire[:head], torch.float32), wire[head:], out, out.numel(),
            BLOCK=method.block, TILE=tile, BITS=method.num_bits,
        )  # fmt: skip
    return out


@triton.jit
def encode(
    x,
    seed,
    scales,
    packed,
    bad,
    n,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """A tile's scales (float32) and codes; sets ``bad`` where a scale is not finite."""
    ROWS: tl.constexpr = TILE // BLOCK
    TOP: tl.constexpr = (1 << (BITS - 1)) - 1
    tile = tl.program_id(0)
    at = tile * TILE + tl.arange(0, TILE)
    values = tl.reshape(tl.load(x + at, mask=at < n, other=0.0), [ROWS, BLOCK])
    most = tl.max(values.to(tl.int32, bitcast=True) & SIGNLESS, axis=1)
    if tl.max(most, axis=0) >= INFINITY:
        tl.store(bad, 1)
    scale = tl.maximum(tl.div_rn(most.to(tl.float32, bitcast=True), 1.0 * TOP), TINY, propagate_nan=tl.PropagateNan.ALL)
    rows = tile * ROWS + tl.arange(0, ROWS)
    tl.store(scales + rows, scale, mask=rows * BLOCK < n)
    level = tl.div_rn(values, tl.broadcast_to(scale[:, None], [ROWS, BLOCK]))
    if STOCHASTIC:
        low = tl.floor(level)
        draw = tl.reshape(uniforms(tl.load(seed), tile * (TILE // 4), TILE), [ROWS, BLOCK])
        code = tl.minimum(tl.maximum(low + (draw < level - low).to(tl.float32), -TOP), TOP)
    else:
        code = rounded(level)
    fields = tl.reshape(code.to(tl.int32), [TILE]) & ((1 << BITS) - 1)
    store_packed(packed, tile * (TILE * BITS // 8), fields, n - tile * TILE, BITS, TILE)


@triton.jit
def decode(scales, packed, out, n, BLOCK: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr):
    """A tile of numbers."""
    ROWS: tl.constexpr = TILE // BLOCK
    SIGN: tl.constexpr = 1 << (BITS - 1)
    tile = tl.program_id(0)
    at = tile * TILE + tl.arange(0, TILE)
    rows = tile * ROWS + tl.arange(0, ROWS)
    scale = tl.load(scales + rows, mask=rows * BLOCK < n, other=0.0)
    code = (load_packed(packed, tile * TILE, n - tile * TILE, BITS, TILE) ^ SIGN) - SIGN
    values = tl.reshape(code.to(tl.float32), [ROWS, BLOCK]) * scale[:, None]
    tl.store(out + at, tl.reshape(values, [TILE]), mask=at < n)
