"""`--bf16`: gradients of a model that computes in bfloat16, against float32 autograd of one sample at a time."""

from __future__ import annotations

import json

import blocks
import pytest
import torch

from gradwire import cli
from gradwire.attribution.persample import loop
from gradwire.attribution.store import store
from gradwire.lm.data.batches import collate
from gradwire.lm.data.shards import Shards
from gradwire.lm.models import causal

SAMPLES = 7


@pytest.fixture(scope="module")
def exact(small):
    """Gradients in float32 with the weights rounded to bfloat16, by one backward pass each, [SAMPLES, n]."""
    model, shards = causal.load(small.model, torch.bfloat16).float(), Shards(small.shards, "train")
    alone = (loop.gradients(model, collate([shards[position]], 0, 1), "mean").gradient for position in range(SAMPLES))
    return torch.cat([torch.cat([values.flatten(1) for values in gradient.values()], 1) for gradient in alone])


def collect(small, run, dim, *words):
    given = ["--model_dir", small.model, "--data_path", small.shards, "--max_samples", SAMPLES, "--output_path", run]
    return cli.main(["grads", "collect", *map(str, [*given, "--dim", dim, "--bf16", *words])])


@pytest.mark.parametrize("method", ["hooks", "vmap", "loop"])
def test_rows_have_the_error_of_bfloat16(small, exact, tmp_path, method):
    dim = exact.shape[1]
    assert collect(small, tmp_path, dim, "--projection", "none", "--method", method) == 0
    rows = blocks.read(store.all_names(tmp_path / f"rank_0/dim{dim}")).rows
    assert rows.dtype == torch.float32
    deviations = (rows - exact).norm(dim=1) / exact.norm(dim=1)
    assert 1e-4 < deviations.max() < 0.03, deviations


def test_a_store_says_so_and_is_recomputed_so(small, tmp_path):
    assert collect(small, tmp_path, 64, "--projection", "factored", "--batch_size", 3) == 0
    assert cli.main(["grads", "aggregate", "--base_path", str(tmp_path), "--dim", "64"]) == 0
    assert cli.main(["grads", "validate", "--output_dir", str(tmp_path), "--recompute", "4"]) == 0
    assert json.loads((tmp_path / "dim64/manifest.json").read_text())["bf16"] is True
