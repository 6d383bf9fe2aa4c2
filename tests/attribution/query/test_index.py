"""Indices of a store: exact scores of the rows that they propose, recall against NumPy, and what is refused."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import get_args

import full_disk
import numpy as np
import pytest
import torch
from changed_store import copied, edit
from test_query import refused

from gradwire import cli
from gradwire.attribution.options import Metric
from gradwire.attribution.query import index, search, serve
from gradwire.attribution.query.searcher import Searcher
from gradwire.attribution.store import provenance, store
from gradwire.attribution.store.provenance import FORMAT, Provenance
from gradwire.base.errors import BadInput
from gradwire.base.files import sha256_file

ROWS, DIM = 1501, 48
KINDS = [("flat", []), ("ivf", ["--lists", 37, "--probe", 9]), ("pq", ["--bytes", 24])]


def stored(path, rows):
    """Write a merged store of these rows, of samples ``s0``, ``s1``, …"""
    words = dict.fromkeys(("source", "model_dir", "model_digest", "data_digest"), "")
    about = {"split": "train", "samples": len(rows), "world_size": 1, "dims": [DIM], "grad_type": "sgd", "loss": "mean"}
    made_by = {"method": "loop", "projection": "normal", "seed": 0, "save_interval": len(rows), "data_path": "none"}
    origin = Provenance(format=FORMAT, **words, **about, **made_by)
    columns = {"loss": 1.0, "n_targets": 1, "norm": 1.0, "flag": None}
    names = store.all_names(path)
    path.mkdir(parents=True)
    block = store.bind(
        torch.from_numpy(rows), [{"sample_id": f"s{row}", **columns} for row in range(len(rows))], origin
    )
    store.write(names, block)
    counts = {"dim": DIM, "order": "as in the data", "rows": len(rows), "duplicates": 0, "duplicates_deviation": 0.0}
    sums = {file.name: sha256_file(file) for file in names}
    provenance.write_manifest(path, provenance.Manifest(**origin.model_dump(), **counts, sha256=sums))
    return path


def drawn(seed):
    """Rows around 60 directions, of lengths from 0.5 to 3; row 5 is zero."""
    random = np.random.default_rng(seed)
    centres = random.standard_normal((60, DIM))[random.integers(60, size=ROWS)]
    rows = (random.uniform(0.5, 3, (ROWS, 1)) * (centres + 0.5 * random.standard_normal((ROWS, DIM)))).astype("f4")
    rows[5] = 0
    return rows


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    rows = drawn(7)
    return rows, stored(tmp_path_factory.mktemp("index") / "dim48", rows)


def build(path, kind, metric, *more):
    pytest.importorskip("faiss")
    return cli.main(["grads", "index", *map(str, ["--store", path, "--kind", kind, "--metric", metric, *more])])


def by_hand(rows, at, metric):
    wide = rows.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1)
    scale = np.where(lengths == 0, 1, lengths) if metric == "cosine" else np.ones(len(rows))
    return wide @ wide[at] / scale / scale[at]


@pytest.mark.parametrize("metric", get_args(Metric))
@pytest.mark.parametrize(("kind", "more"), KINDS)
def test_scores_are_exact_and_few_samples_are_missed(made, capsys, kind, more, metric):
    rows, path = made
    assert build(path, kind, metric, *more) == 0
    shares = []
    for at in (0, 11, 403, 1500):
        capsys.readouterr()
        words = [
            "--store",
            str(path),
            "--sample_id",
            f"s{at}",
            "--metric",
            metric,
            "--top_k",
            "20",
            "--index",
            "--json",
        ]
        assert cli.main(["grads", "query", *words]) == 0
        answer = json.loads(capsys.readouterr().out)
        scores = by_hand(rows, at, metric)
        places = [int(one["sample_id"][1:]) for one in answer["top"]]
        assert [one["score"] for one in answer["top"]] == pytest.approx(scores[places].tolist(), rel=1e-9)
        assert all(one["score"] >= other["score"] for one, other in pairwise(answer["top"]))
        assert answer["index"] == kind and len(places) == 20
        shares.append(len({*places} & {*np.argsort(-scores)[:20].tolist()}) / 20)
    assert np.mean(shares) >= (1 if kind == "flat" else 0.8)


@pytest.mark.parametrize(("kind", "more"), KINDS)
def test_several_rows_of_a_query_each_propose(made, kind, more):
    """With ``--over max`` a sample near to one of them is found, which is not near to their mean."""
    rows, path = made
    assert build(path, kind, "cosine", *more) == 0
    found = search.open_store(path)
    against = search.target(rows[[3, 700, 1499]], "cosine", search.groups_of("max", 3))
    among = index.Index(found).near(against, "cosine", 9)
    assert {3, 700, 1499} <= {*among.tolist()} and (np.diff(among) > 0).all()
    best = {one.position for one in search.nearest(found, against, "cosine", 9, among=among)}
    assert {3, 700, 1499} <= best and len(best) == 9


def test_many_samples_are_searched_exactly(made):
    rows, path = made
    assert build(path, "ivf", "dot", "--probe", 1) == 0
    found = search.open_store(path)
    assert index.Index(found).near(search.target(rows[:1], "dot", search.groups_of("mean", 1)), "dot", 200) is None


def test_lists_without_rows_are_not_an_empty_answer(made):
    rows, path = made
    assert build(path, "ivf", "dot", "--probe", 1) == 0
    found = index.Index(search.open_store(path))

    def nothing(asked, count):
        return None, np.full((len(asked), count), -1)  # as FAISS says it

    found._index = SimpleNamespace(ntotal=ROWS, search=nothing)
    with pytest.raises(BadInput, match="have no rows; index again with a larger --probe"):
        found.near(search.target(rows[:1], "dot", search.groups_of("mean", 1)), "dot", 3)


def test_an_index_that_does_not_fit_is_refused(made, tmp_path, capsys):
    path = copied(made[1], tmp_path / "dim48")
    asked = ["--sample_id", "s3", "--index"]
    (path / index.NOTE).unlink(missing_ok=True)
    assert build(path, "flat", "cosine") == 0
    assert "is for cosine, not dot" in refused(capsys, path, *asked, "--metric", "dot")
    assert "--index is given with --curvature" in refused(capsys, path, *asked, "--curvature", "fisher")
    whole = (path / index.FILE).read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", whole[:1000] + b"\1" + whole[1001:]):
        (path / index.FILE).write_bytes(damaged)
        assert "is damaged: its SHA-256 differs" in refused(capsys, path, *asked)
    (path / index.FILE).write_bytes(b"not an index")
    edit(path / index.NOTE, sha256=sha256_file(path / index.FILE))
    assert "cannot be read by this version of FAISS" in refused(capsys, path, *asked)
    (path / index.FILE).write_bytes(whole)
    edit(path / index.NOTE, sha256=sha256_file(path / index.FILE))
    assert cli.main(["grads", "query", "--store", str(path), *asked]) == 0
    other = stored(tmp_path / "other", drawn(8))
    for name in (index.FILE, index.NOTE):
        (other / name).write_bytes((path / name).read_bytes())
    assert "was built from other rows" in refused(capsys, other, *asked)
    (path / index.NOTE).write_text("{")
    assert "is not valid JSON" in refused(capsys, path, *asked)
    (path / index.NOTE).unlink()
    assert "has no complete index: run `gradwire grads index --store" in refused(capsys, path, *asked)


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("flat", ["--lists", 3], "--lists is given for --kind flat"),
        ("ivf", ["--bytes", 3], "--bytes is given for --kind ivf"),
        ("ivf", ["--lists", 1502], "--lists 1502 and --probe 188 for 1501 rows"),
        ("ivf", ["--lists", 5, "--probe", 6], "--lists 5 and --probe 6"),
        ("pq", ["--bytes", 7], "with 7 bytes for 1501 rows of 48 columns"),
    ],
)
def test_flags_that_do_not_fit_are_refused(made, tmp_path, capsys, kind, more, message):
    path = copied(made[1], tmp_path / "dim48")
    for name in (index.FILE, index.NOTE):
        (path / name).unlink(missing_ok=True)
    assert build(path, kind, "dot", *more) == 2
    assert message in capsys.readouterr().err
    assert not (path / index.FILE).exists() and not (path / index.NOTE).exists()


@pytest.mark.parametrize("rows", [20, ROWS])
def test_a_full_disk_leaves_no_half_index(made, tmp_path, capsys, rows):
    """No file may grow beyond 1,500 bytes: with few rows the first write that fails is that of closing the file."""
    pytest.importorskip("faiss")
    path = stored(tmp_path / "dim48", made[0][:rows])
    assert build(path, "flat", "cosine") == 0
    (path / index.FILE).unlink()
    capsys.readouterr()
    with full_disk.limited(1500):
        assert build(path, "flat", "dot") == 3
    assert (
        capsys.readouterr().err.strip()
        == f"gradwire grads index: {path / index.FILE} cannot be written: File too large."
    )
    assert not [*path.glob(f"{index.FILE}*")] and not (path / index.NOTE).exists()


@pytest.mark.parametrize("forged", [ROWS, 10**9, 2**62])
def test_ids_that_the_store_does_not_have_are_refused(made, tmp_path, capsys, forged):
    """An index that was changed and signed again."""
    faiss = pytest.importorskip("faiss")
    path = copied(made[1], tmp_path / "dim48")
    assert build(path, "ivf", "cosine", "--lists", 3, "--probe", 3) == 0
    found = faiss.read_index(str(path / index.FILE))
    other = faiss.IndexIVFFlat(found.quantizer, DIM, 3, faiss.METRIC_INNER_PRODUCT)
    ids = np.arange(ROWS)
    ids[3] = forged  # the query itself
    other.add_with_ids(index.prepared(made[0], "cosine"), ids)
    faiss.write_index(other, str(path / index.FILE))
    edit(path / index.NOTE, sha256=sha256_file(path / index.FILE))
    message = refused(capsys, path, "--sample_id", "s3", "--index", "--metric", "cosine", "--top_k", "3")
    assert f"has rows that the store does not have, such as {forged}: index again." in message


def test_a_missing_library_is_one_message(made, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert cli.main(["grads", "index", "--store", str(made[1]), "--kind", "flat"]) == 2
    assert "an index needs FAISS: pip install 'gradwire[faiss]'." in capsys.readouterr().err
    assert "an index needs FAISS" in refused(capsys, made[1], "--sample_id", "s3", "--index")


def test_the_server_searches_the_index(made):
    assert build(made[1], "ivf", "cosine", "--lists", 37, "--probe", 37) == 0
    searchers = [Searcher(made[1], {}, "cpu", indexed=indexed) for indexed in (True, False)]
    found, exact = (serve.answer(searcher, b'{"sample_id": "s403", "top_k": 7}') for searcher in searchers)
    assert found == exact and found[0]["sample_id"] == "s403"
    with pytest.raises(BadInput, match=r"is for cosine, not dot: ask for cosine, or index again"):
        serve.answer(searchers[0], b'{"sample_id": "s403", "metric": "dot"}')
