"""Writing of stores from a program's own loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gradwire.attribution.store import provenance, row_file, store
from gradwire.attribution.store.provenance import Manifest
from gradwire.base.errors import BadInput
from gradwire.base.files import digest, sha256_file

UNKNOWN = "(a program's own)"  # model and data
STEP_BYTES = 1 << 22  # of rows that are bound at once


class RowWriter:
    """Appends rows to a store that `GradientStore.create` writes."""

    def __init__(self, stream: BinaryIO, about: Mapping[str, Any]) -> None:
        self._stream, self._about, self._dim = stream, about, 0
        self._records: dict[str, dict[str, Any]] = {}  # by id

    def append(self, rows: Any, ids: Sequence[str], norms: Any = None) -> None:
        """Append rows with the ids of their samples.

        Args:
            rows: [n, D], of NumPy or torch.
            ids: n strings that were not appended before.
            norms: The gradients' norms before projection, [n]; None for those of rows without a projection.

        Raises:
            BadInput: If counts or widths differ, norms are missing, an id is no string or was appended before, or a
                number is not finite.
        """
        values = matrix(rows, self._dim or None)
        if norms is None and self._about["projection"] != "none":
            raise BadInput("norms are missing: give the norms of the gradients before their projection.")
        of_rows = np.linalg.norm(values.astype(np.float64), axis=1) if norms is None else matrix(norms)[0]
        if not len(values) == len(ids) == len(of_rows):
            raise BadInput(
                f"{len(values)} rows have {len(ids)} ids and {len(of_rows)} norms: give one of each per row."
            )
        seen = set[str]()
        for id_ in ids:
            if not isinstance(id_, str):
                raise BadInput(f"the id {id_!r} is no string: give `[str(id) for id in ids]`.")
            if id_ in self._records or id_ in seen:
                raise BadInput(f"the id {id_!r} was appended before: a store has one row for each id.")
            seen.add(id_)
        self._dim = values.shape[1]
        self._stream.write(values.data)
        for id_, norm in zip(ids, of_rows.tolist(), strict=True):
            self._records[id_] = {"sample_id": id_, "loss": None, "n_targets": None, "norm": norm, "flag": None}

    def finish(self, folder: Path) -> None:
        """Bind the rows to their ids, and write the files of the store.

        Raises:
            BadInput: If there is no row.
        """
        import torch

        if not self._records:
            raise BadInput("no row was appended, so there is no store.")
        ids, names = [*self._records], store.all_names(folder)
        count, dim = len(ids), self._dim
        origin = provenance.Provenance(
            **self._about,
            **dict.fromkeys(("source", "model_dir", "data_path"), UNKNOWN),
            format=provenance.FORMAT,
            data_digest=digest(ids),
            split="all",
            samples=count,
            world_size=1,
            dims=[dim],
            save_interval=count,
        )
        self._stream.seek(0)
        tables, step = [], max(1, STEP_BYTES // (4 * dim))
        with row_file.tensor_writer(names.rows, (count, dim), origin.store) as writer:
            for first in range(0, count, step):
                chosen = [self._records[id_] for id_ in ids[first : first + step]]
                values = np.fromfile(self._stream, np.float32, len(chosen) * dim).reshape(-1, dim)
                block = store.bind(torch.from_numpy(values), chosen, origin)
                writer.append(block.stored.numpy())
                tables.append(block.meta)
        store.write_metadata(names, pa.concat_tables(tables), ids)
        sums = {file.name: sha256_file(file) for file in names}
        made = Manifest(**origin.model_dump(), dim=dim, order="as appended", rows=count, sha256=sums)
        provenance.write_manifest(folder, made)


def matrix(rows: Any, dim: int | None = None) -> NDArray[np.float32]:
    """Return rows of NumPy or torch as float32 [n, D]; of a vector [D], one row.

    Raises:
        BadInput: If they are no such numbers, not finite, or not of ``dim`` columns.
    """
    given = rows.detach().cpu().float().numpy() if hasattr(rows, "detach") else rows
    try:
        with np.errstate(over="ignore"):
            values = np.ascontiguousarray(np.atleast_2d(given), np.float32)
    except (TypeError, ValueError):
        raise BadInput(f"rows are a matrix of numbers [n, D], got {type(rows).__name__}.") from None
    if values.ndim != 2 or values.shape[1] != (dim or values.shape[1]) or not values.size:
        raise BadInput(f"rows are [n, {dim or 'D'}], got {list(np.shape(given))}.")
    if not np.isfinite(values).all():
        raise BadInput(f"row {int(np.flatnonzero(~np.isfinite(values).all(1))[0])} is not finite.")
    return values
