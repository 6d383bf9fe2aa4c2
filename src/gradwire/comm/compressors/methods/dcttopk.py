"""Top-k of the cosine transform: the k largest coefficients of every tile of a matrix.

As in DeMo (Peng et al., "DeMo: Decoupled Momentum Optimization", arXiv:2411.19870, 2024), whose momentum is what error
feedback keeps here (`comm_optimizer: demo`). A matrix is cut into tiles of 64 x 64 elements, and each gets the
orthonormal DCT-II along both dimensions. Where 64 does not divide a dimension, a tile's side is the largest number
below it that does. A vector is a matrix of one row. Of a smaller tile the same part is sent, where the authors' code
sends k of every tile. Sums are float64, rounded once to float32.

Wire: that of `gradwire.comm.compressors.sparse.Chunked`, of the coefficients, tile after tile.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from gradwire.comm.compressors.base import Count, Shape
from gradwire.comm.compressors.sparse import Chunked


class DCTTopK(Chunked):
    """Sends ``k`` coefficients of each tile of ``tile`` x ``tile`` elements."""

    name = "dcttopk"
    use = "A momentum whose slow waves travel first: `comm_optimizer: demo`."
    overflow: ClassVar[float] = 2.0**120  # sums over a tile stay finite below it

    k: Count = Field(default=32, description="coefficients of a tile that are sent")
    tile: Annotated[int, Field(ge=1, le=256)] = Field(default=64, description="largest side of a tile")

    @property
    def growth(self) -> float:
        """A wave of one frequency is one coefficient."""
        return float(self.tile)

    @property
    def density(self) -> float:
        """``k`` of a whole tile's coefficients."""
        return min(1.0, self.k / self.tile**2)

    def length(self, shape: Shape) -> int:
        """Elements of a tile."""
        return math.prod(self.sides(shape))

    def sides(self, shape: Shape) -> tuple[int, int]:
        """Rows and columns of a tile."""
        rows, columns = matrix(shape)
        return divisor(rows, self.tile), divisor(columns, self.tile)

    def chunked(self, x: Tensor) -> Tensor:
        """The coefficients, tile after tile."""
        shape = tuple(x.shape)
        (rows, columns), (height, width) = matrix(shape), self.sides(shape)
        tiles = x.reshape(rows // height, height, columns // width, width).transpose(1, 2).to(torch.float64)
        return (cosines(height, x.device) @ tiles @ cosines(width, x.device).T).to(torch.float32).reshape(-1)

    def place(self, values: Tensor, places: Tensor, shape: Shape) -> Tensor:
        """Transform back what was sent."""
        (rows, columns), (height, width) = matrix(shape), self.sides(shape)
        sent = super().place(values, places, shape).to(torch.float64)
        tiles = sent.view(rows // height, columns // width, height, width)
        back = cosines(height, sent.device).T @ tiles @ cosines(width, sent.device)
        return back.transpose(1, 2).to(torch.float32).reshape(-1)


def matrix(shape: Shape) -> tuple[int, int]:
    """Rows and columns; a vector has one row."""
    if isinstance(shape, int):
        return 1, shape
    return (shape[0], shape[1]) if len(shape) == 2 else (1, math.prod(shape))


def divisor(n: int, most: int) -> int:
    """Return the largest divisor of ``n`` that is at most ``most``; 1 for 0."""
    return max((side for side in range(1, min(n, most) + 1) if n % side == 0), default=1)


@lru_cache(maxsize=64)
def cosines(n: int, device: torch.device) -> Tensor:
    """Return the orthonormal DCT-II of n elements: float64 [n, n]."""
    frequency, time = (
        torch.arange(n, dtype=torch.float64, device="cpu").view(-1, 1),
        torch.arange(n, dtype=torch.float64, device="cpu"),
    )
    matrix = torch.cos(math.pi / n * (time + 0.5) * frequency) * math.sqrt(2 / n)
    matrix[0] *= math.sqrt(0.5)
    return matrix.to(device)
