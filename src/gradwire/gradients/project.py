"""Random projections of gradients: P with E[PᵀP] = I, so that norms and inner products keep their expected value.

P is never stored. Each entry is a function of (seed, parameter name, column, row) alone, in integer arithmetic, so one
seed gives one matrix on every device, rank, batch and tile size.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding

from gradwire.errors import BadInput, unknown

PROJECTIONS = ("rademacher", "none")
TILE = 1 << 20  # signs that exist at once, 4 MB as float32
WORD = 64  # signs in one 64-bit word

# SplitMix64 (Steele, Lea & Flood, 2014, "Fast splittable pseudorandom number generators")
GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


class Projector(Protocol):
    """A linear map of rows of n gradient entries to rows of ``dim``; columns follow the model's parameter order."""

    def project(self, rows: Tensor, dims: Sequence[int]) -> dict[int, Tensor]:
        """Project rows [samples, n] to float32 [samples, dim] for each dim."""

    def fingerprint(self, dim: int) -> str:
        """A digest of the map: equal for equal maps, on any device."""


def build(projection: str, parameters: Mapping[str, int], seed: int) -> Projector:
    """The projector of a name.

    Args:
        projection: One of ``PROJECTIONS``.
        parameters: Entries of each parameter, by name, in the model's order.
        seed: Seed of the matrix.

    Raises:
        BadInput: If there is no such projection.
    """
    if projection == "rademacher":
        return Rademacher(parameters, seed)
    if projection == "none":
        return Whole(parameters)
    raise unknown("projection", projection, PROJECTIONS)


class Rademacher:
    """P with independent entries ±1/√dim (Achlioptas, 2003); a smaller dim has the first rows of a larger one's signs.

    Var(‖Px‖²/‖x‖²) = (2/dim)(1 - ‖x‖₄⁴/‖x‖₂⁴).
    """

    def __init__(self, parameters: Mapping[str, int], seed: int) -> None:
        self.parameters = dict(parameters)
        self.seed = seed

    def project(self, rows: Tensor, dims: Sequence[int]) -> dict[int, Tensor]:
        """Project rows [samples, n] to float32 [samples, dim] for each dim, in one pass over the rows."""
        widest = max(dims)
        projected = torch.zeros(len(rows), widest, device=rows.device)
        start = 0
        for name, numel in self.parameters.items():
            for first, last in _tiles(numel, max(1, TILE // widest)):
                signs = self.signs(name, torch.arange(first, last, device=rows.device), widest)
                projected += rows[:, start + first : start + last].float() @ signs
            start += numel
        return {dim: projected[:, :dim] / math.sqrt(dim) for dim in dims}

    def signs(self, name: str, columns: Tensor, dim: int) -> Tensor:
        """The signs ±1 of a parameter's ``columns`` [c], as float32 [c, dim]."""
        bits = self._words(name, columns, dim).view(torch.uint8).int()
        return embedding(bits, _byte_signs(columns.device)).flatten(1)[:, :dim]

    def fingerprint(self, dim: int) -> str:
        """A digest of the signs of every parameter's first and last column, bit-exact on any device."""
        hashed = hashlib.sha256(f"rademacher dim={dim}".encode())
        for name, numel in self.parameters.items():
            probes = self._words(name, torch.tensor([0, numel - 1]), dim)
            hashed.update(f"{name} {numel}".encode() + probes.numpy().tobytes())
        return hashed.hexdigest()

    def _words(self, name: str, columns: Tensor, dim: int) -> Tensor:
        """64 signs per word: int64 [c, ⌈dim / 64⌉]."""
        key = int.from_bytes(hashlib.sha256(f"{self.seed} {name}".encode()).digest()[:8], "little", signed=True)
        words = torch.arange(1, math.ceil(dim / WORD) + 1, device=columns.device)
        return _mix(_mix(columns * GAMMA + key)[:, None] + words * GAMMA)


class Whole:
    """No projection: a row is the gradient itself, its parameters one after another."""

    def __init__(self, parameters: Mapping[str, int]) -> None:
        self.parameters = dict(parameters)

    def project(self, rows: Tensor, dims: Sequence[int]) -> dict[int, Tensor]:
        """A copy of the rows, as float32; ``dims`` can only be their width."""
        for dim in dims:
            self._check(dim)
        return {dim: rows.to(torch.float32, copy=True) for dim in dims}

    def fingerprint(self, dim: int) -> str:
        """A digest of the parameters' names and sizes."""
        self._check(dim)
        return hashlib.sha256(f"none {self.parameters}".encode()).hexdigest()

    def _check(self, dim: int) -> None:
        numel = sum(self.parameters.values())
        if dim != numel:
            raise BadInput(f"--dim {dim} with --projection none: the model's gradients have {numel} entries.")


def _tiles(numel: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut ``range(numel)`` into ranges of ``size``, the last one shorter."""
    return ((first, min(first + size, numel)) for first in range(0, numel, size))


def _mix(words: Tensor) -> Tensor:
    """SplitMix64's output function on int64, whose products wrap around and whose shifts must not copy the sign."""
    for shift, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
        words = (words ^ _shift(words, shift)) * multiplier
    return words ^ _shift(words, 31)


def _shift(words: Tensor, by: int) -> Tensor:
    return (words >> by) & ((1 << (64 - by)) - 1)


def _byte_signs(device: torch.device) -> Tensor:
    """For each byte the signs of its eight bits, float32 [256, 8]: a set bit is -1."""
    byte, bit = torch.arange(256, device=device)[:, None], torch.arange(8, device=device)
    return 1.0 - 2.0 * (byte >> bit & 1)
