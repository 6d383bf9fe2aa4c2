"""The subsampled randomised Hadamard transform (Ailon & Chazelle, 2009; Tropp, 2011): √(N/dim) S H D x / √N.

D has random signs, H is Hadamard's matrix of order N, the next power of two, and S keeps ``dim`` of its rows, none
twice. O(N log N) operations, and N floats for each sample beside the gradient.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from gradwire.errors import BadInput
from gradwire.gradients.projections import hashing
from gradwire.gradients.projections.base import Band, Projector, chi2_band

FACTOR = 64  # H is applied as a product of Hadamard matrices of this order
ORDERED = 1 << 22  # as many rows can be put in a random order to choose from


class Srht(Projector):
    """Var(‖Px‖²/‖x‖²) is about (2/dim)(1 - dim/N); with dim = N norms are kept exactly."""

    def project(self, rows: Tensor, dims: Sequence[int]) -> dict[int, Tensor]:
        """Project rows [samples, n] to float32 [samples, dim] for each dim, in one transform."""
        chosen = {dim: self.rows(dim).to(rows.device) for dim in dims}
        padded = torch.zeros(len(rows), self.order, device=rows.device)
        for name, start, end in self.parameters():
            signs = hashing.signs(hashing.key(self.seed, f"{name} srht"), 0, end - start, rows.device)
            torch.mul(rows[:, start:end], signs, out=padded[:, start:end])
        transformed = hadamard(padded)
        return {dim: transformed[:, of] / math.sqrt(dim) for dim, of in chosen.items()}

    @cached_property
    def order(self) -> int:
        """N, the next power of two above the number of entries."""
        return 1 << (sum(self.sizes.values()) - 1).bit_length()

    def rows(self, dim: int) -> Tensor:
        """The rows that are kept: int64 [dim].

        Raises:
            BadInput: If there are not as many.
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
        """A digest of the rows and of each parameter's first and last sign."""
        hashed = hashlib.sha256(f"srht dim={dim} {self.order}".encode() + self.rows(dim).numpy().tobytes())
        for name, numel in self.sizes.items():
            stream = hashing.key(self.seed, f"{name} srht")
            ends = [float(hashing.signs(stream, at, at + 1, torch.device("cpu"))) for at in (0, numel - 1)]
            hashed.update(f"{name} {numel} {ends}".encode())
        return hashed.hexdigest()

    def band(self, dim: int) -> Band:
        """That of χ², which is too wide where ``dim`` is near N."""
        return chi2_band(dim)


def hadamard(rows: Tensor) -> Tensor:
    """``rows`` [samples, N] times Hadamard's matrix of order N, a power of two, unscaled."""
    samples, order = rows.shape
    done = 1
    while done < order:
        factor = min(FACTOR, order // done)
        matrix = _matrix(factor, rows.device)
        rows = matrix @ rows.view(-1, factor, done) if done > 1 else rows.view(-1, factor) @ matrix
        done *= factor
    return rows.view(samples, order)


def _matrix(order: int, device: torch.device) -> Tensor:
    """Hadamard's matrix by Sylvester's rule: entry (i, j) is -1 to the number of ones in i & j."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < order:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix
