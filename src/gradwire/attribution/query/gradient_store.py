"""Gradient stores in Python: ``GradientStore`` opens, reads, searches and writes them.

The commands that read merged rows are layers on this class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from gradwire.attribution.options import Count, Metric, Over, Projection, RowType
from gradwire.attribution.query import search
from gradwire.attribution.query.documents import Contents
from gradwire.attribution.query.search import Near, Solve
from gradwire.attribution.store import provenance, store
from gradwire.attribution.store.provenance import Seed
from gradwire.attribution.store.row_file import BoundRows, RowFile
from gradwire.attribution.store.row_writer import RowWriter, matrix
from gradwire.base.errors import BadInput
from gradwire.base.files import atomic_folder, atomic_write
from gradwire.base.flags import NOT_NEGATIVE
from gradwire.base.strict import checked_arguments

# Fields that are equal for training and validation.
SAME = ("model_digest", "lora", "of_modules", "dim", "projection", "seed", "fingerprint", "loss")
SAME_STEP = ("adam_variant", "optimizer_digest")  # if both are of type adam, or both of ekfac
Checked = "checked"  # of an argument, by `checked_arguments`


class GradientStore:
    """A store of gradient rows, each bound to the id of its sample: the ``dim<D>/`` folder of ``grads aggregate``, or
    what `create` wrote.

    Opening reads the manifest alone, ids and table are read when they are first used, and of the rows those that are
    asked for. Each is verified against its digest.

    ``store[i]`` is a row, float32 [D]; ``store[i:j]`` and ``store[[3, 1]]`` are rows [n, D]; ``for id, row in store``
    goes through all of them.

    Args:
        path: The folder.

    Attributes:
        path: The folder.
        manifest: What the rows were made from.

    Raises:
        BadInput: If the folder is not a merged store; on reading, if a file is damaged or a row is not what was written
            for its id.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not (self.path / provenance.MANIFEST).is_file() or not store.all_names(self.path).exist():
            raise BadInput(f"{path} is not a merged store: run `gradwire grads aggregate` and pass its dim<N> folder.")
        self.manifest = provenance.read_manifest(self.path)
        self._solvers: dict[float | None, Solve] = {}

    @cached_property
    def rows(self) -> BoundRows:
        """The files of the rows."""
        return BoundRows(store.all_names(self.path), self.manifest.dim, self.manifest)

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows, and D."""
        return self.rows.shape

    @property
    def ids(self) -> list[str]:
        """The ids of the rows."""
        return self.rows.ids

    @property
    def meta(self) -> pa.Table:
        """The table of the rows: id, loss, number of targets, norm before projection, flag, digest."""
        return self.rows.meta

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int | slice | Sequence[int] | NDArray[Any]) -> NDArray[np.float32]:
        chosen = self._places[index]
        if not chosen.size:
            return np.empty((0, self.shape[1]), np.float32)
        rows = self.rows.take(np.atleast_1d(chosen))
        return rows if chosen.ndim else rows[0]

    def __iter__(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        for ids, rows in self.chunks():
            yield from zip(ids, rows, strict=True)

    def row(self, sample_id: str) -> NDArray[np.float32]:
        """Return the row [D] with an id.

        Raises:
            BadInput: If there is none.
        """
        if sample_id not in self._place_of:
            raise BadInput(f"{self.path} has no sample {sample_id!r}; its ids begin {self.ids[:3]}.")
        return self[self._place_of[sample_id]]

    def chunks(self, rows: int | None = None) -> Iterator[tuple[list[str], NDArray[np.float32]]]:
        """Yield ids and rows [n, D], at most ``rows`` at a time; None for as many as a megabyte holds."""
        step = rows or search.block_rows(self.shape[1])
        for first in range(0, len(self), step):
            last = min(first + step, len(self))
            yield self.ids[first:last], self.rows.read(first, last)

    def check(self) -> None:
        """Compare the files with the manifest's checksums; files with the size and time of an earlier check are not
        read again.

        Raises:
            BadInput: If one differs or is damaged.
        """
        if wrong := provenance.differing_since(self.path, self.manifest):
            raise BadInput(f"{wrong[0]}; run `gradwire grads aggregate` again.")
        _ = self.rows

    def validate(self) -> None:
        """Read all rows, and check what `grads validate` checks of a merged store by itself: files, counts, digests,
        norms and checksums. The command compares ids with the data, and rows with those of the ranks, too.

        Raises:
            CheckFailed: If a check fails, with the affected files.
        """
        from gradwire.attribution.store.checks import Audit, conclude

        audit = Audit(self.manifest)
        audit.merged(store.all_names(self.path), self.manifest.dim, {})
        conclude([check.report() for check in audit.checks], self.path)

    @checked_arguments
    def nearest(
        self,
        rows: Any,
        k: Count = 10,
        *,
        metric: Annotated[Metric, Checked] = "cosine",
        over: Annotated[Over, Checked] = "mean",
        damping: Annotated[float, NOT_NEGATIVE] | None = None,
    ) -> list[Near]:
        """Find the rows with the highest scores, best first; the search is exact, in float64.

        Args:
            rows: The query, [m, D] or [D], of NumPy or torch.
            k: The number of rows to find.
            metric: ``cosine`` or ``dot``.
            over: A row's score is the mean of its similarities to the rows of the query, or their maximum.
            damping: Take products and norms under the inverse second moment of this store's rows, damped by this number
                of times its mean diagonal, as with ``--curvature fisher``; None for plain ones.

        Returns:
            Position, id and score of each.

        Raises:
            BadInput: If the query is not finite or of another width, or a file is not what the manifest says.
        """
        query = matrix(rows, self.manifest.dim)
        self.check()
        solve = self.solver(damping)
        against = search.target(query, metric, search.groups_of(over, len(query)), solve)
        return search.nearest(self.rows, against, metric, k, solve)

    @checked_arguments
    def select(
        self,
        validation: GradientStore,
        k: Count = 100,
        *,
        metric: Annotated[Metric, Checked] = "cosine",
        over: Annotated[Literal["mean", "max", "subtask"], Checked] = "mean",
        subtasks: Path | None = None,
        damping: Annotated[float, NOT_NEGATIVE] | None = None,
        corpus: Path | None = None,
    ) -> list[Near]:
        """Select rows for the samples of a validation store, as ``grads influence`` does for one checkpoint.

        Args:
            validation: A store of rows made in the same way.
            k: The number of rows to select.
            metric: As in `nearest`.
            over: As in `nearest`, or ``subtask``: the maximum over subtasks of the mean within each.
            subtasks: A JSON object of the validation documents' subtasks by id; None for an id up to its last slash.
            damping: As in `nearest`.
            corpus: The corpus of this store, to pass over exact duplicates.

        Returns:
            Position, id and score of each, best first.

        Raises:
            BadInput: If the rows of the two stores cannot be compared, or a subtask or a document is missing.
        """
        self.check()
        validation.check()
        self.check_alike(validation)
        _, groups = search.grouped(over, validation.sample_ids, subtasks)
        blocks = weighted([(self, validation)], [1.0], groups, metric, damping)
        scores = np.concatenate([*blocks]).max(1)
        best, _ = self.without_repeats(search.order_of(scores), k, corpus)
        return [Near(position, self.ids[position], float(scores[position])) for position in best]

    def check_alike(self, validation: GradientStore) -> None:
        """Check that rows can be compared with those of another store.

        Raises:
            BadInput: If their projections or models differ, or one alone is of type ekfac.
        """
        kinds = {self.manifest.grad_type, validation.manifest.grad_type}
        both = f"{self.path} and {validation.path}"
        if "ekfac" in kinds and len(kinds) > 1:  # each side has the root of the inverse curvature
            raise BadInput(
                f"{both} differ in grad_type: of {' and '.join(sorted(kinds))}, collect both with --grad_type ekfac, "
                "or neither."
            )
        stepped = kinds in ({"adam"}, {"ekfac"})
        formats = {store.manifest.chat_format for store in (self, validation) if store.manifest.chat_format}
        if len(formats) > 1:
            raise BadInput(
                f"{both} have chats in different formats, {' and '.join(sorted(formats))}: collect both with one "
                "--chat_format."
            )
        for field in (*SAME, *(SAME_STEP if stepped else ())):
            if getattr(self.manifest, field) != getattr(validation.manifest, field):
                raise BadInput(f"{both} differ in {field}: their gradients cannot be compared.")

    def without_repeats(self, order: NDArray[np.int64], count: int, corpus: Path | None) -> tuple[list[int], int]:
        """Return the first ``count`` positions of an order, and how many were passed over.

        Those are passed over that repeat the content of one before; without a corpus, contents are not known.
        """
        if corpus is None:
            return order[:count].tolist(), 0
        rows = ((self.ids[place], self.sample_ids[place]) for place in order)
        places, repeated = Contents(corpus).unrepeated(rows, count)
        return order[places].tolist(), repeated

    def solver(self, damping: float | None) -> Solve:
        """Return the function that applies the inverse second moment of the rows, damped: `search.solver`."""
        if damping not in self._solvers:
            self._solvers[damping] = search.solver(RowFile(self.rows.path), damping)
        return self._solvers[damping]

    @cached_property
    def sample_ids(self) -> list[str]:
        """The id of each row's sample, which is not the row's where rows are of tokens or modules."""
        return [self.manifest.sample_id(id_) for id_ in self.ids]

    def to_parquet(self, path: Path | str) -> None:
        """Write ids and float32 rows as the columns ``sample_id`` and ``row`` of a Parquet file, atomically."""
        schema = pa.schema([("sample_id", pa.string()), ("row", pa.list_(pa.float32(), self.shape[1]))])
        with atomic_write(Path(path)) as part, pq.ParquetWriter(part, schema) as stream:
            for ids, rows in self.chunks():
                lists = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), self.shape[1])
                stream.write_table(pa.Table.from_arrays([pa.array(ids), lists], schema=schema))

    @staticmethod
    @contextmanager
    @checked_arguments
    def create(
        path: Path | str,
        *,
        row_type: Annotated[RowType, Checked] = "float32",
        projection: Annotated[Projection, Checked] = "none",
        seed: Seed = 0,
        model: str = "",
    ) -> Iterator[RowWriter]:
        """Write a store from a program's own loop: a context manager that gives a `RowWriter`.

        The folder appears whole when the context ends without an error; a killed program leaves nothing that a later
        one would take for a store. Give each rank its folder.

        Args:
            path: The folder, which must not exist.
            row_type: How rows are stored: ``float32``, ``float16``, ``int8``, ``int4`` or ``onebit``.
            projection: The projection of the rows; ``none`` for rows that are gradients themselves.
            seed: Its seed.
            model: A text that says which weights the gradients are of. Stores are compared only if it is the same.

        Raises:
            BadInput: If the path exists, or no row was appended.
        """
        folder = Path(path)
        _check_new(folder)
        with atomic_folder(folder) as part:
            with (part / "appended").open("w+b") as stream:
                about = {"store": row_type, "projection": projection, "seed": seed, "model_digest": model}
                writer = RowWriter(stream, about)
                yield writer
                writer.finish(part)
            (part / "appended").unlink()
            _check_new(folder)  # of another rank

    @cached_property
    def _places(self) -> NDArray[np.int64]:
        return np.arange(len(self))

    @cached_property
    def _place_of(self) -> dict[str, int]:
        return {id_: place for place, id_ in enumerate(self.ids)}


def _check_new(folder: Path) -> None:
    if folder.exists():
        raise BadInput(f"{folder} exists: choose another folder for this store, or delete that one.")


def weighted(
    pairs: Sequence[tuple[GradientStore, GradientStore]],
    weights: Sequence[float],
    groups: NDArray[np.int64],
    metric: str,
    damping: float | None,
) -> Iterator[NDArray[np.float64]]:
    """Yield the scores of blocks of training samples, summed over the checkpoints: [block, groups].

    Args:
        pairs: The training and the validation store of each checkpoint.
        weights: Their weights.
        groups: The group of each validation sample, over which the mean is taken.
        metric: ``cosine`` or ``dot``.
        damping: Of the curvature; None for none.
    """
    at_once = min(search.block_rows(train.shape[1]) for train, _ in pairs)
    scores = []
    for train, validation in pairs:
        solve = train.solver(damping)
        against = search.target(validation.rows, metric, groups, solve)
        scores.append(search.similarities(train.rows, against, metric, solve, at_once))
    for blocks in zip(*scores, strict=True):
        yield sum((weight * block for weight, block in zip(weights, blocks, strict=True)), start=0.0 * blocks[0])
