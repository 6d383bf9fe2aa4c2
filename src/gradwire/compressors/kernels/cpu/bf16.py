"""bf16 on a CPU core: cast and check in one pass. torch's own cast back is one pass already."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.compressors.kernels.cpu import SIGNLESS, compiled
from gradwire.compressors.methods.bf16 import BFloat16

HALF = np.uint32(16)  # bits that are dropped
OVERFLOW = np.float32(BFloat16.overflow).view(np.uint32)


def covers(method: BFloat16) -> bool:
    """There are no options."""
    return True


def to_wire(method: BFloat16, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """The wire, and whether a magnitude reaches `overflow`; if so, the wire is the plain form's."""
    wire = torch.empty(method.wire_bytes(x.shape), dtype=torch.uint8)
    bad = encode(x.view(-1).numpy().view(np.uint32), wire.numpy().view(np.uint16))
    return method.to_wire(x, generator) if bad else wire, torch.tensor([bad])


def from_wire(method: BFloat16, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The plain form."""
    return method.from_wire(wire, shape)


@compiled
def encode(bits: np.ndarray, out: np.ndarray) -> bool:
    """float32, given as uint32 [n], to bfloat16 as uint16 [n]; whether one of them is not finite there."""
    worst = np.uint32(0)
    for i in range(bits.size):
        worst = max(worst, np.uint32(bits[i] & SIGNLESS))
        odd = np.uint32((bits[i] >> HALF) & np.uint32(1))
        out[i] = np.uint32(bits[i] + np.uint32(0x7FFF) + odd) >> HALF
    return bool(worst >= OVERFLOW)
