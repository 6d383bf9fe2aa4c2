"""Per-sample gradients against autograd by hand; the store over ranks, kills and faults; row i belongs to id i.

Of `collect.py`, `rows.py`, `collect/validate.py`, `store/merge.py`, `store/checks.py`, `store/provenance.py`,
`store/aggregate.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import blocks
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from changed_store import collected_by, copied, edit, sign
from small_model import MAX_LENGTH, origin

from gradwire import cli
from gradwire.attribution.collect import collect, rows
from gradwire.attribution.persample import loop
from gradwire.attribution.store import checks, merge, provenance, store
from gradwire.attribution.store.row_file import BoundRows, RowFile
from gradwire.base import failures
from gradwire.base.errors import BadInput, CheckFailed, NonFiniteGradient
from gradwire.base.files import sha256_file
from gradwire.lm.data import shards
from gradwire.lm.data.batches import Batch, collate
from gradwire.lm.data.corpus import documents
from gradwire.lm.data.shards import Sample, Shards
from gradwire.lm.data.tokenizer import load as load_tokenizer
from gradwire.lm.data.writer import cuts, sample_ids
from gradwire.lm.models import causal, saved

SAMPLES, DIMS, INTERVAL = 11, (64, 100), 4


def chosen(small):
    return {
        "model_dir": small.model,
        "data_path": small.shards,
        "max_samples": SAMPLES,
        "dim": DIMS,
        "save_interval": INTERVAL,
    }


def options(small, run, **changes):
    words = ["grads", "collect"]
    for name, value in {**chosen(small), "output_path": run, **changes}.items():
        words += [f"--{name}", *map(str, value if isinstance(value, tuple) else [value])]
    return words


@pytest.fixture(scope="module")
def unmerged(small, tmp_path_factory):
    """A run of one rank, collected only."""
    run = tmp_path_factory.mktemp("unmerged") / "run"
    assert cli.main(options(small, run)) == 0
    return run


@pytest.fixture(scope="module")
def alone(unmerged, tmp_path_factory):
    """The run of one rank, aggregated and validated."""
    run = copied(unmerged, tmp_path_factory.mktemp("ws1") / "run")
    for dim in DIMS:
        assert cli.main(["grads", "aggregate", "--base_path", str(run), "--dim", str(dim)]) == 0
    assert cli.main(["grads", "validate", "--output_dir", str(run)]) == 0
    return run


@pytest.fixture(scope="module")
def unmerged_pair(world, small, tmp_path_factory):
    """The same run on two ranks, collected only."""
    return collected_by(world(2), tmp_path_factory.mktemp("unmerged") / "run", **chosen(small))


@pytest.fixture(scope="module")
def pair(small, unmerged_pair, tmp_path_factory):
    """The run on two ranks, by one command, which goes on from what was collected."""
    base = tmp_path_factory.mktemp("ws2")
    config = {"model_dir": str(small.model), "data_path": str(small.shards), "max_samples": SAMPLES, "dim": list(DIMS)}
    (base / "run.json").write_text(json.dumps({**config, "save_interval": INTERVAL, "recompute": 3}))
    run = copied(unmerged_pair, base / "run")
    words = ["--config_path", str(base / "run.json"), "--output_dir", str(run), "--num_gpus", "2"]
    assert cli.main(["grads", "run", *words]) == 0
    return run


@pytest.fixture
def run(pair, tmp_path):
    """A copy of the run on two ranks, to be changed."""
    return copied(pair, tmp_path / "run")


@pytest.fixture(scope="module")
def discarded_pair(pair, tmp_path_factory):
    """The run on two ranks, in which a row is in one place."""
    run = copied(pair, tmp_path_factory.mktemp("discarded") / "run")
    for dim in DIMS:
        assert cli.main(["grads", "aggregate", "--base_path", str(run), "--dim", str(dim), "--discard_parts"]) == 0
    return run


@pytest.fixture
def discarded(discarded_pair, tmp_path):
    """A copy of that, to be changed."""
    return copied(discarded_pair, tmp_path / "discarded")


def merged(run, dim=DIMS[0]):
    return blocks.read(store.all_names(run / f"dim{dim}"))


# --- gradients of one batch


def small_batch():
    tokens = torch.tensor([[5, 6, 7, 8, 9, 5], [9, 8, 7, 0, 0, 0], [4, 3, 2, 1, 0, 0]])
    labels = tokens.clone()
    labels[1, 3:] = labels[2, 4:] = -100
    labels[2, :2] = -100  # a prompt: its tokens are read, not predicted
    return Batch(tokens, labels, ["a", "b", "c"])


def test_a_samples_gradient_is_that_of_its_own_mean_loss():
    model = causal.build("micro", 64, 8, seed=0).double()
    batch = small_batch()
    targets = [[1, 2, 3, 4, 5], [1, 2], [2, 3]]
    computed = loop.gradients(model, batch)
    assert computed.n_targets.tolist() == [len(places) for places in targets]
    assert list(computed.gradient) == [name for name, _ in model.named_parameters()]
    for row, places in enumerate(targets):
        tokens = batch.input_ids[row]
        log_p = model(tokens[None]).logits[0].log_softmax(-1)
        loss = -sum(log_p[place - 1, tokens[place]] for place in places) / len(places)
        model.zero_grad()
        loss.backward()
        assert computed.loss[row].item() == pytest.approx(loss.item(), rel=1e-12)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(computed.gradient[name][row], parameter.grad, rtol=1e-9, atol=1e-12)


def test_the_tied_embedding_has_one_gradient_with_both_of_its_uses():
    model = causal.build("micro", 64, 8, seed=0)
    computed = loop.gradients(model, small_batch()).gradient
    assert [name for name in computed if "wte" in name or "lm_head" in name] == ["transformer.wte.weight"]
    gradient = computed["transformer.wte.weight"][0]
    assert gradient[40].abs().sum() > 0  # never read: the output layer's part
    untied = causal.build("micro", 64, 8, seed=0)
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach().clone())
    apart = loop.gradients(untied, small_batch()).gradient
    both = apart["transformer.wte.weight"][0] + apart["lm_head.weight"][0]
    torch.testing.assert_close(gradient, both)


def test_padding_and_batch_mates_change_no_bit_and_the_mode_is_kept():
    model = causal.build("micro", 64, 8, seed=0).train()
    batch = small_batch()
    together = loop.gradients(model, batch).gradient
    narrow = Batch(batch.input_ids[1:2, :3], batch.labels[1:2, :3], ["b"])
    single = loop.gradients(model, narrow).gradient
    assert all(torch.equal(single[name][0], together[name][1]) for name in together)
    assert model.training


def rounding(numel):
    """The change of a projected row by another order of adding ``numel`` products in float32, relative to its gradient.

    A sum of n products x_i errs by some u * sum |x_i| at each level of a blocked sum (Higham 2002, section 4.2), and
    sum |x_i| <= sqrt(n) |x|. Processors differ in how they block.
    """
    return 2.0**-24 * math.sqrt(numel)


def assert_same_rows(found, expected, norms, numel):
    allowed = 4 * rounding(numel) * torch.tensor(norms) / math.sqrt(found.shape[1])
    assert ((found - expected).abs().amax(dim=1) <= allowed).all()


class FakeShards(list):
    meta = {"pad_id": 0}  # noqa: RUF012


def maker_of(model, method="loop", projection="rademacher", batch_size=2):
    made_from = origin(5, dims=[64], method=method, projection=projection, save_interval=4)
    return rows.RowMaker(model, made_from, torch.device("cpu"), batch_size=batch_size)


def test_a_sample_without_a_target_has_a_zero_row_and_a_flag():
    shards = FakeShards([Sample("one", torch.tensor([7])), Sample("three", torch.tensor([7, 8, 9]))])
    block = maker_of(causal.build("micro", 64, 8, seed=0)).blocks(shards, [0, 1])[64]
    assert block.ids == ["one", "three"]
    assert torch.equal(block.rows[0], torch.zeros(64)) and block.rows[1].norm() > 0
    assert block.meta["flag"].to_pylist() == ["no_target", None]
    assert block.meta["n_targets"].to_pylist() == [0, 2]
    assert block.meta["loss"][0].as_py() is None and block.meta["norm"][0].as_py() == 0
    assert math.isfinite(block.meta["loss"][1].as_py())


@pytest.mark.parametrize("together", [1, 2])
def test_how_many_samples_are_projected_at_once_changes_no_row(monkeypatch, together):
    shards = FakeShards([Sample(f"s{k}", torch.arange(k, k + 4)) for k in range(5)])
    maker = maker_of(causal.build("micro", 64, 8, seed=0))
    atomic_write = maker.blocks(shards, range(5))[64]
    numel = sum(parameter.numel() for parameter in maker.model.parameters())
    monkeypatch.setitem(rows.STACK_BYTES, "cpu", 4 * numel * together)
    cut = maker.blocks(shards, range(5))[64]
    assert cut.ids == atomic_write.ids == [f"s{k}" for k in range(5)]
    assert_same_rows(cut.rows, atomic_write.rows, atomic_write.meta["norm"].to_pylist(), numel)


@pytest.mark.parametrize("projection", ["sjlt", "factored"])
def test_batches_are_of_similar_lengths_and_rows_in_the_order_asked_for(monkeypatch, projection):
    lengths = [3, 8, 1, 5, 7, 4, 8]
    shards = FakeShards([Sample(f"s{at}", torch.arange(length) + at) for at, length in enumerate(lengths)])
    model, positions = causal.build("micro", 64, 8, seed=0), [6, 0, 2, 5, 1, 4, 3]
    maker, widths = maker_of(model, "hooks", projection, batch_size=3), []
    made = maker._batch

    def watched(*arguments):
        batch = made(*arguments)
        widths.append(batch.input_ids.shape[1])
        return batch

    monkeypatch.setattr(maker, "_batch", watched)
    found = maker.blocks(shards, positions)[64]
    assert widths == [8, 5, 1]
    alone = [maker_of(model, "loop", projection).blocks(shards, [at])[64] for at in positions]
    assert found.ids == [f"s{at}" for at in positions] == [id_ for one in alone for id_ in one.ids]
    numel = sum(parameter.numel() for parameter in model.parameters())
    wanted = store.concatenated(alone)
    assert_same_rows(found.rows, wanted.rows, wanted.meta["norm"].to_pylist(), numel)
    assert found.meta["n_targets"].to_pylist() == [lengths[at] - 1 for at in positions]
    assert not store.mismatched(maker.made_from.identity, found.ids, found.meta, found.stored.numpy())


def test_a_gradient_that_is_not_finite_ends_the_run_with_its_sample():
    model = causal.build("micro", 64, 8, seed=0)
    torch.nn.init.constant_(model.transformer.ln_f.weight, math.nan)
    with pytest.raises(NonFiniteGradient, match="sample 'three'"):
        maker_of(model).blocks(FakeShards([Sample("three", torch.tensor([7, 8, 9]))]), [0])
    with pytest.raises(NonFiniteGradient, match="sample 'three'"):
        maker_of(model, "hooks").check(FakeShards([Sample("three", torch.tensor([7, 8, 9]))]), [0])


def test_weights_that_are_not_finite_are_the_models_fault(small, tmp_path, capsys):
    shutil.copytree(small.model, tmp_path / "nan", ignore=shutil.ignore_patterns("SHA256SUMS"))
    model = causal.load(small.model)
    torch.nn.init.constant_(model.transformer.ln_f.weight, math.nan)
    model.save_pretrained(tmp_path / "nan")
    assert cli.main(options(small, tmp_path / "run", model_dir=tmp_path / "nan")) == 2
    printed = capsys.readouterr().err
    assert (
        "transformer.ln_f.weight of the model in" in printed
        and "is not finite" in printed
        and "--method" not in printed
    )
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["grads_collect.failed.json"]


@pytest.mark.parametrize("id_", ["é" * 100_000, "a word " * 20_000], ids=["one word", "many"])
def test_a_long_id_makes_no_long_message(tmp_path, id_):
    printed = str(NonFiniteGradient(f"the gradients of {id_!r}, {id_!r} and {id_!r} are not finite: remove them."))
    assert printed.startswith(f"the gradients of '{id_[:20]}") and printed.endswith("are not finite: remove them.")
    assert len(printed) < 11_000 and " characters) …" in printed
    failures.write_failure(tmp_path, "norms", KeyError(id_))
    assert (tmp_path / "norms.failed.json").stat().st_size < 100_000
    assert len(checks.Check("rows", "", [f"{id_!r} is missing"] * 9).report()["detail"]) < 11_000


# --- the store over ranks


def written(run):
    return sorted(str(path.relative_to(run)) for path in run.rglob("dim*/*"))


NAMES = ("all_orig.pt", "all_ids.pkl", "all_meta.parquet")


def of_rank(rank, ends, names=NAMES):
    """A rank's files of both widths, with the blocks that end at `ends`."""
    blocks = [
        f"{name}-{end}.{kind}" for end in ends for name, kind in (("grads", "pt"), ("ids", "pkl"), ("meta", "parquet"))
    ]
    return [f"rank_{rank}/dim{dim}/{name}" for dim in DIMS for name in (*blocks, *names)]


