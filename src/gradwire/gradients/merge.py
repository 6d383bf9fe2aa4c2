"""Merging of the ranks' rows: one row per sample, in data order, with duplicates compared.

Ids and tables are kept in memory. Rows are copied in chunks from the ranks' files to the merged file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from gradwire.errors import BadInput, CheckFailed
from gradwire.gradients import store
from gradwire.gradients.provenance import Provenance
from gradwire.gradients.row_file import NUMPY, BoundRows
from gradwire.gradients.row_types import least_deviation

NAMED = 3  # ids that an error lists
CHUNK_BYTES = 1 << 26  # of rows in memory at once


class Place(NamedTuple):
    """The position of a row: its source, and its index there."""

    source: int
    row: int


@dataclass(frozen=True)
class Merged:
    """The merged view of several sources.

    Attributes:
        sources: The ranks' rows.
        ids: Every sample's id, in output order.
        places: The position of each sample's row.
        duplicates: Number of rows that repeat another row of the same sample.
        deviation: Largest difference between such rows, relative to the row's norm: `row_types.least_deviation`.
    """

    sources: Sequence[BoundRows]
    ids: Sequence[str]
    places: Sequence[Place]
    duplicates: int
    deviation: float

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the merged matrix."""
        return len(self.ids), self.sources[0].shape[1]

    def chunks(self) -> Iterator[NDArray[Any]]:
        """Yield the merged rows in chunks, as they are stored."""
        height = max(1, CHUNK_BYTES // (4 * self.shape[1]))
        for first in range(0, len(self.places), height):
            places = self.places[first : first + height]
            chunk = np.empty((len(places), self.sources[0].codec.width), dtype=NUMPY[self.sources[0].codec.dtype])
            for number, source in enumerate(self.sources):
                here = [at for at, place in enumerate(places) if place.source == number]
                if here:
                    chunk[here] = source.take_stored([places[at].row for at in here])
            yield chunk

    @property
    def meta(self) -> pa.Table:
        """The merged table."""
        starts = np.cumsum([0, *(len(source.ids) for source in self.sources)])
        rows = [int(starts[place.source]) + place.row for place in self.places]
        return pa.concat_tables([source.meta for source in self.sources]).take(pa.array(rows, pa.int64()))


def read_rank(folder: Path, dim: int, origin: Provenance) -> BoundRows:
    """Open all rows of a rank.

    Raises:
        BadInput: If they are missing, damaged or of a different width.
    """
    names = store.all_names(folder)
    if not names.exist():
        raise BadInput(f"{folder} is missing or incomplete; run `gradwire grads collect` again to resume.")
    return BoundRows(names, dim, origin)


def merge(sources: Sequence[BoundRows], ids: Sequence[str], tolerance: float) -> Merged:
    """Find every sample's row.

    A padded sampler assigns some samples to two ranks. Their rows must agree, and the first one is used.

    Args:
        sources: One per rank.
        ids: Every sample's id, in output order.
        tolerance: Largest allowed difference between two rows of a sample, relative to their norm.

    Raises:
        BadInput: If a sample has no row, or a row has no sample.
        CheckFailed: If two rows of one sample disagree.
    """
    first: dict[str, Place] = {}
    duplicates, deviation = 0, 0.0
    for place in (Place(number, row) for number, source in enumerate(sources) for row in range(len(source.ids))):
        id_ = sources[place.source].ids[place.row]
        if first.setdefault(id_, place) == place:
            continue
        apart = _apart(sources, place, first[id_])
        if not apart <= tolerance:
            raise CheckFailed(f"two rows of sample {id_!r} differ by {apart:.1e} of the row's norm; collect again.")
        duplicates, deviation = duplicates + 1, max(deviation, apart)
    _check_complete(first.keys(), ids)
    return Merged(sources, ids, [first[id_] for id_ in ids], duplicates, deviation)


def _apart(sources: Sequence[BoundRows], one: Place, other: Place) -> float:
    stored = [torch.from_numpy(sources[place.source].take_stored([place.row])) for place in (one, other)]
    return float(least_deviation(*map(sources[0].codec.bounds, stored)))


def _check_complete(found: Set[str], ids: Sequence[str]) -> None:
    missing, strange = set(ids) - found, found - set(ids)
    if missing:
        raise BadInput(f"the ranks have no row for sample {named(missing)}; collect again.")
    if strange:
        raise BadInput(f"the ranks have rows for sample {named(strange)}, not in the data; collect again.")


def named(ids: Set[str]) -> str:
    """Format some of the ids and their count."""
    some = ", ".join(map(repr, sorted(ids)[:NAMED]))
    return f"{some} ({len(ids)} in all)"
