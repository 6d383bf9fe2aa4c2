"""Layout of the parameters in a flat gradient buffer.

A layout has one row per rank. A `Shard` is a contiguous run of one parameter's elements in one row; the rest is
padding, which is never encoded, sent or counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gradwire.base.errors import RunFault

Kind = Literal["reduce_scatter", "all_reduce"]
FEW = 32  # gaps that are set to 0 one by one


class Shard(NamedTuple):
    """``flat[start:start + numel]`` is ``parameter.flatten()[at:at + numel]`` and belongs to ``row``."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    row: int
    start: int
    numel: int
    at: int

    @property
    def place(self) -> slice:
        """The shard's position in the buffer."""
        return slice(self.start, self.start + self.numel)

    @property
    def source(self) -> slice:
        """The shard's position in its flattened parameter."""
        return slice(self.at, self.at + self.numel)

    @property
    def form(self) -> tuple[int, ...]:
        """The shape for the codec: a matrix if the shard is whole rows of its parameter, else a vector."""
        width = math.prod(self.shape[1:])
        if len(self.shape) > 1 and self.at % width == 0 and self.numel % width == 0:
            return self.numel // width, width
        return (self.numel,)


class Run(NamedTuple):
    """Pieces of the buffer, one in each of some rows, of equal lengths and distances there and in a vector x.

    Attributes:
        row: The first piece's row.
        start: Its first element in the buffer.
        first: Its first element in x.
        numel: Elements of a piece.
        pieces: Number of pieces.
        stride: Elements in the buffer from one piece to the next.
        step: Elements in x from one piece to the next.
    """

    row: int
    start: int
    first: int
    numel: int
    pieces: int = 1
    stride: int = 1
    step: int = 1

    def in_buffer(self, flat: Tensor) -> Tensor:
        """Return the pieces in the buffer: [pieces, numel], a view."""
        return pieces_of(flat, self.start, self.numel, self.pieces, self.stride)

    def in_vector(self, x: Tensor) -> Tensor:
        """Return the pieces in x: [pieces, numel], a view."""
        return pieces_of(x, self.first, self.numel, self.pieces, self.step)

    def followed_by(self, piece: Run) -> Run | None:
        """Return this run and a piece of the next row as a run; None if lengths or distances differ."""
        stride, step = (piece.start - self.start) // self.pieces, (piece.first - self.first) // self.pieces
        longer = self._replace(pieces=self.pieces + 1, stride=stride, step=step)
        fits = (
            self.row + self.pieces == piece.row
            and self.numel == piece.numel <= stride
            and (self.start + self.pieces * stride, self.first + self.pieces * step) == (piece.start, piece.first)
            and (self.pieces == 1 or (self.stride, self.step) == (stride, step))
        )
        return longer if fits else None

    @classmethod
    def merged(cls, shards: Iterable[Shard], by_row: bool) -> tuple[Run, ...]:
        """Return the runs of shards that follow each other in x."""
        pieces: list[Run] = []
        first = 0
        for shard in shards:
            last = pieces[-1] if pieces else None
            if last and last.start + last.numel == shard.start and (last.row == shard.row or not by_row):
                pieces[-1] = last._replace(numel=last.numel + shard.numel)
            else:
                pieces.append(cls(shard.row, shard.start, first, shard.numel))
            first += shard.numel
        runs: list[Run] = []
        latest: dict[int, int] = {}  # the run that has the n-th piece of a row
        for _, in_row in groupby(pieces, key=lambda piece: piece.row):
            for number, piece in enumerate(in_row):
                longer = runs[latest[number]].followed_by(piece) if number in latest else None
                if longer is not None:
                    runs[latest[number]] = longer
                else:
                    latest[number] = len(runs)
                    runs.append(piece)
        return tuple(runs)


def pieces_of(x: Tensor, start: int, numel: int, pieces: int, stride: int) -> Tensor:
    """Return equal pieces of a vector at equal distances: [pieces, numel], a view."""
    distance = max(stride, numel)  # torch copies a lone piece element by element where both strides are 1
    return x[start : start + (pieces - 1) * stride + numel].unfold(0, numel, distance)


