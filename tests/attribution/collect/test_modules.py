"""`--modules`: gradients of some modules, against autograd, in rows, factors and scores; what does not mix."""

from __future__ import annotations

import json

import blocks
import numpy as np
import pytest
import torch

from gradwire import cli
from gradwire.attribution.persample import loop
from gradwire.attribution.store import store
from gradwire.lm.data.batches import collate
from gradwire.lm.data.shards import Shards
from gradwire.lm.models import causal

SAMPLES = 7
PATTERNS = ("*.mlp.c_fc", "transformer.ln_f")


@pytest.fixture(scope="module")
def chosen(small):
    """Gradients with respect to the modules by one backward pass each, [SAMPLES, n]."""
    model, shards = causal.load(small.model).double(), Shards(small.shards, "train")
    rows = []
    for position in range(SAMPLES):
        gradient = loop.gradients(model, collate([shards[position]], 0, 1), "mean").gradient
        of = [values.flatten(1) for name, values in gradient.items() if ".mlp.c_fc." in name or ".ln_f." in name]
        rows.append(torch.cat(of, 1))
    return torch.cat(rows)


def call(*words):
    return cli.main(["grads", *map(str, words)])


def given(small, *more):
    return ["--model_dir", small.model, "--data_path", small.shards, "--max_samples", SAMPLES, *more]


def collect(small, run, dim, *words):
    made = call("collect", *given(small, "--output_path", run, "--dim", dim, "--modules", *PATTERNS, *words))
    assert made == 0 and call("aggregate", "--base_path", run, "--dim", dim) == 0


@pytest.fixture(scope="module")
def projected(small, tmp_path_factory):
    run = tmp_path_factory.mktemp("projected")
    collect(small, run, 64, "--projection", "factored")
    return run


@pytest.mark.parametrize("method", ["hooks", "vmap", "loop"])
def test_rows_are_gradients_of_the_modules_alone(small, chosen, tmp_path, method):
    collect(small, tmp_path, chosen.shape[1], "--projection", "none", "--method", method)
    block = blocks.read(store.all_names(tmp_path / f"dim{chosen.shape[1]}"))
    torch.testing.assert_close(block.rows.double(), chosen, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(block.meta["norm"], chosen.norm(dim=1), rtol=1e-4)
    assert json.loads((tmp_path / "collect.json").read_text())["of_modules"] == [*PATTERNS]


def test_validation_and_queries_take_the_same_modules(small, projected, capsys):
    assert call("validate", "--output_dir", projected, "--recompute", 3) == 0
    capsys.readouterr()
    words = ["--data_path", small.shards, "--over", "max", "--json", "--top_k", 1]
    assert call("query", "--store", projected / "dim64", *words) == 0
    assert json.loads(capsys.readouterr().out)["top"][0]["score"] == pytest.approx(1, abs=1e-5)


def test_scores_and_factors_are_of_the_modules(small, chosen, tmp_path):
    asked = ["--query_path", small.shards, "--queries", SAMPLES, "--metric", "dot", "--modules", *PATTERNS]
    assert call("score", *given(small, *asked, "--output_dir", tmp_path / "plain")) == 0
    np.testing.assert_allclose(np.load(tmp_path / "plain/matrix.npy"), chosen @ chosen.T, rtol=1e-3, atol=1e-5)
    assert call("factors", *given(small, "--modules", *PATTERNS, "--output_dir", tmp_path / "factors")) == 0
    curved = ["--grad_type", "ekfac", "--optimizer_dir", tmp_path / "factors"]
    assert call("score", *given(small, *asked, *curved, "--output_dir", tmp_path / "curved")) == 0
    assert not np.allclose(np.load(tmp_path / "curved/matrix.npy"), np.load(tmp_path / "plain/matrix.npy"), rtol=0.1)


def test_other_modules_do_not_mix(small, projected, tmp_path, capsys):
    words = ["--output_path", projected, "--dim", 64, "--projection", "factored", "--modules"]
    assert call("collect", *given(small, *words, "*.attn.*")) == 2
    assert "of_modules is ['*.mlp.c_fc', 'transformer.ln_f'] there and ['*.attn.*'] here" in capsys.readouterr().err
    whole = ["--output_path", tmp_path / "whole", "--dim", 64, "--projection", "factored"]
    assert call("collect", *given(small, *whole)) == 0
    assert call("aggregate", "--base_path", tmp_path / "whole", "--dim", 64) == 0
    both = ["--train", tmp_path / "whole/dim64", "--validation", projected / "dim64"]
    both += ["--output_dir", tmp_path / "scores"]
    assert call("influence", *both, "--top_k", 1, "--corpus", small.corpus) == 2
    assert "differ in of_modules" in capsys.readouterr().err
    assert call("factors", *given(small, "--output_dir", tmp_path / "factors")) == 0
    curved = ["--grad_type", "ekfac", "--optimizer_dir", tmp_path / "factors", "--output_path", tmp_path / "curved"]
    assert call("collect", *given(small, *curved, "--dim", 64, "--modules", "*.attn.*")) == 2
    assert "factors of another model, LoRA adapter or modules" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pattern", "hint"), [("*.atn.*", "Did you mean 'attn' or 'c_attn'? A pattern"), ("mlp", "parameters. A pattern")]
)
def test_a_pattern_that_matches_nothing_is_one_message(small, tmp_path, capsys, pattern, hint):
    words = ["--output_path", tmp_path / "run", "--dim", 64, "--modules", "*.mlp.*", pattern]
    assert call("collect", *given(small, *words)) == 2
    error = capsys.readouterr().err
    assert f"--modules {pattern} matches no module" in error and hint in error
    assert "matches whole names, such as transformer.ln_f." in error
    assert not any((tmp_path / "run").glob("rank_*/dim*/*"))
