"""The verb ``grads aggregate``: merge the ranks' blocks into one matrix, one row per sample, in data order."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from gradwire.attribution.collect.types import TOLERANCE
from gradwire.attribution.options import Count
from gradwire.attribution.store import provenance, row_file, samples, store
from gradwire.attribution.store.provenance import EXPORTS, NORMALIZED, Provenance
from gradwire.attribution.store.row_file import NUMPY, BoundRows
from gradwire.attribution.store.row_types import least_deviation
from gradwire.attribution.store.store import Block, Names
from gradwire.base.errors import BadInput, CheckFailed
from gradwire.base.files import remove_leftovers, sha256_file
from gradwire.base.flags import RANKS, output_folder
from gradwire.base.strict import Strict
from gradwire.lm.data.batches import prefetch


class Options(Strict):
    """Flags of ``gradwire grads aggregate``."""

    base_path: Path = Field(description="the collection folder, with rank_<r>/dim<D>/")
    output_dir: Annotated[Path, output_folder] | None = Field(
        None, description="where to write dim<D>/, or dim<D> itself (default: --base_path)"
    )
    num_gpus: Annotated[int, RANKS] | None = Field(
        None, description="ranks that collected (default: from collect.json)"
    )
    dim: Count = Field(description="columns per row")
    normalize: bool = Field(False, description="also write all_normalized.pt, with rows of norm 1")
    export: tuple[Literal["safetensors", "parquet"], ...] = Field(
        (), description="also write the rows as all_orig.<format>"
    )


def target(options: Options) -> Path:
    """Return the output folder ``dim<N>``."""
    chosen = options.output_dir or options.base_path
    return chosen if re.fullmatch(r"dim\d+", chosen.name) else chosen / f"dim{options.dim}"


def beside(options: Options) -> Path:
    """Return the folder of the outputs."""
    return target(options)


def main(options: Options) -> None:
    """Merge the ranks and write the matrix, its ids, its metadata and a manifest.

    Raises:
        BadInput: If a rank or a sample is missing, a row differs from what was collected, or the collection folder does
            not match the arguments.
        CheckFailed: If two rows of one sample disagree.
    """
    origin = provenance.read(options.base_path)
    check_asked(origin, options.base_path, options.num_gpus, [options.dim])
    ranks = [store.rank_folder(options.base_path, rank, options.dim) for rank in range(origin.world_size)]
    ids = samples.row_ids(origin, samples.samples(origin))
    merged = merge([read_rank(folder, options.dim, origin) for folder in ranks], ids, TOLERANCE[origin.grad_type])
    names = store.all_names(target(options))
    checksums = write(merged, names, options)
    made = provenance.Manifest(
        **origin.model_dump(),
        dim=options.dim,
        order="as in the data",
        rows=len(merged.ids),
        duplicates=merged.duplicates,
        duplicates_deviation=merged.deviation,
        sha256=checksums,
    )
    provenance.write_manifest(target(options), made)
    print(f"{len(merged.ids)} rows of {options.dim} from {origin.world_size} ranks in {target(options)}")


def further(options: Options) -> list[Path]:
    """Return the optional files that a call writes."""
    names = [NORMALIZED] * options.normalize + [EXPORTS[kind] for kind in options.export]
    return [target(options) / name for name in names]


def write(merged: Merged, names: Names, options: Options) -> dict[str, str]:
    """Write the merged rows to all outputs in one pass, then their table and ids; return each file's checksum."""
    for name in (NORMALIZED, *EXPORTS.values()):  # left by a killed call with other flags
        remove_leftovers(target(options) / name)
    with ExitStack() as stack:
        codec = merged.sources[0].codec
        rows = stack.enter_context(row_file.tensor_writer(names.rows, merged.shape, codec.name))
        plain: list[row_file.Writer] = []
        scaled: list[row_file.Writer] = []
        hashed = {names.rows: rows}
        for path in further(options):
            if path.name == NORMALIZED:
                hashed[path] = stack.enter_context(row_file.tensor_writer(path, merged.shape))
                scaled.append(hashed[path])
            elif path.suffix == ".safetensors":
                hashed[path] = stack.enter_context(row_file.safetensors_writer(path, merged.shape))
                plain.append(hashed[path])
            else:
                plain.append(stack.enter_context(row_file.parquet_writer(path, merged.shape, merged.ids)))
        for chunk in merged.chunks():
            rows.append(chunk)
            decoded = merged.sources[0].decoded(chunk) if plain or scaled else chunk
            for writer in plain:
                writer.append(decoded)
            for writer in scaled:
                writer.append(row_file.normalized(decoded))
    store.write_metadata(names, merged.meta, merged.ids)
    checksums = {path: writer.sha256.hexdigest() for path, writer in hashed.items()}
    return {path.name: checksums.get(path) or sha256_file(path) for path in [*names, *further(options)]}


def check_asked(origin: Provenance, collection: Path, num_gpus: int | None, dims: Sequence[int]) -> None:
    """Check that a collection folder matches the arguments of a verb.

    Raises:
        BadInput: If it was collected by a different number of ranks, or lacks one of these widths.
    """
    if num_gpus not in (None, origin.world_size):
        raise BadInput(f"--num_gpus {num_gpus}: {collection} was collected by {origin.world_size} ranks.")
    absent = sorted(set(dims) - set(origin.dims))
    if absent:
        raise BadInput(f"--dim {absent[0]}: {collection} has rows of {', '.join(map(str, origin.dims))} columns.")


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
