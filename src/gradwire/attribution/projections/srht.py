"""The subsampled randomised Hadamard transform (Ailon & Chazelle, 2009; Tropp, 2011): √(N/dim) S H D x / √N.

D holds random signs, H is the Hadamard matrix of order N, the next power of two, and S selects ``dim`` distinct rows.
It takes O(N log N) operations, and N floats per sample in addition to the gradient.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from gradwire.attribution.projections import hashing
from gradwire.attribution.projections.base import Band, Image, Projector, chi2_band
from gradwire.base.errors import BadInput

FACTOR = 64  # H is applied as a product of Hadamard matrices of this order
ORDERED = 1 << 22  # largest number of rows to permute at once


class Srht(Projector):
    """Var(‖Px‖²/‖x‖²) is about (2/dim)(1 - dim/N); with dim = N norms are preserved exactly."""

    def image(self, samples: int, dims: Sequence[int], device: torch.device) -> Image:
        """Return the rows of zero gradients."""
        return Padded(self, samples, dims, device)

    @cached_property
    def order(self) -> int:
        """N, the next power of two above the number of entries."""
        return 1 << (sum(self.sizes.values()) - 1).bit_length()

    @property
    def formed(self) -> int:
        """Most entries of a sample's gradient that its image holds: N."""
        return self.order

    def rows(self, dim: int) -> Tensor:
        """Return the selected rows: int64 [dim].

        Raises:
            BadInput: If ``dim`` exceeds N.
        """
        if dim > self.order:
            raise BadInput(
                f"--dim {dim} with --projection srht: the transform of these gradients has {self.order} rows."
            )
        stream = hashing.key(self.seed, f"{self.order} rows")
        if self.order <= max(ORDERED, 4 * dim):
            return hashing.words(stream, torch.arange(self.order)).argsort(stable=True)[:dim]
        drawn = hashing.words(stream, torch.arange(2 * dim)) & (self.order - 1)
        return torch.tensor(list(dict.fromkeys(drawn.tolist()))[:dim])

    def fingerprint(self, dim: int) -> str:
        """Return a digest of the rows and of each parameter's first and last sign."""
        hashed = hashlib.sha256(f"srht dim={dim} {self.order}".encode() + self.rows(dim).numpy().tobytes())
        for name, numel in self.sizes.items():
            stream = hashing.key(self.seed, f"{name} srht")
            ends = [float(hashing.signs(stream, column, column + 1, torch.device("cpu"))) for column in (0, numel - 1)]
            hashed.update(f"{name} {numel} {ends}".encode())
        return hashed.hexdigest()

    def band(self, dim: int) -> Band:
        """Return the χ² band, which is conservative for ``dim`` near N."""
        return chi2_band(dim)


class Padded(Image):
    """D x with zeros up to N; all rows come from one transform."""

    def __init__(self, projector: Srht, samples: int, dims: Sequence[int], device: torch.device) -> None:
        self._projector = projector
        self._rows = {dim: projector.rows(dim).to(device) for dim in dims}
        self._columns = {name: (start, end) for name, start, end in projector.parameters()}
        self._padded = torch.zeros(samples, projector.order, device=device)

    def add_values(self, name: str, values: Tensor) -> None:
        """Add a parameter's gradients, float32 [samples, numel]."""
        start, end = self._columns[name]
        stream = hashing.key(self._projector.seed, f"{name} srht")
        self._padded[:, start:end].addcmul_(values, hashing.signs(stream, 0, end - start, values.device))

    def finished(self) -> dict[int, Tensor]:
        """Return the rows."""
        transformed = hadamard(self._padded)
        return {dim: transformed[:, of] / math.sqrt(dim) for dim, of in self._rows.items()}


def hadamard(rows: Tensor) -> Tensor:
    """Multiply ``rows`` [samples, N] by the unscaled Hadamard matrix of order N, a power of two."""
    samples, order = rows.shape
    done = 1
    while done < order:
        factor = min(FACTOR, order // done)
        matrix = _matrix(factor, rows.device)
        rows = matrix @ rows.view(-1, factor, done) if done > 1 else rows.view(-1, factor) @ matrix
        done *= factor
    return rows.view(samples, order)


def _matrix(order: int, device: torch.device) -> Tensor:
    """Build the Hadamard matrix by Sylvester's rule: entry (i, j) is -1 to the number of ones in i & j."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < order:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix
