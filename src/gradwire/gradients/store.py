"""The gradient store: blocks of rows with their ids and facts, each block in three files that appear together.

``rank_<r>/dim<D>/grads-<N>.pt, ids-<N>.pkl, meta-<N>.parquet`` hold what a rank collected since its last block, N being
its samples so far; ``all_orig.pt, all_ids.pkl, all_meta.parquet`` hold a rank's whole work, and beside the ranks'
folders, in ``dim<D>/``, every sample of the data once. Row i belongs to id i, and ``meta`` binds the two by a digest.
"""

from __future__ import annotations

import hashlib
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from gradwire.errors import BadInput
from gradwire.files import whole
from gradwire.gradients import metadata

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


def row_digests(ids: Sequence[str], rows: Tensor) -> list[str]:
    """For each row the SHA-256 of its id (UTF-8) and then its entries (float32, little-endian), in hex."""
    return [
        hashlib.sha256(id_.encode() + row.numpy().tobytes()).hexdigest() for id_, row in zip(ids, rows, strict=True)
    ]


def write(names: Names, block: Block) -> None:
    """Write a block's files, each whole or not at all; the ids come last."""
    with whole(names.rows) as part, part.open("wb") as stream:  # a stream, for a path would name itself in the bytes
        torch.save(block.rows.contiguous(), stream)
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
        BadInput: If the file is missing, damaged or no such tensor.
    """
    try:
        rows = torch.load(path, weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise BadInput(f"{path} cannot be read as a tensor: {_first_line(error)}") from error
    if not isinstance(rows, Tensor) or rows.dtype != torch.float32 or rows.ndim != 2:
        raise BadInput(f"{path} is no float32 matrix.")
    return rows


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
    """Read a table of ``META``'s columns, and perhaps further ones.

    Raises:
        BadInput: If the file is missing, damaged or has other columns.
    """
    try:
        table = pq.ParquetFile(path).read()
    except (OSError, pa.ArrowException) as error:
        raise BadInput(f"{path} cannot be read as Parquet: {_first_line(error)}") from error
    if not set(META).issubset(table.schema):
        raise BadInput(f"{path} has not the columns {', '.join(META.names)}.")
    return table


def concatenated(blocks: Iterable[Block]) -> Block:
    """One block of several, in their order."""
    rows, ids, meta = zip(*blocks, strict=True)
    return Block(torch.cat(rows), [id_ for part in ids for id_ in part], pa.concat_tables(meta))


def bind(rows: Tensor, facts: Sequence[Mapping[str, Any]], further: Sequence[str] = ()) -> Block:
    """A block of rows and what is known of each (`META` and the further columns), bound by digests."""
    ids = [fact["sample_id"] for fact in facts]
    bound = zip(row_digests(ids, rows), facts, strict=True)
    schema = pa.schema([*META, *(pa.field(*column) for column in metadata.schema(further))])
    return Block(rows, ids, pa.Table.from_pylist([{**fact, "digest": digest} for digest, fact in bound], schema))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