# Why: docs/decisions.md, "An all-reduce takes parameters one after the other".
@dataclass(frozen=True, eq=False)  # by identity, because comparing all shards is slow
class Layout:
    """The shards of a buffer, in ascending order of ``start``.

    Attributes:
        world: Number of ranks, and of rows.
        row_numel: Elements of a row, padding included.
        shards: The shards.
        by_row: Whether the rows follow each other in the buffer, as a reduce-scatter needs them; else the parameters
            do, without padding.
    """

    world: int
    row_numel: int
    shards: tuple[Shard, ...]
    by_row: bool = True

    @classmethod
    def dim0(cls, shapes: Iterable[tuple[str, tuple[int, ...]]], world: int) -> Layout:
        """Cut each parameter along its first dimension, as `torch.chunk` and FSDP2 do.

        Row r holds the r-th chunks of all parameters in order, each padded to the size of the first chunk; a parameter
        with fewer rows than ranks has no shard in the last rows.

        Args:
            shapes: Name and shape of every parameter, in buffer order.
            world: Number of ranks.
        """
        shards = []
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
                    shards.append(Shard(name, shape, row, row * offset + start, min(chunk, numel - at), at))
        return cls(world, offset, tuple(shards))

    @classmethod
    def packed(cls, shapes: Iterable[tuple[str, tuple[int, ...]]], world: int) -> Layout:
        """Cut each parameter as `dim0` does, into a buffer with one parameter after the other.

        Args:
            shapes: Name and shape of every parameter, in buffer order.
            world: Number of ranks.
        """
        shards: list[Shard] = []
        sizes = [0] * world
        for parts in cls.dim0(shapes, world).parameters.values():
            for shard in parts:
                start = shards[-1].place.stop if shards else 0
                shards.append(shard._replace(start=start))
                sizes[shard.row] += shard.numel
        return cls(world, max(sizes), tuple(shards), by_row=False)

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
        shards = []
        offset = 0  # of the parameter in the buffer
        for name, shape in shapes:
            start, end = offset, offset + math.prod(shape)
            while name is not None and start < end:
                row = start // row_numel
                stop = min(end, (row + 1) * row_numel)
                shards.append(Shard(name, tuple(shape), row, start, stop - start, start - offset))
                start = stop
            offset = end
        return cls(world, row_numel, tuple(shards))

    @cached_property
    def numel(self) -> int:
        """Number of elements of the buffer, padding included."""
        return self.world * self.row_numel if self.by_row else sum(shard.numel for shard in self.shards)

    @cached_property
    def rows(self) -> tuple[tuple[Shard, ...], ...]:
        """The shards of each row."""
        rows: list[list[Shard]] = [[] for _ in range(self.world)]
        for shard in self.shards:
            rows[shard.row].append(shard)
        return tuple(map(tuple, rows))

    @cached_property
    def parameters(self) -> dict[str, tuple[Shard, ...]]:
        """The shards of each parameter, in the order of its elements."""
        by_name: dict[str, list[Shard]] = {shard.name: [] for shard in self.shards}
        for shard in sorted(self.shards, key=lambda shard: shard.at):
            by_name[shard.name].append(shard)
        return {name: tuple(shards) for name, shards in by_name.items()}

    @cached_property
    def wholes(self) -> tuple[Shard, ...]:
        """Each parameter as one shard, in the order of `parameters`."""
        return tuple(map(whole, self.parameters.values()))

    def place_in_row(self, shard: Shard) -> slice:
        """Return a shard's position in its row."""
        row = self.rows[shard.row]
        return in_row(row, self.row_numel if self.by_row else None)[row.index(shard)].place

    def in_rows(self, flat: Tensor) -> Tensor:
        """Return a buffer as [world, row_numel], padding 0; a view where the rows follow each other."""
        if self.by_row:
            return flat.view(self.world, self.row_numel)
        rows = flat.new_zeros((self.world, self.row_numel))
        for row, shards in zip(rows, self.rows, strict=True):
            for shard, placed in zip(shards, in_row(shards), strict=True):
                row[placed.place] = flat[shard.place]
        return rows

    def check(self, flat: Tensor) -> None:
        """Check that ``flat`` is a buffer of this layout.

        Raises:
            RunFault: If its size differs, for example because a parameter got no gradient.
        """
        if flat.shape != (self.numel,):
            names = [shard.name for shard in self.shards] or ["no parameter"]
            raise RunFault(
                f"a gradient buffer has shape {tuple(flat.shape)}, but {self.numel} elements were expected "
                f"({names[0]} ... {names[-1]} on {self.world} ranks); did a parameter get no gradient? "
                f"Was one frozen while gradients accumulate?"
            )

    @cached_property
    def gaps(self) -> tuple[slice, ...]:
        """The padding."""
        starts = [0, *(shard.place.stop for shard in self.shards)]
        ends = [*(shard.start for shard in self.shards), self.numel]
        return tuple(slice(start, end) for start, end in zip(starts, ends, strict=True) if start < end)

    def empty(self, device: torch.device) -> Tensor:
        """Return a new float32 buffer whose padding is 0; the rest need not be set."""
        if len(self.gaps) > FEW:
            return torch.zeros(self.numel, dtype=torch.float32, device=device)
        flat = torch.empty(self.numel, dtype=torch.float32, device=device)
        for gap in self.gaps:
            flat[gap] = 0
        return flat

    @cached_property
    def _runs(self) -> tuple[tuple[str, Run], ...]:
        """The runs of each parameter, in the buffer's order."""
        runs = [(name, run) for name, shards in self.parameters.items() for run in Run.merged(shards, by_row=False)]
        return tuple(sorted(runs, key=lambda named: named[1].start))

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Copy tensors by name into a new float32 buffer; padding is 0.

        Without rows that follow each other, tensors that do so in memory are not copied: the buffer is their memory.
        """
        if (memory := self._memory(tensors)) is not None:
            return memory
        flat = self.empty(next(iter(tensors.values())).device)
        for name, run in self._runs:
            run.in_buffer(flat).copy_(run.in_vector(tensors[name].reshape(-1)))
        return flat

    def unpack(self, flat: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Copy a buffer into contiguous tensors by name, in place."""
        if (memory := self._memory(tensors)) is not None:
            memory.copy_(flat)
            return
        for name, run in self._runs:
            run.in_vector(tensors[name].view(-1)).copy_(run.in_buffer(flat))

    def _memory(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """Return the tensors as one vector, if they follow each other in memory as the buffer has them."""
        if self.by_row:
            return None
        parts = [tensors[name] for name, _ in self._runs]
        first, start = parts[0], parts[0].data_ptr()
        for part in parts:
            if part.dtype != first.dtype or part.data_ptr() != start or not part.is_contiguous():
                return None
            start += part.nbytes
        storage = first.untyped_storage()
        return first.as_strided((self.numel,), (1,)) if start <= storage.data_ptr() + storage.nbytes() else None


def whole(shards: Sequence[Shard]) -> Shard:
    """Join a parameter's shards into one, of which only the form and the number of elements hold."""
    return shards[0]._replace(numel=sum(shard.numel for shard in shards), at=0)


def in_row(shards: Sequence[Shard], row_numel: int | None = None) -> tuple[Shard, ...]:
    """Return the shards of a row, each with its start in the row.

    Args:
        shards: The shards of one row, ascending.
        row_numel: Elements from one row to the next; None: the shards of a row follow each other without padding.
    """
    ends = accumulate((shard.numel for shard in shards), initial=0)
    starts = ends if row_numel is None else (shard.start - shard.row * row_numel for shard in shards)
    return tuple(shard._replace(start=start) for shard, start in zip(shards, starts, strict=False))
