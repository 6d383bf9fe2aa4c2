"""A sparse projection (SJLT; Kane & Nelson, 2014): each column has ``NONZEROS`` entries ±1/√NONZEROS in distinct rows.

Two steps read the gradient once, in order, and write nothing of its size. First, columns with random signs are summed
into `SLOTS` slots: each block of `SLOTS` columns of a parameter is rotated by a random amount, so columns of one block
never collide, and columns of different blocks collide with probability 1/`SLOTS`. Then each slot maps to one row in
each of ``NONZEROS`` equal parts of the rows. Their product is a sparse matrix as described above.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from gradwire.attribution.projections import hashing
from gradwire.attribution.projections.base import Band, Image, Projector, Shapes, chi2_band, tiles

SLOTS = 1 << 16
NONZEROS = 4
BLOCKS = {"cpu": 1, "cuda": 64}  # whose signs are generated at once: few fit a core's cache, a GPU is slow to start


class Sorted(NamedTuple):
    """The second step as embedding bags: the slots of row r begin at ``starts[r]``."""

    slots: Tensor
    signs: Tensor
    starts: Tensor


# Why: docs/decisions.md, "SJLT by rotations".
class Sjlt(Projector):
    """Var(‖Px‖²/‖x‖²) is at most that of signs, (2/dim)(1 - ‖x‖₄⁴/‖x‖₂⁴), plus 2/SLOTS for the slots."""

    def __init__(self, shapes: Shapes, seed: int) -> None:
        super().__init__(shapes, seed)
        self._sorted: dict[tuple[int, torch.device], Sorted] = {}
        self._rotations: dict[str, list[int]] = {}
        self._signs: dict[tuple[str, torch.device], Tensor] = {}  # of the parameters of one block

    def image(self, samples: int, dims: Sequence[int], device: torch.device) -> Image:
        """Return the rows of zero gradients."""
        return Slots(self, samples, dims, device)

    def add(self, name: str, values: Tensor, slots: Tensor) -> None:
        """Add a parameter's gradients [samples, numel] to ``slots`` [samples, SLOTS]."""
        blocks = iter(self.rotations(name))
        for begin, end in tiles(values.shape[1], SLOTS * BLOCKS[values.device.type]):
            signs = self.signs(name, begin, end, values.device)
            for values_of_block, sign in zip(values[:, begin:end].split(SLOTS, dim=1), signs.split(SLOTS), strict=True):
                turned = next(blocks)
                fits = min(len(sign), SLOTS - turned)
                slots[:, turned : turned + fits].addcmul_(values_of_block[:, :fits], sign[:fits])
                slots[:, : len(sign) - fits].addcmul_(values_of_block[:, fits:], sign[fits:])

    def rotations(self, name: str) -> list[int]:
        """Return the slot of the first column of each of a parameter's blocks."""
        if name not in self._rotations:
            stream = hashing.key(self.seed, f"{name} rotation")
            blocks = torch.arange(-(-self.sizes[name] // SLOTS))
            self._rotations[name] = hashing.below(stream, blocks, SLOTS).tolist()
        return self._rotations[name]

    def signs(self, name: str, first: int, last: int, device: torch.device) -> Tensor:
        """Return the signs of some of a parameter's columns: float32 [last - first]."""
        stream = hashing.key(self.seed, f"{name} sjlt")
        if self.sizes[name] > SLOTS:
            return hashing.signs(stream, first, last, device)
        if (name, device) not in self._signs:
            self._signs[name, device] = hashing.signs(stream, 0, self.sizes[name], device)
        return self._signs[name, device][first:last]

    def spread(self, slots: Tensor, dim: int) -> Tensor:
        """Map the slots' sums [samples, SLOTS] to rows: float32 [samples, dim]."""
        bags = self._bags(dim, slots.device)
        rows = embedding_bag(bags.slots, slots.T.contiguous(), bags.starts, mode="sum", per_sample_weights=bags.signs)
        return rows.T / math.sqrt(min(NONZEROS, dim))

    def fingerprint(self, dim: int) -> str:
        """Return a digest of the second step, of each parameter's first and last sign and of its last rotation."""
        bags = self._bags(dim, torch.device("cpu"))
        hashed = hashlib.sha256(f"sjlt dim={dim} {SLOTS} {NONZEROS}".encode())
        for part in bags:
            hashed.update(part.numpy().tobytes())
        for name, numel in self.sizes.items():
            ends = [float(self.signs(name, column, column + 1, torch.device("cpu"))) for column in (0, numel - 1)]
            hashed.update(f"{name} {numel} {ends} {self.rotations(name)[-1]}".encode())
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


class Slots(Image):
    """The sums of the first step."""

    def __init__(self, projector: Sjlt, samples: int, dims: Sequence[int], device: torch.device) -> None:
        self._projector, self._dims = projector, dims
        self._slots = torch.zeros(samples, SLOTS, device=device)

    def add_values(self, name: str, values: Tensor) -> None:
        """Add a parameter's gradients, float32 [samples, numel]."""
        self._projector.add(name, values, self._slots)

    def finished(self) -> dict[int, Tensor]:
        """Return the rows."""
        return {dim: self._projector.spread(self._slots, dim) for dim in self._dims}
