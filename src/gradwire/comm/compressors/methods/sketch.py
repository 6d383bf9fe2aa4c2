"""A count-sketch: a small table, linear in the gradient, from which its largest elements can be recovered.

Charikar, Chen and Farach-Colton, "Finding Frequent Items in Data Streams" (ICALP 2002); for gradients Ivkin et al.,
"Communication-efficient Distributed SGD with Sketching" (NeurIPS 2019). Each row r of the table adds every element to
one of its columns, ``table[r, column_r(i)] += sign_r(i) x[i]``. Then ``sign_r(i) table[r, column_r(i)]`` is an unbiased
estimate of x[i] with variance ``(||x||^2 - x[i]^2) / columns`` over the choice of hash functions, and the median over
rows is far off only if half of the rows are.

Columns and signs are two multiply-shift hashes per row (Dietzfelbinger, "Universal Hashing and k-Wise Independent
Random Variables via Integer Arithmetic without Primes", STACS 1996): ``a i + b`` modulo 2^64, whose upper 33 bits are
pairwise independent for i below 2^32. The column is ``columns`` times the upper 32 bits, as a fraction; the sign is the
first bit. Row r's numbers (a, b for the column, a, b for the sign) are words 8 r to 8 r + 7 of the seed's stream
(`gradwire.comm.compressors.philox`), two words each, the lower one first.

Wire: the seed as int64, then the table as float32 [rows, columns]. It decodes to the median estimates of the k
elements where these are largest, and 0 elsewhere. If that is not shorter than the tensor, it travels as float32.

Rounds: the tables of all ranks are summed, with hash functions of the step that all ranks know. The elements where
the summed table's estimates are largest, 4 times k of them, are then summed exactly, and the k largest
sums are kept. A rank's own contribution is its exact values at those k places, so their mean is the result.

A table is summed in float64 and rounded once, so that the order of addition, which CUDA does not fix, does not matter
unless a sum is within float64's rounding error of the middle between two float32 numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from gradwire.comm.compressors.base import Compressor, Shape, as_numbers, numel
from gradwire.comm.compressors.philox import WORD, draw_seed, words
from gradwire.comm.compressors.rounds import Context, ReduceRequest, RoundCost, Rounds, State
from gradwire.comm.compressors.sparse import largest, largest_places, share

FEWEST_COLUMNS = 16
CANDIDATES = 4  # in rounds, elements summed exactly for each one that is kept


class Sketch(Compressor):
    """Sends a table of ``rows * columns`` numbers.

    With 5 rows, an estimate is off by more than ``t ||x|| / sqrt(columns)`` with a probability of at most
    ``10 / t^6``: three rows must be, each with at most ``1 / t^2``.
    """

    name = "sketch"
    use = "When encodings must be additive, with a size that does not depend on the data."
    linear = True

    rows: Literal[1, 3, 5, 7, 9] = Field(
        default=5, description="rows of the table; odd, so that the median is one of them"
    )
    width: float = Field(default=0.02, gt=0, le=1, description="columns of the table, as a fraction of the elements")
    density: float = Field(default=0.01, gt=0, le=1, description="fraction of the elements that is recovered")

    def columns(self, shape: Shape) -> int:
        """Columns of the table."""
        return max(math.ceil(self.width * numel(shape)), FEWEST_COLUMNS)

    def kept(self, shape: Shape) -> int:
        """Elements that are recovered."""
        return share(self.density, numel(shape))

    def examined(self, shape: Shape) -> int:
        """Elements whose exact values are summed in rounds."""
        return min(CANDIDATES * self.kept(shape), numel(shape))

    def compresses(self, shape: Shape) -> bool:
        """Whether a tensor of this shape travels as a table instead of float32."""
        return 8 + 4 * self.rows * self.columns(shape) < 4 * numel(shape)

    def wire_bytes(self, shape: Shape) -> int:
        """The seed and four bytes per element of the table, or of the tensor."""
        return 8 + 4 * self.rows * self.columns(shape) if self.compresses(shape) else 4 * numel(shape)

    def to_wire(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """A fresh seed, and the table."""
        return self.coded(x, generator)[0]

    def coded(self, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """The wire, and whether the table is not finite; a non-finite x makes its columns so."""
        if not self.compresses(x.shape):
            return x.view(-1).view(torch.uint8), self.not_representable(x)
        seed = draw_seed(generator, x.device, self.name)
        table = self.table(x, seed)
        return torch.cat([seed.view(torch.uint8), table.view(-1).view(torch.uint8)]), self.not_representable(table)

    def from_wire(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The largest estimates."""
        if not self.compresses(shape):
            return as_numbers(wire, torch.float32)
        seed, table = as_numbers(wire[:8], torch.int64), as_numbers(wire[8:], torch.float32)
        estimates = self.estimates(table.view(self.rows, -1), seed, numel(shape))
        places = largest_places(estimates, self.kept(shape))
        return torch.zeros(numel(shape), dtype=torch.float32, device=wire.device).index_copy_(
            0, places, estimates[places]
        )

    def multipliers(self, seed: Tensor) -> Tensor:
        """Each row's a and b for the column, and for the sign: int64 [rows, 4], to be taken modulo 2^64."""
        low, high = words(seed, 8 * self.rows).view(self.rows, 4, 2).unbind(dim=2)
        return high << 32 | low

    def hashes(self, seed: Tensor, count: int, columns: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Row by row, the column of each of ``count`` elements (int64) and its sign (float32, 1 or -1)."""
        keys = torch.arange(count, dtype=torch.int64, device=seed.device)
        for a, b, c, d in self.multipliers(seed):
            column = (((keys * a + b) >> 32) & WORD) * columns >> 32
            yield column, 1 - 2 * (keys * c + d < 0).to(torch.float32)

    def table(self, x: Tensor, seed: Tensor) -> Tensor:
        """The sketch of ``x``: float32 [rows, columns]."""
        values = x.view(-1).to(torch.float64)
        table = values.new_zeros(self.rows, self.columns(x.shape))
        for row, (column, sign) in zip(table, self.hashes(seed, x.numel(), table.shape[1]), strict=True):
            row.index_add_(0, column, values * sign)
        return table.to(torch.float32)

    def estimates(self, table: Tensor, seed: Tensor, count: int) -> Tensor:
        """The median estimate over rows for each of ``count`` elements: float32."""
        hashes = self.hashes(seed, count, table.shape[1])
        rows = [sign * row[column] for row, (column, sign) in zip(table, hashes, strict=True)]
        return torch.stack(rows).median(dim=0).values

    def rounds(self, x: Tensor, state: State, context: Context) -> Rounds:
        """Sum the tables, then exact values where the summed table's estimates are largest."""
        if not self.compresses(x.shape):
            return (yield ReduceRequest("sum", x, rows=True)) / context.world, x
        seed = torch.tensor([context.derived_seed()], dtype=torch.int64, device=x.device)
        table = yield ReduceRequest("sum", self.table(x, seed))
        places = largest_places(self.estimates(table, seed, x.numel()), self.examined(x.shape))
        values = x.view(-1)[places]
        total = yield ReduceRequest("sum", values)
        chosen = largest(total, self.kept(x.shape))
        zeros = torch.zeros_like(x).view(-1)
        mean = zeros.index_copy(0, places, torch.where(chosen, total / context.world, 0))
        sent = zeros.index_copy_(0, places, torch.where(chosen, values, 0))
        return mean.view(x.shape), sent.view(x.shape)

    def round_cost(self, shape: Shape, step: int | None = None) -> RoundCost:
        """Four bytes per element of the table and per candidate, or per element of the tensor."""
        if not self.compresses(shape):
            return RoundCost(rows=4 * numel(shape))
        return RoundCost(summed=4 * (self.rows * self.columns(shape) + self.examined(shape)))