MERGED_FILES = [f"dim{dim}/{name}" for dim in DIMS for name in (*NAMES, "manifest.json")]


def test_all_files_of_the_contract_stay(unmerged, alone, pair):
    assert written(unmerged) == sorted(of_rank(0, (4, 8, 11)))
    assert written(alone) == sorted([*of_rank(0, (4, 8, 11)), *MERGED_FILES])
    assert written(pair) == sorted([*of_rank(0, (4, 6)), *of_rank(1, (4, 6)), *MERGED_FILES])
    parts, all_rows = pair / "rank_1/dim100", merged(pair, 100)
    for path, ids in ((parts / "grads-6.pt", "ids-6.pkl"), (parts / "all_orig.pt", "all_ids.pkl")):
        rows = torch.load(path)
        for row, id_ in zip(rows, store.read_ids(parts / ids), strict=True):
            computed_by_rank_0 = id_ == all_rows.ids[0]  # the sampler's padding
            assert computed_by_rank_0 or torch.equal(row, all_rows.rows[all_rows.ids.index(id_)])
    assert all(path.stat().st_nlink == 1 for path in pair.rglob("*") if path.is_file())


def test_discarded_parts_leave_a_row_in_one_place(pair, discarded):
    kept = ("all_ids.pkl", "all_meta.parquet")
    files = sorted([*of_rank(0, (), kept), *of_rank(1, (), kept), *MERGED_FILES])
    assert written(discarded) == files
    assert {path: sha256_file(discarded / path) for path in files} == {path: sha256_file(pair / path) for path in files}
    assert cli.main(["grads", "validate", "--output_dir", str(discarded), "--recompute", "2"]) == 0


