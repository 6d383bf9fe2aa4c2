"""The projector interface, bounds on projected norms, and the identity."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.attribution.persample.layer_factors import Direct, LayerFactor
from gradwire.base.errors import BadInput

Shapes = Mapping[str, tuple[int, ...]]

FALSE_ALARM = 1e-12  # probability that a correct row lies outside its band


class Band(NamedTuple):
    """The accepted range of ``‖Px‖² / ‖x‖²``."""

    low: float
    high: float


class Image(ABC):
    """Projected rows, accumulated parameter by parameter."""

    def add(self, name: str, use: LayerFactor) -> None:
        """Add one use of a parameter; its gradient is formed."""
        self.add_values(name, use.gradient().flatten(1).float())

    @abstractmethod
    def add_values(self, name: str, values: Tensor) -> None:
        """Add a parameter's gradients, float32 [samples, numel]."""

    @abstractmethod
    def finished(self) -> dict[int, Tensor]:
        """Return the rows, float32 [samples, dim] by dim."""


class Projector(ABC):
    """A linear map of rows of n gradient entries to rows of ``dim``; columns follow the model's parameter order.

    Args:
        shapes: The shape of each parameter, by name, in the model's order.
        seed: Seed of the matrix.
    """

    def __init__(self, shapes: Shapes, seed: int) -> None:
        self.shapes = dict(shapes)
        self.sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        self.seed = seed

    def project(self, rows: Tensor, dims: Sequence[int]) -> dict[int, Tensor]:
        """Project rows [samples, n] to float32 [samples, dim] for each dim, in one pass over the rows.

        Raises:
            BadInput: If this projection does not support a dim.
        """
        image = self.image(len(rows), dims, rows.device)
        for name, start, end in self.parameters():
            image.add(name, Direct(rows[:, start:end]))
        return image.finished()

    @abstractmethod
    def image(self, samples: int, dims: Sequence[int], device: torch.device) -> Image:
        """Return the rows of zero gradients, to which those of parameters are added.

        Raises:
            BadInput: If this projection does not support a dim.
        """

    @abstractmethod
    def fingerprint(self, dim: int) -> str:
        """Return a digest of the map, equal for equal maps on any device.

        Raises:
            BadInput: If this projection does not support ``dim``.
        """

    @abstractmethod
    def band(self, dim: int) -> Band:
        """Return the range of ``‖Px‖² / ‖x‖²`` with probability 1 - `FALSE_ALARM`."""

    @property
    def formed(self) -> int:
        """Most entries of a sample's gradient that its image is given or holds at once."""
        return max(self.sizes.values(), default=0)

    def parameters(self) -> Iterator[tuple[str, int, int]]:
        """Yield each parameter's name and the start and end of its columns."""
        start = 0
        for name, numel in self.sizes.items():
            yield name, start, start + numel
            start += numel


def chi2_band(freedom: float) -> Band:
    """Return the band of a mean of ``freedom`` squared standard normals, which approximates ``‖Px‖² / ‖x‖²``."""
    from scipy.stats import chi2

    low, high = chi2.ppf(FALSE_ALARM / 2, freedom), chi2.isf(FALSE_ALARM / 2, freedom)
    return Band(float(low) / freedom, float(high) / freedom)


def tiles(numel: int, size: int) -> Iterator[tuple[int, int]]:
    """Split ``range(numel)`` into ranges of ``size``; the last may be shorter."""
    return ((first, min(first + size, numel)) for first in range(0, numel, size))


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
