"""Queries of a store: scores against autograd in float64 and against `grads influence`, texts, and what is refused.

Of `searcher.py`, `attribution/options.py`.
"""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc
from typing import get_args

import blocks
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from changed_store import collected, copied, edit, sign
from diagonals import diagonals
from safetensors.torch import load_file, save_file
from small_model import MAX_LENGTH

from gradwire import cli
from gradwire.attribution.options import RowType
from gradwire.attribution.query import query, search
from gradwire.attribution.store import row_file, store
from gradwire.lm.data.shards import Shards
from gradwire.lm.data.tokenizer import load as load_tokenizer
from gradwire.lm.models import causal, saved

PROMPT = "Title 3\ngradient wire rank gradient"
COLLECTED = {  # name -> split, grad_type, projection; dim 32, or all of the gradient
    "train": ("train", "sgd", "sjlt"),
    "val": ("val", "sgd", "sjlt"),
    "train-sign": ("train", "sign", "sjlt"),
    "val-sign": ("val", "sign", "sjlt"),
    "whole": ("train", "sgd", "none"),
}


@pytest.fixture(scope="module")
def stores(small, tmp_path_factory):
    base = tmp_path_factory.mktemp("query")
    found = {}
    for name, (split, kind, projection) in COLLECTED.items():
        dim = saved.entries(small.model) if projection == "none" else 32
        words = ["--split", split, "--grad_type", kind, "--projection", projection, "--seed", 5]
        found[name] = collected(small.model, small.shards, base / name, dim, *words)
    return small, found


def ask(capsys, path, *words):
    capsys.readouterr()
    assert cli.main(["grads", "query", "--json", "--store", str(path), *map(str, words)]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, path, *words):
    capsys.readouterr()
    assert cli.main(["grads", "query", "--store", str(path), *map(str, words)]) == 2
    printed = capsys.readouterr()
    assert not printed.out and printed.err.count("\n") == 1 and printed.err.startswith("gradwire grads query: ")
    return printed.err


def by_hand(model, tokens):
    """The gradient of the mean loss of a text's tokens but the first, in float64 from the log-probabilities."""
    log_p = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    loss = -sum(log_p[place - 1, tokens[place]] for place in range(1, len(tokens))) / (len(tokens) - 1)
    parameters = [parameter for _, parameter in model.named_parameters()]
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)]).numpy()


def test_scores_are_products_of_gradients_by_hand(stores, capsys):
    small, of = stores
    model, samples = causal.load(small.model).double(), Shards(small.shards, "train")
    asked = by_hand(model, load_tokenizer(small.model).encode_batch([PROMPT])[0])
    gradients = {sample.sample_id: by_hand(model, sample.input_ids.tolist()) for sample in samples}
    for metric in ("dot", "cosine"):
        wanted = {id_: gradient @ asked for id_, gradient in gradients.items()}
        if metric == "cosine":
            norms = {id_: np.linalg.norm(gradient) * np.linalg.norm(asked) for id_, gradient in gradients.items()}
            wanted = {id_: product / norms[id_] for id_, product in wanted.items()}
        answer = ask(capsys, of["whole"], "--prompt", PROMPT, "--metric", metric, "--top_k", 1000)
        found = {one["sample_id"]: one["score"] for one in answer["top"]}
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5 * max(map(abs, wanted.values())))
        assert [one["sample_id"] for one in answer["top"]] == sorted(found, key=found.get, reverse=True)
        assert [one["rank"] for one in answer["top"]] == [*range(1, len(samples) + 1)]
        few = ask(capsys, of["whole"], "--prompt", PROMPT, "--metric", metric, "--top_k", 3)
        assert few["top"] == answer["top"][:3] and few["samples"] == len(samples)


