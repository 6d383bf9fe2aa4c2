"""Stores in Python: rows and searches against NumPy and the commands, and what is refused before a wrong number.

Of `documents.py`, `attribution/store/checks.py` and `attribution/store/row_writer.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from changed_store import collected, copied, sign

import gradwire as gw
from gradwire import cli
from gradwire.attribution.store import row_file, row_writer, store
from gradwire.base.errors import BadInput, CheckFailed

ROWS, DIM = 23, 7
IDS = [f"s{row}" for row in range(ROWS)]


def drawn(seed=0):
    return np.random.default_rng(seed).standard_normal((ROWS, DIM)).astype("f4")


def written(path, rows, ids=IDS, at_once=5, **options):
    """Write a store in parts of five rows."""
    with gw.GradientStore.create(path, **options) as writer:
        for first in range(0, len(rows), at_once):
            writer.append(rows[first : first + at_once], ids[first : first + at_once])
    return gw.GradientStore(path)


@pytest.fixture(scope="module")
def stores(small, tmp_path_factory):
    """Stores of training and validation samples, of 32 columns."""
    base = tmp_path_factory.mktemp("stores")
    return small, [
        collected(small.model, small.shards, base / split, 32, "--split", split, "--metadata", "position")
        for split in ("train", "val")
    ]


def test_rows_are_indexed_as_numpy_does(tmp_path, monkeypatch):
    monkeypatch.setattr(row_writer, "STEP_BYTES", 4 * DIM * 6)
    rows = drawn()
    made = written(tmp_path / "rows", torch.from_numpy(rows))
    assert (len(made), made.shape, made.ids) == (ROWS, (ROWS, DIM), IDS)
    for index in (4, -1, np.int64(3), slice(2, 9), slice(None, None, -4), [5, 1, 5], rows[:, 0] > 0, slice(3, 3), []):
        np.testing.assert_array_equal(made[index], rows[index])
    assert made[4].shape == (DIM,) and made[4].dtype == np.float32
    np.testing.assert_array_equal(made.row("s17"), rows[17])
    pairs = [*made]
    assert [id_ for id_, _ in pairs] == IDS
    np.testing.assert_array_equal([row for _, row in pairs], rows)
    assert [len(ids) for ids, _ in made.chunks(9)] == [9, 9, 5]
    np.testing.assert_allclose(made.meta["norm"].to_pylist(), np.linalg.norm(rows.astype("f8"), axis=1), rtol=1e-12)
    for wrong in (ROWS, -ROWS - 1, [0, 99]):
        with pytest.raises(IndexError):
            made[wrong]
    with pytest.raises(BadInput, match=r"rows has no sample 's23'; its ids begin \['s0', 's1', 's2'\]"):
        made.row("s23")


def test_a_row_is_read_without_the_others(tmp_path, monkeypatch):
    made, counted = written(tmp_path / "rows", drawn(), row_type="int8"), []
    decode = row_file.RowFile.decoded
    monkeypatch.setattr(
        row_file.RowFile, "decoded", lambda file, stored: counted.append(len(stored)) or decode(file, stored)
    )
    made[11], made[3:6], made[[2, 20]], made.row("s1")
    assert counted == [1, 3, 2, 1]


@pytest.mark.parametrize("row_type", ["float32", "float16", "int8", "int4", "onebit"])
def test_a_program_writes_what_commands_read(tmp_path, capsys, row_type):
    """Of every type, `validate`, `grads query` and `grads influence` take the store of a program's own loop."""
    rows = drawn(3)
    made = written(tmp_path / "rows", rows, row_type=row_type)
    made.validate()
    least = {"float32": 1.0, "float16": 1 - 1e-6, "int8": 0.999, "int4": 0.98, "onebit": 0.6}[row_type]
    lengths = np.linalg.norm(made[:], axis=1) * np.linalg.norm(rows, axis=1)
    assert (np.einsum("ij,ij->i", made[:], rows) / lengths >= least - 1e-6).all()
    np.testing.assert_allclose(np.linalg.norm(made[:], axis=1), np.linalg.norm(rows, axis=1), rtol=1e-5)
    words = ["--store", str(made.path), "--sample_id", "s5", "--metric", "dot", "--json"]
    assert cli.main(["grads", "query", *words]) == 0
    top = json.loads(capsys.readouterr().out)["top"]
    near = made.nearest(made[5], metric="dot")
    assert [(hit["sample_id"], hit["score"]) for hit in top] == [(hit.sample_id, hit.score) for hit in near]
    words = ["--train", made.path, "--validation", made.path, "--over", "max", "--output_dir", tmp_path / "influence"]
    assert cli.main(["grads", "influence", *map(str, words)]) == 0
    ids = [json.loads(line)["sample_id"] for line in (tmp_path / "influence/top.jsonl").read_text().splitlines()]
    assert [hit.sample_id for hit in made.select(made, over="max")] == ids
    assert cli.main(["grads", "query", "--store", str(made.path), "--prompt", "a text"]) == 2
    assert "the model of" in (printed := capsys.readouterr().err) and printed.count("\n") == 1


