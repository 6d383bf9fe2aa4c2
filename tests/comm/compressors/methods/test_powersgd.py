"""PowerSGD is an orthogonal projection, linear in the mean, and with a warm start it finds the best one."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep import lockstep
from samples import generator, normal
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _should_compress

from gradwire.comm.compressors import build
from gradwire.comm.compressors.philox import draw_seed
from gradwire.comm.compressors.rounds import Context


def of_rank(rank: int, n: int, m: int, seed: int = 0) -> torch.Tensor:
    """A matrix of that rank, with singular values of like size."""
    return normal((n, rank), seed) @ normal((rank, m), seed + 1)


def best_error(matrix: torch.Tensor, rank: int) -> float:
    """The error of the best approximation of that rank, by the singular values."""
    return torch.linalg.svdvals(matrix.double())[rank:].norm().item()


def step(compressor, xs, states, at=0):
    """One step of rounds, every rank's mean equal: the mean."""
    means, sents, _ = lockstep(compressor, xs, states, Context("w", tuple(xs[0].shape), at, len(xs), 7))
    assert all(torch.equal(other.view(torch.int32), means[0].view(torch.int32)) for other in [*means, *sents])
    return means[0]


def fresh(compressor, shape, world):
    return [compressor.new_state(shape, seed=7) for _ in range(world)]


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(8, 40),
    m=st.integers(8, 40),
    rank=st.integers(1, 3),
    true_rank=st.integers(0, 8),
    exponent=st.integers(-18, 18),
    seed=st.integers(0, 2**31),
)
def test_it_is_an_orthogonal_projection(n, m, rank, true_rank, exponent, seed):
    matrix = of_rank(true_rank, n, m, seed) * 10.0**exponent
    wire = build("powersgd", rank=rank).encode(matrix, generator=generator(seed))
    p, q = wire.view(torch.float32).double().view(n + m, rank).split([n, m])
    exact = matrix.double()
    size = exact.norm().item()
    gram = p.T @ p
    kept = gram.diagonal() > 0.5
    assert torch.allclose(gram, torch.diag(kept.double()), atol=1e-6)
    assert kept.sum() >= min(rank, true_rank)  # more, where float32's rounding in M Q looks like a direction
    assert true_rank > 0 or not kept.any()
    assert torch.allclose(q, exact.T @ p, rtol=0, atol=1e-5 * size)
    decoded = build("powersgd", rank=rank).decode(wire, (n, m)).double()
    assert torch.allclose(decoded, p @ p.T @ exact, rtol=0, atol=1e-5 * size)
    left = exact.square().sum() - (p.T @ exact).square().sum()
    assert (exact - decoded).square().sum().item() == pytest.approx(left.item(), abs=1e-5 * size**2)
    if 0 < true_rank <= rank:  # exact, but for float32's rounding of M Q, which counts more where Q misses a direction
        q = build("powersgd", rank=rank).drawn((n, m), draw_seed(generator(seed), matrix.device, "q")).double()
        least = torch.linalg.svdvals(exact @ q)[true_rank - 1].item()
        assert (exact - decoded).norm() <= 1e-6 * size * (1 + size * q.norm().item() / least)


def test_wire_is_p_then_q():
    matrix = torch.zeros(3, 5)
    matrix[1] = torch.tensor([1.0, 2.0, 0.0, 0.0, -2.0])
    p, q = build("powersgd", rank=1).encode(matrix, generator=generator()).view(torch.float32).split([3, 5])
    sign = p[1].item()
    assert p.tolist() == [0.0, sign, 0.0] and abs(sign) == 1.0
    assert q.tolist() == (matrix[1] * sign).tolist()


