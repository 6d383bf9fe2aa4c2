"""Statistics over seeds: means, spreads, paired differences, and the quality gate.

The **spread** of fewer than `LEAST` seeds is their range; with more seeds, Student's 95 % interval of the mean. All
tables, the page, `gradwire compare` and `benchmarks/quality_table.py` use this definition.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
LEAST = 5  # fewest seeds for an interval
TOLERANCE = 1.0  # percent above the baseline's perplexity that the quality gate allows


class Estimate(NamedTuple):
    """A mean over seeds and its spread; NaN without seeds. With one seed, deviation and spread are NaN.

    Attributes:
        n: Number of seeds.
        mean: The mean.
        std: The sample standard deviation.
        low: Lower end of the spread: the minimum of fewer than `LEAST` seeds, else of the 95 % interval of the mean.
        high: Upper end of the spread.
    """

    n: int
    mean: float = math.nan
    std: float = math.nan
    low: float = math.nan
    high: float = math.nan


def estimate(sample: Sequence[float]) -> Estimate:
    """Estimate the mean and spread of one sample."""
    return estimates([sample])[0]


def estimates(samples: Sequence[Sequence[float]]) -> list[Estimate]:
    """Estimate each sample; samples of equal size are vectorized."""
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
    """Percent by which each seed's value exceeds the baseline's, for common seeds in ascending order."""
    return [100 * (values[seed] / baseline[seed] - 1) for seed in sorted(values.keys() & baseline.keys())]


def gated(mean: float, baseline: float) -> bool:
    """The quality gate: whether a mean perplexity is more than 1 % above the baseline's, so that it cannot win.

    An unknown perplexity (NaN) is not gated, but has not passed either.
    """
    return 100 * (mean / baseline - 1) > TOLERANCE


class Paired(NamedTuple):
    """Pairwise difference of two samples, in percent of the first.

    Attributes:
        n: Number of pairs.
        mean: The mean of the ratios' logarithms, as a percentage.
        low: Lower end of the spread of the logarithms (see `Estimate`); NaN with one pair.
        high: Upper end of the spread.
        p: p-value of a two-sided paired t-test on the logarithms (`scipy.stats.ttest_rel`); NaN with one pair, 1 for
            equal samples, 0 for a constant non-zero difference.
    """

    n: int
    mean: float = math.nan
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan


def paired(one: Sequence[float], other: Sequence[float]) -> Paired:
    """Compare ``other`` with ``one``, both positive, pair by pair; NaN without pairs."""
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
    """Adjust p-values by the Benjamini-Hochberg procedure; NaN stays NaN and is not counted as a test.

    Benjamini and Hochberg, "Controlling the False Discovery Rate", Journal of the Royal Statistical Society B 57, 1995.
    """
    from scipy.stats import false_discovery_control

    found = np.array(p, dtype=np.float64)
    tested = ~np.isnan(found)
    if tested.any():
        found[tested] = false_discovery_control(found[tested])
    return [float(value) for value in found]
