"""The verb ``grads lds``: the linear datamodeling score of attribution methods, from trainings on random subsets.

A method predicts that training on a subset lowers a query's loss the more, the larger the sum of its scores over the
subset. The linear datamodeling score is Spearman's rank correlation of these sums with minus the losses of models
trained on the subsets, averaged over queries (Park et al., 2023, "TRAK", section 2.2; Ilyas et al., 2022).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from gradwire.attribution.options import Count
from gradwire.base.errors import BadInput
from gradwire.base.files import write_json
from gradwire.base.flags import FRACTION, Number
from gradwire.bench.judge import methods as attribution
from gradwire.bench.judge.methods import RESAMPLES, JudgeOptions, costs, interval, shown, table
from gradwire.bench.judge.methods import beside as beside

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gradwire.bench.judge.methods import Scores
    from gradwire.bench.judge.retraining import Subsets

RESULT = "lds.json"
SUBSETS = Number(int, 2, 2**31 - 1)


class Options(JudgeOptions):
    """Flags of ``gradwire grads lds``."""

    subsets: Annotated[int, SUBSETS] = Field(32, description="number of trainings on subsets")
    fraction: Annotated[float, FRACTION] = Field(0.5, description="size of a subset relative to all samples")
    workers: Count = Field(1, description="processes that train subsets, of one thread each")


def main(options: Options) -> None:
    """Train on all samples and on the subsets, score by every method, and print a table.

    Raises:
        BadInput: If the data or the settings are invalid, or the folder has results of other settings.
        RunFault: If a training diverges, or a worker dies.
    """
    from gradwire.bench.judge import retraining

    train, val, samples = attribution.opened(options, options.queries)
    shards = train.folder.parent
    subsets = retraining.Subsets(
        options.output_dir / "subsets", shards, samples, options.queries, options.fraction, options.recipe
    )
    if not 1 <= subsets.size < samples:
        raise BadInput(
            f"--fraction {options.fraction:g} of {samples} samples is {subsets.size}; it must be from 1 to "
            f"{samples - 1}."
        )
    settings = attribution.settings_of("lds", options, train, val, samples) | {"fraction": options.fraction}
    attribution.claim(options.output_dir, settings)
    study = attribution.Study(options, shards, samples, options.queries)
    scores: dict[str, attribution.Scores] = {name: study.scores(name) for name in options.chosen_methods}
    retraining.run_missing(subsets, options.subsets, options.workers)
    members, losses = outcomes(subsets, options.subsets)
    rows = judged(scores, members, losses, options.seed)
    result: dict[str, Any] = {
        "settings": settings,
        "subsets": options.subsets,
        **{name: getattr(options, name) for name in ("dim", "projection", "damping")},
        "loss": float(losses.mean()),
        "loss_spread": float(losses.std(0).mean()),
        "methods": rows,
    }
    write_json(options.output_dir / RESULT, result)
    print(table([shown_row(row) for row in rows]))
    print(
        "loss of a query: {loss:.3f} nats, with a standard deviation of {loss_spread:.3f} over subsets".format(**result)
    )


def shown_row(row: Mapping[str, Any]) -> dict[str, str]:
    """Format a method's row of the table."""
    ahead = "best" if row["behind"] == 0 else shown(row["behind"], row["behind_interval"])
    score = {"LDS [95 %]": shown(row["lds"], row["interval"]), "behind the best [95 %]": ahead}
    return {"method": row["method"], **score, **costs(row)}


def outcomes(subsets: Subsets, total: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the subsets' members, 0 or 1, [subsets, samples], and the queries' losses, [subsets, queries]."""
    members = np.zeros((total, subsets.samples))
    losses = np.empty((total, subsets.queries))
    for number in range(total):
        chosen, losses[number] = subsets.read(number)
        members[number, chosen] = 1
    return members, losses


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
    """Spearman's rank correlation of each column over the rows, ties at their mean rank; 0 for a constant column.

    Args:
        predicted: [subsets, queries].
        measured: As many.

    Returns:
        [queries].
    """
    left, right = _centred_ranks(predicted), _centred_ranks(measured)
    size = np.sqrt((left**2).sum(0) * (right**2).sum(0))
    return np.asarray((left * right).sum(0) / np.where(size == 0, 1, size))


def resampled(predicted: NDArray[np.float64], losses: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Return `RESAMPLES` scores of subsets and queries drawn with replacement; equal draws for equal seeds."""
    random = np.random.default_rng(seed)
    count, queries = losses.shape
    means = np.empty(RESAMPLES)
    for number in range(RESAMPLES):
        drawn = np.ix_(random.integers(count, size=count), random.integers(queries, size=queries))
        means[number] = correlations(predicted[drawn], -losses[drawn]).mean()
    return means


def _centred_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    from scipy.stats import rankdata

    ranks = rankdata(values, axis=0)
    return np.asarray(ranks - ranks.mean(0))
