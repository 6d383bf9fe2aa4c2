"""The gradient store: blocks of rows with their ids and facts, each block in three files that appear together.

``rank_<r>/dim<D>/grads-<N>.pt, ids-<N>.pkl, meta-<N>.parquet`` hold what a rank collected since its last block, N being
its samples so far; ``all_orig.pt, all_ids.pkl, all_meta.parquet`` hold a rank's whole work, and beside the ranks'
folders, in ``dim<D>/``, every sample of the data once. Row i belongs to id i: in ``meta`` the rank that computed a row
notes a digest of it, of its id and facts, and of what the collection was made from.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from gradwire.errors import BadInput
from gradwire.files import whole
from gradwire.gradients import metadata

if TYPE_CHECKING:
    from gradwire.gradients.provenance import Provenance

META = pa.schema(  # the columns that every table has; `metadata` knows further ones
    [
        ("sample_id", pa.string()),
        ("loss", pa.float64()),  # mean or sum over the sample's targets; null where it has none
        ("n_targets", pa.int64()),
        ("norm", pa.float64()),  # of what is projected, before it is
        ("flag", pa.string()),  # "no_target" where the row is zero for want of a target, else null
        ("digest", pa.string()),  # row_digests
    ]
)


class Block(NamedTuple):
    """Rows [n, D] in float32, their n ids, and a table of ``META``'s columns with n rows."""

    rows: Tensor
    ids: list[str]
    meta: pa.Table


class Names(NamedTuple):
    """The files of a block."""

    rows: Path
    ids: Path
    meta: Path

    def exist(self) -> bool:
        """Whether the block is complete."""
        return all(path.is_file() for path in self)


def rank_folder(run: Path, rank: int, dim: int) -> Path:
    """Where a rank writes its rows of a width."""
    return run / f"rank_{rank}" / f"dim{dim}"


def part_names(folder: Path, seen: int) -> Names:
    """The files of the block that ends at a rank's ``seen``-th sample."""
    return Names(folder / f"grads-{seen}.pt", folder / f"ids-{seen}.pkl", folder / f"meta-{seen}.parquet")


def all_names(folder: Path) -> Names:
    """The files of the block that holds a folder's whole work."""
    return Names(folder / "all_orig.pt", folder / "all_ids.pkl", folder / "all_meta.parquet")


def parts(folder: Path) -> list[int]:
    """Every N of which any file of a block exists, in ascending order."""
    found = (re.fullmatch(r"(?:grads|ids|meta)-(\d+)\.(?:pt|pkl|parquet)", path.name) for path in folder.glob("*-*"))
    return sorted({int(match[1]) for match in found if match})


def row_digests(identity: str, meta: pa.Table, rows: Tensor) -> list[str]:
    """What binds each row to its id, its facts and its collection.

    Returns:
        For each row, in hex, the SHA-256 of the collection's `Provenance.identity`, then the row's facts as JSON with
        sorted keys (all columns but the digest), then its entries (float32, little-endian).
    """
    told = (json.dumps(fact, sort_keys=True) for fact in meta.drop_columns("digest").to_pylist())
    bound = zip(told, rows, strict=True)
    return [hashlib.sha256(f"{identity}{fact}".encode() + row.numpy().tobytes()).hexdigest() for fact, row in bound]


def unbound(names: Names, block: Block, identity: str, first: int = 0) -> list[str]:
    """What is wrong with the rows of a block that are not what a collection wrote for their ids.

    Args:
        names: The block's files.
        block: All of it, or some consecutive rows.
        identity: The collection's.
        first: The number of the first of these rows in the files.
    """
    noted = zip(block.meta["sample_id"].to_pylist(), block.meta["digest"].to_pylist(), strict=True)
    found = zip(block.ids, row_digests(identity, block.meta, block.rows), strict=True)
    wrong = [row for row, (one, other) in enumerate(zip(noted, found, strict=True)) if one != other]
    files = f"{names.rows} with {names.ids} and {names.meta}"
    if wrong and len(wrong) == len(block.ids):
        return [f"{files}: no row is of this collection: they are another's, or what it was made from was edited"]
    return [f"{files}: row {first + row} is not what was collected for {block.ids[row]!r}" for row in wrong]


def check_bound(names: Names, block: Block, identity: str, first: int = 0) -> None:
    """See that the rows of a block are what a collection wrote for their ids.

    Raises:
        BadInput: If one is not; the arguments are those of `unbound`.
    """
    if wrong := unbound(names, block, identity, first):
        raise BadInput(f"{wrong[0]}; delete these files and collect again.")


def write(names: Names, block: Block) -> None:
    """Write a block's files, each whole or not at all; the ids come last."""
    rows = block.rows if _alone(block.rows) else block.rows.clone(memory_format=torch.contiguous_format)
    with whole(names.rows) as part, part.open("wb") as stream:  # a stream, for a path would name itself in the bytes
        torch.save(rows, stream)
    write_facts(names, block.meta, block.ids)


