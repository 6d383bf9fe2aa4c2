"""A count-sketch is linear, each row an unbiased estimate of exact variance; and what is large is found."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep import lockstep
from samples import assert_frequencies, assert_unbiased, draws, generator, normal

from gradwire.comm.compressors import build, philox
from gradwire.comm.compressors.rounds import Context
from gradwire.comm.compressors.sparse import largest


def seed_of(number: int) -> torch.Tensor:
    return torch.tensor([number])


def table_of_the_definition(x: list[float], seed: int, rows: int, columns: int) -> list[list[float]]:
    """Python's integers, straight from the file's description."""
    words = philox.words(seed_of(seed), 8 * rows).tolist()
    table = [[0.0] * columns for _ in range(rows)]
    for row in range(rows):
        a, b, c, d = (words[8 * row + i] + (words[8 * row + i + 1] << 32) for i in (0, 2, 4, 6))
        for i, value in enumerate(x):
            column = (((a * i + b) % 2**64) >> 32) * columns >> 32
            table[row][column] += -value if (c * i + d) % 2**64 >> 63 else value
    return table


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_the_table_is_the_definitions(rows):
    x = normal(700, seed=2)
    wire = build("sketch", rows=rows).encode(x, generator=generator(rows))
    seed = wire[:8].view(torch.int64).item()
    expected = torch.tensor(table_of_the_definition(x.double().tolist(), seed, rows, 16), dtype=torch.float64)
    assert torch.equal(wire[8:].view(torch.float32).view(rows, 16), expected.float())


@settings(max_examples=30, deadline=None)
@given(n=st.integers(100, 900), seed=st.integers(0, 2**62), other=st.integers(0, 2**31))
def test_it_is_linear(n, seed, other):
    compressor = build("sketch")
    x = torch.randint(-(2**12), 2**12, (n,), generator=generator(other)).float()
    y = torch.randint(-(2**12), 2**12, (n,), generator=generator(other + 1)).float()
    tables = [compressor.table(vector, seed_of(seed)) for vector in (x, y, x + y, -2 * x)]
    assert torch.equal(tables[0] + tables[1], tables[2])
    assert torch.equal(-2 * tables[0], tables[3])


def test_a_row_is_unbiased_and_has_the_exact_variance():
    x, columns = normal(60, seed=4), 16
    drawn = draws(build("sketch", rows=1, density=1.0), x, 700)
    exact = x.double()
    variance = (exact.square().sum() - exact.square()) / columns
    assert_unbiased(drawn, x, variance)
    squares = (drawn - exact).square()
    sigma = (squares.var(dim=0) / len(drawn)).sqrt()
    assert ((squares.mean(dim=0) - variance).abs() <= 5 * sigma).all()
    total = squares.mean(dim=1)  # of one draw's estimates, whose errors depend on each other
    assert (total.mean() - variance.mean()).abs() <= 5 * total.std() / math.sqrt(len(total))


def test_rows_err_independently_of_each_other():
    compressor, count = build("sketch", rows=3, density=1.0), 800
    x = torch.zeros(60)
    x[7], x[30] = 1.0, 4.0
    drawn = draws(compressor, x, count)
    p, half = 1 / 16, 1 / 32
    same_side = 3 * half**2 * (1 - half) + half**3  # the median moves up if two rows or more do
    moved = torch.stack([(drawn[:, 7] == 5.0).sum(), (drawn[:, 7] == -3.0).sum()])
    assert set(drawn[:, 7].tolist()) <= {1.0, 5.0, -3.0} and p < 0.1
    assert_frequencies(moved, count, torch.full((2,), same_side))


@pytest.mark.parametrize("seed", range(6))
def test_what_is_large_is_found(seed):
    x = 0.01 * normal(5000, seed)
    places = torch.randperm(5000, generator=generator(seed))[:20]
    x[places] += 10.0 * (torch.arange(20) % 2 * 2 - 1) * torch.linspace(1, 2, 20)
    compressor = build("sketch", rows=9, density=20 / 5000, width=0.08)
    decoded = compressor.decode(compressor.encode(x, generator=generator(seed)), 5000)
    assert sorted(decoded.nonzero().view(-1).tolist()) == sorted(places.tolist())
    assert (decoded - x)[places].abs().max() <= 1.0


@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, math.nan]), min_size=1, max_size=30), data=st.data())
def test_the_largest_are_exactly_so_many_and_ties_go_to_the_lowest_index(values, data):
    keep = data.draw(st.integers(1, len(values)))
    order = sorted(range(len(values)), key=lambda i: (-math.inf if math.isnan(values[i]) else -abs(values[i]), i))
    expected = [i in order[:keep] for i in range(len(values))]
    assert largest(torch.tensor(values), keep).tolist() == expected


@pytest.mark.parametrize(("rows", "density"), itertools.product([1, 3, 5, 7, 9], [0.001, 0.3, 1.0]))
def test_recovery_is_the_medians(rows, density):
    compressor = build("sketch", rows=rows, density=density, width=0.05)
    n = 3001
    # Few values, so that estimates tie.
    x = torch.randint(-2, 3, (n,), generator=generator(rows)).float()
    wire = compressor.encode(x, generator=generator(rows))
    seed, table = wire[:8].view(torch.int64), wire[8:].view(torch.float32).view(rows, -1)
    says = [sign * row[column] for row, (column, sign) in zip(table, compressor.hashes(seed, n, 151), strict=True)]
    median = torch.stack(says).sort(dim=0).values[rows // 2]
    order = sorted(range(n), key=lambda i: (-abs(median[i].item()), i))[: compressor.kept(n)]
    expected = torch.zeros(n)
    expected[order] = median[order]
    assert torch.equal(compressor.decode(wire, n), expected)


def step(compressor, xs, at=0, name="w"):
    context = Context(name, tuple(xs[0].shape), at, len(xs), 3)
    return lockstep(compressor, xs, [{} for _ in xs], context)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_rounds_return_the_exact_values_of_what_is_large_in_the_sum(world):
    """A value that no rank can see alone is found: the noise of one rank is the other's with the opposite sign."""
    n, k = 5000, 20
    places = torch.randperm(n, generator=generator(1))[:k]
    xs = [0.01 * normal(n, rank) for rank in range(world)]
    if world > 1:
        noise = 5 * normal(n, 77)
        xs[0] += noise
        xs[1] -= noise
    for x in xs:
        x[places] += 4.0
    compressor = build("sketch", density=k / n, width=0.08)
    means, sents, _ = step(compressor, xs)
    exact = torch.stack(xs).double().mean(dim=0)
    kept = torch.zeros(n, dtype=torch.bool).index_fill(0, places, True)
    assert torch.allclose(means[0].double(), torch.where(kept, exact, 0), rtol=0, atol=2e-6)
    for x, sent in zip(xs, sents, strict=True):
        assert torch.equal(sent, torch.where(kept, x, 0))


