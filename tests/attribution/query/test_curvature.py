"""Scores under the second moment of a store's rows, against dense matrices in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradwire.attribution.query.search import groups_of, scored, solver, target
from gradwire.attribution.store.row_file import RowFile
from gradwire.base.errors import BadInput


def written(path, rows):
    torch.save(torch.from_numpy(rows), path)
    return RowFile(path)


def dense(train, queries, damping, metric):
    """Scores [n, m] by the inverse of the whole matrix."""
    one, other = train.astype(np.float64), queries.astype(np.float64)
    moment = one.T @ one / len(one)
    inverse = np.linalg.inv(moment + damping * np.diag(moment).mean() * np.eye(len(moment)))
    found = one @ inverse @ other.T
    if metric == "cosine":
        sizes = [np.sqrt(np.diag(rows @ inverse @ rows.T)) for rows in (one, other)]
        found = found / np.where(sizes[0] == 0, 1, sizes[0])[:, None] / sizes[1]
    return found


@pytest.mark.parametrize("count", [41, 11, 5])  # of 11 columns; the last in the form of the rows' products
@pytest.mark.parametrize("metric", ["dot", "cosine"])
@pytest.mark.parametrize("over", ["mean", "max"])
def test_scores_are_those_of_the_dense_inverse(tmp_path, count, metric, over):
    random = np.random.default_rng(count)
    rows = (random.standard_normal((count, 11)) * np.arange(1, 12)).astype(np.float32)
    rows[2] = 0
    queries = random.standard_normal((3, 11)).astype(np.float32)
    train = written(tmp_path / "rows.pt", rows)
    solve = solver(train, 0.3)
    groups = groups_of(over, 3)
    found = scored(train, target(queries, metric, groups, solve), metric, solve)
    np.testing.assert_allclose(found, getattr(dense(rows, queries, 0.3, metric), over)(1), rtol=1e-9, atol=1e-12)
    plain = scored(train, target(queries, metric, groups), metric)
    assert np.abs(plain - found).max() > 0.1 * np.abs(plain).max() and found[2] == 0


def test_a_singular_moment_is_refused(tmp_path):
    rows = np.random.default_rng(0).standard_normal((30, 6)).astype(np.float32)
    assert np.isfinite(solver(written(tmp_path / "full.pt", rows), 0.0)(np.ones((1, 6)))).all()
    few, flat, zero = rows[:4], np.tile(rows[:, :1], 6), np.zeros_like(rows)
    for name, each, damping in (("few", few, 0.0), ("few", few, 1e-13), ("flat", flat, 0.0), ("zero", zero, 0.1)):
        with pytest.raises(BadInput, match=rf"{name}.pt is singular with --damping {damping:g}: use a larger"):
            solver(written(tmp_path / f"{name}.pt", each), damping)
