"""Influence scores against NumPy, and the documents that they choose."""

from __future__ import annotations

import json
import shutil

import blocks
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from changed_store import collected, copied, edit, sign

from gradwire import cli
from gradwire.attribution.query import search
from gradwire.attribution.query.search import grouped
from gradwire.attribution.store import store
from gradwire.base.errors import BadInput


@pytest.fixture(scope="module")
def stores(small, tmp_path_factory):
    """Two checkpoints' stores of the training and the validation split, and one of another seed."""
    base = tmp_path_factory.mktemp("influence")
    found = {}
    for name, split, seed, kind in (
        ("train", "train", 0, "sgd"),
        ("val", "val", 0, "sgd"),
        ("train-sign", "train", 0, "sign"),
        ("val-sign", "val", 0, "sign"),
        ("other", "val", 1, "sgd"),
    ):
        words = ["--split", split, "--seed", seed, "--grad_type", kind, "--projection", "sjlt"]
        found[name] = collected(small.model, small.shards, base / name, 32, *words)
    return small, found


def influence(output, train, validation, *more):
    words = ["--train", *train, "--validation", *validation, "--output_dir", output, *more]
    return cli.main(["grads", "influence", *map(str, words)])


def rows(path):
    return blocks.read_rows(path / "all_orig.pt").double().numpy()


@pytest.mark.parametrize("metric", ["cosine", "dot"])
@pytest.mark.parametrize("over", ["mean", "max"])
def test_scores_are_the_weighted_similarities(stores, tmp_path, metric, over):
    small, of = stores
    more = ["--weights", "3e-4", "1e-4", "--metric", metric, "--over", over, "--top_k", "4", "--corpus", small.corpus]
    assert influence(tmp_path, [of["train"], of["train-sign"]], [of["val"], of["val-sign"]], *more) == 0
    wanted = getattr(of_pairs(of, metric), over)(1)
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


def of_pairs(of, metric, val="val"):
    """The scores of all pairs of the two checkpoints, with weights of 3 to 1."""
    wanted = 0.0
    for weight, kind in ((0.75, ""), (0.25, "-sign")):
        one, other = rows(of[f"train{kind}"]), rows(of[f"{val}{kind}"])
        if metric == "cosine":
            one, other = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (one, other))
        wanted = wanted + weight * (one @ other.T)
    return wanted


@pytest.mark.parametrize("metric", ["cosine", "dot"])
@pytest.mark.parametrize("matrix", [False, True])
def test_subtasks_are_the_largest_of_means_over_all_checkpoints(stores, tmp_path, monkeypatch, metric, matrix):
    """As LESS's matching: first the sum over checkpoints, then the mean within a subtask, then the maximum."""
    _, of = stores
    ids = store.read_ids(of["train"] / "all_ids.pkl")
    monkeypatch.setattr(search, "BLOCK_BYTES", 4 * 32 * 5)  # several blocks, of five rows
    documents = list(dict.fromkeys(id_.split("#")[0] for id_ in ids))
    assert len(documents) >= 3
    names = {id_: "even" if at % 3 == 0 else "odd" for at, id_ in enumerate(documents)}
    (tmp_path / "names.json").write_text(json.dumps(names))
    more = ["--weights", "3e-4", "1e-4", "--metric", metric, "--over", "subtask", "--subtasks", tmp_path / "names.json"]
    pairs, group = of_pairs(of, metric, "train"), np.array([names[id_.split("#")[0]] for id_ in ids])
    assert influence(tmp_path, [of["train"], of["train-sign"]], [of["train"], of["train-sign"]], *more, "--top_k", 5,
                     *(["--matrix"] if matrix else [])) == 0  # fmt: skip
    wanted = {name: pairs[:, group == name].mean(1) for name in ("even", "odd")}
    table = pq.read_table(tmp_path / "scores.parquet")
    assert len(set(table["subtask"].to_pylist())) == 2
    for name, scores in wanted.items():
        np.testing.assert_allclose(table[f"subtask:{name}"].to_numpy(), scores, rtol=1e-9, atol=1e-15)
    best = np.maximum(wanted["even"], wanted["odd"])
    np.testing.assert_allclose(table["score"].to_numpy(), best, rtol=1e-9, atol=1e-15)
    of_best = np.where(wanted["even"] >= wanted["odd"], "even", "odd")
    assert table["subtask"].to_pylist() == of_best.tolist()
    top = [json.loads(line) for line in (tmp_path / "top.jsonl").read_text().splitlines()]
    assert [line["subtask"] for line in top] == of_best[np.argsort(-best)[:5]].tolist()
    record = json.loads((tmp_path / "influence.json").read_text())
    assert record["subtasks"] == {name: int((group == name).sum()) for name in ("even", "odd")}
    assert record["columns"] == (ids if matrix else None)
    assert (tmp_path / "matrix.npy").exists() == matrix
    if matrix:
        np.testing.assert_allclose(np.load(tmp_path / "matrix.npy"), pairs, rtol=1e-6, atol=1e-6 * np.abs(pairs).max())


