"""Statistics over seeds: means, their spread, pairing with a baseline, and the quality gate.

The **spread** of fewer than `LEAST` seeds is their range, from there on Student's 95 % interval of the mean. This is
the only definition: every table, the page, `gradwire compare` and `benchmarks/quality_table.py` use it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
LEAST = 5  # seeds of an interval
TOLERANCE = 1.0  # percent of perplexity over the baseline's that the quality gate lets pass


class Estimate(NamedTuple):
    """A mean over seeds; without any seed it is NaN, with one there is neither deviation nor spread, both NaN.

    Attributes:
        n: Seeds.
        mean: Their mean.
        std: The sample standard deviation.
        low: Lower end of the spread: of fewer than `LEAST` seeds the lowest, else of the 95 % interval of the mean.
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
    """The estimate from each sample; those of one size at once, which is what makes many of them fast."""
    from scipy.special import stdtrit

    found = [Estimate(len(sample), *sample) if len(sample) < 2 else None for sample in samples]
    by_size: defaultdict[int, list[int]] = defaultdict(list)
    for i, sample in enumerate(samples):
        by_size[len(sample)].append(i)
    for size, members in by_size.items():
        if size > 1:
            values = np.array([samples[i] for i in members], dtype=np.float64)
            mean, std = values.mean(1), values.std(1, ddof=1)
            half = stdtrit(size - 1, (1 + CONFIDENCE) / 2) * std / math.sqrt(size)
            ends = (values.min(1), values.max(1)) if size < LEAST else (mean - half, mean + half)
            for i, *numbers in zip(members, *(column.tolist() for column in (mean, std, *ends)), strict=True):
                found[i] = Estimate(size, *numbers)
    return [one for one in found if one is not None]


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
        low: Lower end of its spread, that of the logarithms' `Estimate`; NaN with one pair.
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
    found = estimate(logs.tolist())
    mean, low, high = (100 * math.expm1(log) for log in (found.mean, found.low, found.high))
    if found.n < 2:
        return Paired(found.n, mean)
    if np.ptp(logs) == 0:  # no spread, so no t
        return Paired(found.n, mean, mean, mean, 0.0 if mean else 1.0)
    return Paired(found.n, mean, low, high, float(ttest_rel(np.log(other), np.log(one)).pvalue))


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
