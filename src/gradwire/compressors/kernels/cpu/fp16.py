"""fp16 on a CPU core: cast and check in one pass. torch's own cast back is one pass already."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.compressors.kernels.cpu import SIGNLESS, compiled
from gradwire.compressors.kernels.cpu.floats import narrow
from gradwire.compressors.methods.fp16 import Half

MANTISSA, BIAS = np.uint32(10), np.uint32(15)
OVERFLOW = np.float32(Half.overflow).view(np.uint32)


def covers(method: Half) -> bool:
    """There are no options."""
    return True


def to_wire(method: Half, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """The wire, and whether a magnitude reaches `overflow`; if so, the wire is the plain form's."""
    wire = torch.empty(method.wire_bytes(x.shape), dtype=torch.uint8)
    bad = encode(x.view(-1).numpy().view(np.uint32), wire.numpy().view(np.uint16))
    return method.to_wire(x, generator) if bad else wire, torch.tensor([bad])


def from_wire(method: Half, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The plain form."""
    return method.from_wire(wire, shape)


@compiled
def encode(bits: np.ndarray, out: np.ndarray) -> bool:
    """float32, given as uint32 [n], to float16 as uint16 [n]; whether one of them is not finite there."""
    worst = np.uint32(0)
    for i in range(bits.size):
        magnitude = np.uint32(bits[i] & SIGNLESS)
        worst = max(worst, magnitude)
        sign = np.uint32((bits[i] >> np.uint32(16)) & np.uint32(0x8000))
        out[i] = narrow(magnitude, MANTISSA, BIAS) | sign
    return bool(worst >= OVERFLOW)
