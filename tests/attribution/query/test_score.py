"""`grads score` against gradients of one backward pass each, over ranks, interruptions and other settings."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from gradwire import cli
from gradwire.attribution.collect import ekfac, rows
from gradwire.attribution.persample import loop
from gradwire.attribution.persample.batch import shapes
from gradwire.attribution.query import score
from gradwire.base.files import sha256_file
from gradwire.comm.collectives.world import World
from gradwire.lm.data.batches import collate
from gradwire.lm.data.shards import Shards
from gradwire.lm.models import causal, saved

SAMPLES = 13


@pytest.fixture(scope="module")
def factors(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("factors")
    words = ["--model_dir", small.model, "--data_path", small.shards, "--output_dir", folder]
    assert cli.main(["grads", "factors", *map(str, words)]) == 0
    return folder


def words(small, output, *more):
    given = ["--model_dir", small.model, "--data_path", small.shards, "--max_samples", SAMPLES, "--output_dir", output]
    given += ["--query_path", small.shards, "--query_split", "val", "--save_interval", 4, "--device", "cpu", *more]
    return ["grads", "score", *map(str, given)]


def alone(small, split, count):
    """Gradients by one backward pass each, [count, n]."""
    model, shards = causal.load(small.model), Shards(small.shards, split)
    made = []
    for position in range(count):
        gradient = loop.gradients(model, collate([shards[position]], 0, 1), "mean").gradient
        made.append(torch.cat([values.flatten(1) for values in gradient.values()], 1))
    return torch.cat(made)


def expected(small, grad_type, metric, factors):
    train, queries = alone(small, "train", SAMPLES), alone(small, "val", len(Shards(small.shards, "val")))
    if grad_type == "ekfac":
        model = causal.load(small.model)
        root = ekfac.load(factors, saved.digest(small.model), "mean", shapes(model), torch.device("cpu"))
        train, queries = root(train), root(queries)
    train, queries = train.double(), queries.double()
    if metric == "cosine":
        train, queries = (of / of.norm(dim=1, keepdim=True) for of in (train, queries))
    return (train @ queries.T).numpy()


@pytest.mark.parametrize("metric", ["dot", "cosine"])
@pytest.mark.parametrize("grad_type", ["sgd", "ekfac"])
def test_scores_are_products_of_whole_gradients(small, factors, tmp_path, grad_type, metric):
    chosen = ["--grad_type", grad_type, "--metric", metric]
    if grad_type == "ekfac":
        chosen += ["--optimizer_dir", factors]
    assert cli.main(words(small, tmp_path, *chosen)) == 0
    matrix, wanted = np.load(tmp_path / "matrix.npy"), expected(small, grad_type, metric, factors)
    assert matrix.dtype == np.float32 and matrix.shape == wanted.shape and len(set(wanted.ravel())) == wanted.size
    np.testing.assert_allclose(matrix, wanted, rtol=1e-3, atol=1e-5 * np.abs(wanted).max())
    train, val = (Shards(small.shards, split) for split in ("train", "val"))
    table = pq.read_table(tmp_path / "scores.parquet")
    assert table["sample_id"].to_pylist() == [train[position].sample_id for position in range(SAMPLES)]
    np.testing.assert_allclose(table["score"], matrix.mean(1), rtol=1e-5, atol=1e-6 * np.abs(wanted).max())
    noted = json.loads((tmp_path / "score.json").read_text())
    assert noted["columns"] == [sample.sample_id for sample in val]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["matrix.npy", "score.json", "scores.parquet"]


def test_an_interrupted_call_goes_on_and_other_settings_are_refused(small, tmp_path, monkeypatch, capsys):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    computed, gradients = [], rows.RowMaker.gradients

    def stopping(self, shards, positions, use):
        if len(computed) == 3:  # the queries' gradients, and two of the four files
            raise KeyboardInterrupt
        computed.append(positions)
        return gradients(self, shards, positions, use)

    assert cli.main(words(small, whole)) == 0
    with monkeypatch.context() as patched, pytest.raises(BaseException):  # noqa: B017
        patched.setattr(rows.RowMaker, "gradients", stopping)
        raise SystemExit(cli.main(words(small, broken)))
    assert sorted(path.name for path in (broken / "rank_0").iterdir()) == ["scores-4.npy", "scores-8.npy"]
    assert cli.main(words(small, broken, "--metric", "dot")) == 2
    assert "scores of another metric: 'cosine' there and 'dot' here" in capsys.readouterr().err
    done = (broken / "rank_0/scores-4.npy").stat().st_mtime_ns
    kept = []
    monkeypatch.setattr(
        rows.RowMaker,
        "gradients",
        lambda self, shards, positions, use: kept.append(done) or gradients(self, shards, positions, use),
    )
    assert cli.main(words(small, broken)) == 0
    assert len(kept) == 3
    for name in ("matrix.npy", "scores.parquet"):
        assert sha256_file(broken / name) == sha256_file(whole / name)
    assert cli.main(words(small, broken)) == 0 and len(kept) == 3
    assert cli.main(words(small, broken, "--queries", 1)) == 2
    assert "scores of another queries.samples" in capsys.readouterr().err


def test_a_call_that_failed_before_its_first_score_leaves_the_folder_free(small, factors, tmp_path, capsys):
    of_other_modules = ["--grad_type", "ekfac", "--optimizer_dir", factors, "--modules", "*.mlp.*"]
    assert cli.main(words(small, tmp_path, *of_other_modules)) == 2
    assert cli.main(words(small, tmp_path)) == 0
    assert cli.main(words(small, tmp_path, "--metric", "dot")) == 2
    assert "scores of another metric" in capsys.readouterr().err


def scored_by_a_rank(rank, ranks, group, given):
    score.score_share(score.Options(**given), World(rank, rank, ranks, "gloo", torch.device("cpu")))


def test_two_ranks_give_the_scores_of_one(world, small, tmp_path):
    assert cli.main(words(small, tmp_path / "one", "--metric", "dot")) == 0
    given = {"model_dir": small.model, "data_path": small.shards, "max_samples": SAMPLES, "save_interval": 4}
    given |= {"query_path": small.shards, "query_split": "val", "metric": "dot", "output_dir": tmp_path / "two"}
    world(2).run(scored_by_a_rank, given)
    one, two = (np.load(tmp_path / name / "matrix.npy") for name in ("one", "two"))
    np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-6 * np.abs(one).max())