def test_parts_are_not_discarded_for_rows_in_another_folder(run, tmp_path, capsys):
    words = ["grads", "aggregate", "--base_path", str(run), "--dim", "64", "--discard_parts"]
    assert cli.main([*words, "--output_dir", str(tmp_path / "other")]) == 2
    assert "--discard_parts: the rows of" in capsys.readouterr().err
    assert (run / "rank_0/dim64/grads-4.pt").is_file()


@pytest.mark.parametrize(
    ("changes", "discard", "printed"),
    [
        ({"count": 30_000}, False, "will take 5.9 GB of disk, 2.0 GB with --discard_parts"),
        ({"count": 62_000, "store": "float16", "modules": ["a", "b"]}, True, "4.1 GB of disk, and twice that while"),
        ({"count": 20_000}, False, ""),
    ],
)
def test_the_size_of_a_large_collection_is_printed(capsys, changes, discard, printed):
    count, *_ = changes.values()
    further = {name: value for name, value in changes.items() if name != "count"}
    store.note_size(origin(count, method="loop", projection="sjlt", dims=[8192, 8192], **further), discard)
    said = capsys.readouterr().err
    assert printed in said and bool(said) == bool(printed)


@pytest.mark.parametrize(("ranks", "discard"), [(1, []), (2, ["--discard_parts"])])
def test_a_merged_collection_is_merged_again_and_collected_no_more(world, small, alone, pair, tmp_path, ranks, discard):
    run = copied({1: alone, 2: pair}[ranks], tmp_path / "run")
    aggregate = ["grads", "aggregate", "--base_path", str(run), "--dim", "64"]
    assert cli.main([*aggregate, *discard]) == 0
    before = {path: sha256_file(run / path) for path in written(run)}
    collected_by(world(ranks), run, **chosen(small))
    assert cli.main(aggregate) == 0
    assert {path: sha256_file(run / path) for path in written(run)} == before
    assert cli.main([*aggregate, "--output_dir", str(tmp_path / "copy")]) == 0
    assert sha256_file(tmp_path / "copy/dim64/all_orig.pt") == before["dim64/all_orig.pt"]
    assert written(run) == sorted(before)


def test_a_ranks_rows_that_are_lost_are_joined_again(small, alone, tmp_path):
    run = copied(alone, tmp_path / "run")
    for name in ("rank_0/dim64/all_orig.pt", "rank_0/dim100/all_ids.pkl"):
        (run / name).unlink()
    assert cli.main(["grads", "validate", "--output_dir", str(run)]) == 1
    assert cli.main(options(small, run)) == 0
    assert cli.main(["grads", "validate", "--output_dir", str(run)]) == 0
    assert {path: sha256_file(run / path) for path in written(run)} == {
        path: sha256_file(alone / path) for path in written(alone)
    }


