"""The identity projection."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.attribution.projections.base import Band, Image, Projector
from gradwire.base.errors import BadInput

ROUNDING = 1e-5  # of a float32 row's norm


class Whole(Projector):
    """Identity: a row is the concatenated gradient of all parameters."""

    def image(self, samples: int, dims: Sequence[int], device: torch.device) -> Image:
        """Return the rows of zero gradients; ``dims`` must equal their width."""
        for dim in dims:
            self._check(dim)
        return Gradient(self, samples, dims, device)

    def fingerprint(self, dim: int) -> str:
        """Return a digest of the parameters' names and sizes."""
        self._check(dim)
        return hashlib.sha256(f"none {self.sizes}".encode()).hexdigest()

    def band(self, dim: int) -> Band:
        """Return a band around 1, up to rounding."""
        return Band(1 - ROUNDING, 1 + ROUNDING)

    @property
    def formed(self) -> int:
        """Most entries of a sample's gradient that its image holds: all."""
        return sum(self.sizes.values())

    def _check(self, dim: int) -> None:
        numel = sum(self.sizes.values())
        if dim != numel:
            raise BadInput(f"--dim {dim} with --projection none: the model's gradients have {numel} entries.")


class Gradient(Image):
    """The gradients of all parameters."""

    def __init__(self, projector: Whole, samples: int, dims: Sequence[int], device: torch.device) -> None:
        self._columns = {name: (start, end) for name, start, end in projector.parameters()}
        self._rows = {dim: torch.zeros(samples, dim, device=device) for dim in dims}

    def add_values(self, name: str, values: Tensor) -> None:
        """Add a parameter's gradients, float32 [samples, numel]."""
        start, end = self._columns[name]
        for rows in self._rows.values():
            rows[:, start:end] += values

    def finished(self) -> dict[int, Tensor]:
        """Return the rows."""
        return self._rows