def test_what_is_small_or_no_matrix_travels_as_it_is():
    compressor = build("powersgd", rank=2)
    for shape, compressed in (((4, 4), False), ((4, 5), True), ((2, 100), False), (50, False), ((3, 7), True)):
        size = math.prod(shape) if isinstance(shape, tuple) else shape
        assert (compressor.wire_bytes(shape) < 4 * size) == compressed
        x = normal(shape)
        decoded = compressor.decode(compressor.encode(x, generator=generator()), shape)
        assert torch.equal(decoded, x) != compressed


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_many_workers_are_one_worker_with_the_mean(world):
    compressor = build("powersgd", rank=3)
    many, one = fresh(compressor, (33, 40), world), fresh(compressor, (33, 40), 1)
    for at in range(4):
        xs = [normal((33, 40), seed=10 * at + rank) * (rank + 1) for rank in range(world)]
        mean = torch.stack(xs).double().mean(dim=0)
        together = step(compressor, xs, many, at)
        alone = step(compressor, [mean.float()], one, at)
        assert (together - alone).norm() <= 1e-4 * alone.norm()
        p = torch.linalg.svd(together.double())[0][:, :3]  # the columns that it spans
        assert (together.double() - p @ p.T @ mean).norm() <= 1e-5 * mean.norm()


def test_a_warm_start_finds_the_best_approximation():
    matrix = torch.linalg.svd(normal((30, 50)))[0] @ torch.diag(0.8 ** torch.arange(30.0)) @ normal((30, 50), 2) / 7
    best, size = best_error(matrix, 4), matrix.norm().item()
    compressor = build("powersgd", rank=4)
    states = fresh(compressor, (30, 50), 2)
    errors = [(matrix - step(compressor, [matrix, matrix], states, at)).double().norm().item() for at in range(60)]
    assert errors[0] > 1.02 * best
    assert all(after <= before + 1e-6 * size for before, after in pairwise(errors))
    assert errors[-1] == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize("ruin", [0.0, math.nan, math.inf])
def test_a_gradient_of_nothing_or_worse_leaves_no_trace(ruin):
    """A column of Q that becomes 0 or NaN would stay so for ever."""
    compressor = build("powersgd", rank=2)
    states = fresh(compressor, (20, 30), 2)
    spoiled = torch.full((20, 30), ruin)
    assert step(compressor, [spoiled, spoiled], states).isfinite().all() == math.isfinite(ruin)
    matrix = of_rank(2, 20, 30)
    assert torch.allclose(step(compressor, [matrix, matrix], states, 1), matrix, rtol=0, atol=1e-4)


def test_a_direction_that_was_missing_is_found_when_it_comes():
    compressor = build("powersgd", rank=3)
    states = fresh(compressor, (20, 30), 1)
    for at in range(3):
        step(compressor, [of_rank(1, 20, 30)], states, at)
    matrix = of_rank(3, 20, 30, seed=5)
    assert torch.allclose(step(compressor, [matrix], states, 3), matrix, rtol=0, atol=1e-3)


@pytest.mark.parametrize("scale", [1e-18, 1e18])
def test_neither_tiny_nor_huge_gradients_wear_the_warm_start_out(scale):
    compressor = build("powersgd", rank=2)
    states = fresh(compressor, (20, 30), 1)
    matrix = of_rank(2, 20, 30) * scale
    for at in range(5):
        mean = step(compressor, [matrix], states, at)
        assert (mean - matrix).double().norm() <= 1e-5 * matrix.double().norm()


def test_all_ranks_begin_with_one_q_and_keep_it_between_steps():
    """GRACE draws Q from each rank's own global state, and draws it again in every step."""
    compressor = build("powersgd")
    before = torch.get_rng_state()
    first, second = fresh(compressor, (33, 40), 2)
    assert torch.equal(first["q"], second["q"]) and not torch.equal(first["q"], compressor.new_state((33, 40), 8)["q"])
    assert torch.equal(before, torch.get_rng_state())
    matrix = normal((33, 40))
    decoded = step(compressor, [matrix, matrix], [first, second])
    again = step(compressor, [matrix, matrix], [first, second], 1)
    assert (matrix - again).norm() < (matrix - decoded).norm() < matrix.norm(), "the mean, not the sum"


def test_it_compresses_what_torchs_hook_does_with_a_minimal_rate_of_1():
    shapes = [(n, m) for n in range(1, 20) for m in range(1, 20)]
    for rank in (1, 4):
        torchs = [[_should_compress(n, m, rank, rate)[0] for n, m in shapes] for rate in (1, 2)]
        ours = [build("powersgd", rank=rank).compresses(shape) for shape in shapes]
        assert ours == torchs[0] != torchs[1], "the page says that torch's default leaves more uncompressed"
