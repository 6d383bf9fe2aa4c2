"""Random-k draws every k-subset alike, and its errors are what that says."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
import torch
from lockstep import lockstep
from samples import FLOAT32, assert_unbiased, draws, generator, normal
from scipy import stats

from gradwire.comm.compressors import build
from gradwire.comm.compressors.kernels.cpu import sparse as kernel
from gradwire.comm.compressors.methods import randomk as reference
from gradwire.comm.compressors.rounds import Context


def assert_uniform(counts: Counter, outcomes: list) -> None:
    """Every outcome equally likely, by chi-square."""
    assert set(counts) <= set(outcomes)
    seen = np.array([counts[outcome] for outcome in outcomes])
    expected = seen.sum() / len(outcomes)
    assert expected >= 25
    statistic = ((seen - expected) ** 2 / expected).sum()
    low, high = stats.chi2(max(1, len(outcomes) - 1)).ppf([1e-6, 1 - 1e-6])
    assert (low <= statistic or len(outcomes) < 20) and statistic <= high


def first(n: int, k: int, count: int) -> list[tuple[int, ...]]:
    """The draws of ``count`` consecutive seeds; neighbouring seeds must be as good as any."""
    return [tuple(kernel.permuted(seed, n, k).tolist()) for seed in range(count)]


@pytest.mark.parametrize("n", [1, 2, 3, 100, 128, 129, 256, 257, 5003, 2**22 + 1, 2**31 + 5, 2**40])
def test_the_images_are_distinct_in_range_and_alike_in_both_forms(n):
    for seed in (0, 1, 2**63 - 2, -1):
        k = min(n, 3000)
        images = kernel.permuted(seed, n, k)
        assert torch.equal(images, reference.permuted(torch.tensor([seed]), n, k))
        assert images.min() >= 0 and images.max() < n and images.unique().numel() == k


@pytest.mark.parametrize(("n", "k"), [(7, 1), (13, 2), (4, 2), (5, 3), (6, 3), (8, 4), (9, 7), (12, 3), (64, 2)])
def test_every_subset_is_as_likely_as_any_other(n, k):
    subsets = list(combinations(range(n), k))
    assert_uniform(Counter(tuple(sorted(drawn)) for drawn in first(n, k, 40 * len(subsets))), subsets)


@pytest.mark.parametrize("n", [257, 4096, 10_007])
def test_of_many_places_each_is_included_as_often(n):
    """The statistic of draws without replacement: (n - 1) / n times the sum of squares is chi-square."""
    k, count = n // 20, 400
    seen = np.zeros(n)
    for seed in range(count):
        seen[kernel.permuted(seed, n, k).numpy()] += 1
    share = k / n
    statistic = ((seen - count * share) ** 2).sum() / (count * share * (1 - share)) * (n - 1) / n
    low, high = stats.chi2(n - 1).ppf([1e-6, 1 - 1e-6])
    assert low <= statistic <= high


def test_neighbours_are_not_drawn_together():
    """Among k of n places, k (k - 1) / n ordered pairs at any given circular distance are expected."""
    n, k, count = 4099, 200, 500
    masks = np.zeros((count, n))
    for seed in range(count):
        masks[seed, kernel.permuted(seed, n, k).numpy()] = 1
    expected = k * (k - 1) / (n - 1)
    for distance in (1, 2, 4, 64, 1024):
        pairs = (masks * np.roll(masks, distance, axis=1)).sum(axis=1)
        assert abs(pairs.mean() - expected) < 5 * math.sqrt(expected / count)


@pytest.mark.parametrize(("n", "density"), [(300, 0.1), (77, 0.5), (7, 0.3), (1, 0.01)])
def test_scaled_it_is_unbiased_with_the_exact_variance(n, density):
    x, count = normal(n, seed=3), 500
    drawn = draws(build("randomk", density=density), x, count)
    k = max(1, round(density * n))
    assert_unbiased(drawn, x, (n / k - 1) * x.double() ** 2)
    errors = (drawn - x.double()).square().sum(dim=1)
    energy = x.double().square()
    # ||x - Q||^2 = ||x||^2 + ((n/k - 1)^2 - 1) times the sent energy, a sum over k of n without replacement
    factor = (n / k - 1) ** 2 - 1
    spread = factor**2 * k * (1 - k / n) * (energy.var().item() if n > 1 else 0.0)
    band = 5 * math.sqrt(spread / count) + 1e-5 * energy.sum()
    assert abs(errors.mean() - (n / k - 1) * energy.sum()) <= band


@pytest.mark.parametrize(("n", "density"), [(300, 0.1), (77, 0.5), (7, 0.3)])
def test_unscaled_its_error_is_the_part_left_out(n, density):
    x, count = normal(n, seed=4), 500
    drawn = draws(build("randomk", density=density, scaled=False), x, count)
    k = max(1, round(density * n))
    sent = drawn != 0
    assert (sent.sum(dim=1) == k).all()
    assert torch.equal(drawn, torch.where(sent, x.double(), 0.0))
    energy = x.double().square()
    left = (drawn - x.double()).square().sum(dim=1).mean()
    band = 5 * math.sqrt(k * (1 - k / n) * energy.var().item() / count)
    assert abs(left - (1 - k / n) * energy.sum()) <= band


def test_wire_is_a_seed_and_the_values():
    x = normal(1000)
    wire = build("randomk").encode(x, generator=generator(2))
    assert wire.numel() == 8 + 4 * 10
    places = reference.permuted(wire[:8].view(torch.int64), 1000, 10)
    assert torch.equal(wire[8:].view(torch.float32), x[places])
    decoded = build("randomk").decode(wire, 1000)
    assert torch.equal(decoded[places], x[places] * 100)


@pytest.mark.parametrize("scaled", [True, False])
def test_rounds_send_the_same_places_and_average_them(scaled):
    n, world = 1003, 3
    xs = [normal(n, seed=rank) for rank in range(world)]
    compressor = build("randomk", density=0.1, scaled=scaled)
    means, sents, handed = lockstep(compressor, xs, [{}] * world, Context("layer.weight", (n,), 7, world, 42))
    digest = hashlib.sha256(b"42/7/layer.weight").digest()
    seed = torch.tensor([int.from_bytes(digest[:8], "little", signed=True)])
    places = reference.permuted(seed, n, 100)
    gain = n / 100 if scaled else 1.0
    for x, sent in zip(xs, sents, strict=True):
        assert torch.equal(sent, torch.zeros(n).index_put((places,), x[places] * gain))
    exact = torch.stack([sent.double() for sent in sents]).mean(dim=0)
    assert torch.allclose(means[0].double(), exact, rtol=4 * FLOAT32.eps, atol=1e-6)
    assert handed == compressor.round_bytes(n) == 400


def test_rounds_are_unbiased_over_the_steps():
    x, count = normal(60, seed=5), 1000
    compressor = build("randomk", density=0.2)
    means = [lockstep(compressor, [x], [{}], Context("w", (60,), step, 1, 0))[0][0] for step in range(count)]
    assert_unbiased(torch.stack(means).double(), x, 4 * x.double() ** 2)
