"""Random matrices: dense, sparse (SJLT), and factored."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from gradwire.attribution.persample.layer_factors import LayerFactor, OuterProduct
from gradwire.attribution.projections import hashing
from gradwire.attribution.projections.base import Band, Projector, Shapes, chi2_band, tiles
from gradwire.base.errors import BadInput

TILE = 1 << 20  # entries generated at once, 4 MB as float32
SLOTS = 1 << 16
NONZEROS = 4
OLDEST = (8, 0)  # compute capability that the kernels are compiled for


class Rademacher(Projector):
    """Independent entries ±1/√dim (Achlioptas, 2003); a smaller dim uses the first rows of a larger one.

    Var(‖Px‖²/‖x‖²) = (2/dim)(1 - ‖x‖₄⁴/‖x‖₂⁴).
    """

    def entries(self, name: str, columns: Tensor, dim: int) -> Tensor:
        """Return √dim times the entries of a parameter's ``columns`` [c]: signs, float32 [c, dim]."""
        return hashing.sign_table(hashing.key(self.seed, name), columns, dim)

    def width(self, dims: Sequence[int]) -> int:
        """Return the largest dim; the other rows are its first columns."""
        return max(dims)

    def add_values(self, sums: Tensor, dims: Sequence[int], name: str, values: Tensor) -> None:
        """Add the product of a parameter's gradients and its entries, tile by tile, or by a kernel on a GPU."""
        if (kernels := kernels_for(values.device)) is not None:
            kernels.add_signed(sums, values, hashing.key(self.seed, name))
            return
        widest = sums.shape[1]
        for first, last in tiles(values.shape[1], max(1, TILE // widest)):
            columns = torch.arange(first, last, device=values.device)
            sums.addmm_(values[:, first:last], self.entries(name, columns, widest))

    def rows(self, sums: Tensor, dims: Sequence[int]) -> dict[int, Tensor]:
        """Return the first columns, scaled."""
        return {dim: sums[:, :dim] / math.sqrt(dim) for dim in dims}

    def fingerprint(self, dim: int) -> str:
        """Return a digest of the signs of every parameter's first and last column."""
        hashed = hashlib.sha256(f"rademacher dim={dim}".encode())
        for name, numel in self.sizes.items():
            words = hashing.table(
                hashing.key(self.seed, name), torch.tensor([0, numel - 1]), math.ceil(dim / hashing.WORD)
            )
            hashed.update(f"{name} {numel}".encode() + words.numpy().tobytes())
        return hashed.hexdigest()

    def band(self, dim: int) -> Band:
        """Return the χ² band of normal entries, which is conservative for signs."""
        return chi2_band(dim)


class Sorted(NamedTuple):
    """The second step as embedding bags: the slots of row r begin at ``starts[r]``."""

    slots: Tensor
    signs: Tensor
    starts: Tensor


# Why: docs/decisions.md, "SJLT by rotations".
class Sjlt(Projector):
    """A sparse projection (Kane & Nelson, 2014): each column has ``NONZEROS`` entries ±1/√NONZEROS in distinct rows.

    Two steps read the gradient once, in order, and write nothing of its size. First, columns with random signs are
    summed into `SLOTS` slots: each block of `SLOTS` columns of a parameter is rotated by a random amount, so columns of
    one block never collide, and columns of different blocks collide with probability 1/`SLOTS`. Then each slot maps to
    one row in each of ``NONZEROS`` equal parts of the rows. Their product is a sparse matrix as described above.

    Var(‖Px‖²/‖x‖²) is at most that of signs, (2/dim)(1 - ‖x‖₄⁴/‖x‖₂⁴), plus 2/SLOTS for the slots.
    """

    def __init__(self, shapes: Shapes, seed: int) -> None:
        super().__init__(shapes, seed)
        self._sorted: dict[tuple[int, torch.device], Sorted] = {}
        self._rotations: dict[tuple[str, torch.device], Tensor] = {}
        self._signs: dict[tuple[str, torch.device], Tensor] = {}  # of the parameters of one block

    def width(self, dims: Sequence[int]) -> int:
        """Return the number of slots."""
        return SLOTS

    def add_values(self, sums: Tensor, dims: Sequence[int], name: str, values: Tensor) -> None:
        """Add a parameter's gradients to the slots."""
        if self.sizes[name] > SLOTS and (kernels := kernels_for(values.device)) is not None:
            turns = self.rotations(name, values.device)
            kernels.add_turned(sums, values, turns, hashing.key(self.seed, f"{name} sjlt"))
            return
        turns = self.rotations(name, torch.device("cpu"))  # whose numbers nobody waits for
        for (begin, end), turned in zip(tiles(values.shape[1], SLOTS), turns.tolist(), strict=True):
            block, sign = values[:, begin:end], self.signs(name, begin, end, values.device)
            fits = min(len(sign), SLOTS - turned)
            sums[:, turned : turned + fits].addcmul_(block[:, :fits], sign[:fits])
            sums[:, : len(sign) - fits].addcmul_(block[:, fits:], sign[fits:])

    def rotations(self, name: str, device: torch.device) -> Tensor:
        """Return the slot of the first column of each of a parameter's blocks: int32 [blocks]."""
        if (name, device) not in self._rotations:
            stream = hashing.key(self.seed, f"{name} rotation")
            blocks = torch.arange(-(-self.sizes[name] // SLOTS))
            self._rotations[name, device] = hashing.below(stream, blocks, SLOTS).int().to(device)
        return self._rotations[name, device]

    def signs(self, name: str, first: int, last: int, device: torch.device) -> Tensor:
        """Return the signs of some of a parameter's columns: float32 [last - first]."""
        stream = hashing.key(self.seed, f"{name} sjlt")
        if self.sizes[name] > SLOTS:
            return hashing.signs(stream, first, last, device)
        if (name, device) not in self._signs:
            self._signs[name, device] = hashing.signs(stream, 0, self.sizes[name], device)
        return self._signs[name, device][first:last]

    def rows(self, sums: Tensor, dims: Sequence[int]) -> dict[int, Tensor]:
        """Map the slots to rows."""
        return {dim: self._spread(sums, dim) for dim in dims}

    def _spread(self, sums: Tensor, dim: int) -> Tensor:
        bags = self._bags(dim, sums.device)
        rows = embedding_bag(bags.slots, sums.T.contiguous(), bags.starts, mode="sum", per_sample_weights=bags.signs)
        return rows.T / math.sqrt(min(NONZEROS, dim))

    def fingerprint(self, dim: int) -> str:
        """Return a digest of the second step, of each parameter's first and last sign and of its last rotation."""
        bags = self._bags(dim, torch.device("cpu"))
        hashed = hashlib.sha256(f"sjlt dim={dim} {SLOTS} {NONZEROS}".encode())
        for part in bags:
            hashed.update(part.numpy().tobytes())
        for name, numel in self.sizes.items():
            ends = [float(self.signs(name, column, column + 1, torch.device("cpu"))) for column in (0, numel - 1)]
            last = int(self.rotations(name, torch.device("cpu"))[-1])
            hashed.update(f"{name} {numel} {ends} {last}".encode())
        return hashed.hexdigest()

    def band(self, dim: int) -> Band:
        """Return the χ² band for the variance of both steps."""
        return chi2_band(1 / (1 / dim + 1 / SLOTS))

    def _bags(self, dim: int, device: torch.device) -> Sorted:
        if (dim, device) not in self._sorted:
            self._sorted[dim, device] = Sorted(*(tensor.to(device) for tensor in self._sort(dim)))
        return self._sorted[dim, device]

    def _sort(self, dim: int) -> Sorted:
        parts = min(NONZEROS, dim)
        counters = torch.arange(SLOTS)
        targets, signs = [], []
        for part in range(parts):
            first, last = part * dim // parts, (part + 1) * dim // parts
            targets.append(first + hashing.below(hashing.key(self.seed, f"{dim} {part} row"), counters, last - first))
            signs.append(hashing.signs(hashing.key(self.seed, f"{dim} {part} sign"), 0, SLOTS, torch.device("cpu")))
        row = torch.cat(targets)
        order = row.argsort(stable=True)
        starts = torch.zeros(dim, dtype=torch.int64)
        starts[1:] = row.bincount(minlength=dim).cumsum(0)[:-1]
        return Sorted(counters.repeat(parts)[order], torch.cat(signs)[order], starts)


@cache
def kernels_for(device: torch.device) -> ModuleType | None:
    """Return the kernels for a device; None if it has none, of which a GPU warns once."""
    if device.type != "cuda":
        return None
    if find_spec("triton") is None:
        lacking = "triton is not installed"
    elif torch.cuda.get_device_capability(device) < OLDEST:
        lacking = f"{torch.cuda.get_device_name(device)} is older than compute capability {OLDEST[0]}.{OLDEST[1]}"
    else:
        return import_module("gradwire.attribution.projections.cuda")
    warnings.warn(f"{lacking}: projections run on CUDA in their slow reference implementation", stacklevel=4)
    return None


class Factors(NamedTuple):
    """A matrix parameter's P_l [rows, k_l] and P_r [columns, k_r]."""

    left: Tensor
    right: Tensor


# Why: docs/decisions.md, "A factored row is a sum over parameters".
class Factored(Projector):
    """A Kronecker projection (Choe et al., 2024, "What is Your Data Worth to GPT?", section 3).

    The gradient G of a matrix becomes P_lᵀ G P_r. Where G is a sum of outer products, Σ_t l_t ⊗ r_t, it is projected
    through its factors, (P_lᵀ l_t) ⊗ (P_rᵀ r_t), without being formed. Each matrix maps to all ``dim`` = k_l k_r
    columns, and the images of all parameters are added with independent signs, so that E‖Px‖² = ‖x‖² for any shapes.
    Vector parameters are projected by `Sjlt`; parameters of more than two dimensions are [shape[0], rest].

    Var(‖Px‖²/‖x‖²) of one matrix is ρ(2/k_l + 2/k_r + 2/dim) + 2/dim for normal factors, ρ = tr((GᵀG)²)/tr(GᵀG)²
    between 1/rank and 1: much more than a dense projection of equal ``dim``. Signs do not increase it.
    """

    def __init__(self, shapes: Shapes, seed: int) -> None:
        super().__init__(shapes, seed)
        self.matrices = {
            name: (shape[0], math.prod(shape[1:])) for name, shape in self.shapes.items() if len(shape) >= 2
        }
        self.vectors = Sjlt({name: shape for name, shape in self.shapes.items() if len(shape) < 2}, seed)
        self._factors: dict[tuple[str, int, torch.device], Factors] = {}

    def width(self, dims: Sequence[int]) -> int:
        """Return the columns of all rows, and the slots of the vectors if there are any.

        Raises:
            BadInput: If a dim is not a product of two similar numbers.
        """
        for dim in dims:
            split(dim)
        return sum(dims) + (SLOTS if self.vectors.shapes else 0)

    def add(self, sums: Tensor, dims: Sequence[int], name: str, use: LayerFactor) -> None:
        """Add one use of a parameter, without forming its gradient from its factors."""
        if not isinstance(use, OuterProduct):
            super().add(sums, dims, name, use)
            return
        for rows, dim in zip(sums.split(self._widths(dims), 1), dims, strict=False):
            left, right = self.factors(name, dim, rows.device)
            lefts = left[use.left] if use.one_hot else use.left @ left
            rows += (lefts.transpose(1, 2) @ (use.right @ right)).flatten(1)

    def add_values(self, sums: Tensor, dims: Sequence[int], name: str, values: Tensor) -> None:
        """Add a parameter's gradients: a matrix between its factors, a vector to the slots."""
        if name not in self.matrices:
            self.vectors.add_values(sums[:, sum(dims) :], dims, name, values)
            return
        gradients = values.unflatten(1, self.matrices[name])
        for rows, dim in zip(sums.split(self._widths(dims), 1), dims, strict=False):
            left, right = self.factors(name, dim, rows.device)
            rows += (left.T @ (gradients @ right)).flatten(1)

    def rows(self, sums: Tensor, dims: Sequence[int]) -> dict[int, Tensor]:
        """Return the sums of the matrices' rows and the vectors'."""
        rows = dict(zip(dims, sums.split(self._widths(dims), 1), strict=False))
        if not self.vectors.shapes:
            return rows
        of_vectors = self.vectors.rows(sums[:, sum(dims) :], dims)
        return {dim: rows[dim] + of_vectors[dim] for dim in dims}

    def _widths(self, dims: Sequence[int]) -> list[int]:
        return [*dims, self.width(dims) - sum(dims)]

    @property
    def formed(self) -> int:
        """Most entries of a sample's gradient that its image is given at once: of a vector."""
        return self.vectors.formed

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

    def fingerprint(self, dim: int) -> str:
        """Return a digest of each factor's first and last row, and of the projection of the vectors."""
        hashed = hashlib.sha256(f"factored dim={dim} {self.vectors.fingerprint(dim)}".encode())
        for name, sides in self.matrices.items():
            ends = [[0, side - 1] for side in sides]
            factors = self.factors(name, dim, torch.device("cpu"))
            hashed.update(f"{name} {sides}".encode())
            for factor, rows in zip(factors, ends, strict=True):
                hashed.update(factor[rows].sign().to(torch.int8).numpy().tobytes())
        return hashed.hexdigest()

    def band(self, dim: int) -> Band:
        """Return the band of one rank-1 matrix, the widest: a product of two independent χ²."""
        bands = [chi2_band(width) for width in split(dim)]
        return Band(math.prod(band.low for band in bands), math.prod(band.high for band in bands))


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
