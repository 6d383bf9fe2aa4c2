"""What went wrong in the benchmark that this field compares with, one test for each of its defects."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from lockstep import lockstep
from samples import BUILDS, generator, normal
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire.comm.compressors import build
from gradwire.comm.compressors.rounds import Context, ReduceRequest


@pytest.mark.parametrize(
    ("name", "options", "bits"),
    [
        ("signsgd", {}, 1),
        ("signsgd", {"scale": "none"}, 1),
        ("onebit", {}, 1),
        ("terngrad", {}, 2),
    ],
    ids=str,
)
def test_a_sign_travels_as_one_bit_and_a_ternary_as_two(name, options, bits):
    """There, each is a whole byte."""
    n, doubled = 1 << 16, 1 << 17
    wires = [build(name, **options).encode(normal(size), generator=generator()) for size in (n, doubled)]
    means_per_block = {"onebit": 2}.get(name, 1)
    scales = 0 if options.get("scale") == "none" else 4 * means_per_block / 256
    assert wires[1].numel() - wires[0].numel() == pytest.approx(n * (bits / 8 + scales), abs=1)


def test_random_k_leaves_the_global_generator_alone():
    """There, the hash of a tensor's name reseeds it on every tensor and step."""
    compressor, x = build("randomk", density=0.1), normal(1000)
    before = torch.get_rng_state()
    compressor.encode(x, generator=generator())
    lockstep(compressor, [x, x], [{}, {}], Context("weight", (1000,), 0, 2, 0))
    assert torch.equal(torch.get_rng_state(), before)


def test_random_k_draws_without_replacement_and_is_scaled():
    """There, a place may be drawn twice, fewer than k elements travel, and nothing is multiplied by d / k."""
    x = normal(1000)
    for seed in range(20):
        compressor = build("randomk", density=0.5)
        sent = compressor.decode(compressor.encode(x, generator=generator(seed)), 1000)
        places = sent.nonzero().view(-1)
        assert places.numel() == 500
        assert torch.equal(sent[places], 2 * x[places])


def test_random_k_draws_other_places_at_every_step_and_for_every_parameter_but_equal_ones_on_all_ranks():
    compressor, seen = build("randomk", density=0.1), set()
    for step, name in ((0, "a"), (1, "a"), (0, "b")):
        xs = [normal(1000, seed=rank) for rank in range(3)]
        means, sents, _ = lockstep(compressor, xs, [{}] * 3, Context(name, (1000,), step, 3, 0))
        masks = [tuple(sent.nonzero().view(-1).tolist()) for sent in sents]
        assert len(set(masks)) == 1 and len(masks[0]) == 100
        assert torch.allclose(means[0], torch.stack(sents).mean(dim=0), atol=1e-5)
        seen.add(masks[0])
    assert len(seen) == 3


@pytest.mark.parametrize(
    "options", [{"scale": "absolute", "threshold": 2.0}, {"scale": "max", "threshold": 0.8}, {}], ids=str
)
def test_a_threshold_means_magnitudes(options):
    """There, it is compared with the largest value, so that of an all-negative tensor everything is sent."""
    x = -normal(1000).abs()
    compressor = build("threshold", **options)
    sent = compressor.decode(compressor.encode(x), 1000)
    least = {"absolute": 2.0, "max": 0.8 * x.abs().max(), None: 2.5 * x.square().mean().sqrt()}[options.get("scale")]
    assert torch.equal(sent, torch.where(x.abs() >= least, x, 0.0))
    assert 0 < sent.count_nonzero() < 100


def test_powersgd_projects_alike_on_all_ranks_and_returns_the_mean():
    """There, every rank draws another Q from the global generator, and the result is the sum."""
    left, right = normal((40, 2), seed=1), normal((2, 30), seed=2)
    xs = [left @ torch.diag(torch.tensor([1.0 + rank, 2.0 - rank])) @ right for rank in range(3)]
    compressor = build("powersgd", rank=2)
    states = []
    for rank in range(3):
        torch.manual_seed(rank)  # must not matter
        states.append(compressor.new_state((40, 30), seed=5))
    means, _, _ = lockstep(compressor, xs, states, Context("weight", (40, 30), 0, 3, 5))
    assert all(torch.equal(mean, means[0]) for mean in means)
    assert torch.allclose(means[0], torch.stack(xs).mean(dim=0), atol=1e-4)
    assert all(torch.equal(state["q"], states[0]["q"]) for state in states)


