"""The gradient store: blocks of rows with ids and metadata, three files per block.

``rank_<r>/dim<D>/grads-<N>.pt, ids-<N>.pkl, meta-<N>.parquet`` hold the rows a rank collected since its last block,
where N counts its samples so far. ``all_orig.pt, all_ids.pkl, all_meta.parquet`` there hold all rows of the rank,
and, in ``dim<D>/`` of the collection folder, one row for every sample of the data. All of them stay, or, if parts are
discarded, what is merged is deleted, and a rank keeps the ids and the metadata of its rows only. Row i belongs to id i:
a digest in ``meta`` covers the row, its id and metadata, and the provenance of the collection. ``.pt`` files hold a
float32 matrix, or ``{"type": name, "dim": D, "rows": uint8 matrix}`` of another of the `row_types`.
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from gradwire.attribution.store.row_types import Bounds, Float32, RowCodec
from gradwire.base import torch_files
from gradwire.base.errors import BadInput, bounded, unknown
from gradwire.base.files import atomic_write
from gradwire.lm.data.shards import Sample

if TYPE_CHECKING:
    from torch import Tensor

    from gradwire.attribution.store.provenance import Provenance

COPIES, LARGE_GB = 3, 4  # of a row: in a block, in its rank's rows, and merged; a size to tell the user

META = pa.schema(  # the columns of every table
    [
        ("sample_id", pa.string()),
        ("loss", pa.float64()),  # mean or sum over the sample's targets; null without targets
        ("n_targets", pa.int64()),
        ("norm", pa.float64()),  # before projection
        ("flag", pa.string()),  # "no_target" if the row is zero because the sample has no target, else null
        ("digest", pa.string()),  # row_digests
    ]
)


class Column(NamedTuple):
    """An additional column: its type, and a function of a sample, its position in the data and its row's columns."""

    type: pa.DataType
    of: Callable[[Sample, int, Mapping[str, Any]], Any]


COLUMNS = {  # by the names of ``grads collect --metadata``
    "position": Column(pa.int64(), lambda sample, position, row: position),
    "document": Column(pa.string(), lambda sample, position, row: document(sample.sample_id)),
    "n_tokens": Column(pa.int64(), lambda sample, position, row: len(sample.input_ids)),
    "n_valid": Column(pa.int64(), lambda sample, position, row: row["n_targets"]),
    "perplexity": Column(pa.float64(), lambda sample, position, row: _perplexity(row["loss"])),
}


def document(sample_id: str) -> str:
    """Return the id of a sample's document: the sample id without ``#<k>``."""
    stem, mark, number = sample_id.rpartition("#")
    return stem if mark and number.isdecimal() else sample_id


def _perplexity(loss: float | None) -> float | None:
    return None if loss is None else math.exp(min(loss, 700.0))


def chosen_columns(names: str) -> list[str]:
    """Parse a comma-separated list of additional columns, without those that are always present.

    Raises:
        BadInput: If a column is unknown.
    """
    chosen = {name.strip() for name in names.split(",") if name.strip()} - {*META.names}
    for name in sorted(chosen - COLUMNS.keys()):
        raise unknown("column of --metadata", name, [*COLUMNS, *META.names])
    return sorted(chosen)


class Block(NamedTuple):
    """Stored rows [n, width], their n ids, a table of ``META``'s columns with n rows, and the codec of the rows."""

    stored: Tensor
    ids: list[str]
    meta: pa.Table
    codec: RowCodec

    @property
    def rows(self) -> Tensor:
        """The rows as float32 [n, D]."""
        return self.codec.decode(self.stored)

    def take(self, rows: Sequence[int]) -> Block:
        """Return a block of some of the rows, in the order given."""
        return Block(
            self.stored[list(rows)], [self.ids[row] for row in rows], self.meta.take(pa.array(rows)), self.codec
        )

    def bounds(self, row: int) -> Bounds:
        """Bounds on the numbers of a row by its bytes."""
        return self.codec.bounds(self.stored[row : row + 1])