@pytest.mark.parametrize("over", ["mean", "max"])
def test_a_matrix_changes_no_score_and_is_removed_by_a_call_without_it(stores, tmp_path, over):
    _, of = stores
    pairs = ([of["train"], of["train-sign"]], [of["val"], of["val-sign"]], "--over", over)
    assert influence(tmp_path, *pairs, "--matrix") == 0
    matrix = np.load(tmp_path / "matrix.npy").astype(float)
    scores = pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy()
    np.testing.assert_allclose(scores, getattr(matrix, over)(1), rtol=1e-5, atol=1e-7)
    assert influence(tmp_path, *pairs) == 0
    np.testing.assert_allclose(pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy(), scores, rtol=1e-9)
    assert not (tmp_path / "matrix.npy").exists()


def test_subtasks_come_from_ids_or_a_file(tmp_path):
    names, groups = grouped("subtask", ["b/x/1", "a/7#0", "a/7#1", "b/x/2"], None)
    assert names == ["a", "b/x"] and groups.tolist() == [1, 0, 0, 1]
    (tmp_path / "names.json").write_text('{"7": "z", "8#0": "y"}')
    assert grouped("subtask", ["7#1", "8#0"], tmp_path / "names.json")[0] == ["y", "z"]
    for ids, file, message in (
        (["a/1", "2"], None, "no slash ends the subtask in the id of the validation sample '2': pass --subtasks FILE"),
        (["/1"], None, "no slash ends the subtask in the id of the validation sample '/1'"),
        (["7", "9"], tmp_path / "names.json", r"names.json has no subtask \(a string\) of the validation sample '9'"),
        (["7"], tmp_path / "none.json", "none.json"),
    ):
        with pytest.raises(BadInput, match=message):
            grouped("subtask", ids, file)


@pytest.mark.parametrize("metric", ["cosine", "dot"])
def test_curvature_is_of_each_checkpoints_training_rows(stores, tmp_path, metric):
    _, of = stores
    more = ["--metric", metric, "--curvature", "fisher", "--damping", "0.5"]
    assert influence(tmp_path, [of["train"], of["train-sign"]], [of["val"], of["val-sign"]], *more) == 0
    wanted = 0.0
    for train, val in (("train", "val"), ("train-sign", "val-sign")):
        one, other = rows(of[train]), rows(of[val])
        moment = one.T @ one / len(one)
        half = np.linalg.cholesky(np.linalg.inv(moment + 0.5 * np.diag(moment).mean() * np.eye(32)))
        one, other = one @ half, other @ half
        if metric == "cosine":
            one, other = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (one, other))
        wanted = wanted + 0.5 * (one @ other.T).mean(1)
    found = pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-8, atol=1e-10 * np.abs(wanted).max())
    record = json.loads((tmp_path / "influence.json").read_text())
    assert (record["curvature"], record["damping"]) == ("fisher", 0.5)


def test_a_curvature_that_cannot_be_used_is_refused(stores, tmp_path, capsys):
    _, of = stores

    def answer(*args):
        assert influence(tmp_path / "out", [of["train"]], [of["val"]], *args) == 2
        return capsys.readouterr().err

    assert "--damping 0.1 is given without a curvature: add --curvature fisher" in answer("--damping", "0.1")
    assert "is singular with --damping 0: use a larger --damping" in answer("--curvature", "fisher", "--damping", "0")
    assert "--damping is -1.0; it must be at least 0" in answer("--curvature", "fisher", "--damping", "-1")
    assert "Did you mean 'fisher'?" in answer("--curvature", "fischer")
    assert not list((tmp_path / "out").glob("*.parquet"))


def test_exact_duplicates_in_the_corpus_are_passed_over(stores, tmp_path, capsys):
    small, of = stores
    texts = {one["id"]: f"{number % 2}" for number, one in enumerate(json.loads(small.corpus.read_text()))}
    corpus = tmp_path / "corpus.json"
    corpus.write_text(json.dumps([{"id": id_, "title": "", "text": text} for id_, text in texts.items()]))
    assert influence(tmp_path, [of["train"]], [of["val"]], "--corpus", corpus, "--top_k", "5") == 0
    table, wanted, repeated = pq.read_table(tmp_path / "scores.parquet").to_pydict(), {}, 0
    for id_ in [table["sample_id"][at] for at in np.argsort(-np.array(table["score"]), kind="stable")]:
        document, _, part = id_.partition("#")
        repeated += (texts[document], part) in wanted and len(wanted) < 5
        if len(wanted) < 5:
            wanted.setdefault((texts[document], part), id_)
    top = [json.loads(line)["sample_id"] for line in (tmp_path / "top.jsonl").read_text().splitlines()]
    assert top == [*wanted.values()] and repeated
    assert f"; {repeated} exact duplicates are passed over\n" in capsys.readouterr().out


