"""Merging the ranks' rows: every sample once, in the order of the data, its duplicates checked against each other.

Ids and tables are in memory, rows are not: they go from the ranks' files to the merged one piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from torch import Tensor

from gradwire.errors import BadInput, CheckFailed
from gradwire.gradients import store
from gradwire.gradients.provenance import Provenance
from gradwire.gradients.row_file import BoundRows

NAMED = 3  # ids that an error names
CHUNK_BYTES = 1 << 26  # of rows that are in memory at once


class Place(NamedTuple):
    """A row of a source."""

    source: int
    row: int


@dataclass(frozen=True)
class Merged:
    """How the sources are merged.

    Attributes:
        sources: The ranks.
        ids: Every sample's id, in the order wanted.
        places: Where each one's row is.
        duplicates: Rows that repeat another one of the same sample.
        deviation: The largest deviation among those, relative to the row's norm.
    """

    sources: Sequence[BoundRows]
    ids: Sequence[str]
    places: Sequence[Place]
    duplicates: int
    deviation: float

    @property
    def shape(self) -> tuple[int, int]:
        """Of the merged matrix."""
        return len(self.ids), self.sources[0].shape[1]

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        """The merged rows, some at a time."""
        width = self.shape[1]
        height = max(1, CHUNK_BYTES // (4 * width))
        for first in range(0, len(self.places), height):
            places = self.places[first : first + height]
            chunk = np.empty((len(places), width), dtype=np.float32)
            for number, source in enumerate(self.sources):
                here = [at for at, place in enumerate(places) if place.source == number]
                if here:
                    chunk[here] = source.take([places[at].row for at in here])
            yield chunk

    @property
    def meta(self) -> pa.Table:
        """The merged table."""
        starts = np.cumsum([0, *(len(source.ids) for source in self.sources)])
        rows = [int(starts[place.source]) + place.row for place in self.places]
        return pa.concat_tables([source.meta for source in self.sources]).take(pa.array(rows, pa.int64()))


def read_rank(folder: Path, dim: int, origin: Provenance) -> BoundRows:
    """A rank's whole work.

    Raises:
        BadInput: If it is missing, damaged or of another width.
    """
    names = store.all_names(folder)
    if not names.exist():
        raise BadInput(
            f"{folder} is missing or not complete; run `gradwire grads collect` again, it goes on where it stopped."
        )
    return BoundRows(names, dim, origin)


def merge(sources: Sequence[BoundRows], ids: Sequence[str], tolerance: float) -> Merged:
    """Find every sample's row.

    A padded sampler gives some samples to two ranks; such rows must agree, and the first one is kept.

    Args:
        sources: One per rank.
        ids: Every sample's id, in the order wanted.
        tolerance: How far two rows of a sample may lie apart, relative to their norm.

    Raises:
        BadInput: If a sample has no row, or a row no sample.
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
            raise CheckFailed(f"two rows of sample {id_!r} differ by {apart:.1e} of the row's norm; collect anew.")
        duplicates, deviation = duplicates + 1, max(deviation, apart)
    _check_complete(first.keys(), ids)
    return Merged(sources, ids, [first[id_] for id_ in ids], duplicates, deviation)


def _apart(sources: Sequence[BoundRows], one: Place, other: Place) -> float:
    rows = [np.float64(sources[place.source].take([place.row])[0]) for place in (one, other)]
    scale = max(float(np.linalg.norm(row)) for row in rows)
    return float(np.linalg.norm(rows[0] - rows[1])) / scale if scale else 0.0


def relative_deviation(row: Tensor, other: Tensor) -> float:
    """The norm of the difference of two rows, relative to the larger of theirs; 0 for two zero rows."""
    scale = max(float(row.norm()), float(other.norm()))
    return float((row - other).norm()) / scale if scale else 0.0


def _check_complete(found: Set[str], ids: Sequence[str]) -> None:
    missing, strange = set(ids) - found, found - set(ids)
    if missing:
        raise BadInput(f"the ranks have no row for sample {named(missing)}; collect anew.")
    if strange:
        raise BadInput(f"the ranks have rows for sample {named(strange)}, which the data have not; collect anew.")


def named(ids: Set[str]) -> str:
    """Some of the ids, and how many there are."""
    some = ", ".join(map(repr, sorted(ids)[:NAMED]))
    return f"{some} ({len(ids)} in all)"