@pytest.mark.parametrize(
    ("kind", "metric", "over", "curvature"),
    diagonals(["", "-sign"], ["dot", "cosine"], ["mean", "max"], ["fisher", "none"]),
)
def test_scores_are_those_of_influence(stores, tmp_path, capsys, kind, metric, over, curvature):
    small, of = stores
    both = ["--metric", metric, "--over", over, "--top_k", "1000", "--curvature", curvature]
    words = ["--train", of[f"train{kind}"], "--validation", of[f"val{kind}"], "--output_dir", tmp_path, *both]
    assert cli.main(["grads", "influence", *map(str, words)]) == 0
    wanted = pq.read_table(tmp_path / "scores.parquet").to_pydict()
    answer = ask(capsys, of[f"train{kind}"], "--data_path", small.shards, "--split", "val", *both)
    found = {one["sample_id"]: one["score"] for one in answer["top"]}
    scale = max(map(abs, wanted["score"]))
    assert found == pytest.approx(dict(zip(wanted["sample_id"], wanted["score"], strict=True)), abs=1e-6 * scale)
    assert answer["query_samples"] == len(Shards(small.shards, "val"))
    assert (answer["curvature"], answer["damping"]) == (curvature, 0.1 if curvature == "fisher" else None)


@pytest.mark.parametrize("kind", get_args(RowType))
def test_a_store_of_any_type_is_asked_with_a_float32_row(stores, tmp_path, capsys, kind):
    """Only the store's rows are rounded."""
    small, of = stores
    collected(small.model, small.shards, tmp_path, 32, "--projection", "sjlt", "--seed", 5, "--store", kind)
    exact = blocks.read_rows(of["val"] / "all_orig.pt").double().mean(0)
    wanted = blocks.read_rows(tmp_path / "dim32" / "all_orig.pt").double() @ exact
    asked = ["--data_path", small.shards, "--split", "val", "--metric", "dot", "--top_k", 1000]
    answer = ask(capsys, tmp_path / "dim32", *asked)
    found = {one["sample_id"]: one["score"] for one in answer["top"]}
    ids = store.read_ids(tmp_path / "dim32" / "all_ids.pkl")
    assert found == pytest.approx(dict(zip(ids, wanted.tolist(), strict=True)), abs=1e-6 * wanted.abs().max().item())


def test_a_sample_of_the_store_is_nearest_to_itself(stores, capsys):
    _, of = stores
    ids = store.read_ids(of["train"] / "all_ids.pkl")
    rows = blocks.read_rows(of["train"] / "all_orig.pt").double()
    answer = ask(capsys, of["train"], "--sample_id", ids[4], "--top_k", len(ids), "--model_dir", "nowhere")
    assert answer["top"][0]["sample_id"] == ids[4] and answer["top"][0]["score"] == pytest.approx(1, rel=1e-12)
    cosines = torch.nn.functional.cosine_similarity(rows, rows[4:5])
    assert {one["sample_id"]: one["score"] for one in answer["top"]} == pytest.approx(
        dict(zip(ids, cosines.tolist(), strict=True)), abs=1e-12
    )


def test_the_texts_are_those_of_the_samples_or_their_documents(stores, tmp_path, capsys):
    small, of = stores
    documents = {one["id"]: one for one in json.loads(small.corpus.read_text())}
    words = ["--prompt", PROMPT, "--top_k", 1000]
    whole = ask(capsys, of["train"], *words, "--corpus", small.corpus)["top"]
    parts = {one["sample_id"]: one["text"] for one in ask(capsys, of["train"], *words)["top"]}
    assert len(parts) == len(whole) > len({id_.split("#")[0] for id_ in parts})
    for one in whole:
        document = documents[one["sample_id"].split("#")[0]]
        assert (one["title"], one["text"]) == (document["title"], document["text"])
        joined = "".join(text for _, text in sorted(parts.items()) if _.split("#")[0] == document["id"])
        assert joined == f"{document['title']}\n{document['text']}"
    (tmp_path / "other.json").write_text('[{"id": "x", "text": "y"}]')
    assert "has no document of sample" in refused(capsys, of["train"], *words, "--corpus", tmp_path / "other.json")
    moved = copied(of["train"], tmp_path / "moved")
    edit(moved / "manifest.json", data_path="/nowhere", model_dir="/nowhere")
    assert "text" not in ask(capsys, moved, *words, "--model_dir", small.model)["top"][0]
    again = ask(capsys, moved, *words, "--model_dir", small.model, "--shards", small.shards)["top"]
    assert {one["sample_id"]: one["text"] for one in again} == parts
    assert "/nowhere, the model of" in refused(capsys, moved, *words)


