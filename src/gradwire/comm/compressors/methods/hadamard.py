"""The Hadamard transform of groups of 32 consecutive elements, a stage before a quantizer as in ``hadamard+int8``.

As in Jia et al., "SDP4Bit: Toward 4-bit Communication Quantization in Sharded Data Parallelism for LLM Training"
(arXiv:2410.15526, 2024), before 4-bit gradients. In stage h = 1, 2, 4, 8, 16 elements a and b at distance h in a group
of 2h become a + b and a - b; a group of 32 is then divided by sqrt(32). The last n mod 32 elements are transformed in
groups of 16, 8, 4, 2 and 1, by the binary digits of their number. Each transform is orthogonal and symmetric, so it
is its own inverse. Sums are float64, rounded once to float32.

Wire: the transformed tensor as float32; in a chain, the quantizer's wire of it as a vector.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from gradwire.comm.compressors.rotation import Rotation

GROUP = 32


class Hadamard(Rotation):
    """Sends sums and differences of the 32 elements of a group, over which an outlier is spread."""

    name = "hadamard"
    use = "Before a quantizer of few bits: `hadamard+int8` with `num_bits: 4`."
    group: ClassVar[int] = GROUP

    def rotate(self, x: Tensor) -> Tensor:
        """Transform all groups."""
        n, y = x.numel(), x.to(torch.float64)
        stages = [2**k for k in range(GROUP.bit_length() - 1)]
        for h in stages:
            pairs = y[: n - n % (2 * h)].view(-1, 2, h)
            a, b = pairs.unbind(dim=1)
            pairs.copy_(torch.stack([a + b, a - b], dim=1))
        whole = n - n % GROUP
        y[:whole] *= GROUP**-0.5
        for h in reversed(stages):
            if n & h:
                start = n - n % (2 * h)
                y[start : start + h] *= h**-0.5
        return y.to(torch.float32)
