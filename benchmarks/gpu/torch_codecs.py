"""PyTorch's own operations for the jobs of compressors, as cases of ``gradwire bench compressors``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.bench.codecs.cases import Case

DENSITY, RANK = 0.01, 4


def torch_cases() -> list[Case]:
    """Return PyTorch's own operations for the same jobs."""
    density = {"density": DENSITY}
    return [
        Case("torch: to(float16)", Operations(lambda x, _: x.half(), lambda wire, _: wire.float())),
        Case("torch: to(bfloat16)", Operations(lambda x, _: x.bfloat16(), lambda wire, _: wire.float())),
        Case("torch: quantize_per_channel", Operations(quantized_rows, lambda wire, _: wire[0].dequantize())),
        Case("torch: topk", Operations(largest, scattered), density),
        Case("torch: nonzero", Operations(above_quantile, scattered), density),
        Case("torch: PowerSGD hook's maths", Operations(factors, lambda wire, _: wire[0] @ wire[1].T), {"rank": RANK}),
    ]


class Operations(NamedTuple):
    """A codec of two functions."""

    encoding: Callable[[Tensor, torch.Generator], Any]
    decoding: Callable[[Any, tuple[int, ...]], Tensor]

    def encode(self, x: Tensor, *, generator: torch.Generator, flag: Tensor) -> Any:
        """Encode into one or several tensors."""
        return self.encoding(x, generator)

    def decode(self, wire: Any, shape: tuple[int, ...]) -> Tensor:
        """Decode ``wire`` into a tensor."""
        return self.decoding(wire, shape)


def quantized_rows(x: Tensor, _: torch.Generator) -> tuple[Tensor, Tensor]:
    """Quantize to 8 bits with a scale per row of the matrix."""
    scales = (x.abs().amax(dim=1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    zeros = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in PyTorch
        return torch.quantize_per_channel(x, scales, zeros, 0, torch.qint8), scales


def largest(x: Tensor, _: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the largest magnitudes by ``torch.topk``, with int64 places."""
    flat = x.view(-1)
    places = flat.abs().topk(round(flat.numel() * DENSITY), sorted=False).indices
    return flat[places], places


def above_quantile(x: Tensor, _: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the elements above the quantile of a normal distribution with x's standard deviation, with places."""
    flat = x.view(-1)
    share = torch.tensor(1 - DENSITY, dtype=torch.float64, device=x.device)
    threshold = torch.erfinv(share).mul(2**0.5).to(torch.float32) * flat.square().mean().sqrt()
    places = (flat.abs() >= threshold).nonzero().view(-1)
    return flat[places], places


def scattered(wire: tuple[Tensor, Tensor], shape: tuple[int, ...]) -> Tensor:
    """Return values at their places among zeros."""
    values, places = wire
    out = torch.zeros(shape, dtype=torch.float32, device=values.device)
    out.view(-1)[places] = values
    return out


def factors(x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Compute as PyTorch's PowerSGD hook does, from a random Q: P = M Q, made orthonormal by QR, and Q = M'P."""
    q = torch.randn(x.shape[1], min(RANK, *x.shape), generator=generator, device=x.device)
    p = torch.linalg.qr(x @ q).Q
    return p, x.T @ p
