"""Statistics over seeds against scipy, numpy and the standard library.

Of `statistics/seeds.py`.
"""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from gradwire.bench.statistics.seeds import LEAST, estimate, estimates, paired, percent_worse, percents


@pytest.mark.parametrize("size", [2, 3, 4, 5, 31])
def test_an_estimate_is_scipy_s_and_the_standard_library_s(size):
    sample = np.random.default_rng(size).lognormal(4, 0.3, size).tolist()
    found = estimate(sample)
    assert found.n == size
    assert found.mean == pytest.approx(statistics.mean(sample), rel=1e-14)
    assert found.std == pytest.approx(statistics.stdev(sample), rel=1e-12)
    interval = ttest_1samp(sample, 0).confidence_interval(0.95)
    assert found[3:] == pytest.approx(interval if size >= 5 else (min(sample), max(sample)), rel=1e-12)


def test_an_interval_does_not_depend_on_what_else_is_estimated():
    samples = [[50.125, 49.5, 51.75], [7.0], [3.0, 9.0], [], [50.0, 50.0, 50.0]]
    together, alone = estimates(samples), [estimate(sample) for sample in samples]
    np.testing.assert_allclose(together, alone, rtol=1e-14)
    assert [one.n for one in together] == [3, 1, 2, 0, 3]
    assert together[4][1:] == (50.0, 0.0, 50.0, 50.0)


def test_an_interval_of_the_mean_holds_it_in_about_95_percent_of_cases():
    draws = np.random.default_rng(5).normal(10, 2, (4000, LEAST))
    inside = [one.low <= 10 <= one.high for one in estimates(draws.tolist())]
    assert 0.94 <= np.mean(inside) <= 0.96


def test_one_seed_has_no_interval_and_none_has_nothing():
    one, nothing = estimate([7.0]), estimate([])
    assert one[:2] == (1, 7.0)
    assert all(map(math.isnan, one[2:]))
    assert nothing.n == 0
    assert all(map(math.isnan, nothing[1:]))


def test_pairing_takes_the_seeds_that_both_have():
    assert percent_worse({0: 101.0, 2: 210.0, 7: 1.0}, {2: 200.0, 0: 100.0, 1: 3.0}) == pytest.approx({0: 1.0, 2: 5.0})


@pytest.mark.parametrize("size", [3, 6])
def test_relative_differences_are_estimated_on_their_logarithms(size):
    draws = np.random.default_rng(size)
    base, other = draws.lognormal(4, 0.1, size), draws.lognormal(4.1, 0.1, size)
    worse = percent_worse(dict(enumerate(other)), dict(enumerate(base)))
    found, test = percents([[*worse.values()]])[0], paired(base, other)
    assert (found.n, found.mean, found.low, found.high) == pytest.approx((size, test.mean, test.low, test.high))
    (back,) = percents([[*percent_worse(dict(enumerate(base)), dict(enumerate(other))).values()]])
    assert (1 + back.mean / 100) * (1 + found.mean / 100) == pytest.approx(1)
    assert percents([[], [5.0]])[0].n == 0 and percents([[], [5.0]])[1].mean == pytest.approx(5.0)
