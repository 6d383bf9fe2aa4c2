"""Influence scores against NumPy, and the documents that they choose."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from small_model import make

from gradwire import cli
from gradwire.gradients import store


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Two checkpoints' stores of the training and the validation split, and one of another seed."""
    base = tmp_path_factory.mktemp("influence")
    small = make(base)
    found = {}
    for name, split, seed, kind in (
        ("train", "train", 0, "sgd"),
        ("val", "val", 0, "sgd"),
        ("train-sign", "train", 0, "sign"),
        ("val-sign", "val", 0, "sign"),
        ("other", "val", 1, "sgd"),
    ):
        words = ["--model_dir", small.model, "--data_path", small.shards, "--output_path", base / name, "--dim", 32]
        words += ["--split", split, "--seed", seed, "--grad_type", kind, "--projection", "sjlt"]
        assert cli.main(["grads", "collect", *map(str, words)]) == 0
        assert cli.main(["grads", "aggregate", "--base_path", str(base / name), "--dim", "32"]) == 0
        found[name] = base / name / "dim32"
    return small, found


def influence(output, train, validation, *more):
    words = ["--train", *train, "--validation", *validation, "--output_dir", output, *more]
    return cli.main(["grads", "influence", *map(str, words)])


def rows(path):
    return store.read_rows(path / "all_orig.pt").double().numpy()


@pytest.mark.parametrize("metric", ["cosine", "dot"])
@pytest.mark.parametrize("over", ["mean", "max"])
def test_scores_are_the_weighted_similarities(stores, tmp_path, metric, over):
    small, of = stores
    more = ["--weights", "3e-4", "1e-4", "--metric", metric, "--over", over, "--top_k", "4", "--corpus", small.corpus]
    assert influence(tmp_path, [of["train"], of["train-sign"]], [of["val"], of["val-sign"]], *more) == 0
    wanted = 0.0
    for weight, train, val in ((0.75, "train", "val"), (0.25, "train-sign", "val-sign")):
        one, other = rows(of[train]), rows(of[val])
        if metric == "cosine":
            one, other = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (one, other))
        wanted = wanted + weight * getattr(one @ other.T, over)(1)
    table = pq.read_table(tmp_path / "scores.parquet")
    np.testing.assert_allclose(table["score"].to_numpy(), wanted, rtol=1e-9)
    ids = store.read_ids(of["train"] / "all_ids.pkl")
    assert table["sample_id"].to_pylist() == ids
    top = [json.loads(line) for line in (tmp_path / "top.jsonl").read_text().splitlines()]
    assert [line["sample_id"] for line in top] == [ids[at] for at in np.argsort(-wanted)[:4]]
    documents = {one["id"]: one for one in json.loads(small.corpus.read_text())}
    for line in top:
        document = documents[line["sample_id"].split("#")[0]]
        assert (line["title"], line["text"]) == (document["title"], document["text"])


def test_stores_that_do_not_belong_together_are_refused(stores, tmp_path, capsys):
    _, of = stores

    def answer(*args):
        assert influence(tmp_path / "out", *args) == 2
        return capsys.readouterr().err

    assert "differ in seed: their gradients cannot be compared" in answer([of["train"]], [of["other"]])
    assert "give one of each for every checkpoint" in answer([of["train"]], [of["val"], of["val"]])
    assert "learning rates are above 0" in answer([of["train"]], [of["val"]], "--weights", "-1")
    assert "hold other samples" in answer([of["train"], of["val"]], [of["val"], of["val"]])
    assert "is no merged store" in answer([of["train"].parent], [of["val"]])
    (tmp_path / "corpus.json").write_text('[{"id": "x", "text": "y"}]')
    assert "has no document of sample" in answer([of["train"]], [of["val"]], "--corpus", tmp_path / "corpus.json")
    assert not (tmp_path / "out" / "top.jsonl").exists()