def test_stores_that_do_not_belong_together_are_refused(stores, tmp_path, capsys):
    _, of = stores

    def answer(*args):
        assert influence(tmp_path / "out", *args) == 2
        return capsys.readouterr().err

    assert "differ in seed: their gradients cannot be compared" in answer([of["train"]], [of["other"]])
    assert "give one of each per checkpoint" in answer([of["train"]], [of["val"], of["val"]])
    assert "--weights is -1.0; it must be above 0." in answer([of["train"]], [of["val"]], "--weights", "-1")
    assert "hold different samples" in answer([of["train"], of["val"]], [of["val"], of["val"]])
    assert "hold different samples" in answer([of["train"], of["train"]], [of["val"], of["train"]])
    assert "gives no learning_rate" in answer([of["train"]], [of["val"]], "--weights", "learning_rate")
    both = ["--weights", "learning_rate", "1e-4"]
    assert "learning_rate applies to all checkpoints" in answer([of["train"]] * 2, [of["val"]] * 2, *both)
    assert "without --over subtask: add it" in answer([of["train"]], [of["val"]], "--subtasks", "names.json")
    assert "is not a merged store" in answer([of["train"].parent], [of["val"]])
    (tmp_path / "corpus.json").write_text('[{"id": "x", "text": "y"}]')
    assert "has no document of sample" in answer([of["train"]], [of["val"]], "--corpus", tmp_path / "corpus.json")
    assert not (tmp_path / "out" / "top.jsonl").exists()


@pytest.mark.parametrize("projection", ["sjlt", "rademacher", "factored"])
def test_a_store_may_have_been_collected_with_other_widths_too(stores, tmp_path, projection, capsys):
    small, _ = stores
    made = {}
    for name, dims in (("one", ["36"]), ("three", ["16", "36", "64"])):
        words = ["--model_dir", small.model, "--data_path", small.shards, "--output_path", tmp_path / name, "--dim"]
        words += [*dims, "--projection", projection, "--split", "val"]
        assert cli.main(["grads", "collect", *map(str, words)]) == 0
        for dim in dims[:2]:
            assert cli.main(["grads", "aggregate", "--base_path", str(tmp_path / name), "--dim", dim]) == 0
        made[name] = tmp_path / name / "dim36"
    one, other = rows(made["one"]), rows(made["three"])
    np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5 * np.linalg.norm(one, axis=1).max())
    assert influence(tmp_path / "out", [made["three"]], [made["one"]], "--metric", "dot") == 0
    found = pq.read_table(tmp_path / "out" / "scores.parquet")["score"].to_numpy()
    np.testing.assert_allclose(found, (other @ one.T).mean(1), rtol=1e-9)
    query = ["--store", made["three"], "--prompt", "a word of the corpus", "--top_k", "3"]
    assert cli.main(["grads", "query", *map(str, query)]) == 0
    capsys.readouterr()
    for path, changed, field in ((made["three"], "36", "fingerprint"), (tmp_path / "three" / "dim16", "", "dim")):
        digests = json.loads((path / "manifest.json").read_text())["fingerprints"]
        edit(path / "manifest.json", fingerprints=digests | {changed: "0"})
        assert influence(tmp_path / "out", [path], [made["one"]]) == 2
        assert f"differ in {field}: their gradients cannot be compared" in capsys.readouterr().err


def test_what_the_rows_are_of_has_to_agree(stores, tmp_path, capsys):
    """LoRA adapters, and Adam's moments, of one model: its digest is the same."""
    _, of = stores
    for changes, message in (
        ({"lora": {"rank": 4, "seed": 1}}, "differ in lora"),
        ({"grad_type": "adam", "optimizer_digest": "one"}, None),
        ({"optimizer_digest": "other"}, None),
    ):
        train = copied(of["train"], tmp_path / "train")
        edit(train / "manifest.json", **changes)
        assert influence(tmp_path / "out", [train], [of["val"]]) == 2
        printed = capsys.readouterr().err
        assert (message or "no row is of this collection") in printed
        shutil.rmtree(train)
    both = [copied(of[name], tmp_path / name) for name in ("train", "val")]
    for path, moments in zip(both, ("one", "other"), strict=True):
        edit(path / "manifest.json", grad_type="adam", optimizer_digest=moments)
    assert influence(tmp_path / "out", both[:1], both[1:]) == 2
    assert "differ in optimizer_digest" in capsys.readouterr().err
    assert not (tmp_path / "out" / "top.jsonl").exists()


def swapped_rows(path):
    rows = blocks.read_rows(path / "all_orig.pt").clone()
    torch.save(rows.flip(0).contiguous(), path / "all_orig.pt")
    return "all_orig.pt", "its SHA-256 differs"


def swapped_and_signed(path):
    swapped_rows(path)
    sign(path)
    return "all_orig.pt", "row 0 is not what was collected for"


@pytest.mark.parametrize("plant", [swapped_rows, swapped_and_signed])
def test_a_store_that_is_not_what_its_manifest_says_is_refused(stores, tmp_path, capsys, plant):
    _, of = stores
    both = [copied(of["train"], tmp_path / "train"), copied(of["val"], tmp_path / "val")]
    file, message = plant(both[0])
    assert influence(tmp_path / "out", both[:1], both[1:]) == 2
    printed = capsys.readouterr().err
    assert str(tmp_path) in printed and file in printed and message in printed and "Traceback" not in printed
    assert not (tmp_path / "out" / "top.jsonl").exists()