def test_the_result_is_also_a_file_and_a_table(stores, tmp_path, capsys):
    _, of = stores
    words = ["--prompt", PROMPT, "--top_k", "2"]
    answer = ask(capsys, of["train"], *words, "--output_dir", tmp_path)
    assert json.loads((tmp_path / "query.json").read_text()) == answer
    assert answer["prompt"] == PROMPT and "data_path" not in answer
    assert cli.main(["grads", "query", "--store", str(of["train"]), *words]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["rank", "score", "sample_id", "text"] and len(lines) == 2
    for line, one in zip(lines, answer["top"], strict=True):
        assert line.split()[0] == str(one["rank"]) and line.split()[2] == one["sample_id"]
        assert " ".join(one["text"].split()) in " ".join(line.split()) or line.endswith("…")
    hostile = [{"rank": 1, "score": 0.5, "sample_id": "a\x1b[2J\n" + "b" * 99, "text": "\x1b]0;x\x07 y\u202ez" * 90}]
    lines = query.table(hostile, 100).split("\n")
    assert len(lines) == 2 and all(line.isprintable() and len(line) <= 150 for line in lines)  # 104 of the id
    module = {**hostile[0], "sample_id": "doc/1234#5@model.layers.11.self_attn.q_proj"}
    assert module["sample_id"] in query.table([module], 80) and len(query.table([module], 80).split("\n")[1]) <= 90


def test_a_search_holds_a_block_in_memory(tmp_path):
    """64 MiB of rows, of which one is not zero; NumPy's allocations are counted."""
    rows, width = 4096, 4096
    with row_file.tensor_writer(tmp_path / "rows.pt", (rows, width)):
        pass
    start = row_file.RowFile(tmp_path / "rows.pt")._start
    with (tmp_path / "rows.pt").open("r+b") as stream:
        stream.seek(start + 3001 * width * 4)
        stream.write(np.arange(width, dtype="<f4").tobytes())
    tracemalloc.start()
    scores = search.scored(row_file.RowFile(tmp_path / "rows.pt"), np.ones((1, width)), "dot")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert scores[3001] == width * (width - 1) / 2 and np.count_nonzero(scores) == 1
    assert peak < 8 << 20


# --- what is refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", " ".join(["gradient"] * 50)], f"tokens, and the model in {{model}} reads {MAX_LENGTH}: shorten"),
        (["--prompt", ""], "the prompt has 0 tokens and so nothing to predict"),
        (["--prompt", "g"], "the prompt has 1 token and so nothing to predict"),
        (["--sample_id", "doc/99"], "has no sample 'doc/99'; its ids begin ['doc/"),
        (["--data_path", "nowhere.json"], "nowhere.json does not exist: give a shards folder or a corpus file"),
        (["--prompt", PROMPT, "--shards", "nowhere"], "nowhere is not a shards folder"),
        (["--prompt", PROMPT, "--top_k", "0"], "--top_k is 0; it must be at least 1."),
    ],
)
def test_a_query_that_cannot_be_asked(stores, capsys, words, message):
    small, of = stores
    assert message.format(model=small.model) in refused(capsys, of["train"], *words)


def test_shards_that_were_modified(stores, tmp_path, capsys):
    small, of = stores
    data = copied(small.shards.parent, tmp_path / "data")
    shard = next((data / "shards" / "val").glob("shard-*.pt"))
    shard.write_bytes(shard.read_bytes() + b"0")
    assert "was modified" in refused(capsys, of["train"], "--data_path", data / "shards", "--split", "val")
    assert "was modified" in refused(capsys, of["train"], "--prompt", PROMPT, "--shards", data / "shards")