@pytest.mark.parametrize(("over", "metric", "damping"), [("mean", "cosine", 0.3), ("max", "dot", None)])
def test_nearest_is_the_similarity_by_hand(tmp_path, over, metric, damping):
    rows, queries = drawn(1).astype("f8"), drawn(2)[:3].astype("f8")
    made = written(tmp_path / "rows", rows)
    inverse = np.eye(DIM)
    if damping:
        moment = rows.astype("f4").astype("f8").T @ rows.astype("f4") / ROWS
        inverse = np.linalg.inv(moment + damping * np.trace(moment) / DIM * np.eye(DIM))
    pairs = rows @ inverse @ queries.T
    if metric == "cosine":
        lengths = [np.sqrt(np.einsum("ij,jk,ik->i", wide, inverse, wide)) for wide in (rows, queries)]
        pairs /= np.outer(*lengths)
    scores = pairs.mean(1) if over == "mean" else pairs.max(1)
    near = made.nearest(queries, 6, metric=metric, over=over, damping=damping)
    best = np.argsort(-scores)[:6]
    assert [(hit.position, hit.sample_id) for hit in near] == [(place, f"s{place}") for place in best]
    np.testing.assert_allclose([hit.score for hit in near], scores[best], rtol=1e-5)


def test_a_selection_is_that_of_the_command(stores, tmp_path):
    small, (train, validation) = stores
    subtasks = {id_.partition("#")[0]: f"task{len(id_) % 2}" for id_ in gw.GradientStore(validation).ids}
    (tmp_path / "subtasks.json").write_text(json.dumps(subtasks))
    for over, more in (("subtask", {"subtasks": tmp_path / "subtasks.json"}), ("mean", {"corpus": small.corpus})):
        words = ["--train", train, "--validation", validation, "--over", over, "--top_k", 5, "--output_dir", tmp_path]
        words += [word for name, value in more.items() for word in (f"--{name}", value)]
        assert cli.main(["grads", "influence", *map(str, words)]) == 0
        lines = [json.loads(line) for line in (tmp_path / "top.jsonl").read_text().splitlines()]
        near = gw.GradientStore(train).select(gw.GradientStore(validation), 5, over=over, **more)
        assert [(hit.sample_id, hit.score) for hit in near] == [(line["sample_id"], line["score"]) for line in lines]


def test_a_collected_store_has_its_ids_and_table_and_goes_to_parquet(stores, tmp_path):
    _, (train, _) = stores
    made = gw.GradientStore(str(train))
    assert made.ids == store.read_ids(train / "all_ids.pkl")
    assert made.meta["position"].to_pylist() == [*range(len(made))]
    made.validate()
    made.to_parquet(tmp_path / "rows.parquet")
    table = pq.read_table(tmp_path / "rows.parquet")
    assert table["sample_id"].to_pylist() == made.ids
    np.testing.assert_array_equal(np.array(table["row"].to_pylist(), "f4"), torch.load(train / "all_orig.pt"))


def change(path, name, place):
    """Change a byte of a file, and write the checksums of what is there."""
    with (path / name).open("r+b") as stream:
        stream.seek(place)
        byte = stream.read(1)[0]
        stream.seek(place)
        stream.write(bytes([byte ^ 1]))


def test_a_changed_row_is_found_where_it_is_read_and_by_validate(tmp_path):
    written(tmp_path / "rows", drawn())
    path = copied(tmp_path / "rows", tmp_path / "copy")
    start = row_file.RowFile(path / "all_orig.pt")._start
    change(path, "all_orig.pt", start + 4 * DIM * 6 + 2)
    made = gw.GradientStore(path)
    np.testing.assert_array_equal(made[5], drawn()[5])
    with pytest.raises(BadInput, match=r"row 6 is not what was collected for 's6'"):
        made[6]
    with pytest.raises(BadInput, match=r"all_orig\.pt does not match .*manifest\.json"):
        made.nearest(drawn()[5])
    with pytest.raises(CheckFailed, match=r"3 of 5 checks of .*copy failed:\n.*row i belongs to id i: .*row 6"):
        made.validate()
    sign(path)
    with pytest.raises(CheckFailed, match=r"2 of 5 checks of .*copy failed:\n.*row i belongs to id i: .*row 6"):
        gw.GradientStore(path).validate()
    shutil.copy(tmp_path / "rows/all_orig.pt", path / "all_orig.pt")
    sign(path)
    gw.GradientStore(path).validate()


