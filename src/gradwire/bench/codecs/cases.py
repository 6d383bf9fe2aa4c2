"""The cases of ``bench compressors``: every registered method, variants, chains, and PyTorch's own operations."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gradwire.comm.compressors import kernels, registry
from gradwire.comm.compressors.base import Compressor
from gradwire.comm.compressors.rotation import Rotated
from gradwire.comm.compressors.sparse import Chain

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "int8": [{"rounding": "stochastic"}, {"num_bits": 4}],
    "fp8": [{"format": "e5m2"}],
    "signsgd": [{"scale": "none"}],
    "qsgd": [{"norm": "max"}],
}
"""Options that are timed in addition to the defaults."""

CHAINS = ("topk+int8", "topk+natural", "topk+fp16", "randomk+qsgd", "randomk+int8", "threshold+onebit")
"""Chains that are timed by default."""
DENSITY, RANK = 0.01, 4  # of PyTorch's own operations


class Codec(Protocol):
    """Interface of timed objects; a `Compressor` has it."""

    def encode(self, x: Tensor, *, generator: torch.Generator, flag: Tensor) -> Any:
        """Encode into one or several tensors."""

    def decode(self, wire: Any, shape: tuple[int, ...]) -> Tensor:
        """Decode ``wire`` into a tensor."""


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    name: str
    codec: Codec
    options: dict[str, Any] = field(default_factory=dict)

    def form(self, device: torch.device) -> str:
        """``kernel``, ``reference`` or, for a chain of both, ``kernel+reference``; ``torch`` for those of PyTorch."""
        if not isinstance(self.codec, Compressor):
            return "torch"
        stages: list[Compressor] = [self.codec]
        if isinstance(self.codec, Chain):
            stages = [self.codec.sparsifier, self.codec.quantizer]
        elif isinstance(self.codec, Rotated):
            stages = [self.codec.rotation, self.codec.quantizer]
        return "+".join(
            dict.fromkeys(
                "reference" if kernels.find(stage, device) is kernels.REFERENCE else "kernel" for stage in stages
            )
        )


def cases(names: Sequence[str] | None = None) -> list[Case]:
    """Return the cases in the order of the table.

    Args:
        names: Methods (with their variants) and chains; all, and PyTorch's own operations, by default.

    Raises:
        BadInput: If a method or chain is unknown.
    """
    if names is None:
        methods = registry.available()
        chains = [chain for chain in CHAINS if set(chain.split("+")) <= set(methods)]
    else:
        chosen = dict.fromkeys("+".join(registry.members(name)) for name in names)
        methods, chains = [name for name in chosen if "+" not in name], [name for name in chosen if "+" in name]
    builds = [(name, options) for name in methods for options in ({}, *VARIANTS.get(name, []))]
    builds += [(chain, {}) for chain in chains]
    ours = [Case(name, registry.build(name, **options), options) for name, options in builds]
    return ours if names is not None else [*ours, *torch_cases()]


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


def size(wire: Any) -> int:
    """Return the bytes of an encoding."""
    tensors = wire if isinstance(wire, tuple) else (wire,)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
