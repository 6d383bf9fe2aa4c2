"""`grads lds` and `grads recall`: against trainings by hand, closed forms and SciPy; resumption; what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from changed_store import edit
from scipy.stats import spearmanr
from small_model import make

from gradwire import cli
from gradwire.attribution.query.curvature import solver
from gradwire.attribution.query.search import groups_of, similarities, target
from gradwire.attribution.store import store
from gradwire.attribution.store.row_file import RowFile
from gradwire.bench.judge import lds, recall, retraining
from gradwire.bench.judge.methods import METHODS, Scores
from gradwire.lm.data.shards import Shards
from gradwire.lm.models import causal

RECIPE = "--model micro --steps 12 --batch_size 4 --dim 64 --projection sjlt --seed 3"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return make(tmp_path_factory.mktemp("attribution"))


def words(verb, small, output, *more):
    return ["grads", verb, "--data_path", small.shards, "--output_dir", output, *RECIPE.split(), *more]


def run(verb, small, output, *more):
    return cli.main([str(word) for word in words(verb, small, output, *more)])


@pytest.fixture(scope="module")
def judged(small, tmp_path_factory):
    """The folder of four subsets of seven samples."""
    output = tmp_path_factory.mktemp("judged") / "lds"
    assert run("lds", small, output, "--queries", 3, "--subsets", 4, "--fraction", 0.35) == 0
    return output


def by_hand(small, members, steps=12, batch=4, seed=3):
    """The losses of three queries after a training on some samples, from log-probabilities in float64."""
    train, val = Shards(small.shards, "train"), Shards(small.shards, "val")
    model = causal.build("micro", train.meta["vocab_size"], train.meta["max_length"], seed).double()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))

    def loss(tokens):
        log_p = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        return -sum(log_p[place - 1, tokens[place]] for place in range(1, len(tokens)))

    stream = []
    for epoch in range(100):
        order = np.random.default_rng([seed, epoch]).permutation(len(train)).tolist()
        stream += [train[place].input_ids.tolist() for place in order if place in members]
    for step in range(steps):
        lr = (step + 1) / 6 if step < 6 else 0.1 + 0.45 * (1 + np.cos(np.pi * (step - 6) / (steps - 6)))
        for group in groups:
            group["lr"] = 3e-3 * lr
        for live, group in zip(optimizer.param_groups, groups, strict=True):
            live["lr"] = group["lr"]
        taken = stream[step * batch : (step + 1) * batch]
        optimizer.zero_grad()
        (sum(map(loss, taken)) / sum(len(tokens) - 1 for tokens in taken)).backward()
        norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters()))
        for p in model.parameters():
            p.grad *= min(1.0, 1.0 / norm.item())
        optimizer.step()
    with torch.no_grad():
        queries = [val[place].input_ids.tolist() for place in range(3)]
        return [(loss(tokens) / (len(tokens) - 1)).item() for tokens in queries]


def test_a_subsets_losses_are_those_of_a_training_by_hand(small, judged):
    samples = len(Shards(small.shards, "train"))
    found = [json.loads((judged / "subsets" / f"{j}.json").read_text()) for j in range(4)]
    for one in found:
        assert len(set(one["members"])) == 7 and one["members"] == sorted(one["members"])
        assert set(one["members"]) < set(range(samples))
    assert len({tuple(one["members"]) for one in found}) == 4
    untrained = by_hand(small, found[0]["members"], steps=0)
    for one in found[:2]:
        assert one["losses"] == pytest.approx(by_hand(small, one["members"]), rel=1e-4)
    spread = np.ptp([one["losses"] for one in found], axis=0)
    assert (spread > 3e-3).all() and (np.array(untrained) - found[0]["losses"] > 0.1).all()


def test_the_table_is_the_rank_correlation_of_summed_scores(judged):
    record = json.loads((judged / "lds.json").read_text())
    subsets = [json.loads((judged / "subsets" / f"{j}.json").read_text()) for j in range(4)]
    rows = {
        name: store.read_rows(judged / f"{name}-sjlt-64" / "dim64" / "all_orig.pt").double().numpy()
        for name in ("sgd", "adam")
    }
    queries = store.read_rows(judged / "queries-sjlt-64" / "dim64" / "all_orig.pt").double().numpy()
    moment = rows["sgd"].T @ rows["sgd"] / len(rows["sgd"])
    half = np.linalg.cholesky(np.linalg.inv(moment + 0.1 * np.diag(moment).mean() * np.eye(64)))

    def unit(of):
        return of / np.linalg.norm(of, axis=1, keepdims=True)

    scores = {
        "dot": rows["sgd"] @ queries.T,
        "cosine": unit(rows["sgd"]) @ unit(queries).T,
        "adam": unit(rows["adam"]) @ unit(queries).T,
        "fisher": rows["sgd"] @ half @ (queries @ half).T,
        "fisher-cosine": unit(rows["sgd"] @ half) @ unit(queries @ half).T,
    }
    found = {one["method"]: one for one in record["methods"]}
    assert list(found) == list(METHODS) and record["subsets"] == 4
    losses = np.array([one["losses"] for one in subsets])
    assert (record["loss"], record["loss_spread"]) == pytest.approx((losses.mean(), losses.std(axis=0).mean()))
    for name, each in scores.items():
        sums = np.array([each[one["members"]].sum(0) for one in subsets])
        wanted = [spearmanr(sums[:, q], [-one["losses"][q] for one in subsets])[0] for q in range(3)]
        assert found[name]["lds"] == pytest.approx(np.mean(wanted), abs=1e-9), name
        low, high = found[name]["interval"]
        assert -1 <= low <= found[name]["lds"] <= high <= 1
        assert found[name]["store_bytes"] > 4 * rows["sgd"].size and found[name]["seconds"] > 0


def test_ties_and_constant_columns(tmp_path):
    random = np.random.default_rng(5)
    one, other = random.integers(0, 4, (9, 5)).astype(float), random.standard_normal((9, 5))
    one[:, 3] = 2
    wanted = [spearmanr(one[:, q], other[:, q])[0] if q != 3 else 0 for q in range(5)]
    np.testing.assert_allclose(lds.correlations(one, other), wanted, atol=1e-12)


def test_exact_influence_scores_well_and_its_opposite_badly(tmp_path, monkeypatch):
    """Ridge regression, retrained in closed form: curved products of gradients are its influence to first order."""
    monkeypatch.setattr(lds, "RESAMPLES", 200)
    random = np.random.default_rng(1)
    samples, dim, queries, ridge = 60, 6, 9, 1.0
    inputs = random.standard_normal((samples + queries, dim)) * [3, 2, 1, 1, 0.5, 0.5]
    targets = inputs @ random.standard_normal(dim) + random.standard_normal(len(inputs))
    seen, asked = slice(samples), slice(samples, None)

    def solution(chosen):
        x, y = inputs[chosen], targets[chosen]
        return np.linalg.solve(x.T @ x + ridge * np.eye(dim), x.T @ y)

    errors = inputs @ solution(np.arange(samples)) - targets
    gradients = (errors[:, None] * inputs).astype(np.float32)
    torch.save(torch.from_numpy(gradients[seen]).clone(), tmp_path / "rows.pt")
    rows = RowFile(tmp_path / "rows.pt")

    chosen = [random.permutation(samples)[: samples // 2] for _ in range(64)]
    members = np.zeros((64, samples))
    for one, of in zip(members, chosen, strict=True):
        one[of] = 1
    losses = np.array([0.5 * (inputs[asked] @ solution(of) - targets[asked]) ** 2 for of in chosen])

    def judge(values, other=None):
        scores = {"one": Scores(values, 0.0, 0), "other": Scores(values if other is None else other, 0.0, 0)}
        return lds.judged(scores, members, losses, seed=0)

    solve = solver(rows, 0.01)
    against = target(gradients[asked], "dot", groups_of("max", len(gradients[asked])), solve)
    influence = np.concatenate([*similarities(rows, against, "dot", solve)])
    exact, twin = judge(influence)
    plain = judge(gradients[seen].astype(float) @ gradients[asked].T)[0]
    assert exact["lds"] > 0.6 and exact["interval"][0] > 0.4
    assert judge(-influence)[0]["lds"] == pytest.approx(-exact["lds"], abs=1e-12)
    assert 0.1 < plain["lds"] < exact["lds"]
    control = judge(random.standard_normal(influence.shape))[0]
    assert abs(control["lds"]) < 0.15 and control["interval"][0] < 0 < control["interval"][1]
    assert all((one["behind"], one["behind_interval"]) == (0, (0, 0)) for one in (exact, twin))
    behind, _ = judge(influence + random.standard_normal(influence.shape) * influence.std() * 3, influence)
    assert 0 < behind["behind_interval"][0] < behind["behind"] < behind["behind_interval"][1] < 1
    assert behind["behind"] == pytest.approx(exact["lds"] - behind["lds"], abs=1e-12)
    assert all(judge(np.roll(influence, 1, axis))[0]["lds"] < 0.3 for axis in (0, 1))


@pytest.mark.sweep
def test_a_killed_call_goes_on_to_the_same_files(small, judged, tmp_path):
    """Killed while the third subset's file is written."""
    output = tmp_path / "lds"
    output.mkdir()
    for name in (
        "settings.json",
        "model",
        *(f"{name}-sjlt-64" for name in ("sgd", "adam", "queries")),
    ):  # trained and collected as before
        copy = shutil.copytree if (judged / name).is_dir() else shutil.copy
        copy(judged / name, output / name)
    given = words("lds", small, output, "--queries", 3, "--fraction", 0.35, "--subsets", 4)
    killed = Path(__file__).parents[2] / "helpers" / "killed_lds.py"
    command = [sys.executable, killed, "2", *map(str, given), "--methods", "random"]  # which needs no gradients
    done = subprocess.run(command, capture_output=True, timeout=120)
    assert done.returncode == -9, done.stderr
    assert sorted(path.name for path in (output / "subsets").glob("*.json")) == ["0.json", "1.json"]
    assert cli.main([*map(str, given)]) == 0
    assert contents(output / "subsets") == contents(judged / "subsets")
    assert untimed(output) == untimed(judged)


