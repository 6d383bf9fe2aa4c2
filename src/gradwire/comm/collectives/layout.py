"""Layout of the parameters in a flat gradient buffer.

A layout has one row per rank. A `Shard` is a contiguous run of one parameter's elements in one row; the rest is
padding, which is never encoded, sent or counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gradwire.base.errors import RunFault

Kind = Literal["reduce_scatter", "all_reduce"]


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
    def _starts_in_row(self) -> dict[Shard, int]:
        """The first element of each shard in its row."""
        if self.by_row:
            return {shard: shard.start - shard.row * self.row_numel for shard in self.shards}
        starts = {}
        for row in self.rows:
            end = 0
            for shard in row:
                starts[shard], end = end, end + shard.numel
        return starts

    def place_in_row(self, shard: Shard) -> slice:
        """Return a shard's position in its row."""
        start = self._starts_in_row[shard]
        return slice(start, start + shard.numel)

    def in_rows(self, flat: Tensor) -> Tensor:
        """Return a buffer as [world, row_numel], padding 0; a view where the rows follow each other."""
        if self.by_row:
            return flat.view(self.world, self.row_numel)
        rows = flat.new_zeros((self.world, self.row_numel))
        for shard in self.shards:
            rows[shard.row, self.place_in_row(shard)] = flat[shard.place]
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
        """Return a new float32 buffer in which only the padding is set, to 0."""
        flat = torch.empty(self.numel, dtype=torch.float32, device=device)
        for gap in self.gaps:
            flat[gap] = 0
        return flat

    @cached_property
    def _runs(self) -> tuple[Shard, ...]:
        """The shards, with contiguous ones of a parameter merged; a merged shard's `row` is undefined."""
        runs: list[Shard] = []
        for shard in self.shards:
            last = runs[-1] if runs else None
            if last and (last.name, last.place.stop, last.source.stop) == (shard.name, shard.start, shard.at):
                runs[-1] = last._replace(numel=last.numel + shard.numel)
            else:
                runs.append(shard)
        return tuple(runs)

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Copy tensors by name into a new float32 buffer; padding is 0.

        Without rows that follow each other, tensors that do so in memory are not copied: the buffer is their memory.
        """
        if (memory := self._memory(tensors)) is not None:
            return memory
        flat = self.empty(next(iter(tensors.values())).device)
        for run in self._runs:
            flat[run.place] = tensors[run.name].reshape(-1)[run.source]
        return flat

    def unpack(self, flat: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Copy a buffer into contiguous tensors by name, in place."""
        if (memory := self._memory(tensors)) is not None:
            memory.copy_(flat)
            return
        for run in self._runs:
            tensors[run.name].view(-1)[run.source] = flat[run.place]

    def _memory(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """Return the tensors as one vector, if they follow each other in memory as the buffer has them."""
        if self.by_row:
            return None
        parts = [tensors[run.name] for run in self._runs]
        first, start = parts[0], parts[0].data_ptr()
        for part in parts:
            if part.dtype != first.dtype or part.data_ptr() != start or not part.is_contiguous():
                return None
            start += part.nbytes
        storage = first.untyped_storage()
        return first.as_strided((self.numel,), (1,)) if start <= storage.data_ptr() + storage.nbytes() else None
