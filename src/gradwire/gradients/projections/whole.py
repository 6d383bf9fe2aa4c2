"""The identity projection."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.errors import BadInput
from gradwire.gradients.projections.base import Band, Projector

ROUNDING = 1e-5  # of a float32 row's norm


class Whole(Projector):
    """Identity: a row is the concatenated gradient of all parameters."""

    def project(self, rows: Tensor, dims: Sequence[int]) -> dict[int, Tensor]:
        """Copy the rows as float32; ``dims`` must equal their width."""
        for dim in dims:
            self._check(dim)
        return {dim: rows.to(torch.float32, copy=True) for dim in dims}

    def fingerprint(self, dim: int) -> str:
        """Return a digest of the parameters' names and sizes."""
        self._check(dim)
        return hashlib.sha256(f"none {self.sizes}".encode()).hexdigest()

    def band(self, dim: int) -> Band:
        """Return a band around 1, up to rounding."""
        return Band(1 - ROUNDING, 1 + ROUNDING)

    def _check(self, dim: int) -> None:
        numel = sum(self.sizes.values())
        if dim != numel:
            raise BadInput(f"--dim {dim} with --projection none: the model's gradients have {numel} entries.")
