"""The linear datamodeling score of attribution methods, from trainings on random subsets of the samples.

A method predicts that training on a subset lowers a query's loss the more, the larger the sum of its scores over the
subset. The linear datamodeling score is Spearman's rank correlation of these sums with minus the losses of models
trained on the subsets, averaged over queries (Park et al., 2023, "TRAK", section 2.2; Ilyas et al., 2022).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from study import RESAMPLES, Scores, Study, entry, interval, methods_of, opened, parser_of, shown, trained, write
from tqdm import tqdm

from gradwire.attribution.persample.batch import evaluation, losses_of
from gradwire.base.files import write_json
from gradwire.lm.data.batches import collate
from gradwire.lm.data.shards import Shards


def train_on_subset(given: argparse.Namespace, samples: int, number: int) -> None:
    """Train on one subset, and write its members and the queries' losses; which they are depends on the seed alone."""
    torch.set_num_threads(1)
    train, val = Shards(given.data_path, "train"), Shards(given.data_path, "val")
    drawn = np.random.default_rng([given.seed, number]).permutation(samples)
    members = sorted(drawn[: round(given.fraction * samples)].tolist())
    model, _ = trained(given, train, members, samples)
    with evaluation(model), torch.no_grad():
        batches = [collate([val[position]], val.meta["pad_id"], 1) for position in range(given.queries)]
        losses = [loss for batch in batches for loss in losses_of(model, batch).tolist()]
    if not np.isfinite(losses).all():
        raise ValueError(f"the training on subset {number} diverged: use a smaller --lr in another --output_dir")
    write_json(given.output_dir / "subsets" / f"{number}.json", {"members": members, "losses": losses})


def outcomes(folder: Path, total: int, samples: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the subsets' members, 0 or 1, [subsets, samples], and the queries' losses, [subsets, queries]."""
    subsets = [json.loads((folder / f"{number}.json").read_text()) for number in range(total)]
    members = np.array([np.isin(np.arange(samples), subset["members"]) for subset in subsets], np.float64)
    return members, np.array([subset["losses"] for subset in subsets])


def judged(
    scores: Mapping[str, Scores], members: NDArray[np.float64], losses: NDArray[np.float64], seed: int
) -> list[dict[str, Any]]:
    """Judge methods: the rows of the table, each with how far it is behind the best, on the same draws."""
    predicted = {name: members @ of_method.values for name, of_method in scores.items()}
    scored = {name: float(correlations(sums, -losses).mean()) for name, sums in predicted.items()}
    drawn = {name: resampled(sums, losses, seed) for name, sums in predicted.items()}
    best = max(scored, key=scored.__getitem__)
    return [
        {
            "method": name,
            "lds": scored[name],
            "interval": interval(drawn[name]),
            "behind": scored[best] - scored[name],
            "behind_interval": interval(drawn[best] - drawn[name]),
            "seconds": of_method.seconds,
            "store_bytes": of_method.store_bytes,
        }
        for name, of_method in scores.items()
    ]


def correlations(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return Spearman's rank correlation of each column, [subsets, queries] to [queries]; 0 for a constant column."""
    ranks = [rankdata(values, axis=0) for values in (predicted, measured)]
    left, right = (of - of.mean(0) for of in ranks)
    size = np.sqrt((left**2).sum(0) * (right**2).sum(0))
    return np.asarray((left * right).sum(0) / np.where(size == 0, 1, size))


def resampled(predicted: NDArray[np.float64], losses: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Return scores of subsets and queries drawn with replacement; equal draws for equal seeds."""
    random, (subsets, queries) = np.random.default_rng(seed), losses.shape
    draws = (
        np.ix_(random.integers(subsets, size=subsets), random.integers(queries, size=queries)) for _ in range(RESAMPLES)
    )
    return np.array([correlations(predicted[drawn], -losses[drawn]).mean() for drawn in draws])


def main() -> None:
    """Train on all samples and on the subsets, score by every method, and print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("--subsets", type=int, default=32, help="number of trainings on subsets")
    parser.add_argument("--fraction", type=float, default=0.5, help="size of a subset relative to all samples")
    parser.add_argument("--workers", type=int, default=1, help="processes that train subsets, of one thread each")
    given = parser.parse_args()
    _, _, samples = opened(given, given.queries)
    study = Study(given, given.data_path, samples, given.queries)
    scores = {name: study.scores(name) for name in methods_of(given)}
    folder = given.output_dir / "subsets"
    missing = [number for number in range(given.subsets) if not (folder / f"{number}.json").is_file()]
    with ProcessPoolExecutor(given.workers, get_context("spawn")) as pool:
        list(tqdm(pool.map(partial(train_on_subset, given, samples), missing), "subsets", len(missing), disable=None))
    members, losses = outcomes(folder, given.subsets, samples)
    rows = judged(scores, members, losses, given.seed)
    loss, spread = float(losses.mean()), float(losses.std(0).mean())
    cells = [
        {
            "LDS [95 %]": shown(row["lds"], row["interval"]),
            "behind the best [95 %]": "best" if row["behind"] == 0 else shown(row["behind"], row["behind_interval"]),
        }
        for row in rows
    ]
    write(given, "lds.json", {"loss": loss, "loss_spread": spread, "methods": rows}, cells)
    print(f"loss of a query: {loss:.3f} nats, with a standard deviation of {spread:.3f} over subsets")


if __name__ == "__main__":
    entry(main)
