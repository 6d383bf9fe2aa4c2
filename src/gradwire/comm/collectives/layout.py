"""Layout of the parameters in a flat gradient buffer, and the rank that owns each part.

A buffer has one row per rank. A `Piece` is a contiguous run of one parameter's elements in one row; the rest is
padding, which is never encoded, sent or counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.base.errors import RunFault


class Piece(NamedTuple):
    """``flat[start:start + numel]`` is ``parameter.flatten()[at:at + numel]`` and belongs to ``row``."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    row: int
    start: int
    numel: int
    at: int

    @property
    def place(self) -> slice:
        """The piece's position in the buffer."""
        return slice(self.start, self.start + self.numel)

    @property
    def source(self) -> slice:
        """The piece's position in its flattened parameter."""
        return slice(self.at, self.at + self.numel)

    @property
    def form(self) -> tuple[int, ...]:
        """The shape for the codec: a matrix if the piece is whole rows of its parameter, else a vector."""
        width = math.prod(self.shape[1:])
        if len(self.shape) > 1 and self.at % width == 0 and self.numel % width == 0:
            return self.numel // width, width
        return (self.numel,)


@dataclass(frozen=True, eq=False)  # by identity, because comparing all pieces is slow
class Layout:
    """The pieces of a buffer of ``world * row_numel`` elements, in ascending order of ``start``."""

    world: int
    row_numel: int
    pieces: tuple[Piece, ...]

    @classmethod
    def dim0(cls, shapes: Iterable[tuple[str, tuple[int, ...]]], world: int) -> Layout:
        """Cut each parameter along its first dimension, as `torch.chunk` and FSDP2 do.

        Row r holds the r-th chunks of all parameters in order, each padded to the size of the first chunk; a parameter
        with fewer rows than ranks has no piece in the last rows.

        Args:
            shapes: Name and shape of every parameter, in buffer order.
            world: Number of ranks.
        """
        pieces = []
        offset = 0  # of the parameter inside each row
        plan = []
        for name, shape in shapes:
            length, width = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
            chunk = -(-length // world) * width
            plan.append((name, tuple(shape), length * width, chunk, offset))
            offset += chunk
        for row in range(world):
            for name, shape, numel, chunk, start in plan:
                at = row * chunk
                if at < numel:
                    pieces.append(Piece(name, shape, row, row * offset + start, min(chunk, numel - at), at))
        return cls(world, offset, tuple(pieces))

    @classmethod
    def cut(cls, shapes: Iterable[tuple[str | None, tuple[int, ...]]], world: int) -> Layout:
        """Cut the concatenated parameters into equal rows, at any element; the tail is padding.

        Args:
            shapes: Name and shape of every parameter, in buffer order; the name None marks a gap, such as FSDP1's
                alignment or a frozen parameter.
            world: Number of ranks.
        """
        shapes = list(shapes)
        row_numel = -(-sum(math.prod(shape) for _, shape in shapes) // world)
        pieces = []
        offset = 0  # of the parameter in the buffer
        for name, shape in shapes:
            start, end = offset, offset + math.prod(shape)
            while name is not None and start < end:
                row = start // row_numel
                stop = min(end, (row + 1) * row_numel)
                pieces.append(Piece(name, tuple(shape), row, start, stop - start, start - offset))
                start = stop
            offset = end
        return cls(world, row_numel, tuple(pieces))

    @property
    def numel(self) -> int:
        """Number of elements of the buffer, padding included."""
        return self.world * self.row_numel

    @cached_property
    def rows(self) -> tuple[tuple[Piece, ...], ...]:
        """The pieces of each row."""
        rows: list[list[Piece]] = [[] for _ in range(self.world)]
        for piece in self.pieces:
            rows[piece.row].append(piece)
        return tuple(map(tuple, rows))

    @cached_property
    def parameters(self) -> dict[str, tuple[Piece, ...]]:
        """Each parameter's pieces, in the order of its own elements."""
        found: dict[str, list[Piece]] = {}
        for piece in sorted(self.pieces, key=lambda piece: piece.at):
            found.setdefault(piece.name, []).append(piece)
        names = dict.fromkeys(piece.name for piece in self.pieces)
        return {name: tuple(found[name]) for name in names}

    def place_in_row(self, piece: Piece) -> slice:
        """Return a piece's position in its row."""
        start = piece.start - piece.row * self.row_numel
        return slice(start, start + piece.numel)

    def check(self, flat: Tensor) -> None:
        """Check that ``flat`` is a buffer of this layout.

        Raises:
            RunFault: If its size differs, for example because a parameter got no gradient.
        """
        if flat.shape != (self.numel,):
            names = [piece.name for piece in self.pieces] or ["no parameter"]
            raise RunFault(
                f"a gradient buffer has shape {tuple(flat.shape)}, but {self.numel} elements were expected "
                f"({names[0]} ... {names[-1]} on {self.world} ranks); did a parameter get no gradient? "
                f"Was one frozen while gradients accumulate?"
            )

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Copy tensors by name into a new float32 buffer; padding is 0."""
        device = next(iter(tensors.values())).device
        flat = torch.zeros(self.numel, dtype=torch.float32, device=device)
        for piece in self.pieces:
            flat[piece.place] = tensors[piece.name].reshape(-1)[piece.source]
        return flat

    def unpack(self, flat: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Copy a buffer into contiguous tensors by name, in place."""
        for piece in self.pieces:
            tensors[piece.name].view(-1)[piece.source] = flat[piece.place]
