"""A row per sample and module: against autograd with zeros elsewhere, and sums against the samples' rows."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from changed_store import copied, edit
from data_samples import tokenize_words, write_corpus
from test_targets import DOCUMENTS, LENGTH, by_hand, load

from gradwire import cli
from gradwire.attribution import projections
from gradwire.attribution.store import store
from gradwire.lm.data.shards import Shards
from gradwire.lm.data.tokenizer import load as load_tokenizer
from gradwire.lm.models import causal

DIM, SEED = 36, 3
PROMPTED = {
    "id": "a@3",
    "prompt": "日本 naïve wire; " * 14,
    "completion": "and\n",
    "weight": -2,
}  # begins without a target


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The corpus, its only split once it is collected, and an untrained model."""
    base = tmp_path_factory.mktemp("modules")
    corpus = write_corpus(base / "corpus.json", [PROMPTED, *DOCUMENTS[:6]])
    assert cli.main(tokenize_words(corpus, base / "data", max_length=LENGTH)) == 0
    words = load_tokenizer(base / "data" / "tokenizer")
    model = causal.build("micro", words.vocab_size, LENGTH, seed=3)
    causal.save(model.state_dict(), model.config, base / "data" / "tokenizer", base / "model", {"steps": 0})
    main("norms", "--model_dir", base / "model", "--data_path", corpus, "--cache_dir", base, "--output_dir", base)
    return corpus, base / "all" / "shards", base / "model"


def main(*words):
    assert cli.main([*map(str, words)]) == 0


def collect(made, run, *words, ranks=1):
    corpus, _, model = made
    flags = ["--model_dir", model, "--data_path", corpus, "--cache_dir", corpus.parent, "--output_path", run, *words]
    command = ["grads", "collect", *map(str, flags)]
    return cli.main(command if ranks == 1 else ["launch", "--world_size", str(ranks), "--", *command])


def merged(made, run, *words, ranks=1, recompute=4):
    assert collect(made, run, "--dim", DIM, "--seed", SEED, *words, ranks=ranks) == 0
    main("grads", "aggregate", "--base_path", run, "--dim", DIM)
    main("grads", "validate", "--output_dir", run, "--recompute", recompute)
    return store.read(store.all_names(run / f"dim{DIM}"))


def modules_of(model):
    """Each module's columns in a gradient: a mask of all entries, by the parameters that it registers first."""
    met, masks = set(), {}
    order = [(name, parameter) for name, parameter in model.named_parameters()]
    for name, module in model.named_modules():
        own = {id(one) for one in module.parameters(recurse=False)} - met
        met |= own
        if own:
            masks[name] = torch.cat([torch.full((one.numel(),), id(one) in own) for _, one in order])
    return masks


@pytest.mark.parametrize(
    ("projection", "method", "kind"),
    [
        ("rademacher", "hooks", "sgd"),
        ("normal", "vmap", "sgd"),
        ("factored", "hooks", "sgd"),
        ("factored", "loop", "sgd"),
        ("rademacher", "loop", "sign"),
    ],
)
def test_a_row_is_the_projected_gradient_of_one_module(made, tmp_path, projection, method, kind):
    model, samples = load(made[2]), list(Shards(made[1], "all"))
    words = ["--rows", "module", "--projection", projection, "--method", method, "--grad_type", kind, "--batch_size", 5]
    block = merged(made, tmp_path / "run", *words, "--save_interval", 8, "--metadata", "document,position")
    masks = modules_of(model)
    assert block.ids == [f"{one.sample_id}@{module}" for one in samples for module in masks]
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    whole, row = projections.build(projection, shapes, SEED), 0
    for position, sample in enumerate(samples):
        loss, count, gradient = by_hand(model, sample)
        for mask in masks.values():
            noted, found = block.meta.slice(row, 1).to_pylist()[0], block.rows[row]
            own = torch.where(mask, gradient, 0.0)
            assert noted["n_targets"] == count and noted["flag"] == (None if count else "no_target")
            assert (noted["document"], noted["position"]) == (sample.sample_id.split("#")[0], position)
            assert noted["loss"] == (None if loss is None else pytest.approx(loss, rel=1e-4, abs=1e-5))
            if kind == "sgd":
                assert noted["norm"] == pytest.approx(float(own.norm()), rel=1e-4, abs=1e-6)
                expected = whole.project(own[None].float(), [DIM])[DIM][0]
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * (1 + noted["norm"]))
            else:
                assert noted["norm"] ** 2 <= mask.sum() + 1e-3 and (noted["norm"] > 0) == (count > 0)
            row += 1


@pytest.mark.parametrize("words", [["--projection", "rademacher", "--grad_type", "sign"], ["--projection", "factored"]])
def test_the_rows_of_a_sample_add_up_to_its_row(made, tmp_path, words):
    of_samples = merged(made, tmp_path / "samples", *words)
    of_modules = merged(made, tmp_path / "modules", "--rows", "module", *words, "--batch_size", 3)
    each = len(of_modules.ids) // len(of_samples.ids)
    assert each > 5
    totals = of_modules.rows.double().view(len(of_samples.ids), each, DIM).sum(1)
    torch.testing.assert_close(totals, of_samples.rows.double(), rtol=0, atol=1e-4)
    squares = torch.tensor(of_modules.meta["norm"].to_pylist(), dtype=torch.float64).view(-1, each).square().sum(1)
    norms = torch.tensor(of_samples.meta["norm"].to_pylist(), dtype=torch.float64)
    torch.testing.assert_close(squares.sqrt(), norms, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.sweep), "fsdp2"])
