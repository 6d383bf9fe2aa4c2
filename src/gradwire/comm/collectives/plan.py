"""The plan of a buffer: which tensors one call encodes, by which compressor, and where they are in a message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from gradwire.comm.collectives.layout import Layout, Shard, in_row
from gradwire.comm.compressors import build
from gradwire.comm.compressors.base import Compressor
from gradwire.comm.compressors.driver import Onto
from gradwire.comm.compressors.segments import Segment, Segments
from gradwire.comm.reduction import Exempt

T = TypeVar("T")

FLOAT32 = build("none")


class Sizes(NamedTuple):
    """Bytes of some messages.

    Attributes:
        encodings: Of each encoding, by message; None where it depends on the data.
        known: Of each message, without the encodings whose size depends on the data.
        fixed: Whether there are none of those.
    """

    encodings: Sequence[Sequence[int | None]]
    known: Sequence[int]
    fixed: bool

    @classmethod
    def of(cls, encodings: Sequence[Sequence[int | None]]) -> Sizes:
        """Add up the sizes of each message."""
        known = [sum(size for size in message if size is not None) for message in encodings]
        return cls(encodings, known, not any(None in message for message in encodings))

    @property
    def total(self) -> int | None:
        """Bytes of all messages; None if one depends on the data."""
        return sum(self.known) if self.fixed else None

    def times(self, number: int) -> Sizes:
        """The same messages several times over."""
        return Sizes([*self.encodings] * number, [*self.known] * number, self.fixed)


class Batch(NamedTuple):
    """The tensors of a table that one compressor encodes, in one call.

    Attributes:
        compressor: The compressor.
        segments: Their positions in the values and in the message.
        shards: The shards of each tensor: one; adjacent ones that are sent as float32; or with ``granularity="row"``
            all compressed ones of a row.
        order: The place of each encoding among all of the message.
        places: With ``granularity="row"``, the values' positions in the buffer, from which they are copied; otherwise
            None, and they are read in the buffer.
    """

    compressor: Compressor
    segments: Segments
    shards: tuple[tuple[Shard, ...], ...]
    order: tuple[int, ...]
    places: tuple[slice, ...] | None

    def values(self, flat: Tensor) -> Tensor:
        """Return the values that the segments are positions in."""
        return flat if self.places is None else torch.cat([flat[place] for place in self.places])

    @property
    def elements(self) -> list[slice]:
        """The position of each shard in the values."""
        slices = []
        for group, segment in zip(self.shards, self.segments, strict=True):
            start = segment.start
            for shard in group:
                slices.append(slice(start, start + shard.numel))
                start += shard.numel
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
        sizes: Bytes of each row's encodings.
    """

    batches: tuple[Batch, ...]
    sizes: Sizes

    @classmethod
    def of(cls, rows: Iterable[Sequence[Shard]], compressor: Compressor, exempt: Exempt, granularity: str) -> Table:
        """Make the table of a buffer with these shards, by row; see `Plan.of`."""
        by_row = granularity == "row" and compressor is not FLOAT32
        tensors: tuple[list[tuple[Segment, tuple[Shard, ...], int]], ...] = ([], [])  # compressed, float32
        sizes: list[list[int | None]] = []
        covers, size_of = cache(exempt.covers), cache(compressor.wire_bytes)  # for parameters with many shards
        end = count = gathered = 0  # bytes and encodings of the message so far, and elements gathered
        for row in rows:
            exact = [compressor is FLOAT32 or covers(shard.name, shard.shape) for shard in row]
            coded = tuple(shard for shard, dense in zip(row, exact, strict=True) if not dense)
            groups = [(False, group) for group in ([coded] if by_row and coded else ((shard,) for shard in coded))]
            groups += [(True, group) for group in adjacent(p for p, dense in zip(row, exact, strict=True) if dense)]
            sizes.append([])
            for dense, group in groups:
                numel = sum(shard.numel for shard in group)
                form = group[0].form if len(group) == 1 and not dense else (numel,)
                size = FLOAT32.wire_bytes(form) if dense else size_of(form)
                start = gathered if by_row and not dense else group[0].start
                tensors[dense].append((Segment(start, form, end, size), group, count))
                sizes[-1].append(size)
                end, count, gathered = end + (size or 0), count + 1, gathered + (0 if dense else numel)
        batches = []
        for drafts, coder, gathers in zip(tensors, (compressor, FLOAT32), (by_row, False), strict=True):
            if drafts:
                segments, shards, order = zip(*drafts, strict=True)
                places = [shard.place for group in shards for shard in group]
                batches.append(Batch(coder, Segments(segments), shards, order, tuple(places) if gathers else None))
        return cls(tuple(batches), Sizes.of(sizes))

    def decode(
        self, messages: Tensor, count: int, lengths: Iterable[Iterable[int | None]], out: Tensor, onto: Onto
    ) -> None:
        """Decode messages, one after the other in ``messages``, into a buffer, or add them to it in order.

        Args:
            messages: uint8 vector.
            count: Their number.
            lengths: Bytes of each encoding, by row of each message; read only where they depend on the data.
            out: float32 buffer.
            onto: As in `Compressor.decode_add`.
        """
        if self.sizes.fixed:
            for batch in self.batches:
                batch.decode(messages.view(count, -1), batch.segments, out, onto)
            return
        every = [size for row in lengths for size in row if size is not None]
        encodings = messages.split(every)
        of_message = len(every) // count
        for first in range(0, len(every), of_message):
            wires, sizes = encodings[first : first + of_message], every[first : first + of_message]
            for batch in self.batches:
                wire = torch.cat([wires[i] for i in batch.order])
                placed = batch.segments.placed([sizes[i] for i in batch.order])
                batch.decode(wire.unsqueeze(0), placed, out, onto)
            onto = "sum"