@pytest.mark.parametrize(
    "launch",
    [
        pytest.param([], id="command"),
        pytest.param(["launch", "--world_size", "1", "--"], id="launch", marks=pytest.mark.full),
    ],
)
def test_a_reader_that_leaves_is_no_failure_of_the_command(alone, tmp_path, launch):
    run, (reading, writing) = copied(alone, tmp_path / "run"), os.pipe()
    os.close(reading)
    words = [*launch, "grads", "aggregate", "--base_path", str(run), "--dim", "64"]
    with os.fdopen(writing, "w") as output:
        ended = subprocess.run(
            [sys.executable, "-um", "gradwire", *words],
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (3, "")
    assert not list(run.rglob("*.failed.json"))


def test_a_rank_takes_its_longest_samples_first_and_puts_rows_back_in_order(small, unmerged, unmerged_pair):
    """The blocks of a rank on three samples at once have the least padding; its rows are in the sampler's order."""
    shards = Shards(small.shards, "train")
    lengths = {shards[position].sample_id: len(shards[position].input_ids) for position in range(SAMPLES)}
    taken = [lengths[id_] for end in (4, 8, 11) for id_ in store.read_ids(unmerged / f"rank_0/dim64/ids-{end}.pkl")]
    assert taken == sorted(lengths.values(), reverse=True) != list(lengths.values())
    for rank in range(2):
        positions = provenance.read(unmerged_pair).sampler_indices(rank)
        ids = store.read_ids(unmerged_pair / f"rank_{rank}/dim64/all_ids.pkl")
        assert ids == [shards[position].sample_id for position in positions]


def test_two_ranks_on_an_odd_number_of_samples_give_the_store_of_one(small, alone, pair):
    shards = Shards(small.shards, "train")
    ids = [shards[position].sample_id for position in range(SAMPLES)]
    assert len(set(ids)) == SAMPLES and any("#" in id_ for id_ in ids)
    numel = causal.load(small.model).num_parameters()
    for dim in DIMS:
        one, two = merged(alone, dim), merged(pair, dim)
        assert one.ids == two.ids == ids
        assert one.rows.shape == (SAMPLES, dim)
        assert_same_rows(two.rows, one.rows, one.meta["norm"].to_pylist(), numel)
    manifest = json.loads((pair / "dim64" / "manifest.json").read_text())
    assert (manifest["rows"], manifest["duplicates"], manifest["order"]) == (SAMPLES, 1, "as in the data")
    assert 0 <= manifest["duplicates_deviation"] < rounding(numel)
    assert manifest["sha256"]["all_ids.pkl"] == sha256_file(pair / "dim64" / "all_ids.pkl")


def test_the_rows_are_the_projected_gradients_of_the_samples(small, pair):
    shards, model = Shards(small.shards, "train"), causal.load(small.model)
    origin = provenance.read(pair)
    projector = rows.RowMaker.load(origin, torch.device("cpu")).projector
    for dim in DIMS:
        assert projector.fingerprint(dim) == origin.fingerprints[str(dim)]
        for position, (id_, row, norm) in enumerate(
            zip(merged(pair, dim).ids, merged(pair, dim).rows, merged(pair, dim).meta["norm"].to_pylist(), strict=True)
        ):
            computed = loop.gradients(model, collate([shards[position]], 0, 1)).gradient
            flat = torch.cat([gradient.flatten() for gradient in computed.values()])
            assert shards[position].sample_id == id_
            assert norm == pytest.approx(flat.double().norm().item(), rel=1e-6)
            assert_same_rows(row[None], projector.project(flat[None], [dim])[dim], [norm], len(flat))


@pytest.mark.parametrize("method", ["hooks", "loop"])
def test_gradient_checkpointing_gives_the_same_rows(small, tmp_path, monkeypatch, method):
    saved_, losses_of = [], loop.losses_of

    def counted(model, *given):
        size = 0

        def pack(tensor):
            nonlocal size
            size += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            losses_of(model, *given)
        saved_.append(size)
        return losses_of(model, *given)

    monkeypatch.setattr(loop, "losses_of", counted)
    for run, further in (("less", ["--gradient_checkpointing"]), ("plain", [])):
        words = options(small, tmp_path / run, method=method, max_samples=4, dim=64)
        assert cli.main([*words, "--device", "cpu", *further]) == 0
    assert written(tmp_path / "less") == written(tmp_path / "plain")
    for path in written(tmp_path / "plain"):
        assert sha256_file(tmp_path / "less" / path) == sha256_file(tmp_path / "plain" / path), path
    if method == "loop":
        assert 0 < max(saved_[: len(saved_) // 2]) < 0.5 * max(saved_[len(saved_) // 2 :])


@pytest.fixture(scope="module")
def of_corpus(small, tmp_path_factory):
    """A run of all documents of a corpus file, by one command."""
    base = tmp_path_factory.mktemp("corpus")
    config = {"model_dir": str(small.model), "data_path": str(small.corpus), "cache_dir": str(base / "cache"), "dim": 8}
    (base / "run.json").write_text(json.dumps(config))
    words = ["grads", "run", "--config_path", str(base / "run.json"), "--output_dir", str(base / "run")]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.main(words) == 0
    (base / "printed").write_text(out.getvalue())
    return base


def test_all_documents_of_a_corpus_file_are_collected(small, of_corpus, capsys):
    run, ids = of_corpus / "run", merged(of_corpus / "run", 8).ids
    texts = [document.text for document in documents(small.corpus)]
    lengths = [len(tokens) + 1 for tokens in load_tokenizer(small.model).encode_batch(texts)]
    expected = [
        id_
        for document, length in zip(documents(small.corpus), lengths, strict=True)
        for id_ in sample_ids(document.id, len(cuts(length, MAX_LENGTH)))
    ]
    assert ids == expected and len(ids) > len(texts) == 17
    printed = f"{len(ids)} samples of 17 documents"
    assert f"gradients of {printed} in {run}" in (of_corpus / "printed").read_text()

    words = ["norms", "--model_dir", small.model, "--data_path", small.corpus, "--cache_dir", of_corpus / "cache"]
    words = [*map(str, words), "--output_dir", str(of_corpus)]
    assert cli.main([*words, "--split", "val"]) == 2
    assert f"--split val: {small.corpus} is a corpus file, which is used whole" in capsys.readouterr().err
    assert cli.main(words) == 0
    assert f"norms of {printed} in {of_corpus / 'norms.parquet'}" in capsys.readouterr().out
    table = pq.read_table(of_corpus / "norms.parquet")
    assert table["id"].to_pylist() == ids
    assert table["norm"].to_pylist() == pytest.approx(merged(run, 8).meta["norm"].to_pylist(), rel=1e-4)


def test_validation_compares_with_the_corpus_file(small, of_corpus, tmp_path, capsys):
    validate = ["grads", "validate", "--output_dir", str(of_corpus / "run")]
    assert cli.main(validate) == 0
    assert "every document of the corpus has samples" in (of_corpus / "run/validation.json").read_text()

    file, moved = tmp_path / "corpus.json", tmp_path / "shards"
    values = json.loads(small.corpus.read_text())
    values.insert(1, {"id": "doc/0é#0", "title": "", "text": "new"})
    file.write_text(json.dumps(values))
    assert cli.main([*validate, "--corpus", str(file)]) == 2
    assert f"the corpus {file} is not that of the collection" in capsys.readouterr().err
    shutil.copytree(of_corpus / "cache/all/shards", moved)
    meta = shards.meta(moved, "all")
    torch.save({**meta, "dataset_digest": sha256_file(file)}, moved / "all/shards.meta.pt")
    assert cli.main([*validate, "--corpus", str(file), "--data_path", str(moved)]) == 1
    assert "document 'doc/0é#0' has no sample" in capsys.readouterr().err
    assert cli.main([*validate, "--corpus", str(tmp_path / "none")]) == 2
    assert "cannot read the corpus" in capsys.readouterr().err


def test_documents_are_compared_with_samples_in_order():
    def found(ids, to_the_end=True):
        return list(checks._other_documents(["a", "a#1", "b", "c"], ids, to_the_end))

    assert not found(["a", "a#1", "b#0", "b#1", "c"])
    assert not found(["a", "a#1", "b#0"], to_the_end=False)
    assert found(["a", "a#1", "b#0"]) == ["document 'c' has no sample"]
    assert found(["a", "b#0", "b#1", "c"]) == ["document 'a#1' has no sample"]
    assert found(["a", "a#1", "b", "c", "d"]) == ["sample 'd' belongs to no document"]
    assert found(["a", "a#1", "b#1", "c"]) == [
        "document 'b' has no sample",
        "document 'c' has no sample",
        "sample 'b#1' belongs to no document",
    ]


# --- going on, and refusing to mix


WRITING = """
import sys
from contextlib import ExitStack
from pathlib import Path
from gradwire.base.files import atomic_write
with ExitStack() as stack:
    for path in map(Path, sys.argv[1:]):
        stack.enter_context(atomic_write(path)).write_text("half a file")
    print("writing", flush=True)
    sys.stdin.read()
"""


def test_aggregating_removes_what_a_killed_call_left(alone, tmp_path):
    run = copied(alone, tmp_path / "run")
    names = ("all_orig.pt", "all_meta.parquet", "all_ids.pkl", "manifest.json")
    words = [sys.executable, "-c", WRITING, *(str(run / "dim64" / name) for name in (*names, "notes.txt"))]
    killed, living = (subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2))
    for process in (killed, living):
        assert process.stdout.readline() == b"writing\n"
    killed.kill()
    killed.communicate()
    assert len(list((run / "dim64").glob("*.part"))) == 10
    assert cli.main(["grads", "aggregate", "--base_path", str(run), "--dim", "64"]) == 0
    assert len(list((run / "dim64").glob("*.part"))) == 6, (
        "those of the living one, and notes.txt, no file of the command"
    )
    living.communicate()
    assert living.returncode == 0
    assert len(list((run / "dim64").glob("*.part"))) == 1


def test_a_killed_collection_goes_on_to_the_store_of_an_unbroken_one(small, unmerged, tmp_path, monkeypatch):
    run = tmp_path / "run"
    killed = [
        sys.executable,
        str(Path(__file__).parents[2] / "helpers" / "killed_collect.py"),
        "7",
        *options(small, run),
    ]
    assert subprocess.run(killed, check=False).returncode == -9
    assert len(list(run.rglob("*.part"))) == 1
    parts = run / "rank_0" / "dim64"
    assert (parts / "grads-8.pt").exists() and not (run / "rank_0" / "dim100" / "ids-8.pkl").exists()
    computed, blocks = [], rows.RowMaker.blocks
    monkeypatch.setattr(
        rows.RowMaker, "blocks", lambda self, shards, some: computed.extend(some) or blocks(self, shards, some)
    )
    assert cli.main(options(small, run)) == 0
    assert len(computed) == SAMPLES - 4
    assert written(run) == written(unmerged)
    for path in written(run):
        assert sha256_file(run / path) == sha256_file(unmerged / path), path


def test_a_collection_killed_while_it_deletes_its_blocks_deletes_them(small, unmerged, tmp_path, capsys):
    run = copied(unmerged, tmp_path / "run")
    (run / "rank_0/dim64/ids-4.pkl").unlink()
    assert cli.main(["grads", "validate", "--output_dir", str(run), "--check_ranks"]) == 1
    assert f"1 of 13 checks of {run} failed" in capsys.readouterr().err
    assert cli.main([*options(small, run), "--discard_parts"]) == 0
    assert written(run) == sorted(of_rank(0, ()))
    assert cli.main(["grads", "validate", "--output_dir", str(run), "--check_ranks"]) == 0


def test_an_aggregation_killed_while_it_deletes_parts_deletes_them(run, capsys):
    aggregate = ["grads", "aggregate", "--base_path", str(run), "--dim", "64"]
    (run / "rank_0/dim64/all_orig.pt").unlink()
    assert cli.main(["grads", "validate", "--output_dir", str(run)]) == 1
    assert f"{run / 'rank_0/dim64/all_orig.pt'} is missing" in capsys.readouterr().err
    assert cli.main([*aggregate, "--discard_parts"]) == 0
    assert cli.main(["grads", "validate", "--output_dir", str(run)]) == 0
    assert not list(run.glob("rank_*/dim64/*.pt")) and len(list(run.glob("rank_*/dim100/*.pt"))) == 6


def test_a_collection_does_not_go_on_from_blocks_that_are_not_its_own(small, unmerged, tmp_path, capsys):
    run = copied(unmerged, tmp_path / "run")
    (run / "collect.json").unlink()
    assert cli.main(options(small, run, seed=1)) == 2
    assert "collect.json is missing, but the folder holds gradients" in capsys.readouterr().err
    assert not (run / "collect.json").exists()
    shutil.copy(unmerged / "collect.json", run)
    parts = run / "rank_0" / "dim64"
    names = store.part_names(parts, 8)
    block = blocks.read(names)
    put(names, block.rows + 1e-3, block)
    (parts / "all_ids.pkl").unlink()
    assert cli.main(options(small, run)) == 2
    assert f"{names.rows} with {names.ids}" in capsys.readouterr().err
    assert not (parts / "all_ids.pkl").exists()


def test_a_run_folder_of_another_configuration_is_refused_and_restarted_on_request(small, alone, tmp_path, capsys):
    run = copied(alone, tmp_path / "run")
    before = sha256_file(run / "dim64" / "all_orig.pt")
    changed = options(small, run, seed=1)
    assert cli.main(changed) == 2
    assert "a collection folder of another configuration: seed is 0 there and 1 here" in capsys.readouterr().err
    assert sha256_file(run / "dim64" / "all_orig.pt") == before
    assert cli.main([*changed, "--restart"]) == 0
    assert sha256_file(run / "rank_0" / "dim64" / "all_orig.pt") != before
    assert not (run / "dim64").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 0}, "--dim is 0"),
        ({"dim": 10**9}, "--dim 1000000000: the model's gradients have "),
        ({"dim": 47, "projection": "factored"}, "--dim 47 with --projection factored: not a product of two similar"),
        ({"dim": 64, "projection": "none"}, "--dim 64 with --projection none: the model's gradients have "),
        ({"save_interval": 0}, "--save_interval is 0"),
        ({"max_samples": 0}, "--max_samples is 0"),
        ({"model_dir": "nowhere"}, "nowhere holds no model"),
        ({"data_path": "nowhere"}, "nowhere does not exist: give a shards folder or a corpus file"),
    ],
)
def test_bad_input_is_reported_before_anything_is_written(small, tmp_path, capsys, changes, message):
    assert cli.main(options(small, tmp_path / "run", **changes)) == 2
    said = capsys.readouterr().err
    assert message in said and "--method auto uses" not in said
    assert not (tmp_path / "run" / "collect.json").exists()


