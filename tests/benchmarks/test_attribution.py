"""The scripts that judge attribution: against trainings by hand, closed forms and SciPy; what a second call does."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import blocks
import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from small_model import make

from gradwire.attribution.query.search import groups_of, similarities, solver, target
from gradwire.attribution.store import store
from gradwire.attribution.store.row_file import RowFile
from gradwire.lm.data.shards import Shards
from gradwire.lm.models import causal

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "attribution"
sys.path.append(str(SCRIPTS))
lds, recall, study = map(importlib.import_module, ("lds", "recall", "study"))

RECIPE = "--model micro --steps 12 --batch_size 4 --seed 3"
ROWS = "--dim 64 --projection sjlt"
SUBSETS = "--queries 3 --subsets 4 --fraction 0.35"
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return make(tmp_path_factory.mktemp("attribution"))


def run(script, small, output, *options):
    command = [sys.executable, SCRIPTS / f"{script}.py", "--data_path", small.shards, "--output_dir", output]
    words = [word for option in (RECIPE, *options) for word in option.split()]
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS.parents[1] / "src")}
    return subprocess.run([*map(str, command), *words], capture_output=True, text=True, env=environment, timeout=240)


@pytest.fixture(scope="module")
def scored(small, tmp_path_factory):
    """The folder of four subsets of seven samples."""
    output = tmp_path_factory.mktemp("scored") / "lds"
    done = run("lds", small, output, ROWS, SUBSETS)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("|")]
    assert lines[2:] == [*study.METHODS]
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
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * lr
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


def subsets_of(folder):
    return [json.loads((folder / "subsets" / f"{number}.json").read_text()) for number in range(4)]


def test_a_subsets_losses_are_those_of_a_training_by_hand(small, scored):
    samples = len(Shards(small.shards, "train"))
    subsets = subsets_of(scored)
    for subset in subsets:
        assert len(set(subset["members"])) == 7 and subset["members"] == sorted(subset["members"])
        assert set(subset["members"]) < set(range(samples))
    assert len({tuple(subset["members"]) for subset in subsets}) == 4
    untrained = by_hand(small, subsets[0]["members"], steps=0)
    for subset in subsets[:2]:
        assert subset["losses"] == pytest.approx(by_hand(small, subset["members"]), rel=1e-4)
    spread = np.ptp([subset["losses"] for subset in subsets], axis=0)
    assert (spread > 3e-3).all() and (np.array(untrained) - subsets[0]["losses"] > 0.1).all()


def test_the_table_is_the_rank_correlation_of_summed_scores(scored):
    record, subsets = json.loads((scored / "lds.json").read_text()), subsets_of(scored)
    rows, queries = (
        {
            kind: blocks.read_rows(scored / f"{split}-{kind}-sjlt-64" / "dim64" / "all_orig.pt").double().numpy()
            for kind in kinds
        }
        for split, kinds in (("train", ("sgd", "adam")), ("val", ("sgd",)))
    )
    queries = queries["sgd"]
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
    judged = {row["method"]: row for row in record["methods"]}
    assert list(judged) == list(study.METHODS) and record["subsets"] == 4
    losses = np.array([subset["losses"] for subset in subsets])
    assert (record["loss"], record["loss_spread"]) == pytest.approx((losses.mean(), losses.std(axis=0).mean()))
    for name, each in scores.items():
        assert judged[name]["lds"] == pytest.approx(correlation(each, subsets), abs=1e-6), name
        low, high = judged[name]["interval"]
        assert -1 <= low <= judged[name]["lds"] <= high <= 1
        assert judged[name]["store_bytes"] > 4 * rows["sgd"].size and judged[name]["seconds"] > 0


def correlation(scores, subsets):
    sums = np.array([scores[subset["members"]].sum(0) for subset in subsets])
    return np.mean([spearmanr(sums[:, q], [-subset["losses"][q] for subset in subsets])[0] for q in range(3)])


def test_scores_of_whole_gradients_use_the_trainings_that_are_there(small, scored, tmp_path):
    output = shutil.copytree(scored, tmp_path / "lds")
    before = {path: path.stat().st_mtime_ns for path in (output / "subsets").iterdir()}
    assert "methods of fisher need rows" in run("lds", small, output, SUBSETS, "--methods fisher").stderr
    assert "has results of other settings" in run("lds", small, output, SUBSETS, "--lr 0.1").stderr
    done = run("lds", small, output, SUBSETS, "--methods dot ekfac")
    assert done.returncode == 0, done.stderr[-3000:]
    assert {path: path.stat().st_mtime_ns for path in (output / "subsets").iterdir()} == before
    for row, name in zip(json.loads((output / "lds.json").read_text())["methods"], ("sgd", "ekfac-0.1"), strict=True):
        matrix = np.load(output / f"scores-{name}-dot" / "matrix.npy")
        assert row["lds"] == pytest.approx(correlation(matrix, subsets_of(output)))
        assert row["store_bytes"] == 128 + 4 * matrix.size


def test_ties_and_constant_columns():
    random = np.random.default_rng(5)
    one, other = random.integers(0, 4, (9, 5)).astype(float), random.standard_normal((9, 5))
    one[:, 3] = 2
    wanted = [spearmanr(one[:, q], other[:, q])[0] if q != 3 else 0 for q in range(5)]
    np.testing.assert_allclose(lds.correlations(one, other), wanted, atol=1e-12)


def test_exact_influence_scores_well_and_its_opposite_badly(tmp_path):
    """Ridge regression, retrained in closed form: curved products of gradients are its influence to first order."""
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
        scores = {
            "one": study.Scores(values, 0.0, 0),
            "other": study.Scores(values if other is None else other, 0.0, 0),
        }
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
    assert all((one["behind"], one["behind_interval"]) == (0, [0, 0]) for one in (exact, twin))
    behind, _ = judge(influence + random.standard_normal(influence.shape) * influence.std() * 3, influence)
    assert 0 < behind["behind_interval"][0] < behind["behind"] < behind["behind_interval"][1] < 1
    assert behind["behind"] == pytest.approx(exact["lds"] - behind["lds"], abs=1e-12)
    assert all(judge(np.roll(influence, 1, axis))[0]["lds"] < 0.3 for axis in (0, 1))


@pytest.fixture(scope="module")
def planted(small, tmp_path_factory):
    output = tmp_path_factory.mktemp("planted") / "recall"
    done = run("recall", small, output, ROWS, "--queries 1 --copies 2 --documents 5 --steps 60 --lr 0.01")
    assert done.returncode == 0, done.stderr[-3000:]
    return output


def test_planted_samples_are_what_they_are_called(small, planted):
    before, val = Shards(small.shards, "train"), Shards(small.shards, "val")
    train, queries = (Shards(planted / "data" / "shards", split) for split in ("train", "val"))
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
    ids = store.read_ids(planted / "train-sgd-sjlt-64" / "dim64" / "all_ids.pkl")
    rows = blocks.read_rows(planted / "train-sgd-sjlt-64" / "dim64" / "all_orig.pt").double()
    queries = blocks.read_rows(planted / "val-sgd-sjlt-64" / "dim64" / "all_orig.pt").double()
    judged = {row["method"]: row for row in json.loads((planted / "recall.json").read_text())["methods"]}
    cosines = torch.nn.functional.cosine_similarity(rows[:, None], queries[None], dim=2)
    for query, (kind, count) in enumerate((("exact", 2), ("edited", 2), ("task", 5))):
        best = [ids[place] for place in cosines[:, query].argsort(descending=True)[:count].tolist()]
        share = sum(id_.startswith(f"{kind}/") for id_ in best) / count
        assert judged["cosine"][kind]["recall"] == pytest.approx(share)
    assert judged["cosine"]["exact"]["recall"] == 1 and judged["cosine"]["task"]["recall"] > 0.5
    assert judged["random"]["task"]["recall"] < 0.5


def test_recall_by_hand():
    best = [["a", "b", "c", "d"], ["d", "c", "b", "a"]]
    wanted = [frozenset("ac"), frozenset("a")]
    assert recall.recalls(best, wanted, None).tolist() == [0.5, 0]
    assert recall.recalls(best, wanted, 3).tolist() == [1, 0]
    assert recall.recalls(best, wanted, 1).tolist() == [0.5, 0]
