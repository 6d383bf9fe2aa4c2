"""What of a buffer is encoded at once, by which compressor, into how many bytes."""

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
Sizes = Sequence[Sequence[int | None]]  # row by row; None depends on the data


class Unit(NamedTuple):
    """Pieces of one row that are encoded together.

    Attributes:
        pieces: One; or all of the row that go as float32; or with ``granularity="row"`` all that are compressed.
        compressor: What encodes them.
        runs: Where they lie in the buffer: each piece, but what is float32 and without a gap at once.
        form: The shape that the compressor sees.
        size: Bytes of the encoding, None where it depends on the data.
    """

    pieces: tuple[Piece, ...]
    compressor: Compressor
    runs: tuple[slice, ...]
    form: tuple[int, ...]
    size: int | None

    @classmethod
    def of(cls, pieces: tuple[Piece, ...], compressor: Compressor) -> Unit:
        """The unit of some pieces of one row, in ascending order."""
        runs = [piece.run for piece in pieces]
        form = pieces[0].form if len(pieces) == 1 else (sum(piece.numel for piece in pieces),)
        return cls(
            pieces,
            compressor,
            tuple(joined(runs) if compressor is FLOAT32 else runs),
            form,
            compressor.wire_bytes(form),
        )

    @property
    def name(self) -> str:
        """The first parameter's."""
        return self.pieces[0].name

    def take(self, flat: Tensor, shift: int = 0) -> list[Tensor]:
        """The runs of a buffer that begins ``shift`` elements into the layout's: views."""
        return [flat[run.start - shift : run.stop - shift] for run in self.runs]

    def whole(self, parts: list[Tensor]) -> Tensor:
        """The runs' values as the compressor sees them."""
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(self.form)

    def decode(self, wire: Tensor) -> tuple[Tensor, ...]:
        """The values of the runs, each a vector, from the unit's bytes."""
        values = self.compressor.decode(wire, self.form).view(-1)
        return values.split([run.stop - run.start for run in self.runs])


@dataclass(frozen=True)
class Plan:
    """The units of a buffer, row by row.

    Args:
        compressor: What encodes all that is not exempt.
        rows: Their units.
    """

    compressor: Compressor
    rows: tuple[tuple[Unit, ...], ...]

    @classmethod
    def of(cls, layout: Layout, compressor: Compressor, exempt: Exempt, granularity: str) -> Plan:
        """Plan a buffer.

        Args:
            layout: What lies where.
            compressor: What encodes it.
            exempt: What goes as float32 all the same.
            granularity: Whether a ``piece`` or all of a ``row`` is encoded at once.
        """
        rows = []
        for row in layout.rows:
            exact = [compressor is FLOAT32 or exempt.covers(piece.name, piece.shape) for piece in row]
            dense, coded = list(compress(row, exact)), list(compress(row, map(not_, exact)))
            groups = [tuple(coded)] if granularity == "row" and coded else [(piece,) for piece in coded]
            units = [Unit.of(group, compressor) for group in groups]
            rows.append((*units, Unit.of(tuple(dense), FLOAT32)) if dense else tuple(units))
        return cls(compressor, tuple(rows))

    @cached_property
    def sizes(self) -> Sizes:
        """Bytes of every unit's encoding."""
        return [[unit.size for unit in row] for row in self.rows]

    @cached_property
    def total(self) -> int | None:
        """Bytes of all encodings, None where one depends on the data."""
        known = [size for row in self.sizes for size in row if size is not None]
        return sum(known) if len(known) == sum(map(len, self.rows)) else None


def joined(runs: Iterable[slice]) -> list[slice]:
    """Ascending runs, those that touch as one."""
    found: list[slice] = []
    for run in runs:
        if found and found[-1].stop == run.start:
            found[-1] = slice(found[-1].start, run.stop)
        else:
            found.append(run)
    return found