@pytest.fixture(scope="module")
def longer(small, tmp_path_factory):
    """Shards of samples of one token more than the model has positions."""
    folder = tmp_path_factory.mktemp("longer")
    words = ["--data_path", small.corpus, "--output_dir", folder, "--tokenizer", small.model]
    words = [*map(str, words), "--max_length", str(MAX_LENGTH + 1), "--val_fraction", "0.2"]
    assert cli.main(["tokenize", *words]) == 0
    return folder / "shards"


@pytest.mark.parametrize(
    "command",
    [
        "perplexity",
        "norms --output_dir out",
        "grads collect --output_path out --dim 8",
        "grads factors --output_dir out",
        "grads score --output_dir out --query_path",
        "train --output_dir out --model",
    ],
)
def test_samples_longer_than_the_models_positions_are_refused(small, longer, tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    train = command.startswith("train")
    model = [str(small.model), "--tokenizer", str(small.model)] if train else ["--model_dir", str(small.model)]
    for data in (longer,) if train else (longer, small.corpus):
        words = [*command.split(), *[str(data)] * command.endswith("query_path"), *model, "--data_path", str(data)]
        assert cli.main([*words, "--max_length", str(MAX_LENGTH + 1), "--device", "cpu"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{MAX_LENGTH} positions" in line


def test_more_ranks_than_samples_are_refused_before_they_start(small, tmp_path):
    few = {**chosen(small), "max_samples": 3, "output_path": tmp_path / "run", "world_size": 4}
    with pytest.raises(BadInput, match="4 ranks for 3 samples"):
        collect.preflight(collect.Options(**few))


def test_grads_run_refuses_a_configuration_it_does_not_know(small, tmp_path, capsys):
    def answer(text):
        (tmp_path / "c.yaml").write_text(text)
        assert cli.main(["grads", "run", "--config_path", str(tmp_path / "c.yaml"), "--output_dir", str(tmp_path)]) == 2
        return capsys.readouterr().err

    assert "Did you mean 'projection'" in answer("{model_dir: x, data_path: y, dim: 4, projecton: none}")
    assert "dim is missing" in answer("{model_dir: x, data_path: y}")
    assert "train must be text, got 3" in answer("{model_dir: x, data_path: y, dim: 4, train: 3}")
    assert "save_interval must be" in answer("{model_dir: x, data_path: y, dim: 4, save_interval: 0}")
    assert "is not a mapping" in answer("[1, 2]")
    assert "cannot be read" in answer("{")


def test_skip_training_aggregates_and_validates_what_is_there_without_the_model(unmerged_pair, pair, tmp_path, capsys):
    run, config = copied(unmerged_pair, tmp_path / "run"), tmp_path / "run.yaml"
    edit(run / "collect.json", model_dir=str(tmp_path / "gone"))
    words = ["grads", "run", "--output_dir", str(run), "--skip_training"]
    assert cli.main([*words, "--num_gpus", "3"]) == 2
    assert "was collected by 2 ranks" in capsys.readouterr().err
    config.write_text("{model_dir: gone, data_path: gone, train: gone, recompute: 3, discard_parts: true}")  # no dim
    for further, files in (([], 3), (["--config_path", str(config), "--dim", "100"], 0)):
        assert cli.main([*words, *further]) == 0
        assert capsys.readouterr().out.endswith(f"checks of {run} passed\n")
        assert len(list(run.glob("rank_1/dim100/*.pt"))) == files
    assert sha256_file(run / "dim64/all_orig.pt") == sha256_file(pair / "dim64/all_orig.pt")
    assert cli.main(["grads", "run", "--output_dir", str(run)]) == 2
    assert "needs --config_path FILE, or --skip_training" in capsys.readouterr().err


# --- merging


MERGED = origin(5, dims=[3], method="loop", projection="rademacher")


def block_of(ids, rows):
    records = [{"sample_id": id_, "loss": 1.0, "n_targets": 1, "norm": 1.0, "flag": None} for id_ in ids]
    return store.bind(rows, records, MERGED)


def test_a_digest_covers_the_collection_the_metadata_as_json_and_the_row():
    ids = ["plain", "a\nb", '"}\n{"', "%s\u2028é", "a, b\x1c"]
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    block = block_of(ids, rows)
    for id_, row, found in zip(ids, rows, block.meta["digest"].to_pylist(), strict=True):
        text = json.dumps({"flag": None, "loss": 1.0, "n_targets": 1, "norm": 1.0, "sample_id": id_})
        covered = f"{MERGED.identity}{text}".encode() + row.numpy().astype("<f4").tobytes()
        assert found == hashlib.sha256(covered).hexdigest()
    for given, wrong in ((ids, []), ([*ids[:3], "other", ids[4]], [3])):
        assert store.mismatched(MERGED.identity, given, block.meta, block.stored.numpy()) == wrong
    assert store.row_digests(MERGED.identity, block.meta[:0], rows[:0]) == []


def test_the_identity_covers_all_of_a_provenance_but_places():
    for name in provenance.Provenance.model_fields:
        changed = MERGED.model_copy(update={name: "another"})
        assert (changed.identity == MERGED.identity) == (name in provenance.PLACES), name


def test_merging_orders_by_the_data_and_checks_duplicates(tmp_path, monkeypatch):
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))

    def source(name, *block):
        store.write(store.all_names(tmp_path / name), block_of(*block))
        return BoundRows(store.all_names(tmp_path / name), 3, MERGED)

    first, second = source("0", ["c", "a", "e"], rows[[2, 0, 4]]), source("1", ["b", "d", "a"], rows[[1, 3, 0]])
    for chunk in (1, 24, 1 << 20):
        monkeypatch.setattr(merge, "CHUNK_BYTES", chunk)
        result = merge.merge([first, second], list("abcde"), 1e-4)
        assert torch.equal(torch.from_numpy(np.concatenate(list(result.chunks()))), rows)
    assert result.meta["sample_id"].to_pylist() == list("abcde")
    assert (result.duplicates, result.deviation) == (1, 0.0)
    differing = source("2", ["b", "d", "a"], rows[[1, 3, 0]] * torch.tensor([[1.0], [1.0], [1.01]]))
    with pytest.raises(CheckFailed, match=r"two rows of sample 'a' differ"):
        merge.merge([first, differing], list("abcde"), 1e-4)
    with pytest.raises(BadInput, match=r"no row for sample 'f', 'g' \(2 in all\)"):
        merge.merge([first, second], list("abcdefg"), 1e-4)
    with pytest.raises(BadInput, match=r"rows for sample 'e' \(1 in all\), not in the data"):
        merge.merge([first, second], list("abcd"), 1e-4)


def test_rows_are_read_and_written_chunk_by_chunk_in_torchs_own_format(pair, tmp_path):
    words = ["--base_path", str(pair), "--output_dir", str(tmp_path / "more"), "--dim", "100"]
    assert cli.main(["grads", "aggregate", *words]) == 0
    folder_ = tmp_path / "more" / "dim100"
    for options_ in ({"mmap": True}, {}):
        rows = torch.load(folder_ / "all_orig.pt", weights_only=True, **options_)
        assert torch.equal(rows, merged(pair, 100).rows)
    manifest = json.loads((folder_ / "manifest.json").read_text())
    assert len(manifest["sha256"]) == 3
    assert manifest["sha256"] == {name: sha256_file(folder_ / name) for name in manifest["sha256"]}
    file = RowFile(folder_ / "all_orig.pt")
    for positions in ([3], [0, 10], [7, 2, 2, 9], list(range(11))):
        assert torch.equal(torch.from_numpy(file.take(positions)), rows[positions])


def test_aggregating_refuses_what_the_run_has_not(unmerged_pair, tmp_path, capsys):
    run = copied(unmerged_pair, tmp_path / "run")

    def answer(*more, base=run):
        assert cli.main(["grads", "aggregate", "--base_path", str(base), *more]) == 2
        return capsys.readouterr().err

    before = sorted(run.rglob("*"))
    assert "--dim 65: " in answer("--dim", "65")
    assert "was collected by 2 ranks" in answer("--dim", "64", "--num_gpus", "3")
    assert sorted(run.rglob("*")) == before
    assert "collect.json is missing" in answer("--dim", "64", base=tmp_path / "none")
    for command in (["validate", "--output_dir"], ["index", "--store"]):
        assert cli.main(["grads", *command, str(tmp_path / "none")]) == 2
    capsys.readouterr()
    assert not (tmp_path / "none").exists()
    (run / "rank_1/dim64/all_orig.pt").unlink()
    assert f"{run / 'rank_1' / 'dim64'} is missing or incomplete" in answer("--dim", "64")


def test_aggregating_refuses_altered_rows_and_leaves_the_files_of_an_earlier_call(run, tmp_path, capsys):
    made = tmp_path / "made" / "dim64"
    words = ["grads", "aggregate", "--base_path", str(run), "--output_dir", str(made), "--dim", "64"]
    assert cli.main(words) == 0
    assert {path.name for path in made.iterdir()} == {
        *(path.name for path in store.all_names(made)),
        "manifest.json",
    }
    before = {path.name: sha256_file(path) for path in made.iterdir()}
    names = store.all_names(run / "rank_1" / "dim64")
    alter(names, 2, 3, 0.5)
    assert cli.main(words) == 2
    assert (
        f"{names.meta}: row 2 is not what was collected for {store.read_ids(names.ids)[2]!r}" in capsys.readouterr().err
    )
    (made / "grads_aggregate.failed.json").unlink()
    assert {path.name: sha256_file(path) for path in made.iterdir()} == before


def test_the_output_folder_may_be_the_width_itself(pair, tmp_path):
    for given, meant in ((tmp_path / "a", tmp_path / "a" / "dim64"), (tmp_path / "dim64", tmp_path / "dim64")):
        words = ["--base_path", str(pair), "--output_dir", str(given), "--dim", "64"]
        assert cli.main(["grads", "aggregate", *words]) == 0
        assert sha256_file(meant / "all_ids.pkl") == sha256_file(pair / "dim64" / "all_ids.pkl")


# --- validation finds what is planted


def rewrite(path, ids):
    path.write_bytes(pickle.dumps(ids))


def put(names, rows, block):
    """Other rows with the ids and the metadata of a block."""
    store.write(names, block._replace(stored=block.codec.encode(rows.clone())))


def put_bound(run, names, rows, block):
    """As a forger would who knows what a digest covers."""
    meta = store.with_digests(provenance.read(run).identity, block.meta, block.codec.encode(rows))
    put(names, rows, block._replace(meta=meta))


def alter(names, row, column, value):
    """Another number in a stored row."""
    block = blocks.read(names)
    rows = block.rows.clone()
    rows[row, column] = value
    put(names, rows, block)
    return names.rows


def swapped(ids, i=1, j=3):
    ids = list(ids)
    ids[i], ids[j] = ids[j], ids[i]
    return ids


def swap_ids(path):
    rewrite(path, swapped(store.read_ids(path)))
    return path


def swap_rank_ids(run):
    return swap_ids(run / "rank_1" / "dim64" / "all_ids.pkl")


def swap_merged_ids_and_sign(run):
    path = swap_ids(run / "dim64" / "all_ids.pkl")
    sign(run / "dim64")
    return path


def swap_merged_rows_and_bind_again(run):
    names, block = store.all_names(run / "dim64"), merged(run)
    put_bound(run, names, block.rows[swapped(range(SAMPLES))], block)
    sign(run / "dim64")
    return names.rows


def alter_rank_row(run):
    return alter(store.all_names(run / "rank_1" / "dim64"), 4, 0, 0.5)


def keep(run, positions):
    names, block = store.all_names(run / "dim64"), merged(run)
    ids, meta = [block.ids[at] for at in positions], block.meta.take(pa.array(positions))
    store.write(names, store.Block(block.stored[positions], ids, meta, block.codec))
    sign(run / "dim64")
    return names.ids


def drop_row(run):
    return keep(run, range(SAMPLES - 1))  # the last one: the others are in order


def add_id(run):
    path = run / "rank_0" / "dim64" / "all_ids.pkl"
    rewrite(path, [*store.read_ids(path), "more"])
    return path


def truncate(run):
    path = run / "rank_0" / "dim64" / "all_orig.pt"
    path.write_bytes(path.read_bytes()[:-300])
    return path


def break_pair(run):
    path = run / "rank_1" / "dim64" / "all_ids.pkl"
    path.unlink()
    return path


def lose_rows_of_a_rank(run):
    """The merged block has them, and the other rank has its own."""
    (run / "rank_1" / "dim64" / "all_orig.pt").unlink()
    return run / "rank_1" / "dim64" / "all_orig.pt"


def lose_metadata_of_a_rank(run):
    """The merged block has them, and is not what the rank wrote."""
    (run / "rank_1" / "dim64" / "all_meta.parquet").unlink()
    return run / "rank_1" / "dim64" / "all_meta.parquet"


def forget_a_row(run):
    """Of what a rank keeps; its ids and its table agree."""
    names = store.all_names(run / "rank_0" / "dim64")
    ids, meta = store.read_ids(names.ids), store.read_meta(names.meta)
    store.write_metadata(names, meta[:-1], ids[:-1])
    return names.ids


def add_block(run):
    path = run / "rank_1" / "dim64" / "grads-5.pt"
    path.touch()
    return path.with_name("ids-5.pkl")


def lose_block(run):
    path = run / "rank_1" / "dim64" / "ids-6.pkl"
    path.unlink()
    path.with_name("grads-6.pt").unlink()
    path.with_name("meta-6.parquet").unlink()
    return path


def alter_block(run):
    return alter(store.part_names(run / "rank_1" / "dim64", 6), 1, 2, 0.5)


def block_of_another_rank(run):
    for name, other in zip(*(store.part_names(run / f"rank_{rank}/dim64", 4) for rank in range(2)), strict=True):
        shutil.copy(name, other)
    return run / "rank_1/dim64/grads-4.pt"


def shorten_block(run):
    names = store.part_names(run / "rank_1/dim64", 4)
    store.write(names, blocks.read(names).take([0, 2]))
    return names.rows.parent


def plant_nan(run):
    return alter(store.all_names(run / "rank_0" / "dim64"), 2, 3, math.nan)


def other_width(run):
    path = run / "dim64" / "all_orig.pt"
    torch.save(torch.ones(SAMPLES, 65), path)
    return path


def forge_manifest(run):
    path = run / "dim64" / "manifest.json"
    edit(path, seed=1)
    return path


def remove_merged(run):
    shutil.rmtree(run / "dim64")
    return run / "dim64" / "all_ids.pkl"


def shrink_row_and_bind_again(run):
    """A row of a third of its norm, with digests and checksums to match: only its norm shows it."""
    names, block = store.all_names(run / "dim64"), merged(run)
    rows = block.rows.clone()
    rows[5] /= 3
    put_bound(run, names, rows, block)
    sign(run / "dim64")
    return names.rows


def another_models_ranks(run):
    """The same samples, projection and seed; the gradients are another model's, and in themselves all is right."""
    made = provenance.read(run)
    other = run.parent / "model"
    model = causal.build("micro", 290, 24, seed=4)
    causal.save(model.state_dict(), model.config, Path(made.model_dir), other, {})
    maker = rows.RowMaker.load(
        made.model_copy(update={"model_dir": str(other), "model_digest": saved.digest(other), "dims": [64]}),
        torch.device("cpu"),
    )
    for rank in range(2):
        parts, positions = run / f"rank_{rank}" / "dim64", made.sampler_indices(rank)
        store.write(store.all_names(parts), maker.blocks(Shards(made.data_path, "train"), positions)[64])
    cli.main(["grads", "aggregate", "--base_path", str(run), "--dim", "64"])
    return run / "rank_1" / "dim64" / "all_orig.pt"


def extra_rank(run):
    shutil.copytree(run / "rank_1" / "dim64", run / "rank_2" / "dim64")
    return run / "rank_2" / "dim64"


def edit_loss(run):
    """Of one sample, wherever it is reported, and signed."""
    edited = merged(run).ids[0]
    for place in ("rank_0/dim64", "rank_1/dim64", "dim64"):
        for path in (run / place).glob("*meta*.parquet"):
            table = pq.read_table(path)
            pairs = zip(table["sample_id"].to_pylist(), table["loss"].to_pylist(), strict=True)
            losses = [7.5 if id_ == edited else loss for id_, loss in pairs]
            pq.write_table(table.set_column(1, "loss", pa.array(losses, pa.float64())), path)
    sign(run / "dim64")
    return run / "dim64" / "all_meta.parquet"


def unlisted_file(run):
    path = run / "dim64" / "manifest.json"
    listed = json.loads(path.read_text())["sha256"]
    edit(path, sha256={name: listed[name] for name in listed if name != "all_meta.parquet"})
    return run / "dim64" / "all_meta.parquet"


def save_with_offset(run):
    """`torch.load` gives the right rows, and the numbers of the file begin with others."""
    path = run / "dim64" / "all_orig.pt"
    rows = merged(run).rows.clone()
    torch.save(torch.cat([rows.flip(0), rows])[SAMPLES:], path)
    sign(run / "dim64")
    return path


FAULTS = {  # by the check that finds it
    extra_rank: "no folders of other ranks or widths",
    edit_loss: "row i belongs to id i",
    unlisted_file: "the manifest matches",
    save_with_offset: "files readable, counts equal, rows finite",
    another_models_ranks: "row i belongs to id i",
    swap_rank_ids: "ids are those of the rank's samples, in order",
    alter_rank_row: "row i belongs to id i",
    add_id: "files readable, counts equal, rows finite",
    truncate: "files readable, counts equal, rows finite",
    break_pair: "files complete",
    plant_nan: "files readable, counts equal, rows finite",
    lose_rows_of_a_rank: "files complete",
    lose_block: "files complete",
    add_block: "files complete",
    alter_block: "blocks have the rank's rows",
    block_of_another_rank: "blocks have the rank's rows",
    shorten_block: "blocks have the rank's rows",
    swap_merged_ids_and_sign: "every id once, in data order",
    swap_merged_rows_and_bind_again: "every row comes from a rank",
    drop_row: "every id once, in data order",
    other_width: "files readable, counts equal, rows finite",
    forge_manifest: "the manifest matches",
    remove_merged: "files complete",
    shrink_row_and_bind_again: "norms match the gradients",
}


FAULTS_OF_DISCARDED = {  # in what a rank keeps
    swap_rank_ids: "files readable, counts equal",
    break_pair: "files complete",
    lose_metadata_of_a_rank: "files complete",
    forget_a_row: "ids are those of the rank's samples, in order",
}


@pytest.mark.parametrize("plant", FAULTS_OF_DISCARDED)
def test_validation_finds_the_fault_without_parts(discarded, capsys, plant):
    check_is_found(plant, discarded, FAULTS_OF_DISCARDED[plant], capsys)


@pytest.mark.parametrize("plant", FAULTS)
def test_validation_finds_the_fault_and_names_the_file(run, capsys, plant):
    check_is_found(plant, run, FAULTS[plant], capsys)


def check_is_found(plant, run, name, capsys):
    path = plant(run)
    assert cli.main(["grads", "validate", "--output_dir", str(run), "--dim", "64"]) == 1
    stored = json.loads((run / "validation.json").read_text())
    failed = [check for check in stored["checks"] if not check["passed"]]
    assert stored["passed"] is False
    assert str(path) in " ".join(check["detail"] for check in failed if check["name"].endswith(name))
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(("name", "folder"), [*((name, "run") for name in NAMES), (NAMES[0], "discarded")])
def test_a_lost_file_of_the_merged_rows_is_one_problem(request, name, folder, capsys):
    run = request.getfixturevalue(folder)
    (run / "dim64" / name).unlink()
    assert cli.main(["grads", "validate", "--output_dir", str(run), "--dim", "100"]) == 0
    assert cli.main(["grads", "validate", "--output_dir", str(run), "--dim", "64"]) == 1
    _, *problems = capsys.readouterr().err.splitlines()
    assert problems == [f"  dim64: files complete: {run / 'dim64' / name} is missing"]


@pytest.mark.parametrize("changes", [{"seed": 1}, {"lora": "x"}])
def test_an_edited_provenance_is_not_that_of_the_rows(run, capsys, changes):
    for path in (run / "collect.json", run / "dim64" / "manifest.json", run / "dim100" / "manifest.json"):
        edit(path, **changes)
    assert cli.main(["grads", "validate", "--output_dir", str(run), "--dim", "64", "--recompute", "1"]) == 1
    printed = capsys.readouterr().err
    for place in ("rank_0/dim64/all_orig.pt", "rank_1/dim64/all_orig.pt", "dim64/all_orig.pt"):
        assert f"{run / place} with" in printed
    assert "no row is of this collection" in printed
    assert cli.main(["grads", "aggregate", "--base_path", str(run), "--dim", "64"]) == 2
    assert "is not what was collected for" in capsys.readouterr().err


def test_a_matrix_of_another_width_next_to_the_runs_is_found(run, capsys):
    (run / "dim640").mkdir()
    assert cli.main(["grads", "validate", "--output_dir", str(run)]) == 1
    assert f"{run / 'dim640'} belongs to no rank or width of the collection" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stored: [stored], "object"),
        (lambda stored: {**stored, "samples": "11"}, "samples: Input should be a valid integer"),
        (lambda stored: {**stored, "samples": 1000}, "has 1000 samples on 2 ranks"),
        (lambda stored: {**stored, "world_size": 12}, "has 11 samples on 12 ranks"),
        (lambda stored: {**stored, "save_interval": 0}, "save_interval: Input should be greater than or equal to 1"),
        (lambda stored: {**stored, "dims": [64, "100"]}, "dims.1: Input should be a valid integer"),
        (
            lambda stored: {name: stored[name] for name in stored if name != "format"},
            "written by another version of gradwire",
        ),
        (lambda stored: {**stored, "format": 1}, "written by another version of gradwire"),
    ],
)
def test_a_provenance_of_other_types_is_bad_input(small, pair, tmp_path, capsys, change, message):
    run = tmp_path / "run"
    run.mkdir()
    stored = json.loads((pair / "collect.json").read_text())
    (run / "collect.json").write_text(json.dumps(change(stored)))
    for command in (["validate", "--output_dir", str(run)], ["aggregate", "--base_path", str(run), "--dim", "64"]):
        assert cli.main(["grads", *command]) == 2
        printed = capsys.readouterr().err
        assert message in printed and "collect.json" in printed and "Traceback" not in printed


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of types that it does not recommend
def test_what_is_no_plain_matrix_of_rows_is_refused(tmp_path):
    path = tmp_path / "rows.pt"
    rows = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))

    def refusal(saved_):
        torch.save(saved_, path)
        with pytest.raises(BadInput, match=str(path)) as printed:
            RowFile(path)
        return str(printed.value)

    for other in (
        rows.to_sparse(),
        torch.nn.Parameter(rows),
        torch.quantize_per_tensor(rows, 0.1, 0, torch.qint8),
        rows.to(torch.complex64),
        rows.to("meta"),
    ):
        assert "cannot be read as a tensor: it refers to torch" in refusal(other)
    for other in (rows.clone().requires_grad_(), torch._neg_view(rows)):
        assert "cannot be read as a tensor: it has a tensor that is not plain" in refusal(other)
    for other in (rows.double(), rows.byte(), rows[0], [rows]):
        assert "is not a dense float32 matrix" in refusal(other)
    for part in (rows.T, rows[1:], rows[:2], rows[:, :4]):
        assert "a part of a larger tensor" in refusal(part)
    torch.save(rows, path)
    assert torch.equal(torch.from_numpy(RowFile(path).read(0, 3)), rows)


