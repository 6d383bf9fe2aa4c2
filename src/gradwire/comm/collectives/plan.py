"""Plan of a buffer's encodings: which tensors a call encodes, by which compressor, and where they lie in a message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.comm.collectives.layout import Layout, Piece
from gradwire.comm.compressors import build
from gradwire.comm.compressors.base import Compressor, Onto
from gradwire.comm.compressors.exempt import Exempt
from gradwire.comm.compressors.segments import Segment, Segments

FLOAT32 = build("none")
Sizes = Sequence[Sequence[int | None]]  # by row; None: depends on the data


class Batch(NamedTuple):
    """The tensors of a table that one compressor encodes, in one call.

    Attributes:
        compressor: The compressor.
        segments: Their positions in the values and in the message.
        pieces: The pieces of each tensor: one; adjacent ones that are sent as float32; or with ``granularity="row"``
            all compressed ones of a row.
        order: The place of each encoding among all of the message.
        places: With ``granularity="row"``, where the values lie in the buffer; otherwise they are read in it.
    """

    compressor: Compressor
    segments: Segments
    pieces: tuple[tuple[Piece, ...], ...]
    order: tuple[int, ...]
    places: tuple[slice, ...] | None

    def values(self, flat: Tensor) -> Tensor:
        """Return the values that the segments are positions in."""
        return flat if self.places is None else torch.cat([flat[place] for place in self.places])

    def decode(self, wires: Tensor, segments: Segments, out: Tensor, onto: Onto) -> None:
        """Decode messages, uint8 [messages, b], into a buffer, or add them to it in order."""
        if self.places is None:
            self.compressor.decode_add(wires, segments, out, onto=onto)
            return
        values = self.values(out)
        self.compressor.decode_add(wires, segments, values, onto=onto)
        for place, part in zip(self.places, values.split([p.stop - p.start for p in self.places]), strict=True):
            out[place] = part


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
        drafts = Draft(compressor, []), Draft(FLOAT32, [])
        coded, dense = drafts
        sizes: list[list[int | None]] = []
        at = count = gathered = 0
        for row in rows:
            exact = [compressor is FLOAT32 or exempt.covers(piece.name, piece.shape) for piece in row]
            compressed = [piece for piece, whole in zip(row, exact, strict=True) if not whole]
            groups = [tuple(compressed)] if granularity == "row" and compressed else [(piece,) for piece in compressed]
            sizes.append([])
            for group in groups:
                numel = sum(piece.numel for piece in group)
                form = group[0].form if len(group) == 1 else (numel,)
                start = gathered if granularity == "row" else group[0].start - shift
                coded.tensors.append((Segment(start, form, at, compressor.wire_bytes(form)), group, count))
                gathered += numel
                at, count = at + (coded.tensors[-1][0].size or 0), count + 1
                sizes[-1].append(coded.tensors[-1][0].size)
            for group in adjacent(piece for piece, whole in zip(row, exact, strict=True) if whole):
                numel = sum(piece.numel for piece in group)
                size = FLOAT32.wire_bytes(numel)
                assert size is not None
                dense.tensors.append((Segment(group[0].start - shift, (numel,), at, size), group, count))
                at, count = at + size, count + 1
                sizes[-1].append(size)
        gathers = granularity == "row" and compressor is not FLOAT32
        return cls(tuple(d.batch(gathers and d is coded, shift) for d in drafts if d.tensors), sizes)

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
        for message, own in zip(messages.split([sum(own) for own in lengths]), lengths, strict=True):
            wires = message.split(list(own))
            for batch in self.batches:
                wire = torch.cat([wires[i] for i in batch.order])
                placed = batch.segments.placed([own[i] for i in batch.order])
                batch.decode(wire.unsqueeze(0), placed, out, onto)
            onto = "sum"


class Draft(NamedTuple):
    """A batch in the making."""

    compressor: Compressor
    tensors: list[tuple[Segment, tuple[Piece, ...], int]]

    def batch(self, gathers: bool, shift: int) -> Batch:
        """Make the batch; ``gathers`` if its values are gathered from the buffer."""
        segments, pieces, order = zip(*self.tensors, strict=True)
        places = [slice(p.start - shift, p.start - shift + p.numel) for group in pieces for p in group]
        return Batch(self.compressor, Segments(segments), pieces, order, tuple(places) if gathers else None)


@dataclass(frozen=True)
class Plan:
    """The tables of a buffer.

    Args:
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

    @property
    def sizes(self) -> Sizes:
        """Bytes of every encoding, by row."""
        return self.whole.sizes

    @property
    def total(self) -> int | None:
        """Bytes of all encodings; None if one depends on the data."""
        return self.whole.total


def adjacent(pieces: Iterable[Piece]) -> list[tuple[Piece, ...]]:
    """Group pieces, which must be ascending, into runs without a gap."""
    groups: list[tuple[Piece, ...]] = []
    for piece in pieces:
        if groups and groups[-1][-1].start + groups[-1][-1].numel == piece.start:
            groups[-1] = (*groups[-1], piece)
        else:
            groups.append((piece,))
    return groups
