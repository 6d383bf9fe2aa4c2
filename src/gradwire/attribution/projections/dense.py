"""Dense random matrices with independent entries, generated tile by tile."""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import embedding

from gradwire.attribution.projections import hashing
from gradwire.attribution.projections.base import Band, Image, Projector, chi2_band, tiles

TILE = 1 << 20  # entries generated at once, 4 MB as float32
QUANTILES = 1 << 16


class Dense(Projector):
    """P with independent entries of mean 0 and variance 1/dim; a smaller dim uses the first rows of a larger one."""

    name: str

    @abstractmethod
    def entries(self, name: str, columns: Tensor, dim: int) -> Tensor:
        """Return √dim times the entries of a parameter's ``columns`` [c], as float32 [c, dim]."""

    @abstractmethod
    def probe(self, name: str, columns: Tensor, dim: int) -> Tensor:
        """Return the random bits behind `entries`."""

    def image(self, samples: int, dims: Sequence[int], device: torch.device) -> Image:
        """Return the rows of zero gradients."""
        return DenseImage(self, samples, dims, device)

    def fingerprint(self, dim: int) -> str:
        """Return a digest of the bits behind every parameter's first and last column."""
        hashed = hashlib.sha256(f"{self.name} dim={dim}".encode())
        for name, numel in self.sizes.items():
            probes = self.probe(name, torch.tensor([0, numel - 1]), dim)
            hashed.update(f"{name} {numel}".encode() + probes.numpy().tobytes())
        return hashed.hexdigest()

    def band(self, dim: int) -> Band:
        """Return the χ² band: exact for normal entries, conservative for signs."""
        return chi2_band(dim)


class DenseImage(Image):
    """The widest rows, of which the others are the first columns."""

    def __init__(self, projector: Dense, samples: int, dims: Sequence[int], device: torch.device) -> None:
        self._projector, self._dims = projector, dims
        self._rows = torch.zeros(samples, max(dims), device=device)

    def add_values(self, name: str, values: Tensor) -> None:
        """Add a parameter's gradients, float32 [samples, numel]."""
        widest = self._rows.shape[1]
        for first, last in tiles(values.shape[1], max(1, TILE // widest)):
            columns = torch.arange(first, last, device=values.device)
            self._rows.addmm_(values[:, first:last], self._projector.entries(name, columns, widest))

    def finished(self) -> dict[int, Tensor]:
        """Return the rows."""
        return {dim: self._rows[:, :dim] / math.sqrt(dim) for dim in self._dims}


class Rademacher(Dense):
    """Entries ±1/√dim (Achlioptas, 2003).

    Var(‖Px‖²/‖x‖²) = (2/dim)(1 - ‖x‖₄⁴/‖x‖₂⁴).
    """

    name = "rademacher"

    def entries(self, name: str, columns: Tensor, dim: int) -> Tensor:
        """Signs ±1, [c, dim]."""
        return hashing.sign_table(hashing.key(self.seed, name), columns, dim)

    def probe(self, name: str, columns: Tensor, dim: int) -> Tensor:
        """64 signs per word: int64 [c, ⌈dim / 64⌉]."""
        return hashing.table(hashing.key(self.seed, name), columns, math.ceil(dim / hashing.WORD))


class Normal(Dense):
    """Entries N(0, 1/dim), each one of 65,536 equally likely quantiles with a variance of exactly 1/dim.

    A table replaces logarithms and cosines, whose rounding depends on the device. The largest entry is 4.3 standard
    deviations. Var(‖Px‖²/‖x‖²) = 2/dim.
    """

    name = "normal"

    def entries(self, name: str, columns: Tensor, dim: int) -> Tensor:
        """Standard normal numbers, float32 [c, dim]."""
        chosen = self.probe(name, columns, dim).view(torch.int16).int() + QUANTILES // 2
        return embedding(chosen, _quantiles().to(columns.device)).flatten(1)[:, :dim]

    def probe(self, name: str, columns: Tensor, dim: int) -> Tensor:
        """Four 16-bit numbers per word: int64 [c, ⌈dim / 4⌉]."""
        return hashing.table(hashing.key(self.seed, f"{name} normal"), columns, math.ceil(dim / 4))


@cache
def _quantiles() -> Tensor:
    """Return equally likely quantiles of the standard normal distribution, float32 [65536, 1]."""
    middles = torch.special.ndtri((torch.arange(QUANTILES, dtype=torch.float64) + 0.5) / QUANTILES)
    return (middles / middles.square().mean().sqrt()).float()[:, None]
