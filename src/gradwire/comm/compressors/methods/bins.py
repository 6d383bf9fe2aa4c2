"""Bins: 2^bits bins of equal width over so many standard deviations, each decoded to the mean of what fell into it.

The quantizer of hivemind's `Uniform8BitQuantization` (8 bits; used by INTELLECT-1, Jaghouar et al., arXiv:2412.01152,
2024) and of SparseLoCo (2 bits), over 6 standard deviations around the mean. With n elements of mean m and unbiased
standard deviation s, and B bins of width ``w = 6 s / B``, an element's bin is
``round((x - m) / w + B / 2)``, clamped to 0 .. B - 1.

Wire: the B means as float32, 0 for an empty bin; then n codes of ``bits`` bits, packed.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from gradwire.comm.compressors.base import Quantizer, Shape, as_numbers, numel
from gradwire.comm.compressors.packing import pack, packed_bytes, unpack

SIGMAS = 6.0  # standard deviations that the bins cover


class Bins(Quantizer):
    """Sends a bin per element and the mean of each bin; statistics are float64, rounded once."""

    name = "bins"
    use = "Few bits for what has one scale, such as a sparsifier's values: `chunktopk+bins`; with error feedback."

    bits: Literal[1, 2, 4, 8] = Field(default=2, description="bits of an element")

    def wire_bytes(self, shape: Shape) -> int:
        """A float32 per bin and the codes."""
        return 4 * 2**self.bits + packed_bytes(numel(shape), self.bits)

    def to_wire(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Find each element's bin, and the bins' means; what is not finite falls into the first bin and shows there."""
        values, bins = x.view(-1).double(), 2**self.bits
        centered = values - values.sum() / max(1, values.numel())
        width = SIGMAS * (centered.square().sum() / max(1, values.numel() - 1)).sqrt() / bins
        scaled = torch.where(width > 0, centered / width, 0.0)
        codes = (scaled + bins // 2).round().clamp(0, bins - 1).nan_to_num(0).to(torch.int64)
        sums, counts = (torch.zeros(bins, dtype=torch.float64, device=x.device) for _ in range(2))
        sums.index_add_(0, codes, values)
        counts.index_add_(0, codes, torch.ones_like(values))
        means = (sums / counts.clamp_min(1)).to(torch.float32)
        means[:1] += torch.zeros_like(width).masked_fill_(~width.isfinite(), math.nan)
        return torch.cat([means.view(torch.uint8), pack(codes, self.bits)])

    def from_wire(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Give each element its bin's mean."""
        head = 4 * 2**self.bits
        codes = unpack(wire[head:], self.bits, numel(shape)).to(torch.int64)
        return as_numbers(wire[:head], torch.float32)[codes]
