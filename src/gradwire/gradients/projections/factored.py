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

from gradwire.errors import BadInput
from gradwire.gradients.projections import hashing
from gradwire.gradients.projections.base import Band, Projector, Shapes, chi2_band
from gradwire.gradients.projections.sjlt import SLOTS, Sjlt
from gradwire.persample.layer_factors import Direct, LayerFactor, OuterProduct


class Factors(NamedTuple):
    """A matrix parameter's P_l [rows, k_l] and P_r [columns, k_r]."""

    left: Tensor
    right: Tensor


class Factored(Projector):
    """Projects matrices by factors, vectors by `Sjlt`; parameters of more than two dimensions are [shape[0], rest]."""

    def __init__(self, shapes: Shapes, seed: int) -> None:
        super().__init__(shapes, seed)
        self.matrices = {
            name: (shape[0], math.prod(shape[1:])) for name, shape in self.shapes.items() if len(shape) >= 2
        }
        self._others = Sjlt({name: shape for name, shape in self.shapes.items() if len(shape) < 2}, seed)
        self._factors: dict[tuple[str, int, torch.device], Factors] = {}

    def project(self, rows: Tensor, dims: Sequence[int]) -> dict[int, Tensor]:
        """Project formed gradient rows [samples, n] to float32 [samples, dim] for each dim."""
        image = Image(self, len(rows), dims, rows.device)
        for name, start, end in self.parameters():
            image.add(name, Direct(rows[:, start:end]))
        return image.finished()

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

    def spread(self, slots: Tensor, dim: int) -> Tensor:
        """Project the slots, which hold all vector parameters, to ``dim`` columns."""
        return self._others.spread(slots, dim)

    def add(self, name: str, values: Tensor, slots: Tensor) -> None:
        """Add a vector parameter's gradients to the slots."""
        self._others.add(name, values, slots)

    def fingerprint(self, dim: int) -> str:
        """Return a digest of each factor's first and last row, and of the projection of the vectors."""
        hashed = hashlib.sha256(f"factored dim={dim} {self._others.fingerprint(dim)}".encode())
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


class Image:
    """Projected rows, accumulated parameter by parameter.

    Args:
        projector: The projection.
        samples: Number of rows.
        dims: Widths of the rows.
        device: Device of the rows.
    """

    def __init__(self, projector: Factored, samples: int, dims: Sequence[int], device: torch.device) -> None:
        self._projector, self._device = projector, device
        self._rows = {dim: torch.zeros(samples, dim, device=device) for dim in dims}
        vectors = len(projector.shapes) - len(projector.matrices)
        self._slots = torch.zeros(samples, SLOTS, device=device) if vectors else None

    def add(self, name: str, use: LayerFactor) -> None:
        """Add one use of a parameter, without forming its gradient."""
        if not isinstance(use, OuterProduct):
            if name in self._projector.matrices:
                self.add_matrix(name, use.value.float().reshape(-1, *self._projector.matrices[name]))
            else:
                self.add_vector(name, use.value.flatten(1))
            return
        for dim, rows in self._rows.items():
            left, right = self._projector.factors(name, dim, self._device)
            lefts = left[use.left] if use.one_hot else use.left @ left
            rows += (lefts.transpose(1, 2) @ (use.right @ right)).flatten(1)

    def add_matrix(self, name: str, gradients: Tensor) -> None:
        """Add a matrix parameter's gradients [samples, rows, columns]."""
        for dim, rows in self._rows.items():
            left, right = self._projector.factors(name, dim, self._device)
            rows += (left.T @ (gradients @ right)).flatten(1)

    def add_vector(self, name: str, gradients: Tensor) -> None:
        """Add a vector parameter's gradients [samples, numel]."""
        assert self._slots is not None
        self._projector.add(name, gradients, self._slots)

    def finished(self) -> dict[int, Tensor]:
        """Return the projected rows."""
        if self._slots is None:
            return self._rows
        return {dim: rows + self._projector.spread(self._slots, dim) for dim, rows in self._rows.items()}


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
