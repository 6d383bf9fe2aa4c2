"""Merging of blocks: a rank's blocks into all its rows, and the ranks' rows into one per sample, in data order.

Ids and tables are kept in memory. Rows are copied in chunks from the sources' files to the merged file: a thread reads
them and another verifies them, while the caller writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gradwire.attribution.store import row_file, store
from gradwire.attribution.store.provenance import Provenance
from gradwire.attribution.store.row_file import BoundRows
from gradwire.attribution.store.row_types import least_deviation
from gradwire.attribution.store.store import Names
from gradwire.base.errors import BadInput, CheckFailed
from gradwire.base.files import remove_leftovers, sha256_file
from gradwire.base.prefetch import prefetch

NAMED = 3  # ids that an error lists
CHUNK_BYTES = 1 << 22  # of rows at once; larger chunks leave a core's cache before they are hashed and written
CHUNK_ROWS = 1024  # likewise; Linux reads into so many places at once


@dataclass(frozen=True)
class Merged:
    """The merged view of several sources.

    Attributes:
        sources: The blocks, or the ranks' rows.
        ids: Every sample's id, in output order.
        places: The position of each sample's row, counted through all sources.
        duplicates: Number of rows that repeat another row of the same sample.
        deviation: Largest difference between such rows, relative to the row's norm: `row_types.least_deviation`.
    """

    sources: Sequence[BoundRows]
    ids: Sequence[str]
    places: NDArray[np.int64]
    duplicates: int
    deviation: float

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the merged matrix."""
        return len(self.ids), self.sources[0].shape[1]

    @cached_property
    def in_order(self) -> bool:
        """Whether the merged rows are those of the only source, in its order."""
        return len(self.sources) == 1 and self.sources[0].ids == list(self.ids)

    @cached_property
    def meta(self) -> pa.Table:
        """The merged table."""
        return pa.concat_tables([source.meta for source in self.sources]).take(pa.array(self.places))

    def chunks(self) -> Iterator[NDArray[Any]]:
        """Yield the merged rows in chunks, as they are stored, each verified against its digest.

        Raises:
            BadInput: If a row does not match its digest.
        """
        return prefetch(self._verified(prefetch(self._read())))

    def _read(self) -> Iterator[tuple[slice, NDArray[Any]]]:
        """Yield the merged rows in chunks, unverified, and which of the rows they are."""
        codec = self.sources[0].codec
        height = min(CHUNK_ROWS, max(1, CHUNK_BYTES // codec.row_bytes))
        for first in range(0, len(self.places), height):
            places = self.places[first : first + height]
            rows = np.empty((len(places), codec.width), dtype=codec.dtype)
            for source, here, positions in self._shares(places):
                source.read_into([rows[row].data for row in here], positions)
            yield slice(first, first + height), rows

    def _verified(self, chunks: Iterator[tuple[slice, NDArray[Any]]]) -> Iterator[NDArray[Any]]:
        for chosen, rows in chunks:
            meta = self.meta[chosen]
            if store.mismatched(self.sources[0].identity, self.ids[chosen], meta, rows):
                for source, here, positions in self._shares(self.places[chosen]):
                    source.check(rows[here], meta.take(pa.array(here)), positions)
            yield rows

    def _shares(self, places: NDArray[np.int64]) -> Iterator[tuple[BoundRows, list[int], list[int]]]:
        """Yield each source that has some of these rows: which of them, and their positions in the source."""
        begins = starts(self.sources)
        numbers = np.searchsorted(begins, places, side="right") - 1
        for number in np.unique(numbers).tolist():
            here = np.flatnonzero(numbers == number)
            yield self.sources[number], here.tolist(), (places[here] - begins[number]).tolist()


def read_ranks(collection: Path, dim: int, origin: Provenance) -> list[BoundRows]:
    """Open all rows of each rank, or the merged block if a rank's rows are in it alone.

    Raises:
        BadInput: If they are missing, damaged or of a different width.
    """
    ranks = range(origin.world_size)
    if any(store.only_merged(collection, rank, dim) for rank in ranks):
        return [BoundRows(store.merged_names(collection, dim), dim, origin)]
    blocks = [store.rank_names(collection, rank, dim) for rank in ranks]
    for names in blocks:
        if not names.exist():
            raise BadInput(
                f"{names.rows.parent} is missing or incomplete; run `gradwire grads collect` again to resume."
            )
    return [BoundRows(names, dim, origin) for names in blocks]


def join(
    collection: Path, rank: int, dim: int, ids: Sequence[str], origin: Provenance, *, discard: bool = False
) -> None:
    """Merge a rank's blocks into one of all its rows, unless that is there.

    Args:
        collection: The collection folder.
        rank: The rank.
        dim: Width of the rows.
        ids: The ids of the rank's rows, in their order.
        origin: Provenance of the collection.
        discard: Whether to delete the blocks.

    Raises:
        BadInput: If a block is damaged or of another collection.
    """
    folder = store.rank_folder(collection, rank, dim)
    joined, blocks = store.all_names(folder), [store.part_names(folder, end) for end in origin.ends()]
    lost = not joined.exist() and all(block.exist() for block in blocks)
    if lost or not store.collected(collection, rank, dim):
        write(merge([BoundRows(block, dim, origin) for block in blocks], ids, 0.0), joined)
    if discard:
        store.discard_blocks(folder)


def merge(sources: Sequence[BoundRows], ids: Sequence[str], tolerance: float) -> Merged:
    """Find every id's row.

    A padded sampler assigns some samples to two ranks. Their rows must agree, and the first one is used.

    Args:
        sources: The blocks of a rank, or the rows of all ranks.
        ids: Every sample's id, in output order.
        tolerance: Largest allowed difference between two rows of a sample, relative to their norm.

    Raises:
        BadInput: If a sample has no row, or a row has no sample.
        CheckFailed: If two rows of one sample disagree.
    """
    first: dict[str, int] = {}
    duplicates, deviation = 0, 0.0
    for place, id_ in enumerate(chain.from_iterable(source.ids for source in sources)):
        if first.setdefault(id_, place) == place:
            continue
        apart = _apart(sources, place, first[id_])
        if not apart <= tolerance:
            raise CheckFailed(f"two rows of sample {id_!r} differ by {apart:.1e} of the row's norm; collect again.")
        duplicates, deviation = duplicates + 1, max(deviation, apart)
    _check_complete(first.keys(), ids)
    places = np.fromiter((first[id_] for id_ in ids), np.int64, len(ids))
    return Merged(sources, ids, places, duplicates, deviation)


def starts(sources: Sequence[BoundRows]) -> NDArray[np.int64]:
    """Return the position of each source's first row, counted through all sources."""
    return np.cumsum([0, *(len(source.ids) for source in sources[:-1])])


def _apart(sources: Sequence[BoundRows], left: int, right: int) -> float:
    import torch

    stored = (torch.from_numpy(_stored(sources, place)) for place in (left, right))
    return float(least_deviation(*map(sources[0].codec.bounds, stored)))


def _stored(sources: Sequence[BoundRows], place: int) -> NDArray[Any]:
    begins = starts(sources)
    number = int(np.searchsorted(begins, place, side="right")) - 1
    return sources[number].take_stored([place - int(begins[number])])


def _check_complete(collected: Set[str], ids: Sequence[str]) -> None:
    missing, strange = set(ids) - collected, collected - set(ids)
    if missing:
        raise BadInput(f"the ranks have no row for sample {named(missing)}; collect again.")
    if strange:
        raise BadInput(f"the ranks have rows for sample {named(strange)}, not in the data; collect again.")


def named(ids: Set[str]) -> str:
    """Format some of the ids and their count."""
    some = ", ".join(map(repr, sorted(ids)[:NAMED]))
    return f"{some} ({len(ids)} in all)"


def write(merged: Merged, names: Names, *, move: bool = False) -> dict[str, str]:
    """Write the merged rows in one pass, then their table and ids; return each file's checksum.

    Args:
        merged: The rows.
        names: The files of the block.
        move: Whether to rename a source's file, if it has the merged rows in their order, instead of copying it.
    """
    remove_leftovers(names.rows)  # of a killed call that copied
    if move and merged.in_order:
        for _ in merged.chunks():
            pass
        store.write_metadata(names, merged.meta, merged.ids)
        merged.sources[0].path.replace(names.rows)
        return {path.name: sha256_file(path) for path in names}
    with row_file.tensor_writer(names.rows, merged.shape, merged.sources[0].codec.name) as rows:
        for chunk in merged.chunks():
            rows.append(chunk)
    store.write_metadata(names, merged.meta, merged.ids)
    return {names.rows.name: rows.sha256.hexdigest()} | {path.name: sha256_file(path) for path in names[1:]}
