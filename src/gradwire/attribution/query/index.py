"""The verb ``grads index``: a FAISS index of a store's rows, for ``grads query --index`` and ``serve --index``.

``index.faiss`` is in the folder of the rows. ``index.json`` binds it to them: it has the digest of the store that the
index was built from, the checksum of the index, and how it was built. FAISS reads the file only after both have been
compared.

| kind | holds | finds |
|:--|:--|:--|
| flat | every row as float32 | what exact search does, except for ties within float32's rounding |
| ivf | every row, in lists around centroids (k-means) | only rows of the lists nearest to the query |
| pq | a few bytes per row, product quantization (Jégou et al., 2011) | rows by approximate scores |

An index only proposes rows: `WIDER` times as many as are asked for, whose exact scores are then computed.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from gradwire.attribution.options import Count, Metric
from gradwire.base.errors import BadInput
from gradwire.base.files import digest, read_object, sha256_file, whole, write_json
from gradwire.base.strict import Strict

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from gradwire.attribution.query.search import Store
    from gradwire.attribution.store.provenance import Manifest
    from gradwire.attribution.store.row_file import RowFile

FILE, NOTE = "index.faiss", "index.json"
WIDER = 10
CENTROIDS = 256  # of a product quantizer: one byte
EACH = 64  # rows per centroid that k-means sees
PROBED = 8  # by default, one of this many lists is searched
CODE = 64  # bytes of a row, by default
BLOCK_BYTES = 1 << 26  # of rows added at once


class Options(Strict):
    """Flags of ``gradwire grads index``."""

    store: Path = Field(description="a merged store (dim<N>/)")
    kind: Literal["flat", "ivf", "pq"] = Field("ivf", description="how rows are held and searched")
    metric: Metric = Field("cosine", description="similarity that it is built for")
    lists: Count | None = Field(None, description="ivf: number of lists (default: the root of the number of rows)")
    probe: Count | None = Field(None, description=f"ivf: lists that a query searches (default: one in {PROBED})")
    bytes: Count | None = Field(None, description=f"pq: bytes per row, a divisor of its columns (default: {CODE})")


def beside(options: Options) -> Path | None:
    """Return the folder of the output."""
    return options.store if options.store.is_dir() else None


def main(options: Options) -> None:
    """Build the index and write it to the folder of the rows.

    Raises:
        BadInput: If FAISS is not installed, the store is invalid, or a flag does not fit the kind or the store.
    """
    from gradwire.attribution.query.search import open_store
    from gradwire.attribution.store.row_file import RowFile

    faiss = library()
    merged = open_store(options.store)
    rows = RowFile(merged.rows.names.rows)
    index = empty(rows.shape, options)
    if not index.is_trained:
        index.train(sample(rows, options.metric, EACH * (index.nlist if options.kind == "ivf" else CENTROIDS)))
    for block in blocks(rows, options.metric):
        index.add(block)
    (options.store / NOTE).unlink(missing_ok=True)
    with whole(options.store / FILE) as part, part.open("wb") as stream:  # FAISS's own file ignores errors at its close
        faiss.write_index(index, faiss.PyCallbackIOWriter(stream.write))
    made = {"kind": options.kind, "metric": options.metric, "store": store_digest(merged.manifest)}
    write_json(options.store / NOTE, {**made, "sha256": sha256_file(options.store / FILE)})
    print(f"{options.kind} index of {rows.shape[0]} rows for {options.metric} in {options.store / FILE}")


def blocks(rows: RowFile, metric: str) -> Iterator[NDArray[np.float32]]:
    """Yield a store's rows as an index takes them, in blocks."""
    for block in rows.chunks(max(1, BLOCK_BYTES // (4 * rows.shape[1]))):
        yield prepared(block, metric)


def sample(rows: RowFile, metric: str, count: int) -> NDArray[np.float32]:
    """Return at most ``count`` of these rows, evenly spaced."""
    import numpy as np

    step = max(1, math.ceil(rows.shape[0] / count))
    return prepared(rows.take(np.arange(0, rows.shape[0], step)), metric)


def prepared(block: NDArray[np.float32], metric: str) -> NDArray[np.float32]:
    """Scale rows to norm 1 for ``cosine``; zero rows stay zero."""
    from gradwire.attribution.store.row_file import normalized

    return normalized(block) if metric == "cosine" else block


def empty(shape: tuple[int, int], options: Options) -> Any:
    """Return an index without rows.

    Raises:
        BadInput: If a flag belongs to another kind, or the store has too few rows or not enough columns for it.
    """
    faiss, (count, dim) = library(), shape
    for flag, kind in (("lists", "ivf"), ("probe", "ivf"), ("bytes", "pq")):
        if getattr(options, flag) is not None and options.kind != kind:
            raise BadInput(f"--{flag} is given for --kind {options.kind}: it belongs to --kind {kind}.")
    if options.kind == "flat":
        return faiss.IndexFlatIP(dim)
    if options.kind == "ivf":
        lists = options.lists or max(1, round(math.sqrt(count)))
        probe = options.probe or math.ceil(lists / PROBED)
        if not probe <= lists <= count:
            raise BadInput(
                f"--lists {lists} and --probe {probe} for {count} rows: at most as many lists as rows, and at most as "
                "many searched as there are."
            )
        quantizer = faiss.IndexFlatIP(dim)
        index = faiss.IndexIVFFlat(quantizer, dim, lists, faiss.METRIC_INNER_PRODUCT)
        index.nprobe, index.cp.min_points_per_centroid = probe, 1  # few rows per list are fine, without a warning
        return index
    size = options.bytes or math.gcd(CODE, dim)
    if dim % size or count < CENTROIDS:
        raise BadInput(
            f"--kind pq with {size} bytes for {count} rows of {dim} columns: it takes at least {CENTROIDS} rows, and "
            "--bytes that divides the columns."
        )
    index = faiss.IndexPQ(dim, size, 8, faiss.METRIC_INNER_PRODUCT)
    index.pq.cp.min_points_per_centroid = 1
    return index


# Why: docs/decisions.md, "An index proposes, the rows decide".
class Index:
    """An index that was read.

    Args:
        merged: The store that it is of.

    Raises:
        BadInput: If FAISS or the index is missing, or the index is damaged or belongs to other rows.
    """

    def __init__(self, merged: Store) -> None:
        faiss = library()
        file, note = merged.path / FILE, merged.path / NOTE
        again = f"run `gradwire grads index --store {merged.path}`"
        if not (file.is_file() and note.is_file()):
            raise BadInput(f"{merged.path} has no complete index: {again}.")
        made = read_object(note)
        if made.get("store") != store_digest(merged.manifest):
            raise BadInput(f"{file} was built from other rows than those of its folder: {again} again.")
        if made.get("sha256") != sha256_file(file):
            raise BadInput(f"{file} is damaged: its SHA-256 differs from that in {note}; {again} again.")
        try:
            self._index = faiss.read_index(str(file), faiss.IO_FLAG_MMAP_IFC)
        except (RuntimeError, MemoryError) as error:
            raise BadInput(f"{file} cannot be read by this version of FAISS: {again} again.") from error
        self.kind, self.metric, self._file = made.get("kind"), made.get("metric"), file
        if (self._index.ntotal, self._index.d) != merged.rows.shape:
            raise BadInput(f"{file} does not have the rows of its folder: {again} again.")

    def near(self, against: NDArray[np.float64], metric: str, count: int) -> NDArray[np.int64] | None:
        """Return the positions, ascending, of rows that may be among the ``count`` nearest; None for all rows.

        Args:
            against: A `search.target`, [m, D]; each of its rows proposes separate rows.
            metric: ``cosine`` or ``dot``.
            count: Number of rows to find.

        Raises:
            BadInput: If the index was built for another metric, or proposes no row or one that the store does not have.
        """
        import numpy as np

        if metric != self.metric:
            raise BadInput(f"{self._file} is for {self.metric}, not {metric}: ask for {self.metric}, or index again.")
        if WIDER * count >= self._index.ntotal:
            return None
        norms = np.linalg.norm(against, axis=1, keepdims=True)  # which float32 might not hold
        directions = (against / np.where(norms == 0, 1, norms)).astype(np.float32)
        _, positions = self._index.search(directions, WIDER * count)
        proposed = np.unique(positions[positions >= 0])
        if not len(proposed):
            raise BadInput(f"{self._file}: the searched lists have no rows; index again with a larger --probe.")
        if proposed[-1] >= self._index.ntotal:
            raise BadInput(f"{self._file} has rows that the store does not have, such as {proposed[-1]}: index again.")
        return proposed


def store_digest(made: Manifest) -> str:
    """Return the digest of a store's rows, ids and metadata."""
    from gradwire.attribution.store.provenance import FILES

    return digest({name: made.sha256[name] for name in FILES}, length=64)


def library() -> Any:
    """Return the module ``faiss``.

    Raises:
        BadInput: If it is not installed.
    """
    try:
        import faiss
    except ImportError:
        raise BadInput("an index needs FAISS: pip install 'gradwire[faiss]'.") from None
    return faiss
