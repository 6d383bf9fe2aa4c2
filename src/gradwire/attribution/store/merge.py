"""Merging of the ranks' rows: one row per sample, in data order, with duplicates compared.

Ids and tables are kept in memory. Rows are copied in chunks from the ranks' files to the merged file: a thread reads
them and another verifies them, while the caller writes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.attribution.store import row_file, store
from gradwire.attribution.store.provenance import FURTHER, NORMALIZED, Provenance
from gradwire.attribution.store.row_file import NUMPY, BoundRows, Raw
from gradwire.attribution.store.row_types import least_deviation
from gradwire.attribution.store.store import Block, Names
from gradwire.base.errors import BadInput, CheckFailed
from gradwire.base.files import remove_leftovers, sha256_file
from gradwire.lm.data.batches import prefetch

NAMED = 3  # ids that an error lists
CHUNK_BYTES = 1 << 22  # of rows at once; larger chunks leave a core's cache before they are hashed and written
CHUNK_ROWS = 1024  # likewise; Linux reads into so many places at once


@dataclass(frozen=True)
class Merged:
    """The merged view of several sources.

    Attributes:
        sources: The ranks' rows.
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
    def meta(self) -> pa.Table:
        """The merged table."""
        return pa.concat_tables([source.meta for source in self.sources]).take(pa.array(self.places))

    def chunks(self) -> Iterator[NDArray[Any]]:
        """Yield the merged rows in chunks, as they are stored, each verified against its digest.

        Raises:
            BadInput: If a row does not match its digest.
        """
        return prefetch(self._verified(prefetch(self._read())))

    def _read(self) -> Iterator[tuple[NDArray[np.int64], Block]]:
        """Yield the merged block in pieces, with the positions of their rows."""
        codec = self.sources[0].codec
        height = min(CHUNK_ROWS, max(1, CHUNK_BYTES // codec.row_bytes))
        for first in range(0, len(self.places), height):
            places = self.places[first : first + height]
            rows = np.empty((len(places), codec.width), dtype=NUMPY[codec.dtype])
            for source, here, positions in self._shares(places):
                source.read_into([rows[row].data for row in here], positions)
            chosen = slice(first, first + height)
            yield places, Block(torch.from_numpy(rows), list(self.ids[chosen]), self.meta[chosen], codec)

    def _verified(self, pieces: Iterator[tuple[NDArray[np.int64], Block]]) -> Iterator[NDArray[Any]]:
        for places, block in pieces:
            if store.mismatched(block, self.sources[0].identity):
                for source, here, positions in self._shares(places):
                    source.check(block.take(here), positions)
            yield block.stored.numpy()

    def _shares(self, places: NDArray[np.int64]) -> Iterator[tuple[BoundRows, list[int], list[int]]]:
        """Yield each source that has some of these rows: which of them, and their positions in the source."""
        for source, (start, end) in zip(self.sources, pairwise(starts(self.sources)), strict=True):
            here = np.flatnonzero((start <= places) & (places < end))
            if len(here):
                yield source, here.tolist(), (places[here] - start).tolist()


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


def starts(sources: Sequence[BoundRows]) -> list[int]:
    """Return the position of each source's first row, counted through all sources, and the number of all rows."""
    return list(accumulate((len(source.ids) for source in sources), initial=0))


def _apart(sources: Sequence[BoundRows], left: int, right: int) -> float:
    return float(least_deviation(*(sources[0].codec.bounds(_stored(sources, place)) for place in (left, right))))


def _stored(sources: Sequence[BoundRows], place: int) -> Tensor:
    begins = starts(sources)
    number = bisect_right(begins, place) - 1
    return torch.from_numpy(sources[number].take_stored([place - begins[number]]))


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


def write(merged: Merged, names: Names, further: Sequence[Path]) -> dict[str, str]:
    """Write the merged rows to all files in one pass, then their table and ids; return each file's checksum.

    Args:
        merged: The rows.
        names: The files of the block.
        further: Optional files to write: of `provenance.FURTHER`.
    """
    for name in FURTHER:  # left by a killed call with other flags
        remove_leftovers(names.rows.with_name(name))
    with ExitStack() as stack:
        codec = merged.sources[0].codec
        rows = stack.enter_context(row_file.tensor_writer(names.rows, merged.shape, codec.name))
        writers = {path: stack.enter_context(row_file.writer(path, merged.shape, merged.ids)) for path in further}
        for chunk in merged.chunks():
            rows.append(chunk)
            decoded = merged.sources[0].decoded(chunk) if writers else chunk
            for path, writer in writers.items():
                writer.append(row_file.normalized(decoded) if path.name == NORMALIZED else decoded)
    store.write_metadata(names, merged.meta, merged.ids)
    checksums = {
        path: raw.sha256.hexdigest() for path, raw in ({names.rows: rows} | writers).items() if isinstance(raw, Raw)
    }
    return {path.name: checksums.get(path) or sha256_file(path) for path in [*names, *further]}
