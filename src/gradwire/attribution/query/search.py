"""Search in a merged store by exact similarities to given gradients; the rows are streamed in blocks.

With ``--curvature fisher``, scores are aᵀ H⁻¹ b instead of aᵀ b. H = ΦᵀΦ / n + λ · tr(ΦᵀΦ / n) / D · I for the n
training rows Φ [n, D]: their second moment, damped by λ times its mean diagonal. It is the empirical Fisher matrix in
the projected space: the kernel of Park et al., 2023, "TRAK", section 3, with the gradient of the loss itself. λ = 0.1
of the mean eigenvalue is that of Grosse et al., 2023, for EK-FAC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwire.attribution.store.row_file import BoundRows, RowFile
from gradwire.attribution.store.store import document
from gradwire.base.errors import BadInput
from gradwire.base.files import read_object

BLOCK_BYTES = 1 << 20  # of rows: a block and its float64 copy stay in a core's cache
SINGULAR = 1e-12  # of the trace of H: a smaller pivot is rounding noise in float64
LEAST = 1e-24  # of a squared norm in float32: the squares of smaller entries would be lost
Solve = Callable[[NDArray[np.float64]], NDArray[np.float64]]  # rows [m, D] to H⁻¹ of each


class Near(NamedTuple):
    """A row near to others: its position in the store, its id and its score."""

    position: int
    sample_id: str
    score: float


def identity(wide: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return rows as they are."""
    return wide


def nearest(
    rows: BoundRows, against: NDArray[np.float64], metric: str, count: int, solve: Solve = identity
) -> list[Near]:
    """Find the rows with the highest scores.

    The files have been compared with their checksums, so the search reads rows without verifying each; the rows that it
    returns are verified against their digests.

    Args:
        rows: The rows of a store.
        against: A `target`, [m, D].
        metric: ``cosine`` or ``dot``.
        count: Number of rows to find.
        solve: As for the `target`.

    Raises:
        BadInput: If a row found is not what was collected for its id.
    """
    stored = RowFile(rows.path)
    among = possible(stored, against, metric, count) if solve is identity else None
    scores = scored(stored if among is None else rows.take(among), against, metric, solve)
    best = order_of(scores)[:count]
    positions = (best if among is None else among[best]).tolist()
    rows.take(positions)
    return [Near(place, rows.ids[place], score) for place, score in zip(positions, scores[best].tolist(), strict=True)]


def possible(rows: RowFile, against: NDArray[np.float64], metric: str, count: int) -> NDArray[np.int64] | None:
    """Return the positions, ascending, of the rows that may be among the ``count`` nearest; None for all rows.

    Scores in float32 and bounds on their errors exclude the others: a sum of D products errs by at most D · 2⁻²⁴ of
    the product of the norms (Higham, 2002, section 3.1), and the bound has a margin of 4.

    Args:
        rows: The rows.
        against: The target, [m, D].
        metric: ``cosine`` or ``dot``.
        count: Number of rows to find.
    """
    directions = against.astype(np.float32)
    largest = float(np.linalg.norm(against, axis=1).max())
    scores, squares = np.empty(rows.shape[0], np.float32), np.empty(rows.shape[0], np.float32)
    done = 0
    for block in rows.chunks(block_rows(rows.shape[1])):
        part = slice(done, done + len(block))
        scores[part], squares[part] = (block @ directions.T).max(1), np.einsum("ij,ij->i", block, block)
        done += len(block)
    norms = np.sqrt(squares.astype(np.float64))
    sized = (squares > LEAST) & np.isfinite(squares) & np.isfinite(scores)
    if not LEAST < largest**2 < np.inf or sized.sum() < count:
        return None
    scale = norms[sized] if metric == "cosine" else 1.0
    exact = scores[sized].astype(np.float64) / scale
    error = 4 * rows.shape[1] * 2.0**-24 * largest * norms[sized] / scale
    threshold = np.partition(exact - error, -count)[-count]
    near = ~sized  # whose float32 numbers say nothing
    near[sized] = exact + error >= threshold
    return np.flatnonzero(near)


def groups_of(over: str, count: int) -> NDArray[np.int64]:
    """Return the group of each of ``count`` rows: one for all of them (``mean``), or one for each (``max``)."""
    return np.arange(count) if over == "max" else np.zeros(count, np.int64)


def grouped(over: str, ids: Sequence[str], file: Path | None) -> tuple[list[str], NDArray[np.int64]]:
    """Return the subtasks, ascending, and the group of each validation sample; without subtasks there are no names.

    The subtask of a sample is its document's entry in ``file``, or its document's id up to the last slash.

    Raises:
        BadInput: If the file is invalid, or a sample has no subtask.
    """
    if over != "subtask":
        return [], groups_of(over, len(ids))
    known = None if file is None else read_object(file)
    of_samples = []
    for id_ in ids:
        name = document(id_).rpartition("/")[0] if known is None else known.get(id_, known.get(document(id_)))
        if not isinstance(name, str) or not name:
            where = (
                f"{file} has no subtask (a string)" if file else "--over subtask: no slash ends the subtask in the id"
            )
            raise BadInput(f"{where} of the validation sample {id_!r}{'' if file else ': pass --subtasks FILE'}.")
        of_samples.append(name)
    names, groups = np.unique(np.array(of_samples, dtype=object), return_inverse=True)
    return names.tolist(), groups.astype(np.int64)


