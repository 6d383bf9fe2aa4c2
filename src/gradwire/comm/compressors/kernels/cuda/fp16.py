"""fp16 on CUDA: cast and check in one pass; torch's own cast back moves one element at a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.comm.compressors.base import as_numbers, numel
from gradwire.comm.compressors.kernels.cuda.shared import SIGNLESS, no_flag
from gradwire.comm.compressors.methods.fp16 import FP16

TILE = 4096  # elements in a program's tile
OVERFLOW = tl.constexpr(0x477FF000)  # 65,520 as bits


def covers(method: FP16) -> bool:
    """There are no options."""
    return True


def to_wire(method: FP16, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """The wire, and whether a magnitude reaches `overflow`."""
    bad = no_flag(x)
    out = torch.empty(x.numel(), dtype=torch.float16, device=x.device)
    if x.numel():
        encode[(triton.cdiv(x.numel(), TILE),)](x, out, bad, x.numel(), TILE=TILE)
    return out.view(torch.uint8), bad


def from_wire(method: FP16, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Cast back to float32, exactly."""
    out = torch.empty(numel(shape), device=wire.device)
    if out.numel():
        decode[(triton.cdiv(out.numel(), TILE),)](as_numbers(wire, torch.float16), out, out.numel(), TILE=TILE)
    return out


@triton.jit
def encode(x, out, bad, n, TILE: tl.constexpr):
    """A tile as float16; sets ``bad`` where one of it is not finite there."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    value = tl.load(x + at, mask=at < n, other=0.0)
    if tl.max(value.to(tl.int32, bitcast=True) & SIGNLESS, axis=0) >= OVERFLOW:
        tl.store(bad, 1)
    tl.store(out + at, value.to(tl.float16), mask=at < n)


@triton.jit
def decode(wire, out, n, TILE: tl.constexpr):
    """A tile as float32."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out + at, tl.load(wire + at, mask=at < n, other=0.0).to(tl.float32), mask=at < n)
