"""Layout of the parameters in a flat gradient buffer, and the plan of the buffer's encodings.

A buffer has one row per rank. A `Piece` is a contiguous run of one parameter's elements in one row; the rest is
padding, which is never encoded, sent or counted. A `Plan` has which tensors a call encodes, by which compressor, and
where they lie in a message.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gradwire.base.errors import RunFault
from gradwire.comm.compressors import build
from gradwire.comm.compressors.base import Compressor, Onto
from gradwire.comm.compressors.reduction import Exempt
from gradwire.comm.compressors.segments import Segment, Segments

Kind = Literal["reduce_scatter", "all_reduce"]
FLOAT32 = build("none")
Sizes = Sequence[Sequence[int | None]]  # by row; None: depends on the data


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
        """The pieces of each parameter, in the order of its elements."""
        by_name: dict[str, list[Piece]] = {piece.name: [] for piece in self.pieces}
        for piece in sorted(self.pieces, key=lambda piece: piece.at):
            by_name[piece.name].append(piece)
        return {name: tuple(pieces) for name, pieces in by_name.items()}

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

    @cached_property
    def gaps(self) -> tuple[slice, ...]:
        """The padding."""
        starts = [0, *(piece.place.stop for piece in self.pieces)]
        ends = [*(piece.start for piece in self.pieces), self.numel]
        return tuple(slice(start, end) for start, end in zip(starts, ends, strict=True) if start < end)

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Copy tensors by name into a new float32 buffer; padding is 0."""
        device = next(iter(tensors.values())).device
        flat = torch.empty(self.numel, dtype=torch.float32, device=device)
        for gap in self.gaps:
            flat[gap] = 0
        for piece in self.pieces:
            flat[piece.place] = tensors[piece.name].reshape(-1)[piece.source]
        return flat

    def unpack(self, flat: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Copy a buffer into contiguous tensors by name, in place."""
        for piece in self.pieces:
            tensors[piece.name].view(-1)[piece.source] = flat[piece.place]


class Batch(NamedTuple):
    """The tensors of a table that one compressor encodes, in one call.

    Attributes:
        compressor: The compressor.
        segments: Their positions in the values and in the message.
        pieces: The pieces of each tensor: one; adjacent ones that are sent as float32; or with ``granularity="row"``
            all compressed ones of a row.
        order: The place of each encoding among all of the message.
        places: With ``granularity="row"``, the values' positions in the buffer, from which they are copied; otherwise
            None, and they are read in the buffer.
    """

    compressor: Compressor
    segments: Segments
    pieces: tuple[tuple[Piece, ...], ...]
    order: tuple[int, ...]
    places: tuple[slice, ...] | None

    def values(self, flat: Tensor) -> Tensor:
        """Return the values that the segments are positions in."""
        return flat if self.places is None else torch.cat([flat[place] for place in self.places])

    @property
    def elements(self) -> list[slice]:
        """The position of each piece in the values."""
        slices = []
        for group, segment in zip(self.pieces, self.segments, strict=True):
            start = segment.start
            for piece in group:
                slices.append(slice(start, start + piece.numel))
                start += piece.numel
        return slices

    def decode(self, wires: Tensor, segments: Segments, out: Tensor, onto: Onto) -> None:
        """Decode messages, uint8 [messages, b], into a buffer, or add them to it in order."""
        values = self.values(out)
        self.compressor.decode_add(wires, segments, values, onto=onto)
        if self.places is not None:
            for place, elements in zip(self.places, self.elements, strict=True):
                out[place] = values[elements]


class Table(NamedTuple):
    """The encodings of some rows, in the order of a message: by row, first compressed ones, then float32.

    Attributes:
        batches: At most one of compressed tensors, and one of those sent as float32.
        sizes: Bytes of each encoding, by row.
    """

    batches: tuple[Batch, ...]
    sizes: Sizes

    @classmethod
    def of(
        cls, rows: Iterable[Sequence[Piece]], shift: int, compressor: Compressor, exempt: Exempt, granularity: str
    ) -> Table:
        """Make the table of a buffer that begins ``shift`` elements into the layout's; see `Plan.of`."""
        by_row = granularity == "row" and compressor is not FLOAT32
        tensors: tuple[list[tuple[Segment, tuple[Piece, ...], int]], ...] = ([], [])  # compressed, float32
        sizes: list[list[int | None]] = []
        end = count = gathered = 0  # bytes and encodings of the message so far, and elements gathered
        for row in rows:
            exact = [compressor is FLOAT32 or exempt.covers(piece.name, piece.shape) for piece in row]
            coded = tuple(piece for piece, dense in zip(row, exact, strict=True) if not dense)
            groups = [(False, group) for group in ([coded] if by_row and coded else ((piece,) for piece in coded))]
            groups += [(True, group) for group in adjacent(p for p, dense in zip(row, exact, strict=True) if dense)]
            sizes.append([])
            for dense, group in groups:
                numel = sum(piece.numel for piece in group)
                form = group[0].form if len(group) == 1 and not dense else (numel,)
                size = (FLOAT32 if dense else compressor).wire_bytes(form)
                start = gathered if by_row and not dense else group[0].start - shift
                tensors[dense].append((Segment(start, form, end, size), group, count))
                sizes[-1].append(size)
                end, count, gathered = end + (size or 0), count + 1, gathered + (0 if dense else numel)
        batches = []
        for drafts, coder, gathers in zip(tensors, (compressor, FLOAT32), (by_row, False), strict=True):
            if drafts:
                segments, pieces, order = zip(*drafts, strict=True)
                places = [slice(p.start - shift, p.start - shift + p.numel) for group in pieces for p in group]
                batches.append(Batch(coder, Segments(segments), pieces, order, tuple(places) if gathers else None))
        return cls(tuple(batches), sizes)

    @property
    def total(self) -> int | None:
        """Bytes of all encodings; None if one depends on the data."""
        known = [size for row in self.sizes for size in row if size is not None]
        return sum(known) if len(known) == sum(map(len, self.sizes)) else None

    def decode(self, messages: Tensor, lengths: Sequence[Sequence[int]], out: Tensor, onto: Onto) -> None:
        """Decode messages, one after the other in ``messages``, into a buffer, or add them to it in order.

        Args:
            messages: uint8 vector.
            lengths: For each message, the bytes of each encoding.
            out: float32 buffer.
            onto: As in `Compressor.decode_add`.
        """
        if self.total is not None:
            for batch in self.batches:
                batch.decode(messages.view(len(lengths), -1), batch.segments, out, onto)
            return
        for message, sizes in zip(messages.split([sum(sizes) for sizes in lengths]), lengths, strict=True):
            wires = message.split(list(sizes))
            for batch in self.batches:
                wire = torch.cat([wires[i] for i in batch.order])
                placed = batch.segments.placed([sizes[i] for i in batch.order])
                batch.decode(wire.unsqueeze(0), placed, out, onto)
            onto = "sum"


class Plan(NamedTuple):
    """The tables of a buffer.

    Attributes:
        compressor: The compressor of all pieces that are not exempt.
        whole: The table of the whole buffer.
        rows: The table of each row, whose positions are relative to it.
    """

    compressor: Compressor
    whole: Table
    rows: tuple[Table, ...]

    @classmethod
    def of(cls, layout: Layout, compressor: Compressor, exempt: Exempt, granularity: str) -> Plan:
        """Plan a buffer.

        Args:
            layout: The layout of the buffer.
            compressor: The compressor.
            exempt: The parameters to send as float32.
            granularity: Encode each ``piece`` separately, or all of a ``row`` together.
        """
        given = compressor, exempt, granularity
        rows = [Table.of([row], i * layout.row_numel, *given) for i, row in enumerate(layout.rows)]
        return cls(compressor, Table.of(layout.rows, 0, *given), tuple(rows))


def adjacent(pieces: Iterable[Piece]) -> list[tuple[Piece, ...]]:
    """Group pieces, which must be ascending, into runs without a gap."""
    groups: list[tuple[Piece, ...]] = []
    for piece in pieces:
        if groups and groups[-1][-1].place.stop == piece.start:
            groups[-1] = (*groups[-1], piece)
        else:
            groups.append((piece,))
    return groups
