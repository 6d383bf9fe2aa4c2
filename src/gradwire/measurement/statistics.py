"""Statistics over seeds: means, bootstrap intervals, pairing with a baseline, and the quality gate.

Intervals are percentile bootstrap intervals of the mean (Efron and Tibshirani, "An Introduction to the Bootstrap",
Chapman & Hall 1993, chapter 13), resampled with a fixed seed. Over three seeds such an interval is their range.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
RESAMPLES = 2000
SEED = 0
TOLERANCE = 1.0  # percent of perplexity over the baseline's that the quality gate lets pass


class Estimate(NamedTuple):
    """A mean over seeds; without any seed it is NaN, with one there is neither deviation nor interval, both NaN.

    Attributes:
        n: Seeds.
        mean: Their mean.
        std: The sample standard deviation.
        low: Lower end of the 95 % interval of the mean.
        high: Its upper end.
    """

    n: int
    mean: float = math.nan
    std: float = math.nan
    low: float = math.nan
    high: float = math.nan


def estimate(sample: Sequence[float]) -> Estimate:
    """The estimate from one sample."""
    return estimates([sample])[0]


def estimates(samples: Sequence[Sequence[float]]) -> list[Estimate]:
    """The estimate from each sample; those of one size are resampled at once, which is what makes many of them fast."""
    found = [Estimate(len(sample), *sample) if len(sample) < 2 else None for sample in samples]
    by_size: defaultdict[int, list[int]] = defaultdict(list)
    for i, sample in enumerate(samples):
        by_size[len(sample)].append(i)
    for size, members in by_size.items():
        if size > 1:
            values = np.array([samples[i] for i in members], dtype=np.float64)
            columns = values.mean(1), values.std(1, ddof=1), *intervals(values)
            for i, *numbers in zip(members, *(column.tolist() for column in columns), strict=True):
                found[i] = Estimate(size, *numbers)
    return [one for one in found if one is not None]


def intervals(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The lower and upper ends of the intervals of the means of the rows of ``values``, at least two columns."""
    from scipy.stats import bootstrap

    found = bootstrap(
        (values,),
        np.mean,
        axis=-1,
        n_resamples=RESAMPLES,
        batch=1000,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    return found.low, found.high


def percent_worse(values: Mapping[int, float], baseline: Mapping[int, float]) -> list[float]:
    """By how many percent each seed's value is above the baseline's, for the seeds that both have, in order."""
    return [100 * (values[seed] / baseline[seed] - 1) for seed in sorted(values.keys() & baseline.keys())]


def gated(mean: float, baseline: float) -> bool:
    """The quality gate: whether a mean perplexity is more than 1 % above the baseline's, so that it cannot win.

    A perplexity that is not known (NaN) is not gated; it has not passed either.
    """
    return 100 * (mean / baseline - 1) > TOLERANCE


class Paired(NamedTuple):
    """How one sample differs from another, pair by pair, in percent of the first.

    Attributes:
        n: Pairs.
        mean: The mean difference: that of the ratios' logarithms, as a percentage.
        low: Lower end of its 95 % interval, NaN with one pair.
        high: Its upper end.
        p: Of a two-sided paired t-test on the logarithms (`scipy.stats.ttest_rel`), NaN with one pair. Samples that are
            equal have 1, a difference that is the same in all pairs 0.
    """

    n: int
    mean: float = math.nan
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan


def paired(one: Sequence[float], other: Sequence[float]) -> Paired:
    """The difference of positive numbers, ``other`` from ``one``; without any pair it is NaN."""
    from scipy.stats import ttest_rel

    logs = np.log(other) - np.log(one)
    if not len(logs):
        return Paired(0)
    mean = float(100 * np.expm1(logs.mean()))
    if len(logs) == 1:
        return Paired(1, mean)
    if np.ptp(logs) == 0:  # no spread, so no t
        return Paired(len(logs), mean, mean, mean, 0.0 if mean else 1.0)
    test = ttest_rel(np.log(other), np.log(one))
    low, high = 100 * np.expm1(test.confidence_interval(CONFIDENCE))
    return Paired(len(logs), mean, float(low), float(high), float(test.pvalue))


def adjusted(p: Sequence[float]) -> list[float]:
    """p-values of several tests, adjusted after Benjamini and Hochberg; NaN stays NaN and counts as no test.

    After "Controlling the False Discovery Rate", Journal of the Royal Statistical Society B 57, 1995.
    """
    from scipy.stats import false_discovery_control

    found = np.array(p, dtype=np.float64)
    tested = ~np.isnan(found)
    if tested.any():
        found[tested] = false_discovery_control(found[tested])
    return [float(value) for value in found]