@dataclass(frozen=True, eq=False)
class Plan:
    """The tables of a buffer, each made when it is first used.

    Attributes:
        compressor: The compressor of all shards that are not exempt.
        exempt: The parameters to send as float32.
        granularity: ``piece`` encodes each shard separately, ``row`` all of a row together.
        rank: The rank whose row is ``row``.
        shards: The shards in the buffer's order.
        rows: The shards of each row.
        row_numel: Elements from one row to the next in the buffer; None where rows do not follow each other.
        derived: Results of `derive`.
    """

    compressor: Compressor
    exempt: Exempt
    granularity: str
    rank: int
    shards: tuple[Shard, ...]
    rows: tuple[tuple[Shard, ...], ...]
    row_numel: int | None
    derived: dict[object, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, layout: Layout, compressor: Compressor, exempt: Exempt, granularity: str, rank: int) -> Plan:
        """Plan a buffer; the plan does not keep the layout."""
        row_numel = layout.row_numel if layout.by_row else None
        return cls(compressor, exempt, granularity, rank, layout.shards, layout.rows, row_numel)

    @cached_property
    def whole(self) -> Table:
        """The table of the whole buffer, row by row."""
        return self._table(self.rows)

    @cached_property
    def row(self) -> Table:
        """The table of the rank's row, whose positions are relative to it."""
        return self._table([in_row(self.rows[self.rank], self.row_numel)])

    @cached_property
    def undivided(self) -> Table:
        """The table of the whole buffer in its own order, as a single row; with ``granularity="row"`` as ``whole``."""
        return self.whole if self.granularity == "row" else self._table([self.shards])

    @cached_property
    def numel(self) -> int:
        """Elements of all shards."""
        return sum(shard.numel for shard in self.shards)

    @cached_property
    def exempt_numel(self) -> int:
        """Elements of exempt shards."""
        return sum(shard.numel for shard in self.shards if self.exempt.covers(shard.name, shard.shape))

    @cached_property
    def row_elements(self) -> int:
        """Elements of the rank's row."""
        return sum(shard.numel for shard in self.rows[self.rank])

    def derive(self, key: object, make: Callable[[], T]) -> T:
        """Return the result of ``make``, computed once for each key."""
        if key not in self.derived:
            self.derived[key] = make()
        result: T = self.derived[key]
        return result

    def _table(self, rows: Iterable[Sequence[Shard]]) -> Table:
        return Table.of(rows, self.compressor, self.exempt, self.granularity)


def adjacent(shards: Iterable[Shard]) -> list[tuple[Shard, ...]]:
    """Group shards, which must be ascending, into runs without a gap."""
    groups: list[tuple[Shard, ...]] = []
    for shard in shards:
        if groups and groups[-1][-1].place.stop == shard.start:
            groups[-1] = (*groups[-1], shard)
        else:
            groups.append((shard,))
    return groups