def target(
    rows: RowFile | NDArray[np.float32], metric: str, groups: NDArray[np.int64], solve: Solve = identity
) -> NDArray[np.float64]:
    """Return what rows are scored against: the mean of each group of the given rows, [groups, D].

    For ``cosine`` their directions are taken instead; a zero row has none and counts as zero. The mean of inner
    products is the inner product with the mean. With a `solver`, products and norms are those under H⁻¹.

    Args:
        rows: The rows, [m, D].
        metric: ``cosine`` or ``dot``.
        groups: The group of each row, [m], numbered from 0; each has a row.
        solve: Applies H⁻¹.
    """
    counts = np.bincount(groups)
    sums, done = np.zeros((len(counts), rows.shape[1])), 0
    for wide in _wide(rows):
        of_block = groups[done : done + len(wide)]
        order = np.argsort(of_block, kind="stable")
        present, first = np.unique(of_block[order], return_index=True)
        sums[present] += np.add.reduceat(_solved(wide, metric, solve)[order], first)
        done += len(wide)
    return sums / counts[:, None]


def scored(
    rows: RowFile | NDArray[np.float32], against: NDArray[np.float64], metric: str, solve: Solve = identity
) -> NDArray[np.float64]:
    """Score each row by its largest similarity to the rows of a `target`, in float64: [n]; zero rows score 0."""
    return np.concatenate([block.max(1) for block in similarities(rows, against, metric, solve)])


def similarities(
    rows: RowFile | NDArray[np.float32],
    against: NDArray[np.float64],
    metric: str,
    solve: Solve = identity,
    at_once: int | None = None,
) -> Iterator[NDArray[np.float64]]:
    """Yield the similarities of blocks of rows to each row of a `target`, in float64: [block, m].

    Args:
        rows: The rows.
        against: The target, [m, D].
        metric: As for the target.
        solve: As for the target.
        at_once: Rows per block; None for as many as `BLOCK_BYTES` hold.
    """
    for wide in _wide(rows, at_once):
        products = wide @ against.T
        yield products / _norms(wide, solve(wide))[:, None] if metric == "cosine" else products


def order_of(scores: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return positions by descending score; equal scores in the order of the data."""
    return np.argsort(-scores, kind="stable")


def _solved(wide: NDArray[np.float64], metric: str, solve: Solve) -> NDArray[np.float64]:
    """Apply H⁻¹ to rows, for ``cosine`` scaled to norm 1 under it; zero rows stay zero."""
    solved = solve(wide)
    return solved / _norms(wide, solved)[:, None] if metric == "cosine" else solved


def _norms(wide: NDArray[np.float64], solved: NDArray[np.float64]) -> NDArray[np.float64]:
    """The rows' norms under H⁻¹; 1 for zero rows."""
    norms = np.sqrt(np.einsum("ij,ij->i", wide, solved).clip(min=0))
    return np.where(norms == 0, 1, norms)


def block_rows(width: int) -> int:
    """The number of rows of ``width`` numbers in a block."""
    return max(1, BLOCK_BYTES // (4 * width))


def _wide(rows: RowFile | NDArray[np.float32], at_once: int | None = None) -> Iterator[NDArray[np.float64]]:
    if not isinstance(rows, RowFile):
        yield rows.astype(np.float64)
        return
    for block in rows.chunks(at_once or block_rows(rows.shape[1])):
        yield block.astype(np.float64)


def solver(rows: RowFile, damping: float | None) -> Solve:
    """Return the function that applies H⁻¹ to rows, in float64; `identity` if ``damping`` is None.

    Takes the memory of three matrices [d, d], d = min(n, D): with fewer rows than columns, H⁻¹ is computed from their
    products, H⁻¹x = (x − Φᵀ(ΦΦᵀ + n c I)⁻¹Φx) / c, c the damping times the mean diagonal.

    Args:
        rows: The training rows.
        damping: λ.

    Raises:
        BadInput: If H is singular.
    """
    if damping is None:
        return identity
    from scipy.linalg import cho_solve

    count, dim = rows.shape
    if dim <= count:
        moment = _moment(rows)
        factor = _cholesky(rows, moment, damping * np.trace(moment) / dim, damping)
        return lambda wide: cho_solve(factor, wide.T).T
    wide_rows = rows.read(0, count).astype(np.float64)
    kernel = wide_rows @ wide_rows.T
    shift = damping * np.trace(kernel) / dim
    factor = _cholesky(rows, kernel, shift, damping, least=shift)
    return lambda wide: (wide - cho_solve(factor, wide_rows @ wide.T).T @ wide_rows) * (count / shift)


def _moment(rows: RowFile) -> NDArray[np.float64]:
    """Return ΦᵀΦ / n, [D, D], from blocks of D rows."""
    moment = np.zeros((rows.shape[1], rows.shape[1]))
    for block in rows.chunks(rows.shape[1]):
        wide = block.astype(np.float64)
        moment += wide.T @ wide
    return moment / rows.shape[0]


def _cholesky(
    rows: RowFile, matrix: NDArray[np.float64], shift: float, damping: float, least: float = np.inf
) -> tuple[NDArray[np.float64], bool]:
    """Factorise ``matrix + shift · I``, of which ``least`` bounds the smallest eigenvalue where it has none.

    Raises:
        BadInput: If it is singular.
    """
    from scipy.linalg import LinAlgError, cho_factor

    trace = np.trace(matrix)
    matrix[np.diag_indices_from(matrix)] += shift
    try:
        factor = cho_factor(matrix, lower=True)
        smallest = min(float(np.diag(factor[0]).min()) ** 2, least)
    except (LinAlgError, ValueError):
        smallest = 0.0
    if not smallest > SINGULAR * trace:
        raise BadInput(
            f"the second moment of the rows in {rows.path} is singular with --damping {damping:g}: use a larger "
            "--damping, or rows that are not all zero."
        )
    return factor