def test_with_every_element_a_candidate_rounds_are_the_top_k_of_the_mean():
    xs = [normal((33, 40), rank) for rank in range(3)]
    compressor = build("sketch", density=0.25)
    mean = step(compressor, xs)[0][0]
    exact = torch.stack(xs).double().mean(dim=0)
    assert (mean != 0).sum() == 330
    assert exact[mean != 0].abs().min() >= exact[mean == 0].abs().max()
    assert torch.allclose(mean[mean != 0].double(), exact[mean != 0])


def test_steps_and_parameters_have_hash_functions_of_their_own():
    compressor = build("sketch")
    xs = [normal(5000)]
    chosen = {tuple(step(compressor, xs, at, name)[0][0].nonzero().view(-1).tolist()) for at in (0, 1) for name in "ab"}
    assert len(chosen) == 4


def test_bytes_by_hand():
    compressor = build("sketch")
    assert compressor.wire_bytes(100_000) == 8 + 4 * 5 * 2000
    assert compressor.round_bytes(100_000) == 4 * 5 * 2000 + 4 * 4 * 1000
    assert compressor.wire_bytes(300) == 8 + 4 * 5 * 16
    assert compressor.wire_bytes(82) == 4 * 82 and compressor.wire_bytes(83) == 8 + 4 * 5 * 16
    assert compressor.round_bytes(82) == 4 * 82


def test_a_sum_beyond_float32_is_flagged():
    x = torch.full((1000,), 3e38)
    flag = torch.zeros(1, dtype=torch.uint8)
    build("sketch", rows=1).encode(x, generator=generator(), flag=flag)
    assert flag.item() == 1
