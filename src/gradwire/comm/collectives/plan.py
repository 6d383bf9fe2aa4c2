"""The plan of a buffer: which tensors one call encodes, by which compressor, and where they are in a message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.comm.collectives.layout import Layout, Shard
from gradwire.comm.compressors import build
from gradwire.comm.compressors.base import Compressor
from gradwire.comm.compressors.driver import Onto
from gradwire.comm.compressors.segments import Segment, Segments
from gradwire.comm.reduction import Exempt

FLOAT32 = build("none")
Sizes = Sequence[Sequence[int | None]]  # by row; None: depends on the data


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
        sizes: Bytes of each encoding, by row.
        total: Bytes of all encodings; None if one depends on the data.
    """

    batches: tuple[Batch, ...]
    sizes: Sizes
    total: int | None

    @classmethod
    def of(cls, rows: Iterable[Sequence[Shard]], compressor: Compressor, exempt: Exempt, granularity: str) -> Table:
        """Make the table of a buffer with these shards, by row; see `Plan.of`."""
        by_row = granularity == "row" and compressor is not FLOAT32
        tensors: tuple[list[tuple[Segment, tuple[Shard, ...], int]], ...] = ([], [])  # compressed, float32
        sizes: list[list[int | None]] = []
        end = count = gathered = 0  # bytes and encodings of the message so far, and elements gathered
        for row in rows:
            exact = [compressor is FLOAT32 or exempt.covers(shard.name, shard.shape) for shard in row]
            coded = tuple(shard for shard, dense in zip(row, exact, strict=True) if not dense)
            groups = [(False, group) for group in ([coded] if by_row and coded else ((shard,) for shard in coded))]
            groups += [(True, group) for group in adjacent(p for p, dense in zip(row, exact, strict=True) if dense)]
            sizes.append([])
            for dense, group in groups:
                numel = sum(shard.numel for shard in group)
                form = group[0].form if len(group) == 1 and not dense else (numel,)
                size = (FLOAT32 if dense else compressor).wire_bytes(form)
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
        known = [size for row in sizes for size in row if size is not None]
        return cls(tuple(batches), sizes, sum(known) if len(known) == count else None)

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
        compressor: The compressor of all shards that are not exempt.
        whole: The table of the whole buffer, row by row.
        rows: The table of each row, whose positions are relative to it.
        undivided: The table of the whole buffer in its own order, as a single row; with ``granularity="row"`` as
            ``whole``.
        numel: Elements of all shards.
        exempt: Those of exempt ones.
    """

    compressor: Compressor
    whole: Table
    rows: tuple[Table, ...]
    undivided: Table
    numel: int
    exempt: int

    @classmethod
    def of(cls, layout: Layout, compressor: Compressor, exempt: Exempt, granularity: str) -> Plan:
        """Plan a buffer.

        Args:
            layout: The layout of the buffer.
            compressor: The compressor.
            exempt: The parameters to send as float32.
            granularity: ``piece`` encodes each shard separately, ``row`` all of a row together.
        """
        given = compressor, exempt, granularity
        rows = [[shard._replace(start=layout.place_in_row(shard).start) for shard in row] for row in layout.rows]
        whole = Table.of(layout.rows, *given)
        undivided = whole if granularity == "row" else Table.of([layout.shards], *given)
        exact = sum(shard.numel for shard in layout.shards if exempt.covers(shard.name, shard.shape))
        numel = sum(shard.numel for shard in layout.shards)
        return cls(compressor, whole, tuple(Table.of([row], *given) for row in rows), undivided, numel, exact)


def adjacent(shards: Iterable[Shard]) -> list[tuple[Shard, ...]]:
    """Group shards, which must be ascending, into runs without a gap."""
    groups: list[tuple[Shard, ...]] = []
    for shard in shards:
        if groups and groups[-1][-1].place.stop == shard.start:
            groups[-1] = (*groups[-1], shard)
        else:
            groups.append((shard,))
    return groups