class Names(NamedTuple):
    """The files of a block."""

    rows: Path
    ids: Path
    meta: Path

    def exist(self) -> bool:
        """Whether the block is complete."""
        return all(path.is_file() for path in self)


def rank_folder(collection: Path, rank: int, dim: int) -> Path:
    """Return the folder of a rank's rows of one width."""
    return collection / f"rank_{rank}" / f"dim{dim}"


def part_names(folder: Path, seen: int) -> Names:
    """Return the files of the block that ends at a rank's ``seen``-th sample."""
    return Names(folder / f"grads-{seen}.pt", folder / f"ids-{seen}.pkl", folder / f"meta-{seen}.parquet")


def all_names(folder: Path) -> Names:
    """Return the files of a folder's complete block."""
    return Names(folder / "all_orig.pt", folder / "all_ids.pkl", folder / "all_meta.parquet")


def merged_names(collection: Path, dim: int) -> Names:
    """Return the files of a collection's merged block."""
    return all_names(collection / f"dim{dim}")


def rank_names(collection: Path, rank: int, dim: int) -> Names:
    """Return the files of all rows of a rank; that of the rows may be discarded."""
    return all_names(rank_folder(collection, rank, dim))


def only_merged(collection: Path, rank: int, dim: int) -> bool:
    """Whether a rank's rows are in the merged block alone."""
    return not rank_names(collection, rank, dim).rows.is_file() and merged_names(collection, dim).rows.is_file()


def collected(collection: Path, rank: int, dim: int) -> bool:
    """Whether all rows of a rank are there."""
    names = rank_names(collection, rank, dim)
    return names.exist() or (names.ids.is_file() and names.meta.is_file() and only_merged(collection, rank, dim))


def block_ends(folder: Path) -> list[int]:
    """Return every N with at least one block file, in ascending order."""
    matches = (re.fullmatch(r"(?:grads|ids|meta)-(\d+)\.(?:pt|pkl|parquet)", path.name) for path in folder.glob("*-*"))
    return sorted({int(match[1]) for match in matches if match})


def discard_blocks(folder: Path) -> None:
    """Delete the blocks of a rank's rows."""
    for end in block_ends(folder):
        for path in part_names(folder, end):
            path.unlink(missing_ok=True)


def codec_of(row_type: str, dim: int) -> RowCodec:
    """Return the codec of rows of ``dim`` numbers."""
    if row_type == Float32.name:
        return Float32(dim)
    from gradwire.attribution.store.scaled_rows import SCALED

    return SCALED[row_type](dim)


def note_size(origin: Provenance, discard_parts: bool) -> None:
    """Print how much disk a collection takes, if that is much."""
    rows = origin.samples * max(1, len(origin.modules))
    once = rows * sum(codec_of(origin.store, dim).row_bytes for dim in origin.dims) / 1e9
    copies = 1 if discard_parts else COPIES
    if copies * once >= LARGE_GB:
        rest = "and twice that while they are merged" if discard_parts else f"{once:.1f} GB with --discard_parts"
        print(
            f"gradwire grads collect: NOTE: the gradients will take {copies * once:.1f} GB of disk, {rest}",
            file=sys.stderr,
        )


def row_digests(identity: str, meta: pa.Table, stored: NDArray[Any]) -> list[str]:
    """Compute digests that bind each row to its id, its metadata and its collection.

    Returns:
        For each row, the hex SHA-256 of the collection's `Provenance.identity`, the row's metadata as JSON with sorted
        keys (all columns but the digest), and its stored bytes (of float32: its entries, little-endian), concatenated.
    """
    bound = zip(_as_json(meta.drop_columns("digest")), np.ascontiguousarray(stored), strict=True)
    return [_digest(f"{identity}{text}", row) for text, row in bound]


def _as_json(meta: pa.Table) -> Iterator[str]:
    """Yield each row as a JSON object with sorted keys; a column at once takes a third of the time of a row at once."""
    names = sorted(meta.column_names)
    lines = json.JSONEncoder(separators=("\n", ": "))  # JSON has no line break within a value
    columns = [lines.encode(meta[name].to_pylist())[1:-1].splitlines() for name in names]
    row = "{" + ", ".join(f'"{name}": %s' for name in names) + "}"
    return (row % values for values in zip(*columns, strict=True))