def test_powersgd_really_starts_warm():
    """There, every step overwrites Q with fresh random numbers."""

    def errors(warm_start: bool) -> list[float]:
        x = normal((60, 40), seed=3) + 3 * normal((60, 3), seed=4) @ normal((3, 40), seed=5)
        compressor = build("powersgd", rank=3, warm_start=warm_start)
        state, found = compressor.new_state((60, 40), seed=6), []
        for step in range(8):
            means, _, _ = lockstep(compressor, [x], [state], Context("weight", (60, 40), step, 1, 6))
            found.append((x - means[0]).norm().item())
        best = torch.linalg.svdvals(x)[3:].norm().item()
        return [error / best for error in found]

    warm, cold = errors(True), errors(False)
    assert warm[-1] < 1.001 < warm[0]
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in pairwise(warm))
    assert min(cold) > warm[-1] and len(set(cold)) == len(cold)


@pytest.mark.parametrize("options", [{}, {"norm": "max"}, {"levels": 1}], ids=str)
def test_a_zero_bucket_stays_zero_in_qsgd(options):
    """There, 0 / 0 becomes NaN, and an integer is made of it."""
    compressor = build("qsgd", block=64, **options)
    x = torch.cat([normal(64), torch.zeros(64), normal(10)])
    for values in (x, torch.zeros(200)):
        decoded = compressor.decode(compressor.encode(values, generator=generator()), values.numel())
        assert decoded.isfinite().all()
        assert not decoded[64:128].any()
    assert decoded.count_nonzero() == 0


@pytest.mark.parametrize("bits", [8, 9])
@pytest.mark.parametrize("exponent", [-126, -110, -109, 0, 18, 19, 100, 126])
def test_natural_carries_every_exponent(bits, exponent):
    """There, powers below 2^-109 and above 2^18 are clipped, and it needs CUDA's numpy."""
    x = torch.tensor([1.0, -1.0, 1.5, -1.75]) * 2.0**exponent
    compressor = build("natural", bits=bits)
    for seed in range(10):
        decoded = compressor.decode(compressor.encode(x, generator=generator(seed)), 4)
        assert torch.equal(decoded[:2], x[:2])
        assert all(value in (1.0, 2.0) for value in (decoded[2:].abs() / 2.0**exponent).tolist())
        assert torch.equal(decoded.sign(), x.sign())


class Operations(TorchDispatchMode):
    """Counts torch's operations."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def answered(ask: ReduceRequest, world: int) -> torch.Tensor:
    """What `ask` receives where all ranks hand over the same."""
    if ask.op == "gather":
        return torch.stack([ask.tensor] * world)
    return ask.tensor * world if ask.op == "sum" else ask.tensor


def operations(name: str, options: dict, world: int) -> int:
    """How many one rank needs in a reduction over ``world`` ranks, the collectives left out."""
    compressor, x = build(name, **options), normal((40, 24))
    talk = compressor.rounds(x, compressor.new_state((40, 24), seed=1), Context("weight", (40, 24), 0, world, 1))
    total, answer = 0, None
    while True:
        with Operations() as counted:
            try:
                ask = talk.send(answer)
            except StopIteration:
                return total + counted.count
        total += counted.count
        answer = answered(ask, world)


@pytest.mark.parametrize(
    ("name", "options"), [(name, options) for name, options in BUILDS if build(name, **options).has_rounds], ids=str
)
def test_nothing_is_decoded_rank_by_rank(name, options):
    """There, a Python loop decodes every rank's payload."""
    assert operations(name, options, 2) == operations(name, options, 32)
