"""Statistics over seeds: means, spreads, paired differences, and the verdict on a perplexity.

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
POWER = 0.8  # probability of finding a difference of the size that is called detectable
TOLERANCE = 1.0  # percent around the baseline's perplexity that count as the same
VERDICTS = {  # the first that holds, from `verdict`
    "diverged": "a run diverged",
    "not compared": "no seed has both perplexities",
    "one seed": "one seed has both, and so no spread",
    "same": f"the whole spread of the difference is within ±{TOLERANCE:g} %",
    "worse": "the whole spread is above 0",
    "better": "the whole spread is below 0",
    "not distinguishable": "the spread has 0 in it and a difference beyond the tolerance",
}


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

    estimated = [Estimate(len(sample), *sample) if len(sample) < 2 else None for sample in samples]
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
                estimated[i] = Estimate(size, *numbers)
    return [estimate for estimate in estimated if estimate is not None]


def percents(samples: Sequence[Sequence[float]]) -> list[Estimate]:
    """Estimate samples of relative differences in percent on their logarithms, as `paired` does.

    A difference and its inverse then have the same size, and the result does not depend on which of two is the base.
    """
    logs = estimates([np.log1p(np.divide(sample, 100)).tolist() for sample in samples])
    ends = [[100 * math.expm1(log) for log in (of.mean, of.low, of.high)] for of in logs]
    return [Estimate(of.n, mean, 100 * of.std, low, high) for of, (mean, low, high) in zip(logs, ends, strict=True)]


def percent_worse(values: Mapping[int, float], baseline: Mapping[int, float]) -> dict[int, float]:
    """Percent by which each seed's value exceeds the baseline's, for common seeds in ascending order."""
    return {seed: 100 * (values[seed] / baseline[seed] - 1) for seed in sorted(values.keys() & baseline.keys())}


def verdict(difference: Estimate, diverged: bool = False) -> str:
    """One word for what seeds show of a perplexity against the same optimizer in every step: see `VERDICTS`.

    Args:
        difference: The difference in percent, paired by seed.
        diverged: Whether a run diverged.
    """
    if diverged:
        return "diverged"
    if difference.n < 2:
        return "one seed" if difference.n else "not compared"
    if max(abs(difference.low), abs(difference.high)) <= TOLERANCE:
        return "same"
    if difference.low > 0:
        return "worse"
    return "better" if difference.high < 0 else "not distinguishable"


class Paired(NamedTuple):
    """Pairwise difference of two samples, in percent of the first.

    Attributes:
        n: Number of pairs.
        mean: The mean of the ratios' logarithms, as a percentage.
        low: Lower end of the spread of the logarithms (see `Estimate`); NaN with one pair.
        high: Upper end of the spread.
        p: p-value of a two-sided paired t-test on the logarithms (`scipy.stats.ttest_rel`); NaN with one pair, 1 for
            equal samples, 0 for a constant non-zero difference.
        sees: The smallest increase in percent that this test finds with a probability of `POWER`, with as many pairs
            and as much spread as these, if p < 5 % counts; NaN with one pair.
    """

    n: int
    mean: float = math.nan
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    sees: float = math.nan


def paired(first: Sequence[float], second: Sequence[float]) -> Paired:
    """Compare ``second`` with ``first``, both positive, pair by pair; NaN without pairs."""
    from scipy.stats import ttest_rel

    logs = np.log(second) - np.log(first)
    estimated = estimate(logs.tolist())
    mean, low, high = (100 * math.expm1(log) for log in (estimated.mean, estimated.low, estimated.high))
    if estimated.n < 2:
        return Paired(estimated.n, mean)
    if np.ptp(logs) == 0:  # no spread, so no t
        return Paired(estimated.n, mean, mean, mean, 0.0 if mean else 1.0, 0.0)
    p = float(ttest_rel(np.log(second), np.log(first)).pvalue)
    return Paired(estimated.n, mean, low, high, p, 100 * math.expm1(detectable(estimated.n, estimated.std)))


def detectable(n: int, std: float) -> float:
    """The smallest mean that a two-sided t-test at 5 % distinguishes from 0 with a probability of `POWER`.

    Args:
        n: Number of values, at least 2.
        std: Their standard deviation.
    """
    from scipy.optimize import brentq
    from scipy.stats import nct, t

    critical = t.ppf((1 + CONFIDENCE) / 2, n - 1)

    def power(shift: float) -> float:
        """Probability of finding a mean of ``shift`` standard errors, with the right sign."""
        return float(nct.sf(critical, n - 1, shift))

    return brentq(lambda shift: power(shift) - POWER, 0, 3 * critical) * std / math.sqrt(n)


def adjusted(p: Sequence[float]) -> list[float]:
    """Adjust p-values by Holm's procedure; NaN stays NaN and is not counted as a test.

    If adjusted values below 5 % count, the probability of one false finding or more in the whole table is below 5 %,
    whatever the dependence of the tests; cells that share a baseline are dependent.
    Holm, "A Simple Sequentially Rejective Multiple Test Procedure", Scandinavian Journal of Statistics 6, 1979.
    """
    values = np.array(p, dtype=np.float64)
    tested = np.flatnonzero(~np.isnan(values))
    order = tested[np.argsort(values[tested], kind="stable")]
    scaled = values[order] * np.arange(len(order), 0, -1)
    values[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return [float(value) for value in values]