def _digest(text: str, row: NDArray[Any]) -> str:
    hashed = hashlib.sha256(text.encode())
    hashed.update(row.data)  # without the GIL if it is long, so that threads can share the work
    return hashed.hexdigest()


def mismatched(identity: str, ids: Sequence[str], meta: pa.Table, stored: NDArray[Any]) -> list[int]:
    """Return the rows of a block that do not match their digests; ``identity`` is the collection's."""
    noted = zip(meta["sample_id"].to_pylist(), meta["digest"].to_pylist(), strict=True)
    computed = zip(ids, row_digests(identity, meta, stored), strict=True)
    return [row for row, (have, expected) in enumerate(zip(noted, computed, strict=True)) if have != expected]


def unbound(names: Names, ids: Sequence[str], wrong: Sequence[int], read: int) -> list[str]:
    """Describe the rows of a block that do not match their digests.

    Args:
        names: The block's files.
        ids: The ids of all its rows.
        wrong: The positions of these rows.
        read: Number of rows that were read.
    """
    files = f"{names.rows} with {names.ids} and {names.meta}"
    if 1 < len(wrong) == read:
        return [f"{files}: no row is of this collection: the files belong to another, or its provenance was edited"]
    return [f"{files}: row {row} is not what was collected for {ids[row]!r}" for row in wrong]


def write(names: Names, block: Block) -> None:
    """Write a block's files, each atomically; the ids come last."""
    import torch

    whole = block.stored.is_contiguous() and block.stored.untyped_storage().nbytes() == block.stored.nbytes
    stored = block.stored if whole else block.stored.clone(memory_format=torch.contiguous_format)
    with (
        atomic_write(names.rows) as part,
        part.open("wb") as stream,
    ):  # a stream: torch would embed a path's name in the file
        torch.save(contents(stored, block.codec), stream)
    write_metadata(names, block.meta, block.ids)


def check_type(path: Path, codec: RowCodec, origin: Provenance, dim: int) -> None:
    """Check that a file's rows have the width and the type of the collection.

    Raises:
        BadInput: If they differ.
    """
    if codec.dim != dim:
        raise BadInput(f"{path} has rows of {codec.dim} columns, not {dim}.")
    if codec.name != origin.store:
        raise BadInput(f"{path} has rows of type {codec.name}, not {origin.store}.")


def write_metadata(names: Names, meta: pa.Table, ids: Sequence[str]) -> None:
    """Write the table and then the ids of a block whose rows are already written."""
    with atomic_write(names.meta) as part:
        pq.write_table(meta, part)
    with atomic_write(names.ids) as part:
        part.write_bytes(pickle.dumps(list(ids)))


def check_counts(names: Names, counts: Sequence[int]) -> None:
    """Check that a block's files have equal numbers of rows, ids and metadata.

    Raises:
        BadInput: If the counts differ.
    """
    if len(set(counts)) > 1:
        raise BadInput(
            "counts differ: "
            + ", ".join(f"{path} has {count}" for path, count in zip(names, counts, strict=True))
            + "; delete these files and collect again."
        )


def contents(stored: Tensor, codec: RowCodec) -> Any:
    """Return what a file of rows holds."""
    return stored if isinstance(codec, Float32) else {"type": codec.name, "dim": codec.dim, "rows": stored}


