"""The cases of ``bench compressors``: every registered method, variants, chains, and PyTorch's own operations.

Each case has a floor (the bytes that any implementation must read and write, and for matrix products the
multiplications and additions).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gradwire.comm.compressors import kernels, registry
from gradwire.comm.compressors.base import Compressor, numel
from gradwire.comm.compressors.methods.gradiveq import GradiVeQ
from gradwire.comm.compressors.methods.powersgd import PowerSGD
from gradwire.comm.compressors.rotation import Rotated
from gradwire.comm.compressors.sparse import Chain

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "int8": [{"rounding": "stochastic"}, {"num_bits": 4}],
    "fp8": [{"format": "e5m2"}],
    "signsgd": [{"scale": "none"}],
    "qsgd": [{"norm": "max"}],
}
"""Options that are timed besides the defaults."""

CHAINS = ("topk+int8", "topk+natural", "topk+fp16", "randomk+qsgd", "randomk+int8", "threshold+onebit")
"""Chains that are timed by default."""


class Codec(Protocol):
    """Interface of timed objects; a `Compressor` has it."""

    def encode(self, x: Tensor, *, generator: torch.Generator, flag: Tensor) -> Any:
        """Encode into one or several tensors."""

    def decode(self, wire: Any, shape: tuple[int, ...]) -> Tensor:
        """Decode ``wire`` into a tensor."""


class Work(NamedTuple):
    """The least work of one call.

    Attributes:
        moved: Bytes read and written.
        flops: Multiplications and additions of matrix products.
    """

    moved: int
    flops: int = 0


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    name: str
    codec: Codec
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def own(self) -> bool:
        """Whether the case is one of the package's compressors."""
        return isinstance(self.codec, Compressor)

    def form(self, device: torch.device) -> str:
        """``fused``, ``plain`` or, for a chain of both, ``fused+plain``; ``torch`` for PyTorch's own operations."""
        if not isinstance(self.codec, Compressor):
            return "torch"
        stages: list[Compressor] = [self.codec]
        if isinstance(self.codec, Chain):
            stages = [self.codec.sparsifier, self.codec.quantizer]
        elif isinstance(self.codec, Rotated):
            stages = [self.codec.rotation, self.codec.quantizer]
        return "+".join(
            dict.fromkeys("plain" if kernels.find(stage, device) is kernels.PLAIN else "fused" for stage in stages)
        )

    def work(self, shape: tuple[int, int], wire: int) -> tuple[Work, Work]:
        """The least work of `encode` and `decode` for a matrix of ``shape`` with an encoding of ``wire`` bytes."""
        n, codec = numel(shape), self.codec
        encode, decode = Work(4 * n + wire), Work(wire + 4 * n)  # x read, wire written; wire read, tensor written
        if isinstance(codec, PowerSGD | LowRank):  # reads x twice
            flops = 2 * n * min(codec.rank, *shape)
            return Work(8 * n + wire, 2 * flops), decode._replace(flops=flops)
        if isinstance(codec, GradiVeQ):
            flops = 2 * n * codec.components
            return Work(8 * n + wire, 2 * n * codec.slice + flops), decode._replace(flops=flops)
        return encode, decode


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
    """PyTorch's own operations for the same jobs."""
    return [
        Case("torch: to(float16)", Cast(torch.float16)),
        Case("torch: to(bfloat16)", Cast(torch.bfloat16)),
        Case("torch: quantize_per_channel", QuantizeRows()),
        Case("torch: topk", TopK(0.01), {"density": 0.01}),
        Case("torch: nonzero", Nonzero(0.01), {"density": 0.01}),
        Case("torch: PowerSGD hook's maths", LowRank(4), {"rank": 4}),
    ]


@dataclass(frozen=True)
class Cast:
    """A cast and back."""

    dtype: torch.dtype

    def encode(self, x: Tensor, *, generator: torch.Generator, flag: Tensor) -> Tensor:
        """The shorter type."""
        return x.to(self.dtype)

    def decode(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """float32 again."""
        return wire.to(torch.float32)


class QuantizeRows:
    """8 bits per element and a scale per row of the matrix."""

    def encode(self, x: Tensor, *, generator: torch.Generator, flag: Tensor) -> tuple[Tensor, Tensor]:
        """A tensor of torch's quantized type, and its scales."""
        scales = (x.abs().amax(dim=1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        zeros = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated in PyTorch
            return torch.quantize_per_channel(x, scales, zeros, 0, torch.qint8), scales

    def decode(self, wire: tuple[Tensor, Tensor], shape: tuple[int, ...]) -> Tensor:
        """float32 again."""
        return wire[0].dequantize()


@dataclass(frozen=True)
class TopK:
    """The largest magnitudes by ``torch.topk``, with int64 places."""

    density: float

    def encode(self, x: Tensor, *, generator: torch.Generator, flag: Tensor) -> tuple[Tensor, Tensor]:
        """Values and places."""
        flat = x.view(-1)
        places = flat.abs().topk(round(flat.numel() * self.density), sorted=False).indices
        return flat[places], places

    def decode(self, wire: tuple[Tensor, Tensor], shape: tuple[int, ...]) -> Tensor:
        """The values among zeros."""
        values, places = wire
        out = torch.zeros(shape, dtype=torch.float32, device=values.device)
        out.view(-1)[places] = values
        return out


class Nonzero(TopK):
    """Elements above the quantile of a normal distribution with x's standard deviation."""

    def encode(self, x: Tensor, *, generator: torch.Generator, flag: Tensor) -> tuple[Tensor, Tensor]:
        """Values and places."""
        flat = x.view(-1)
        share = torch.tensor(1 - self.density, dtype=torch.float64, device=x.device)
        threshold = torch.erfinv(share).mul(2**0.5).to(torch.float32) * flat.square().mean().sqrt()
        places = (flat.abs() >= threshold).nonzero().view(-1)
        return flat[places], places


@dataclass(frozen=True)
class LowRank:
    """The computation of PyTorch's PowerSGD hook for a matrix, without collectives: P = M Q, P made orthonormal by
    ``torch.linalg.qr``, Q = M'P. Each call draws a new random Q.
    """

    rank: int

    def encode(self, x: Tensor, *, generator: torch.Generator, flag: Tensor) -> tuple[Tensor, Tensor]:
        """P and Q."""
        rank = min(self.rank, *x.shape)
        q = torch.randn(x.shape[1], rank, generator=generator, device=x.device)
        p = torch.linalg.qr(x @ q).Q
        return p, x.T @ p

    def decode(self, wire: tuple[Tensor, Tensor], shape: tuple[int, ...]) -> Tensor:
        """P Q'."""
        p, q = wire
        return p @ q.T


def size(wire: Any) -> int:
    """Bytes of an encoding."""
    tensors = wire if isinstance(wire, tuple) else (wire,)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
