"""What every projector is, and how far a projected norm may lie from the true one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]

FALSE_ALARM = 1e-12  # how often a true row may lie outside of its band


class Band(NamedTuple):
    """The range of ``‖Px‖² / ‖x‖²`` outside of which a row is not believed."""

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
        self.seed = seed

    @abstractmethod
    def project(self, rows: Tensor, dims: Sequence[int]) -> dict[int, Tensor]:
        """Project rows [samples, n] to float32 [samples, dim] for each dim, in one pass over the rows.

        Raises:
            BadInput: If a dim is none that this projection has.
        """

    @abstractmethod
    def fingerprint(self, dim: int) -> str:
        """A digest of the map: equal for equal maps, on any device.

        Raises:
            BadInput: If it has no such dim.
        """

    @abstractmethod
    def band(self, dim: int) -> Band:
        """What ``‖Px‖² / ‖x‖²`` of a true row is in, but for `FALSE_ALARM`."""

    def parameters(self) -> Iterator[tuple[str, int, int]]:
        """Each parameter's name, and where its columns begin and end."""
        start = 0
        for name, numel in self.sizes.items():
            yield name, start, start + numel
            start += numel


def chi2_band(freedom: float) -> Band:
    """The band of a mean of ``freedom`` squared normal numbers, which Px's entries nearly are."""
    from scipy.stats import chi2

    low, high = chi2.ppf(FALSE_ALARM / 2, freedom), chi2.isf(FALSE_ALARM / 2, freedom)
    return Band(float(low) / freedom, float(high) / freedom)


def tiles(numel: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut ``range(numel)`` into ranges of ``size``, the last one shorter."""
    return ((first, min(first + size, numel)) for first in range(0, numel, size))