def test_a_model_that_is_not_the_stores(stores, tmp_path, capsys):
    """Other weights; another tokenizer with the same weights."""
    small, of = stores
    other = copied(small.model, tmp_path / "weights")
    weights = load_file(other / "model.safetensors")
    name = next(iter(weights))
    save_file({**weights, name: weights[name] + 1}, other / "model.safetensors", metadata={"format": "pt"})
    message = f"the model in {other} is not that of the collection"
    assert message in refused(capsys, of["train"], "--prompt", PROMPT, "--model_dir", other)
    other = copied(small.model, tmp_path / "tokenizer")
    words = json.loads((other / "tokenizer.json").read_text())
    first, second, *_ = words["model"]["vocab"]
    vocabulary = words["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(words))
    assert "tokenizer.json is not as it was saved" in refused(
        capsys, of["train"], "--prompt", PROMPT, "--model_dir", other
    )
    (other / "SHA256SUMS").unlink()
    assert "another tokenizer" in refused(capsys, of["train"], "--prompt", PROMPT, "--model_dir", other)


def another_seed(path):
    edit(path / "manifest.json", seed=6)
    return "differs in fingerprints: its projection 'sjlt' of seed 6 to 32 columns"


def another_projection(path):
    edit(path / "manifest.json", projection="rademacher")
    return "differs in fingerprints: its projection 'rademacher'"


def another_type(path):
    edit(path / "manifest.json", grad_type="sign")
    return "no row is of this collection"


def another_adapter(path):
    edit(path / "manifest.json", lora={"rank": 2, "seed": 0})
    return "differs in fingerprints"


def no_fingerprint(path):
    edit(path / "manifest.json", fingerprints={})
    return "differs in fingerprints"


def truncated(path):
    os.truncate(path / "all_orig.pt", (path / "all_orig.pt").stat().st_size - 40)
    return "all_orig.pt does not match"


def truncated_and_signed(path):
    truncated(path)
    sign(path)
    return "all_orig.pt cannot be read as a tensor"


def swapped_and_signed(path):
    rows = blocks.read_rows(path / "all_orig.pt")
    torch.save(rows.flip(0).contiguous(), path / "all_orig.pt")
    sign(path)
    return "is not what was collected for"


class Planted:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def code_in_ids(path):
    (path / "all_ids.pkl").write_bytes(pickle.dumps([Planted(path / "owned")]))
    sign(path)
    return "all_ids.pkl is not a valid list of ids: it refers to"


def code_in_rows(path):
    torch.save(Planted(path / "owned"), path / "all_orig.pt")
    sign(path)
    return "all_orig.pt cannot be read as a tensor"


def code_for_a_manifest(path):
    (path / "manifest.json").write_bytes(pickle.dumps(Planted(path / "owned")))
    return "manifest.json"


def a_file_elsewhere(path):
    names = json.loads((path / "manifest.json").read_text())["sha256"]
    edit(path / "manifest.json", sha256={**names, "../../../etc/passwd": "0"})
    return "lists '../../../etc/passwd', which is not the name of a file in that folder"


def another_width(path):
    edit(path / "manifest.json", dim=2**62)
    return "has rows of 32 columns"


@pytest.mark.parametrize(
    "plant",
    [
        another_seed,
        another_projection,
        another_type,
        another_adapter,
        no_fingerprint,
        truncated,
        truncated_and_signed,
        swapped_and_signed,
        code_in_ids,
        code_in_rows,
        code_for_a_manifest,
        a_file_elsewhere,
        another_width,
    ],
)
def test_a_store_that_is_not_what_it_says(stores, tmp_path, capsys, plant):
    _, of = stores
    path = copied(of["train"], tmp_path / "copy")
    message = plant(path)
    printed = refused(capsys, path, "--prompt", PROMPT)
    assert message in printed and str(path) in printed
    assert not (path / "owned").exists()
