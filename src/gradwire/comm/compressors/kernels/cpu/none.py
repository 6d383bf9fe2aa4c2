"""float32 on a CPU core: one pass that copies and checks, for any number of tensors."""

from __future__ import annotations

import numpy as np

from gradwire.comm.compressors.kernels.cpu import INFINITY, SIGNLESS, Chunk, Segmented, compiled


@compiled
def encode_none(chunk: Chunk) -> bool:
    """Copy."""
    bits, out = chunk.x.view(np.uint32), chunk.wire.view(np.uint32)[chunk.first :]
    worst = np.uint32(0)
    for i in range(bits.size):
        worst = max(worst, np.uint32(bits[i] & SIGNLESS))
        out[i] = bits[i]
    return bool(worst >= INFINITY)


@compiled
def decode_none(chunk: Chunk) -> bool:
    """Copy back."""
    numbers, bits = chunk.wire.view(np.uint32)[chunk.first :], chunk.x.view(np.uint32)
    for i in range(bits.size):
        bits[i] = numbers[i]
    return True


KERNELS = {"none": Segmented("none", encode_none, decode_none, lambda method: (0,), lambda method: 1).kernel()}
