"""A Kronecker projection (Choe et al., 2024, "What is Your Data Worth to GPT?", section 3): P_lᵀ G P_r for a matrix G.

A gradient that is a sum of outer products, Σ_t l_t ⊗ r_t, is projected through its factors, (P_lᵀ l_t) ⊗ (P_rᵀ r_t),
without being formed. Each matrix maps to all ``dim`` = k_l k_r columns, and the images of all parameters are added with
independent signs, so that E‖Px‖² = ‖x‖² for any shapes. Vector parameters are projected by `Sjlt`.

Var(‖Px‖²/‖x‖²) of one matrix is ρ(2/k_l + 2/k_r + 2/dim) + 2/dim for normal factors, ρ = tr((GᵀG)²)/tr(GᵀG)² between
1/rank and 1: much more than a dense projection of equal ``dim``. Signs do not increase it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.attribution.persample.layer_factors import LayerFactor, OuterProduct
from gradwire.attribution.projections import hashing
from gradwire.attribution.projections.base import Band, Image, Projector, Shapes, chi2_band
from gradwire.attribution.projections.sjlt import Sjlt
from gradwire.base.errors import BadInput


class Factors(NamedTuple):
    """A matrix parameter's P_l [rows, k_l] and P_r [columns, k_r]."""

    left: Tensor
    right: Tensor


# Why: docs/decisions.md, "A factored row is a sum over parameters".
class Factored(Projector):
    """Projects matrices by factors, vectors by `Sjlt`; parameters of more than two dimensions are [shape[0], rest]."""

    def __init__(self, shapes: Shapes, seed: int) -> None:
        super().__init__(shapes, seed)
        self.matrices = {
            name: (shape[0], math.prod(shape[1:])) for name, shape in self.shapes.items() if len(shape) >= 2
        }
        self.vectors = Sjlt({name: shape for name, shape in self.shapes.items() if len(shape) < 2}, seed)
        self._factors: dict[tuple[str, int, torch.device], Factors] = {}

    def image(self, samples: int, dims: Sequence[int], device: torch.device) -> Image:
        """Return the rows of zero gradients."""
        vectors = self.vectors.image(samples, dims, device) if self.vectors.shapes else None
        return Products(self, vectors, {dim: torch.zeros(samples, dim, device=device) for dim in dims})

    @property
    def formed(self) -> int:
        """Most entries of a sample's gradient that its image is given at once: of a vector."""
        return self.vectors.formed

    def factors(self, name: str, dim: int, device: torch.device) -> Factors:
        """Return a matrix parameter's factors, which are small and cached."""
        if (name, dim, device) not in self._factors:
            sides = zip(("left", "right"), self.matrices[name], split(dim), strict=True)
            made = [
                hashing.sign_table(hashing.key(self.seed, f"{name} {side}"), torch.arange(length, device=device), width)
                / math.sqrt(width)
                for side, length, width in sides
            ]
            self._factors[name, dim, device] = Factors(*made)
        return self._factors[name, dim, device]

    def fingerprint(self, dim: int) -> str:
        """Return a digest of each factor's first and last row, and of the projection of the vectors."""
        hashed = hashlib.sha256(f"factored dim={dim} {self.vectors.fingerprint(dim)}".encode())
        for name, sides in self.matrices.items():
            ends = [[0, side - 1] for side in sides]
            factors = self.factors(name, dim, torch.device("cpu"))
            hashed.update(f"{name} {sides}".encode())
            for factor, at in zip(factors, ends, strict=True):
                hashed.update(factor[at].sign().to(torch.int8).numpy().tobytes())
        return hashed.hexdigest()

    def band(self, dim: int) -> Band:
        """Return the band of one rank-1 matrix, the widest: a product of two independent χ²."""
        bands = [chi2_band(width) for width in split(dim)]
        return Band(math.prod(band.low for band in bands), math.prod(band.high for band in bands))


class Products(Image):
    """The rows of the matrices, and of the vectors if there are any."""

    def __init__(self, projector: Factored, vectors: Image | None, rows: dict[int, Tensor]) -> None:
        self._projector, self._vectors, self._rows = projector, vectors, rows

    def add(self, name: str, use: LayerFactor) -> None:
        """Add one use of a parameter, without forming its gradient from its factors."""
        if not isinstance(use, OuterProduct):
            super().add(name, use)
            return
        for dim, rows in self._rows.items():
            left, right = self._projector.factors(name, dim, rows.device)
            lefts = left[use.left] if use.one_hot else use.left @ left
            rows += (lefts.transpose(1, 2) @ (use.right @ right)).flatten(1)

    def add_values(self, name: str, values: Tensor) -> None:
        """Add a parameter's gradients, float32 [samples, numel]."""
        if name not in self._projector.matrices:
            assert self._vectors is not None
            self._vectors.add_values(name, values)
            return
        gradients = values.unflatten(1, self._projector.matrices[name])
        for dim, rows in self._rows.items():
            left, right = self._projector.factors(name, dim, rows.device)
            rows += (left.T @ (gradients @ right)).flatten(1)

    def finished(self) -> dict[int, Tensor]:
        """Return the rows."""
        if self._vectors is None:
            return self._rows
        return {dim: self._rows[dim] + rows for dim, rows in self._vectors.finished().items()}


def split(dim: int) -> tuple[int, int]:
    """Factor ``dim`` into k_l times k_r, as close to each other as possible.

    Raises:
        BadInput: If one exceeds four times the other, as for a large prime.
    """
    left = next(width for width in range(math.isqrt(dim), 0, -1) if dim % width == 0)
    if dim // left > 4 * left:
        near = math.isqrt(dim) ** 2
        raise BadInput(f"--dim {dim} with --projection factored: not a product of two similar numbers, such as {near}.")
    return left, dim // left
