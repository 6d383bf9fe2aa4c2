"""Exact search against NumPy's float64 where float32 alone would err, and checksums that are compared once."""

from __future__ import annotations

import os

import numpy as np
import pytest

from gradwire.attribution.query import search
from gradwire.attribution.query.gradient_store import GradientStore
from gradwire.attribution.store import provenance
from gradwire.attribution.store.row_file import RowFile
from gradwire.base.errors import BadInput

ROWS, DIM, NEAR = 1501, 48, 9


def stored(path, rows):
    """Write a store of these rows, of samples ``s0``, ``s1``, …"""
    with GradientStore.create(path) as writer:
        writer.append(rows, [f"s{row}" for row in range(len(rows))])
    return path


def drawn(seed):
    """Rows around 60 directions, of lengths from 0.5 to 3; row 5 is zero."""
    random = np.random.default_rng(seed)
    centres = random.standard_normal((60, DIM))[random.integers(60, size=ROWS)]
    rows = (random.uniform(0.5, 3, (ROWS, 1)) * (centres + 0.5 * random.standard_normal((ROWS, DIM)))).astype("f4")
    rows[5] = 0
    return rows


def by_hand(rows, at, metric):
    wide = rows.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1)
    scale = np.where(lengths == 0, 1, lengths) if metric == "cosine" else np.ones(len(rows))
    return wide @ wide[at] / scale / scale[at]


def close(rows):
    """Rows that float32 products cannot tell apart."""
    return (rows[7] + 1e-7 * np.random.default_rng(3).standard_normal(rows.shape)).astype("f4")


def mixed(rows):
    """Rows of sizes that float32 cannot square, between others."""
    scaled = rows.copy()
    scaled[::3] *= np.float32(1e-25)
    scaled[1::3] *= np.float32(1e25)
    return scaled


CASES = {"usual": lambda rows: rows, "close": close, "mixed": mixed, "tiny": lambda rows: rows * np.float32(1e-25)}


@pytest.mark.parametrize("metric", ["cosine", "dot"])
@pytest.mark.parametrize("case", CASES)
def test_a_search_by_float32_finds_what_float64_does(tmp_path, case, metric):
    rows = CASES[case](drawn(11))
    merged = GradientStore(stored(tmp_path / "dim48", rows))
    place = 7 if case != "mixed" else 3
    against = search.target(rows[[place]], metric, np.zeros(1, np.int64))
    found = search.nearest(merged.rows, against, metric, NEAR)
    exact = by_hand(rows, place, metric)
    best = np.argsort(-exact, kind="stable")[:NEAR]
    np.testing.assert_allclose([hit.score for hit in found], exact[best], rtol=1e-12)
    if case != "close":
        assert [hit.position for hit in found] == best.tolist()
    possible = search.possible(RowFile(merged.rows.names.rows), against, metric, NEAR)
    assert case != "usual" or NEAR <= len(possible) < ROWS / 10
    assert possible is None or set(best) <= set(possible)


def test_every_row_of_a_small_store_is_possible(tmp_path):
    merged = GradientStore(stored(tmp_path / "dim48", drawn(5)[:3]))
    assert len(search.nearest(merged.rows, np.ones((1, DIM)), "cosine", 7)) == 3


def test_checksums_are_compared_once_until_a_file_changes(tmp_path, monkeypatch):
    path = stored(tmp_path / "dim48", drawn(2))
    read, sha256_file = [], provenance.sha256_file
    monkeypatch.setattr(provenance, "sha256_file", lambda file: read.append(file.name) or sha256_file(file))
    GradientStore(path).check()
    GradientStore(path).check()
    assert len(read) == 6 and not (path / "checked.json").exists(), "too new to be remembered"
    for name in provenance.FILES:
        os.utime(path / name, (1e9, 1e9))
    GradientStore(path).check()
    read.clear()
    GradientStore(path).check()
    assert read == []
    assert provenance.differing(path, provenance.read_manifest(path)) == [] and len(read) == 3
    with (path / "all_orig.pt").open("r+b") as stream:
        stream.seek(5000)
        stream.write(b"\x01\x02")
    read.clear()
    with pytest.raises(BadInput, match=r"all_orig\.pt does not match .*manifest\.json"):
        GradientStore(path).check()
    assert read == ["all_orig.pt"]
    (path / "checked.json").write_text("{")
    with pytest.raises(BadInput, match="checked"):
        GradientStore(path).check()
