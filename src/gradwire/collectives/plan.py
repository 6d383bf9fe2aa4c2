"""Plan of a buffer's encodings: which pieces are encoded together, by which compressor, into how many bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from operator import not_
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.collectives.layout import Layout, Piece
from gradwire.compressors import build
from gradwire.compressors.base import Compressor
from gradwire.compressors.exempt import Exempt

FLOAT32 = build("none")
Sizes = Sequence[Sequence[int | None]]  # by row; None: depends on the data


class Segment(NamedTuple):
    """Pieces of one row that are encoded together.

    Attributes:
        pieces: One piece; or all of the row sent as float32; or with ``granularity="row"`` all compressed ones.
        compressor: The compressor that encodes them.
        places: Their positions in the buffer: one per piece; adjacent float32 pieces are joined.
        form: The shape for the compressor.
        size: Bytes of the encoding; None if it depends on the data.
    """

    pieces: tuple[Piece, ...]
    compressor: Compressor
    places: tuple[slice, ...]
    form: tuple[int, ...]
    size: int | None

    @classmethod
    def of(cls, pieces: tuple[Piece, ...], compressor: Compressor) -> Segment:
        """Make a segment of pieces of one row, in ascending order."""
        places = [piece.place for piece in pieces]
        form = pieces[0].form if len(pieces) == 1 else (sum(piece.numel for piece in pieces),)
        return cls(
            pieces,
            compressor,
            tuple(joined(places) if compressor is FLOAT32 else places),
            form,
            compressor.wire_bytes(form),
        )

    @property
    def name(self) -> str:
        """The name of the first parameter."""
        return self.pieces[0].name

    def take(self, flat: Tensor, shift: int = 0) -> list[Tensor]:
        """Return views of the places in ``flat``, which starts ``shift`` elements into the layout's buffer."""
        return [flat[place.start - shift : place.stop - shift] for place in self.places]

    def whole(self, parts: list[Tensor]) -> Tensor:
        """Concatenate the places' values into the shape for the compressor."""
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(self.form)

    def decode(self, wire: Tensor) -> tuple[Tensor, ...]:
        """Decode the segment's bytes into the values of each place, as vectors."""
        values = self.compressor.decode(wire, self.form).view(-1)
        return values.split([place.stop - place.start for place in self.places])


@dataclass(frozen=True)
class Plan:
    """The segments of a buffer, by row.

    Args:
        compressor: The compressor of all pieces that are not exempt.
        rows: The segments of each row.
    """

    compressor: Compressor
    rows: tuple[tuple[Segment, ...], ...]

    @classmethod
    def of(cls, layout: Layout, compressor: Compressor, exempt: Exempt, granularity: str) -> Plan:
        """Plan a buffer.

        Args:
            layout: The layout of the buffer.
            compressor: The compressor.
            exempt: The parameters to send as float32.
            granularity: Encode each ``piece`` separately, or all of a ``row`` together.
        """
        rows = []
        for row in layout.rows:
            exact = [compressor is FLOAT32 or exempt.covers(piece.name, piece.shape) for piece in row]
            dense, coded = list(compress(row, exact)), list(compress(row, map(not_, exact)))
            groups = [tuple(coded)] if granularity == "row" and coded else [(piece,) for piece in coded]
            segments = [Segment.of(group, compressor) for group in groups]
            rows.append((*segments, Segment.of(tuple(dense), FLOAT32)) if dense else tuple(segments))
        return cls(compressor, tuple(rows))

    @cached_property
    def sizes(self) -> Sizes:
        """Bytes of every segment's encoding."""
        return [[segment.size for segment in row] for row in self.rows]

    @cached_property
    def total(self) -> int | None:
        """Bytes of all encodings; None if one depends on the data."""
        known = [size for row in self.sizes for size in row if size is not None]
        return sum(known) if len(known) == sum(map(len, self.rows)) else None


def joined(places: Iterable[slice]) -> list[slice]:
    """Join adjacent places; the places must be ascending."""
    found: list[slice] = []
    for place in places:
        if found and found[-1].stop == place.start:
            found[-1] = slice(found[-1].start, place.stop)
        else:
            found.append(place)
    return found