def test_two_ranks_collect_the_rows_of_one(made, tmp_path, strategy):
    words = ["--rows", "module", "--projection", "factored", "--save_interval", 3, "--max_samples", 7]
    alone = merged(made, tmp_path / "alone", *words)
    together = merged(made, tmp_path / "pair", *words, "--device", "cpu", "--strategy", strategy, ranks=2)
    assert alone.ids == together.ids
    torch.testing.assert_close(alone.rows, together.rows, rtol=1e-4, atol=1e-5)


def test_a_low_rank_adapter_has_modules_of_its_own(made, tmp_path):
    pytest.importorskip("peft")
    words = ["--rows", "module", "--projection", "rademacher", "--lora_rank", 2, "--max_samples", 3]
    block = merged(made, tmp_path / "run", *words)
    modules = {id_.rpartition("@")[2] for id_ in block.ids}
    assert modules and all("lora_A" in name or "lora_B" in name for name in modules)
    assert len(block.ids) == 3 * len(modules)


@pytest.fixture(scope="module")
def stores(made, tmp_path_factory):
    base = tmp_path_factory.mktemp("stores")
    words = ["--projection", "factored"]
    merged(made, base / "modules", "--rows", "module", *words)
    merged(made, base / "samples", *words)
    return base / "modules" / f"dim{DIM}", base / "samples" / f"dim{DIM}"


def test_a_query_is_compared_as_a_whole_with_each_module(made, stores, capsys):
    words, samples = load_tokenizer(made[2]), {one.sample_id: one for one in Shards(made[1], "all")}
    rows = store.read(store.all_names(stores[0]))

    def ask(path, *flags):
        capsys.readouterr()
        main("grads", "query", "--store", path, "--json", "--metric", "dot", "--top_k", 999, *flags)
        return {one["sample_id"]: one for one in json.loads(capsys.readouterr().out)["top"]}

    of_modules, of_samples = (ask(path, "--prompt", "the wire of code") for path in stores)
    for id_, one in of_samples.items():
        parts = [part for other, part in of_modules.items() if other.rpartition("@")[0] == id_]
        assert sum(part["score"] for part in parts) == pytest.approx(one["score"], rel=1e-3, abs=1e-4)
        for part in parts:
            assert part["text"] == words.decode(samples[id_].input_ids.tolist())
    asked = rows.ids[20]
    row = rows.rows[20].double()
    found = ask(stores[0], "--sample_id", asked, "--corpus", made[0])
    assert found[asked]["score"] == pytest.approx(float(row @ row), rel=1e-9)
    assert all(one["text"] for one in found.values()) and len(found) == len(rows.ids)


def test_influence_of_modules_adds_up_to_that_of_samples(made, stores, tmp_path):
    modules, samples = stores
    for train, to in ((modules, tmp_path / "modules"), (samples, tmp_path / "samples")):
        words = ["--train", train, "--validation", samples, "--metric", "dot", "--matrix", "--top_k", 5]
        main("grads", "influence", *words, "--corpus", made[0], "--output_dir", to)
    parts, wholes = (np.load(tmp_path / name / "matrix.npy") for name in ("modules", "samples"))
    added = parts.reshape(len(wholes), -1, wholes.shape[1]).sum(1)
    np.testing.assert_allclose(added, wholes, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("unit", "projection"), [("sample", "sjlt"), ("token", "sjlt"), ("module", "rademacher")])
def test_the_default_projection_is_one_of_these_rows(made, tmp_path, unit, projection):
    assert collect(made, tmp_path / "run", "--rows", unit, "--dim", DIM, "--max_samples", 3) == 0
    assert json.loads((tmp_path / "run" / "collect.json").read_text())["projection"] == projection


@pytest.mark.parametrize("projection", ["sjlt", "srht", "none"])
def test_projections_without_parts_are_refused(made, tmp_path, capsys, projection):
    assert collect(made, tmp_path / "run", "--rows", "module", "--dim", 9, "--projection", projection) == 2
    error = capsys.readouterr().err
    assert f"--rows module has no --projection {projection}: use rademacher, normal, factored." in error
    assert not any((tmp_path / "run").glob("rank_*"))


def test_other_modules_are_not_those_of_the_rows(stores, tmp_path, capsys):
    run = copied(stores[0].parent, tmp_path / "run")
    named = json.loads((run / "collect.json").read_text())["modules"]
    edit(run / "collect.json", modules=[named[1], named[0], *named[2:]])
    assert cli.main(["grads", "validate", "--output_dir", str(run)]) == 1
    assert "no row is of this collection" in capsys.readouterr().err
