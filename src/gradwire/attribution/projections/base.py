"""The projector interface, bounds on projected norms, and the identity."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.attribution.persample.layer_factors import Direct, LayerFactor, SquareNorms
from gradwire.base.errors import BadInput

Shapes = Mapping[str, tuple[int, ...]]

FALSE_ALARM = 1e-12  # probability that a correct row is outside its band


class Band(NamedTuple):
    """The accepted range of ``‖Px‖² / ‖x‖²``."""

    low: float
    high: float


class Projector(ABC):
    """A linear map of rows of n gradient entries to rows of ``dim``; columns follow the model's parameter order.

    Args:
        shapes: The shape of each parameter, by name, in the model's order.
        seed: Seed of the matrix.
    """

    def __init__(self, shapes: Shapes, seed: int) -> None:
        self.shapes = dict(shapes)
        self.sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        ends = [*accumulate(self.sizes.values())]
        self.columns = {
            name: slice(end - size, end) for (name, size), end in zip(self.sizes.items(), ends, strict=True)
        }
        self.seed = seed

    def project(self, rows: Tensor, dims: Sequence[int]) -> dict[int, Tensor]:
        """Project rows [samples, n] to float32 [samples, dim] for each dim, in one pass over the rows.

        Raises:
            BadInput: If this projection does not support a dim.
        """
        sums = torch.zeros(len(rows), self.width(dims), device=rows.device)
        for name, columns in self.columns.items():
            self.add(sums, dims, name, Direct(rows[:, columns]))
        return self.rows(sums, dims)

    @abstractmethod
    def width(self, dims: Sequence[int]) -> int:
        """Return how many numbers per sample the `rows` are made from.

        Raises:
            BadInput: If this projection does not support a dim.
        """

    def add(self, sums: Tensor, dims: Sequence[int], name: str, use: LayerFactor) -> None:
        """Add one use of a parameter to ``sums`` [samples, width]; its gradient is formed."""
        self.add_values(sums, dims, name, use.gradient().flatten(1).float())

    @abstractmethod
    def add_values(self, sums: Tensor, dims: Sequence[int], name: str, values: Tensor) -> None:
        """Add a parameter's gradients, float32 [samples, numel], to ``sums`` [samples, width]."""

    @abstractmethod
    def rows(self, sums: Tensor, dims: Sequence[int]) -> dict[int, Tensor]:
        """Return the rows, float32 [samples, dim] by dim, of the sums over all parameters."""

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
        """Most entries of a sample's gradient that are given to, or held by, its image at once."""
        return max(self.sizes.values(), default=0)


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

    def width(self, dims: Sequence[int]) -> int:
        """Return the number of entries, which the ``dims`` must equal."""
        for dim in dims:
            self._check(dim)
        return self.formed

    def add_values(self, sums: Tensor, dims: Sequence[int], name: str, values: Tensor) -> None:
        """Add a parameter's gradients to its columns."""
        sums[:, self.columns[name]] += values

    def rows(self, sums: Tensor, dims: Sequence[int]) -> dict[int, Tensor]:
        """Return the sums."""
        return dict.fromkeys(dims, sums)

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
        if dim != self.formed:
            raise BadInput(f"--dim {dim} with --projection none: the model's gradients have {self.formed} entries.")


class Images:
    """Projected rows of each part of the parameters, accumulated parameter by parameter.

    Args:
        parts: The projections of the parts.
        samples: Number of samples.
        dims: Widths of the rows.
        device: Device of the rows.
    """

    def __init__(self, parts: Sequence[Projector], samples: int, dims: Sequence[int], device: torch.device) -> None:
        self._dims = dims
        self._sums = [(part, torch.zeros(samples, part.width(dims), device=device)) for part in parts]
        self._squares = [SquareNorms(samples, device) for _ in parts]
        self._of = {name: sums for sums in self._sums for name in sums[0].shapes}
        self._norms = {name: norms for part, norms in zip(parts, self._squares, strict=True) for name in part.shapes}

    def add(self, name: str, use: LayerFactor) -> None:
        """Add one use of a parameter."""
        part, sums = self._of[name]
        part.add(sums, self._dims, name, use)

    def take(self, name: str, use: LayerFactor, last: bool) -> None:
        """Add one use of a parameter, and its norm; ``last`` marks a parameter's last use."""
        self.add(name, use)
        self._norms[name].take(name, use, last)

    def square_norms(self) -> Tensor:
        """Return the squared norms before projection, float64 [samples, parts], of what was taken."""
        return torch.stack([norms.total() for norms in self._squares], 1)

    def finished(self) -> dict[int, Tensor]:
        """Return the projected rows, [samples, parts, dim] by dim."""
        images = [part.rows(sums, self._dims) for part, sums in self._sums]
        return {dim: torch.stack([rows[dim] for rows in images], 1) for dim in self._dims}
