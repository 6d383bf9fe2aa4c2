"""A row per token, and per sample and module: against autograd by hand, and sums against the samples' rows.

Of `store/samples.py`.
"""

from __future__ import annotations

import json
import math

import blocks
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from changed_store import collected_by
from data_samples import tokenize_words, write_corpus
from diagonals import swept
from test_targets import DOCUMENTS, LENGTH, by_hand, load

from gradwire import cli
from gradwire.attribution import projections
from gradwire.attribution.store import store
from gradwire.attribution.store.samples import Tokens
from gradwire.lm.data.shards import Shards
from gradwire.lm.data.tokenizer import load as load_tokenizer
from gradwire.lm.models import causal

SAMPLES, DIM, SEED = 13, 36, 3
PROMPTS = [  # samples without a target: the first of a document, and the last of the data
    {"id": "a@3", "prompt": "日本 naïve wire; " * 14, "completion": "and\n"},
    *DOCUMENTS[:8],
    {"id": "last", "text": "wire " * 50 + "code " * 40, "target_spans": [[0, 20]]},
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The corpus, its only split once it is collected, and an untrained model."""
    base = tmp_path_factory.mktemp("tokens")
    corpus = write_corpus(base / "corpus.json", PROMPTS)
    assert cli.main(tokenize_words(corpus, base / "data", max_length=LENGTH)) == 0
    words = load_tokenizer(base / "data" / "tokenizer")
    model = causal.build("micro", words.vocab_size, LENGTH, seed=3)
    causal.save(model.state_dict(), model.config, base / "data" / "tokenizer", base / "model", {"steps": 0})
    main("norms", "--model_dir", base / "model", "--data_path", corpus, "--cache_dir", base, "--output_dir", base)
    return corpus, base / "all" / "shards", base / "model"


def main(*words):
    assert cli.main([*map(str, words)]) == 0


def collect(made, run, *words):
    corpus, _, model = made
    flags = ["--model_dir", model, "--data_path", corpus, "--cache_dir", corpus.parent, "--output_path", run, *words]
    return cli.main(["grads", "collect", *map(str, flags)])


def merged(made, run, dim, *words):
    assert collect(made, run, "--dim", dim, "--seed", SEED, *words) == 0
    return aggregated(run, dim)


def aggregated(run, dim):
    main("grads", "aggregate", "--base_path", run, "--dim", dim)
    main("grads", "validate", "--output_dir", run, "--recompute", 7)
    return blocks.read(store.all_names(run / f"dim{dim}"))


def samples_of(data):
    return list(Shards(data, "all"))


def targets_by_hand(model, sample):
    """The position, loss and gradient of each target, in float64, from one pass over the whole sample."""
    log_p = model(sample.input_ids[None]).logits[0].log_softmax(-1)
    for place in range(1, len(sample.input_ids)):
        if sample.is_target is None or sample.is_target[place]:
            loss = -log_p[place - 1, sample.input_ids[place]]
            parts = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
            yield place, loss.item(), torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("method", ["hooks", "loop"])
def test_rows_are_gradients_of_each_tokens_loss(made, tmp_path, method):
    model, samples = load(made[2]), samples_of(made[1])
    size = sum(parameter.numel() for parameter in model.parameters())
    words = ["--rows", "token", "--projection", "none", "--method", method, "--max_samples", SAMPLES]
    block = merged(made, tmp_path / "run", size, *words, "--metadata", "document,n_tokens,position")
    wanted = [(one, *found) for one in samples[:SAMPLES] for found in targets_by_hand(model, one)]
    assert block.ids == [f"{one.sample_id}@{place}" for one, place, *_ in wanted]
    assert len({one.sample_id for one, *_ in wanted}) < SAMPLES < len(samples)  # some have no target
    for at, (row, noted, (one, place, loss, gradient)) in enumerate(
        zip(block.rows.double(), block.meta.to_pylist(), wanted, strict=True)
    ):
        torch.testing.assert_close(row, gradient.double(), rtol=0, atol=1e-5)
        assert noted["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-5)
        assert noted["norm"] == pytest.approx(float(gradient.norm()), rel=1e-4, abs=1e-6)
        assert (noted["n_targets"], noted["flag"], noted["n_tokens"]) == (1, None, place + 1)
        assert (noted["position"], noted["document"]) == (at, one.sample_id.split("#")[0])


@pytest.mark.parametrize(
    ("unit", "projection", "strategy"),
    [
        ("module", "factored", "fsdp2"),
        pytest.param("module", "factored", "ddp", marks=pytest.mark.sweep),
        pytest.param("token", "sjlt", "ddp", marks=pytest.mark.sweep),
    ],
)
def test_two_ranks_collect_the_rows_of_one(world, made, tmp_path, unit, projection, strategy):
    given = {"rows": unit, "projection": projection, "save_interval": 3, "max_samples": 5}
    alone = merged(made, tmp_path / "alone", DIM, *(word for name, of in given.items() for word in (f"--{name}", of)))
    given |= {"model_dir": made[2], "data_path": made[0], "cache_dir": made[0].parent, "dim": (DIM,), "seed": SEED}
    run = collected_by(world(2), tmp_path / "pair", strategy=strategy, **given)
    together = aggregated(run, DIM)
    assert alone.ids == together.ids
    torch.testing.assert_close(alone.rows, together.rows, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def stores(made, tmp_path_factory):
    base = tmp_path_factory.mktemp("stores")
    words = ["--projection", "sjlt"]
    merged(made, base / "tokens", 32, "--rows", "token", *words)
    merged(made, base / "samples", 32, *words)
    return base / "tokens" / "dim32", base / "samples" / "dim32"


def test_a_query_finds_tokens_and_shows_what_was_read(made, stores, capsys):
    words, samples = load_tokenizer(made[2]), {one.sample_id: one for one in samples_of(made[1])}
    block = blocks.read(store.all_names(stores[0]))

    def ask(*flags):
        capsys.readouterr()
        assert cli.main(["grads", "query", "--store", str(stores[0]), "--json", "--metric", "dot", *flags]) == 0
        return json.loads(capsys.readouterr().out)["top"]

    for one in ask("--prompt", "the wire of code", "--top_k", "5"):
        id_, _, place = one["sample_id"].rpartition("@")
        assert one["text"] == words.decode(samples[id_].input_ids[: int(place) + 1].tolist())
    asked = next(id_ for id_ in block.ids if id_.startswith("chat"))
    row, rows = block.rows[block.ids.index(asked)].double(), block.rows.double()
    best = (rows @ row).argsort(descending=True, stable=True)[:4]
    found = ask("--sample_id", asked, "--top_k", "4", "--corpus", str(made[0]))
    assert [one["sample_id"] for one in found] == [block.ids[at] for at in best]
    texts = {"chat": "<|system|>", "a@3": "日本", "plain": "日本", "last": "wire", "pair": "the gradient"}
    for one in found:
        assert one["text"].startswith(texts.get(one["sample_id"].rpartition("@")[0].split("#")[0], ""))


def test_influence_of_tokens_on_samples(made, stores, tmp_path):
    tokens, samples = stores
    words = ["--train", tokens, "--validation", samples, "--metric", "dot", "--corpus", made[0], "--top_k", 9]
    main("grads", "influence", *words, "--output_dir", tmp_path)
    rows, queries = (blocks.read(store.all_names(path)) for path in stores)
    scores = rows.rows.double() @ queries.rows.double().mean(0)
    found = pq.read_table(tmp_path / "scores.parquet").to_pydict()
    assert found["sample_id"] == rows.ids
    torch.testing.assert_close(torch.tensor(found["score"], dtype=torch.float64), scores, rtol=1e-5, atol=1e-7)
    whole = {one["id"]: one for one in json.loads(made[0].read_text())}
    for line in map(json.loads, (tmp_path / "top.jsonl").read_text().splitlines()):
        document = line["sample_id"].rpartition("@")[0].split("#")[0]
        (form,) = {"text", "prompt", "messages"} & line.keys()
        assert line[form] == whole[document][form] and math.isfinite(line["score"])


def test_a_token_is_a_sample_that_ends_with_it(made):
    shards = Shards(made[1], "all")
    tokens = Tokens(shards)
    assert len(tokens) == sum(one.n_targets for one in shards) == len(list(tokens))
    assert {one.n_targets for one in tokens} == {1}
    assert tokens.sample_ids(len(tokens)) == [one.sample_id for one in shards]
    for count in (1, 20, len(tokens) - 1):
        ids = tokens.sample_ids(count)
        last = tokens[count - 1].sample_id.rpartition("@")[0]
        assert ids == [one.sample_id for one in shards][: len(ids)] and ids[-1] == last
    with pytest.raises(IndexError):
        tokens[len(tokens)]


def test_what_has_no_token_rows_is_refused(made, stores, tmp_path, capsys):
    assert collect(made, tmp_path / "run", "--rows", "token", "--dim", 9, "--max_samples", 1) == 2
    assert "--rows token: the chosen samples of" in capsys.readouterr().err
    assert not any((tmp_path / "run").glob("rank_*"))
    assert collect(made, stores[0].parent, "--dim", 32, "--projection", "sjlt", "--seed", SEED) == 2
    assert "row_of is 'token' there and 'sample' here" in capsys.readouterr().err


# --- modules


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
        ("factored", "hooks", "sgd"),
        ("rademacher", "loop", "sign"),
        *swept(("rademacher", "vmap", "sgd"), ("factored", "loop", "sgd")),
    ],
)
def test_a_row_is_the_projected_gradient_of_one_module(made, tmp_path, projection, method, kind):
    model, samples = load(made[2]), samples_of(made[1])[:7]
    words = ["--rows", "module", "--projection", projection, "--method", method, "--grad_type", kind, "--batch_size", 5]
    words += ["--save_interval", 4, "--max_samples", len(samples), "--metadata", "document,position"]
    block = merged(made, tmp_path / "run", DIM, *words)
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


def test_the_signs_of_a_samples_modules_add_up_to_its_row(made, tmp_path):
    words = ["--projection", "rademacher", "--grad_type", "sign"]
    of_samples = merged(made, tmp_path / "samples", DIM, *words)
    of_modules = merged(made, tmp_path / "modules", DIM, "--rows", "module", *words, "--batch_size", 3)
    each = len(of_modules.ids) // len(of_samples.ids)
    assert each > 5
    totals = of_modules.rows.double().view(len(of_samples.ids), each, DIM).sum(1)
    torch.testing.assert_close(totals, of_samples.rows.double(), rtol=0, atol=1e-4)
    squares = torch.tensor(of_modules.meta["norm"].to_pylist(), dtype=torch.float64).view(-1, each).square().sum(1)
    norms = torch.tensor(of_samples.meta["norm"].to_pylist(), dtype=torch.float64)
    torch.testing.assert_close(squares.sqrt(), norms, rtol=1e-5, atol=1e-9)


def test_a_low_rank_adapter_has_modules_of_its_own(made, tmp_path):
    pytest.importorskip("peft")
    words = ["--rows", "module", "--projection", "rademacher", "--lora_rank", 2, "--max_samples", 3]
    block = merged(made, tmp_path / "run", DIM, *words)
    modules = {id_.rpartition("@")[2] for id_ in block.ids}
    assert modules and all("lora_A" in name or "lora_B" in name for name in modules)
    assert len(block.ids) == 3 * len(modules)


@pytest.fixture(scope="module")
def modules(made, tmp_path_factory):
    base = tmp_path_factory.mktemp("modules")
    words = ["--projection", "factored", "--max_samples", 2 * SAMPLES]
    merged(made, base / "modules", DIM, "--rows", "module", *words)
    merged(made, base / "samples", DIM, *words)
    return base / "modules" / f"dim{DIM}", base / "samples" / f"dim{DIM}"


def test_a_query_is_compared_as_a_whole_with_each_module(made, modules, capsys):
    words, samples = load_tokenizer(made[2]), {one.sample_id: one for one in Shards(made[1], "all")}
    rows = blocks.read(store.all_names(modules[0]))

    def ask(path, *flags):
        capsys.readouterr()
        main("grads", "query", "--store", path, "--json", "--metric", "dot", "--top_k", 999, *flags)
        return {one["sample_id"]: one for one in json.loads(capsys.readouterr().out)["top"]}

    of_modules, of_samples = (ask(path, "--prompt", "the wire of code") for path in modules)
    for id_, one in of_samples.items():
        parts = [part for other, part in of_modules.items() if other.rpartition("@")[0] == id_]
        assert sum(part["score"] for part in parts) == pytest.approx(one["score"], rel=1e-3, abs=1e-4)
        for part in parts:
            assert part["text"] == words.decode(samples[id_].input_ids.tolist())
    asked = rows.ids[20]
    row = rows.rows[20].double()
    found = ask(modules[0], "--sample_id", asked, "--corpus", made[0])
    assert found[asked]["score"] == pytest.approx(float(row @ row), rel=1e-9)
    assert all(one["text"] for one in found.values()) and len(found) == len(rows.ids)


def test_influence_of_modules_adds_up_to_that_of_samples(made, modules, tmp_path):
    of_modules, samples = modules
    for train, to in ((of_modules, tmp_path / "modules"), (samples, tmp_path / "samples")):
        words = ["--train", train, "--validation", samples, "--metric", "dot", "--matrix", "--top_k", 5]
        main("grads", "influence", *words, "--corpus", made[0], "--output_dir", to)
    parts, wholes = (np.load(tmp_path / name / "matrix.npy") for name in ("modules", "samples"))
    added = parts.reshape(len(wholes), -1, wholes.shape[1]).sum(1)
    np.testing.assert_allclose(added, wholes, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("unit", "projection"), [("sample", "sjlt"), ("token", "sjlt"), ("module", "rademacher")])
def test_the_default_projection_is_one_of_these_rows(made, tmp_path, unit, projection):
    assert collect(made, tmp_path / "run", "--rows", unit, "--dim", DIM, "--max_samples", 3) == 0
    assert json.loads((tmp_path / "run" / "collect.json").read_text())["projection"] == projection


@pytest.mark.parametrize("projection", ["sjlt", "none"])
def test_projections_without_parts_are_refused(made, tmp_path, capsys, projection):
    assert collect(made, tmp_path / "run", "--rows", "module", "--dim", 9, "--projection", projection) == 2
    error = capsys.readouterr().err
    assert f"--rows module has no --projection {projection}: use rademacher, factored." in error
    assert not any((tmp_path / "run").glob("rank_*"))