def read_stored(path: Path) -> tuple[NDArray[Any], RowCodec]:
    """Read rows as they are stored, memory-mapped, without executing code from the file.

    Raises:
        BadInput: If the file is missing or damaged, or is not exactly one contiguous matrix of a row type.
    """
    try:
        loaded = torch_files.read(path)
    except Exception as error:  # a damaged archive can raise nearly anything
        raise BadInput(f"{path} cannot be read as a tensor: {_first_line(error)}") from error
    rows, codec = _typed(path, loaded)
    if not isinstance(rows, np.ndarray) or rows.dtype != codec.dtype or rows.ndim != 2:
        raise BadInput(f"{path} is not a dense {codec.dtype.name} matrix.")
    if rows.shape[1] != codec.width:
        raise BadInput(f"{path} has {rows.shape[1]} bytes per row; {codec.name} of {codec.dim} has {codec.width}.")
    if not rows.flags.c_contiguous or [place.size for place in torch_files.storages(path).values()] != [rows.nbytes]:
        raise BadInput(f"{path} holds a part of a larger tensor, or is not row-major; save `rows.clone()`.")
    return rows, codec


def _typed(path: Path, loaded: Any) -> tuple[Any, RowCodec]:
    """Return the matrix of a file's contents, and the codec that they name."""
    if type(loaded) is not dict:
        return loaded, Float32(loaded.shape[-1] if getattr(loaded, "ndim", 0) else 0)
    from gradwire.attribution.store.scaled_rows import SCALED

    kind, dim, rows = (loaded.get(key) for key in ("type", "dim", "rows"))
    if not (isinstance(kind, str) and kind in SCALED and type(dim) is int and dim > 0):
        raise BadInput(f"{path} has no rows of a known type: {bounded(f'type {kind!r}, dim {dim!r}')}.")
    return rows, codec_of(kind, dim)


class _StringList(pickle.Unpickler):
    """An unpickler that refuses to load classes and functions."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def read_ids(path: Path) -> list[str]:
    """Read a list of strings from a pickle file, without executing code.

    Raises:
        BadInput: If the file is missing or damaged, or is not a list of strings.
    """
    try:
        with path.open("rb") as stream:
            ids = _StringList(stream).load()
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise BadInput(f"{path} is not a valid list of ids: {_first_line(error)}") from error
    if not isinstance(ids, list) or not all(isinstance(id_, str) for id_ in ids):
        raise BadInput(f"{path} is not a valid list of ids: it must contain only strings.")
    return ids


def read_meta(path: Path) -> pa.Table:
    """Read a table with ``META``'s columns and any of ``COLUMNS``.

    Raises:
        BadInput: If the file is missing, damaged or has different columns.
    """
    try:
        table = pq.ParquetFile(path).read()
    except (OSError, pa.ArrowException) as error:
        raise BadInput(f"{path} cannot be read as Parquet: {_first_line(error)}") from error
    columns, known = set(table.schema), {*META, *_further(COLUMNS)}
    if not set(META) <= columns <= known or len(columns) != len(table.schema):
        raise BadInput(f"{path} lacks one of the columns {', '.join(META.names)}, or has unknown ones.")
    return table


def concatenated(blocks: Iterable[Block]) -> Block:
    """Concatenate blocks in order."""
    import torch

    stored, ids, meta, codecs = zip(*blocks, strict=True)
    return Block(torch.cat(stored), [id_ for part in ids for id_ in part], pa.concat_tables(meta), codecs[0])


def bind(rows: Tensor, records: Sequence[Mapping[str, Any]], origin: Provenance) -> Block:
    """Encode rows for a collection, with metadata (`META` and additional columns) and digests that bind them.

    Args:
        rows: float32 [n, D].
        records: The metadata of each row, without its digest.
        origin: Provenance of the collection, which names the row type.
    """
    codec = codec_of(origin.store, rows.shape[1])
    stored = codec.encode(rows)
    meta = pa.Table.from_pylist(records, pa.schema([*META, *_further(origin.metadata)]))
    return Block(
        stored, [record["sample_id"] for record in records], with_digests(origin.identity, meta, stored), codec
    )


def with_digests(identity: str, meta: pa.Table, stored: Tensor) -> pa.Table:
    """Return the table with the digests of these stored rows."""
    column = pa.array(row_digests(identity, meta, stored.numpy()), pa.string())
    return meta.set_column(meta.schema.get_field_index("digest"), "digest", column)


def _further(names: Iterable[str]) -> list[pa.Field]:
    return [pa.field(name, COLUMNS[name].type) for name in names]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
