"""fp16 and bf16 on CUDA: all tensors of a buffer in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.comm.compressors.kernels import Kernel
from gradwire.comm.compressors.kernels.cuda.segments import INFINITY, SIGNLESS, Segmented, place, put

TILE = 4096
HALF = tl.constexpr(2)  # bytes
UNIT = tl.constexpr(2.0**112)  # what float32's exponents are larger by


@triton.jit
def encode(x, table, tiles, seeds, wire, bad, ALIGN: tl.constexpr, TILE: tl.constexpr, BRAIN: tl.constexpr):
    """Round a tile to nearest, ties to even; sets ``bad`` where a number is not finite, or no longer is."""
    segment, tile, start, left, _, head = place(table, tiles, ALIGN, TILE)
    offsets = tl.arange(0, TILE)
    mask = offsets < left
    values = tl.load(x + start + offsets, mask=mask, other=0.0)
    bits = values.to(tl.int32, bitcast=True)
    if BRAIN:
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        worst = tl.max(tl.where((bits & SIGNLESS) >= INFINITY, INFINITY, rounded & SIGNLESS), axis=0) >= INFINITY
        codes = (rounded >> 16) & 0xFFFF
        codes = tl.where((bits & SIGNLESS) > INFINITY, 0x7FC0, codes)  # rounding may carry a NaN over
    else:
        codes = values.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        worst = tl.max(codes & 0x7FFF, axis=0) >= 0x7C00
    if worst:
        tl.store(bad + segment, 1)
    out = wire + head + HALF * (tile * TILE + offsets)
    if ALIGN >= HALF:
        tl.store(out.to(tl.pointer_type(tl.int16)), codes.to(tl.int16), mask=mask)
    else:
        tl.store(out, codes.to(tl.uint8), mask=mask)
        tl.store(out + 1, (codes >> 8).to(tl.uint8), mask=mask)


@triton.jit
def decode(
    wire, table, tiles, out, ALIGN: tl.constexpr, ONTO: tl.constexpr, TILE: tl.constexpr, BRAIN: tl.constexpr
):  # fmt: skip
    """Cast a tile back to float32, exactly."""
    _, tile, start, left, _, head = place(table, tiles, ALIGN, TILE)
    offsets = tl.arange(0, TILE)
    mask = offsets < left
    places = wire + head + HALF * (tile * TILE + offsets)
    if ALIGN >= HALF:
        codes = tl.load(places.to(tl.pointer_type(tl.int16)), mask=mask, other=0).to(tl.int32) & 0xFFFF
    else:
        codes = tl.load(places, mask=mask, other=0).to(tl.int32)
        codes = codes | (tl.load(places + 1, mask=mask, other=0).to(tl.int32) << 8)
    if BRAIN:
        bits = codes << 16
    else:  # the bits move to where float32 has them, and a power of two moves the exponent; a cast would need memory
        moved = (codes & 0x7FFF) << 13
        scaled = moved.to(tl.float32, bitcast=True) * UNIT
        bits = tl.where(moved >= 0x7C00 << 13, moved | INFINITY, scaled.to(tl.int32, bitcast=True))
        bits = bits | ((codes & 0x8000) << 16)
    values = bits.to(tl.float32, bitcast=True)
    put(out, start + offsets, values, mask, ONTO)


def kernel(brain: bool) -> Kernel:
    """The fused form of a method."""
    options = {"TILE": TILE, "BRAIN": brain}
    form = Segmented(encode, decode, lambda method, numel: 0, lambda method, x: options, lambda method: options)
    return Kernel(encode_many=form.encode_many, decode_add=form.decode_add)


KERNELS = {"bf16": kernel(brain=True), "fp16": kernel(brain=False)}