@pytest.mark.sweep
def test_workers_write_the_same_files_and_a_killed_one_is_named(small, judged, tmp_path, capsys):
    given = ["--queries", 3, "--fraction", 0.35, "--subsets", 4]
    assert run("lds", small, tmp_path / "lds", *given, "--workers", 2) == 0
    assert contents(tmp_path / "lds" / "subsets") == contents(judged / "subsets")
    assert untimed(tmp_path / "lds") == untimed(judged)
    shutil.rmtree(tmp_path / "lds" / "subsets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retraining, "_watch_parent", killed)
        assert run("lds", small, tmp_path / "lds", *given, "--workers", 2) == 3
    assert "a worker was killed, possibly for lack of memory: run the command again" in capsys.readouterr().err


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def untimed(output):
    found = json.loads((output / "lds.json").read_text())
    return {**found, "methods": [{**one, "seconds": None} for one in found["methods"]]}


@pytest.fixture(scope="module")
def planted(small, tmp_path_factory):
    output = tmp_path_factory.mktemp("planted") / "recall"
    given = ["--queries", 1, "--copies", 2, "--documents", 5, "--steps", 60, "--lr", 0.01]
    assert run("recall", small, output, *given) == 0
    return output, given


def test_planted_samples_are_what_they_are_called(small, planted):
    output, _ = planted
    before, val = Shards(small.shards, "train"), Shards(small.shards, "val")
    train, queries = (Shards(output / "data" / "shards", split) for split in ("train", "val"))
    tokens = {sample.sample_id: sample.input_ids.tolist() for sample in train}
    assert [*tokens][: len(before)] == [sample.sample_id for sample in before]
    assert all(tokens[sample.sample_id] == sample.input_ids.tolist() for sample in before)
    asked = [sample.input_ids.tolist() for sample in queries]
    assert asked[:2] == [val[place].input_ids.tolist() for place in range(2)] and len(asked) == 3
    assert tokens["exact/0/0"] == tokens["exact/0/1"] == asked[0]
    for k in range(2):
        apart = [one != other for one, other in zip(tokens[f"edited/1/{k}"], asked[1], strict=True)]
        assert 1 <= sum(apart) <= np.ceil(0.1 * len(apart))
    task = [np.array(tokens[f"task/{k}"]) for k in range(5)] + [np.array(asked[2])]
    assert all((one[::2] == task[0][::2]).all() for one in task) and len({tuple(one[1::2]) for one in task}) == 6
    assert len(tokens) == len(before) + 2 + 2 + 5


def test_recall_is_the_share_of_planted_samples_among_the_best(planted):
    output, _ = planted
    ids = store.read_ids(output / "sgd-sjlt-64" / "dim64" / "all_ids.pkl")
    rows = store.read_rows(output / "sgd-sjlt-64" / "dim64" / "all_orig.pt").double()
    queries = store.read_rows(output / "queries-sjlt-64" / "dim64" / "all_orig.pt").double()
    found = {one["method"]: one for one in json.loads((output / "recall.json").read_text())["methods"]}
    cosines = torch.nn.functional.cosine_similarity(rows[:, None], queries[None], dim=2)
    for query, (kind, count) in enumerate((("exact", 2), ("edited", 2), ("task", 5))):
        best = [ids[at] for at in cosines[:, query].argsort(descending=True)[:count].tolist()]
        share = sum(id_.startswith(f"{kind}/") for id_ in best) / count
        assert found["cosine"][kind]["recall"] == pytest.approx(share)
    assert found["cosine"]["exact"]["recall"] == 1 and found["cosine"]["task"]["recall"] > 0.5
    assert found["random"]["task"]["recall"] < 0.5


def test_a_repeated_call_uses_what_is_there(small, planted, tmp_path):
    made, given = planted
    output = shutil.copytree(made, tmp_path / "recall")
    before = {path: path.stat().st_mtime_ns for path in (output / "data").rglob("*.pt")}
    record = json.loads((output / "recall.json").read_text())
    assert run("recall", small, output, *given) == 0
    assert json.loads((output / "recall.json").read_text())["methods"][0] == record["methods"][0]
    assert run("recall", small, output, *given, "--top_k", 30, "--methods", "cosine") == 0
    (found,) = json.loads((output / "recall.json").read_text())["methods"]
    assert [found[kind]["recall"] for kind in recall.KINDS] == [1, 1, 1]  # 30 samples in all
    assert before and before == {path: path.stat().st_mtime_ns for path in (output / "data").rglob("*.pt")}


def test_a_training_that_diverges_is_named(small, tmp_path, capsys):
    given = ["--queries", 3, "--methods", "random", "--lr", 1e30]
    assert run("lds", small, tmp_path / "lds", *given) == 3
    assert "the training on subset 0 diverged: use a smaller --lr in another --output_dir" in capsys.readouterr().err
    assert not list((tmp_path / "lds" / "subsets").iterdir())


def test_scores_of_whole_gradients_use_the_trainings_that_are_there(judged, small, tmp_path, capsys):
    output = shutil.copytree(judged, tmp_path / "lds")
    trained = {path: path.stat().st_mtime_ns for path in (output / "subsets").iterdir()}
    given = ["--queries", "3", "--fraction", "0.35", "--subsets", "4", "--output_dir", str(output)]
    recipe = RECIPE.replace(" --dim 64 --projection sjlt", "").split()
    command = ["grads", "lds", "--data_path", str(small.shards), *recipe, *given]
    assert cli.main([*command, "--methods", "fisher"]) == 2
    assert "--methods fisher is given without --dim" in capsys.readouterr().err
    assert cli.main([*command, "--methods", "dot", "ekfac"]) == 0
    assert {path: path.stat().st_mtime_ns for path in (output / "subsets").iterdir()} == trained
    of_subsets = [json.loads((output / "subsets" / f"{number}.json").read_text()) for number in range(4)]
    losses = np.array([subset["losses"] for subset in of_subsets])
    for row, name in zip(json.loads((output / "lds.json").read_text())["methods"], ("sgd", "ekfac-0.1"), strict=True):
        matrix = np.load(output / f"scores-{name}-dot" / "matrix.npy")
        sums = np.array([matrix[subset["members"]].sum(0) for subset in of_subsets])
        wanted = [spearmanr(sums[:, query], -losses[:, query]).statistic for query in range(3)]
        assert row["lds"] == pytest.approx(np.mean(wanted)) and row["store_bytes"] == 128 + 4 * matrix.size
    assert not [path for path in output.glob("scores-*/*") if path.suffix == ".pt"]


def test_recall_by_hand():
    best = [["a", "b", "c", "d"], ["d", "c", "b", "a"]]
    wanted = [frozenset("ac"), frozenset("a")]
    assert recall.recalls(best, wanted, None).tolist() == [0.5, 0]
    assert recall.recalls(best, wanted, 3).tolist() == [1, 0]
    assert recall.recalls(best, wanted, 1).tolist() == [0.5, 0]


def test_what_cannot_be_judged_is_refused(small, judged, planted, tmp_path, capsys):
    def answer(verb, output, *more):
        capsys.readouterr()
        assert run(verb, small, output, "--queries", 3, *more) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1, printed
        return printed.err

    new, usual = tmp_path / "new", ["--subsets", 4, "--fraction", 0.35]
    assert "--subsets is 1; it must be at least 2" in answer("lds", new, "--subsets", 1)
    assert "--fraction is 1.0; it must be below 1" in answer("lds", new, "--fraction", 1)
    assert "--fraction is 0.0; it must be above 0" in answer("lds", new, "--fraction", 0)
    assert "is 0; it must be from 1 to 20" in answer("lds", new, "--fraction", 0.01)
    assert "is 21; it must be from 1 to 20" in answer("lds", new, "--fraction", 0.99)
    assert "Did you mean 'fisher'" in answer("lds", new, "--methods", "fischer")
    assert "Did you mean 'micro'" in answer("lds", new, "--model", "mikro")
    short = '{"architecture": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 8}'
    assert "has 8 positions, the data need 24" in answer("recall", new, "--model", short, "--queries", 1)
    assert "--queries: " in answer("lds", new, "--queries", 4) and "has 3 samples" in answer("recall", new)
    assert "--max_samples: " in answer("lds", new, "--max_samples", 22)
    assert "is not a shards folder; run `gradwire tokenize`" in answer("lds", new, "--data_path", small.corpus)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.endswith(".failed.json")]

    assert "has results of another lr: 0.003 there and 0.001 here" in answer("lds", judged, *usual, "--lr", 0.001)
    assert "another fraction: 0.35 there and 0.5 here" in answer("lds", judged, "--subsets", 4)
    assert "another verb: 'lds' there and 'recall' here" in answer("recall", judged, "--queries", 1)
    assert "has files of something else: choose a new --output_dir" in answer("lds", small.shards.parent, *usual)


def test_results_that_were_changed_are_refused(small, judged, tmp_path, capsys):
    output = shutil.copytree(judged, tmp_path / "lds")
    again = ["--queries", 3, "--subsets", 4, "--fraction", 0.35]
    edit(output / "subsets" / "1.json", losses=[1.0])
    assert run("lds", small, output, *again) == 2
    assert "1.json is not of this subset and these queries: delete it" in capsys.readouterr().err
    (output / "subsets" / "1.json").unlink()
    edit(output / "sgd-sjlt-64" / "collect.json", seed=4)
    assert run("lds", small, output, *again) == 2
    assert "seed is 4 there and 3 here" in capsys.readouterr().err