def test_stores_of_other_weights_or_projections_are_not_compared(tmp_path):
    rows = drawn()
    first = written(tmp_path / "first", rows, model="step 100")
    with pytest.raises(BadInput, match="differ in model_digest"):
        first.select(written(tmp_path / "second", rows, model="step 200"))
    with gw.GradientStore.create(tmp_path / "third", model="step 100", projection="sjlt", seed=3) as writer:
        with pytest.raises(BadInput, match="norms are missing"):
            writer.append(rows, IDS)
        writer.append(rows, IDS, norms=torch.from_numpy(rows).norm(dim=1))
    with pytest.raises(BadInput, match="differ in projection"):
        first.select(gw.GradientStore(tmp_path / "third"))
    gw.GradientStore(tmp_path / "third").validate()


REFUSED = {  # what is appended, the message
    "counts": ((drawn()[:3], ["a", "b"]), "3 rows have 2 ids and 3 norms"),
    "norms": ((drawn()[:2], ["a", "b"], [1.0, 2.0, 3.0]), "2 rows have 2 ids and 3 norms"),
    "again": ((drawn()[:2], ["a", "s1"]), "the id 's1' was appended before"),
    "twice": ((drawn()[:2], ["a", "a"]), "the id 'a' was appended before"),
    "number": ((drawn()[:1], [7]), "the id 7 is no string"),
    "width": ((drawn()[:1, :5], ["a"]), r"rows are \[n, 7\], got \[1, 5\]"),
    "matrices": ((drawn()[None], ["a"]), r"rows are \[n, 7\], got \[1, 23, 7\]"),
    "words": (("words", ["a"]), r"rows are a matrix of numbers \[n, D\], got str"),
    "infinite": ((drawn()[:3] * [[1], [1], [np.inf]], ["a", "b", "c"]), "row 2 is not finite"),
    "overflow": ((drawn()[:2].astype("f8") * 1e300, ["a", "b"]), "row 0 is not finite"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_append_is_one_line_and_changes_nothing(tmp_path, case):
    given, message = REFUSED[case]
    with gw.GradientStore.create(tmp_path / "rows") as writer:
        writer.append(drawn()[:4], IDS[:4])
        with pytest.raises(BadInput, match=message) as caught:
            writer.append(*given)
        assert "\n" not in str(caught.value)
        writer.append(drawn()[4:], IDS[4:])
    np.testing.assert_array_equal(gw.GradientStore(tmp_path / "rows")[:], drawn())


def test_a_store_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(BadInput, match="no row was appended"), gw.GradientStore.create(tmp_path / "none"):
        pass
    with pytest.raises(KeyError), gw.GradientStore.create(tmp_path / "broken") as writer:
        writer.append(drawn(), IDS)
        raise KeyError
    assert not [*tmp_path.iterdir()]
    written(tmp_path / "rows", drawn())
    with pytest.raises(BadInput, match="rows exists"), gw.GradientStore.create(tmp_path / "rows"):
        pass
    with pytest.raises(BadInput, match="both exists"), gw.GradientStore.create(tmp_path / "both") as writer:
        writer.append(drawn(), IDS)
        written(tmp_path / "both", drawn(4))  # as by another rank
    np.testing.assert_array_equal(gw.GradientStore(tmp_path / "both")[:], drawn(4))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["both", "rows"]


WRITES = ["all_orig.pt", "all_meta.parquet", "all_ids.pkl", "manifest.json"]


@pytest.mark.parametrize("last", ["appended", *WRITES])
def test_a_killed_program_leaves_no_store(tmp_path, last):
    """Killed after any of its files, and the next program writes the store and removes what was left."""
    if not (child := os.fork()):
        renamed = Path.replace

        def replace(path, target):
            result = renamed(path, target)
            if Path(target).name == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        Path.replace = replace
        try:
            with gw.GradientStore.create(tmp_path / "rows") as writer:
                writer.append(drawn(), IDS)
                if last == "appended":
                    os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert not (tmp_path / "rows").exists() and len([*tmp_path.iterdir()]) == 1
    with pytest.raises(BadInput, match="not a merged store"):
        gw.GradientStore(tmp_path / "rows")
    np.testing.assert_array_equal(written(tmp_path / "rows", drawn())[:], drawn())
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "nearest: k must be"),
        ({"metric": "l2"}, "nearest: unknown value of metric 'l2'"),
        ({"over": "subtask"}, "nearest: unknown value of over 'subtask'"),
        ({"damping": -1.0}, "nearest: damping must be"),
        ({"rows": drawn()[0, :3]}, r"rows are \[n, 7\], got \[3\]"),
        ({"rows": torch.full((1, DIM), torch.nan)}, "row 0 is not finite"),
    ],
)
def test_a_wrong_query_is_one_line(tmp_path, options, message):
    made = written(tmp_path / "rows", drawn())
    with pytest.raises(BadInput, match=message) as caught:
        made.nearest(**{"rows": drawn()[0], **options})
    assert "\n" not in str(caught.value)


def test_a_collection_is_no_merged_store(stores):
    _, (train, _) = stores
    for path in (train.parent, train.parent / "rank_0/dim32", train / "nothing"):
        with pytest.raises(BadInput, match="is not a merged store: run `gradwire grads aggregate`"):
            gw.GradientStore(path)