def test_the_checks_of_the_ranks_and_of_the_merged_rows_can_be_asked_for_apart(run):
    swap_rank_ids(run)
    words = ["grads", "validate", "--output_dir", str(run), "--num_gpus", "2", "--recompute", "1"]
    assert cli.main([*words, "--check_aggregated"]) == 0
    assert cli.main([*words, "--check_ranks"]) == 1


class Rule:
    """An installed package's check."""

    name, value = "no long documents", "package:function"

    def load(self):
        return lambda run, blocks: [f"{block.names.rows} of {run.name}" for block in blocks if len(block.block.ids) > 6]


def test_other_packages_may_add_checks(pair, monkeypatch, capsys):
    monkeypatch.setattr(checks, "entry_points", lambda group: [Rule()] * (group == "gradwire.gradient_checks"))
    assert cli.main(["grads", "validate", "--output_dir", str(pair), "--dim", "64", "--check_ranks"]) == 0
    assert cli.main(["grads", "validate", "--output_dir", str(pair), "--dim", "64"]) == 1
    assert f"no long documents: {pair / 'dim64' / 'all_orig.pt'} of run" in capsys.readouterr().err
    monkeypatch.setattr(Rule, "load", lambda self: lambda run, blocks: 1 / 0)
    assert cli.main(["grads", "validate", "--output_dir", str(pair)]) == 2
    assert "the check no long documents (package:function) raised ZeroDivisionError" in capsys.readouterr().err