def write_facts(names: Names, meta: pa.Table, ids: Sequence[str]) -> None:
    """Write the table and then the ids of a block whose rows are written already."""
    with whole(names.meta) as part:
        pq.write_table(meta, part)
    with whole(names.ids) as part:
        part.write_bytes(pickle.dumps(list(ids)))


def read(names: Names) -> Block:
    """Read a block; its rows are mapped, not copied.

    Raises:
        BadInput: If a file is missing, damaged, or holds something else, or the three disagree about the count.
    """
    block = Block(read_rows(names.rows), read_ids(names.ids), read_meta(names.meta))
    check_counts(names, [len(block.rows), len(block.ids), len(block.meta)])
    return block


def read_bound(names: Names, identity: str) -> Block:
    """Read a block, and see that a collection wrote it.

    Raises:
        BadInput: As `read` and `check_bound`.
    """
    block = read(names)
    check_bound(names, block, identity)
    return block


def check_counts(names: Names, counts: Sequence[int]) -> None:
    """See that a block's files have as many rows, ids and facts.

    Raises:
        BadInput: If they have not.
    """
    if len(set(counts)) > 1:
        raise BadInput(
            "counts differ: "
            + ", ".join(f"{path} has {count}" for path, count in zip(names, counts, strict=True))
            + "; delete these files and collect again."
        )


def read_rows(path: Path) -> Tensor:
    """Read float32 rows [n, D] without executing anything.

    Raises:
        BadInput: If the file is missing, damaged or no such tensor, or holds more than its rows, one after another.
    """
    try:
        rows = torch.load(path, weights_only=True, mmap=True)
    except Exception as error:  # a damaged archive can raise nearly anything
        raise BadInput(f"{path} cannot be read as a tensor: {_first_line(error)}") from error
    if type(rows) is not Tensor or rows.layout != torch.strided or rows.dtype != torch.float32 or rows.ndim != 2:
        raise BadInput(f"{path} is no dense float32 matrix.")
    if rows.device.type != "cpu" or rows.requires_grad or rows.is_neg():
        raise BadInput(f"{path} holds no plain numbers in memory; save `rows.detach().cpu().contiguous()`.")
    if not _alone(rows):
        raise BadInput(f"{path} holds a part of a larger tensor, or columns in the place of rows; save `rows.clone()`.")
    return rows


def _alone(rows: Tensor) -> bool:
    """Whether the storage holds the rows, one after another, and nothing else."""
    return rows.is_contiguous() and rows.untyped_storage().nbytes() == rows.numel() * rows.element_size()


class _StringList(pickle.Unpickler):
    """An unpickler that looks up no class and no function."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it wants to call {module}.{name}")


def read_ids(path: Path) -> list[str]:
    """Read a list of strings, and nothing else, from a pickle file.

    Raises:
        BadInput: If the file is missing, damaged, or holds anything but a list of strings.
    """
    try:
        with path.open("rb") as stream:
            ids = _StringList(stream).load()
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise BadInput(f"{path} is refused as a list of ids: {_first_line(error)}") from error
    if not isinstance(ids, list) or not all(isinstance(id_, str) for id_ in ids):
        raise BadInput(f"{path} is refused as a list of ids: it holds something else.")
    return ids


def read_meta(path: Path) -> pa.Table:
    """Read a table of ``META``'s columns, and perhaps of those that ``metadata`` knows.

    Raises:
        BadInput: If the file is missing, damaged or has other columns.
    """
    try:
        table = pq.ParquetFile(path).read()
    except (OSError, pa.ArrowException) as error:
        raise BadInput(f"{path} cannot be read as Parquet: {_first_line(error)}") from error
    columns, known = set(table.schema), {*META, *_further(metadata.COLUMNS)}
    if not set(META) <= columns <= known or len(columns) != len(table.schema):
        raise BadInput(f"{path} has not the columns {', '.join(META.names)}, or has unknown ones.")
    return table


def concatenated(blocks: Iterable[Block]) -> Block:
    """One block of several, in their order."""
    rows, ids, meta = zip(*blocks, strict=True)
    return Block(torch.cat(rows), [id_ for part in ids for id_ in part], pa.concat_tables(meta))


def bind(rows: Tensor, facts: Sequence[Mapping[str, Any]], origin: Provenance) -> Block:
    """A block of rows and what is known of each (`META` and the further columns), bound by digests to each other."""
    meta = pa.Table.from_pylist(facts, pa.schema([*META, *_further(origin.metadata)]))
    return Block(rows, [fact["sample_id"] for fact in facts], with_digests(origin.identity, meta, rows))


def with_digests(identity: str, meta: pa.Table, rows: Tensor) -> pa.Table:
    """The table with the digests of these rows."""
    column = pa.array(row_digests(identity, meta, rows), pa.string())
    return meta.set_column(meta.schema.get_field_index("digest"), "digest", column)


def _further(names: Iterable[str]) -> list[pa.Field]:
    return [pa.field(*column) for column in metadata.schema(names)]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