def test_validation_refuses_another_model_or_other_data(small, pair, tmp_path, capsys):
    other = tmp_path / "model"
    shutil.copytree(small.model, other)
    model = causal.build("micro", 290, 24, seed=4)
    causal.save(model.state_dict(), model.config, small.model, other, {})
    words = ["grads", "validate", "--output_dir", str(pair), "--recompute", "1"]
    assert cli.main([*words, "--model_dir", str(other)]) == 2
    assert "is not that of the collection" in capsys.readouterr().err
    moved = tmp_path / "shards"
    shutil.copytree(small.shards, moved)
    assert cli.main([*words, "--data_path", str(moved)]) == 0


# --- pickles


class Malicious:
    def __reduce__(self):
        return Path.touch, (Path("touched"),)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Malicious()),
        pickle.dumps([Malicious()]),
        pickle.dumps({"a": 1}),
        pickle.dumps(["a", b"b"]),
        pickle.dumps(("a",)),
        pickle.dumps(["a", "b"])[:-4],
        b"",
        b"\x80\x04garbage",
    ],
)
def test_only_a_list_of_strings_is_unpickled(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ids.pkl").write_bytes(content)
    with pytest.raises(BadInput, match=str(tmp_path / "ids.pkl")):
        store.read_ids(tmp_path / "ids.pkl")
    assert not Path("touched").exists()


def test_a_malicious_tensor_file_is_not_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(Malicious(), tmp_path / "rows.pt")
    with pytest.raises(BadInput, match=str(tmp_path / "rows.pt")):
        blocks.read_rows(tmp_path / "rows.pt")
    assert not Path("touched").exists()


def test_rows_are_written_without_what_else_their_storage_holds(tmp_path):
    rows = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    for number, part in enumerate((rows[2:], rows[:3], rows[:, 1:4], rows.T)):
        names = store.all_names(tmp_path / str(number))
        ids = [f"s{row}" for row in range(len(part))]
        store.write(names, block_of(ids, part))
        assert torch.equal(blocks.read(names).rows, part)
        assert torch.equal(torch.from_numpy(RowFile(names.rows).read(0, len(part))), part)


def test_ids_are_data(tmp_path):
    ids = ["../../etc/passwd", "line\nbreak", "ünï ✓", "x" * 1_000_000, ""]
    names = store.all_names(tmp_path)
    store.write(names, block_of(ids, torch.ones(5, 2)))
    assert blocks.read(names).ids == ids
