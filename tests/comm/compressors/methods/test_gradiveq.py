"""GradiVeQ projects slices on their principal components, and the ranks share one basis."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep import lockstep
from samples import normal

from gradwire.base.errors import BadInput
from gradwire.comm.compressors import build
from gradwire.comm.compressors.rounds import Context


def small(**options):
    return build("gradiveq", **{"slice": 8, "components": 2, "window": 3, "refresh": 7, **options})


def plane(count: int, size: int, dimensions: int, seed: int = 0, frame: int = 0) -> torch.Tensor:
    """A vector of slices that lie in so many dimensions around one point; ``frame`` says in which."""
    directions = normal((dimensions, size), 100 + frame)
    return (normal((count, dimensions), seed) @ directions + normal(size, 200 + frame)).view(-1)


def energies(x: torch.Tensor, size: int, components: int) -> tuple[float, float]:
    """The slices' energy around their mean, and what is outside the first components, by the singular values."""
    slices = x[: x.numel() - x.numel() % size].view(-1, size).double()
    values = torch.linalg.svdvals(slices - slices.mean(dim=0)).square()
    return values.sum().item(), values[components:].sum().item()


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(6, 60),
    rest=st.integers(0, 7),
    components=st.integers(1, 4),
    exponent=st.integers(-18, 18),
    seed=st.integers(0, 2**31),
)
def test_what_is_lost_is_the_energy_outside_the_basis(count, rest, components, exponent, seed):
    x = torch.cat([plane(count, 8, 5, seed, frame=seed % 7) + 0.1 * normal(8 * count, seed), normal(rest, seed)])
    x *= 10.0**exponent
    compressor = small(components=components)
    wire = compressor.encode(x)
    decoded = compressor.decode(wire, x.numel()).double()
    assert torch.equal(decoded[8 * count :].float(), x[8 * count :])
    if wire.numel() == 4 * x.numel():
        assert torch.equal(decoded.float(), x)
        return
    numbers = wire.view(torch.float32).double()
    mean, basis = numbers[:8], numbers[8 : 8 + 8 * components].view(components, 8)
    coefficients = numbers[8 + 8 * components :][: components * count].view(count, components)
    slices = x[: 8 * count].double().view(count, 8)
    size = slices.square().sum().item()
    assert torch.allclose(basis @ basis.T, torch.eye(components, dtype=torch.float64), atol=1e-6)
    assert torch.allclose(mean, slices.mean(dim=0), rtol=0, atol=1e-6 * math.sqrt(size))
    lost = (slices - decoded[: 8 * count].view(count, 8)).square().sum().item()
    outside = (slices - mean).square().sum() - coefficients.square().sum()
    assert lost == pytest.approx(outside.item(), abs=3e-6 * size)
    _, best = energies(x, 8, components)
    assert lost == pytest.approx(best, abs=3e-6 * size), "other components would keep more"


def test_wire_is_mean_basis_coefficients_rest():
    x = torch.cat([torch.tensor([[1.0, 1.0, 5.0 + 2 * (i % 2), 0.0] for i in range(9)]).view(-1), torch.tensor([9.0])])
    compressor = build("gradiveq", slice=4, components=1)
    numbers = compressor.encode(x).view(torch.float32)
    assert numbers.numel() == 4 + 4 + 9 + 1
    mean, basis, coefficients, rest = numbers.split([4, 4, 9, 1])
    assert mean.tolist() == pytest.approx([1.0, 1.0, 5 + 8 / 9, 0.0])
    sign = basis[2].item()
    assert basis.tolist() == pytest.approx([0.0, 0.0, sign, 0.0]) and abs(sign) == pytest.approx(1.0)
    assert coefficients.tolist() == pytest.approx([sign * (2 * (i % 2) - 8 / 9) for i in range(9)], abs=1e-6)
    assert rest.tolist() == [9.0]


def test_bytes_by_hand():
    compressor = build("gradiveq")
    assert compressor.wire_bytes(64 * 1000 + 5) == 4 * (64 + 8 * 64 + 8 * 1000 + 5)
    assert compressor.wire_bytes((100, 64)) == 4 * (64 + 8 * 64 + 8 * 100)
    assert compressor.wire_bytes(640) == 4 * 640  # 576 + 80 would be more
    assert compressor.wire_bytes(704) == 4 * (576 + 88)
    assert compressor.round_bytes(64_005, 0) == 4 * 64_005
    assert compressor.round_bytes(64_005, 9) == 4 * (64_005 + 576)
    assert compressor.round_bytes(64_005, 10) == compressor.round_bytes(64_005) == 4 * 8005
    assert compressor.round_bytes(64_005, 99) == 4 * 8005
    assert compressor.round_bytes(64_005, 100) == 4 * 64_005
    assert compressor.round_bytes(640, 50) == 4 * 640


def run(compressor, gradients, states, start=0):
    """Steps of rounds over ``gradients[step][rank]``: each step's mean and the ranks' contributions."""
    out = []
    for at, xs in enumerate(gradients, start):
        means, sents, handed = lockstep(compressor, xs, states, Context("w", tuple(xs[0].shape), at, len(xs), 7))
        assert handed == compressor.round_bytes(tuple(xs[0].shape), at)
        assert all(torch.equal(mean.view(torch.int32), means[0].view(torch.int32)) for mean in means)
        out.append((means[0], sents))
    return out


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_rounds_are_exact_in_the_window_and_project_on_its_components_after_it(world):
    compressor = small(components=3)
    shape = (10, 25)  # 31 slices and 2 elements
    gradients = [[normal(shape, 10 * at + rank) for rank in range(world)] for at in range(17)]
    means = [torch.stack(xs).double().mean(dim=0).view(-1) for xs in gradients]
    states = [compressor.new_state(shape, 0) for _ in range(world)]
    seen: list[torch.Tensor] = []
    for at, (mean, sents) in enumerate(run(compressor, gradients, states)):
        if at % 7 < 3:
            seen = [] if at % 7 == 0 else seen
            seen.append(means[at][:248].view(31, 8))
            assert torch.allclose(mean.double().view(-1), means[at], atol=1e-6)
            assert all(torch.equal(sent, x) for sent, x in zip(sents, gradients[at], strict=True))
            continue
        slices = torch.cat(seen)
        middle = slices.mean(dim=0)
        components = torch.linalg.svd(slices - middle)[2][:3]
        for got, exact in [(mean, means[at]), *zip(sents, (x.double().view(-1) for x in gradients[at]), strict=True)]:
            expected = middle + (exact[:248].view(31, 8) - middle) @ components.T @ components
            assert torch.allclose(got.double().view(-1)[:248], expected.view(-1), atol=1e-5)
            assert torch.allclose(got.double().view(-1)[248:], exact[248:], atol=1e-6)


def test_the_basis_follows_when_the_plane_moves():
    compressor = small(slice=16, components=4)
    gradients = [[plane(40, 16, 4, seed=at, frame=at // 7)] for at in range(14)]
    results = run(compressor, gradients, [compressor.new_state(640, 0)])
    for at in (3, 6, 10, 13):
        assert (results[at][0] - gradients[at][0]).norm() <= 1e-5 * gradients[at][0].norm()


def test_the_basis_is_the_first_ranks():
    """The other rank's machine finds other eigenvectors, as if its sums were others: it takes the basis it is sent."""
    compressor = small()
    states = [compressor.new_state(500, 0) for _ in range(2)]
    talks, asks = [], []
    for rank, state in enumerate(states):
        state["steps"] += 2  # the window's last step
        talks.append(compressor.rounds(normal(500), state, Context("w", (500,), 2, 2, 0)))
        next(talks[rank])
        asks.append(talks[rank].send(normal(500, seed=rank)))
    assert {ask.op for ask in asks} == {"gather"}
    assert not torch.equal(asks[0].tensor, asks[1].tensor)
    for talk in talks:
        with pytest.raises(StopIteration):
            talk.send(torch.stack([ask.tensor for ask in asks]))
    assert all(torch.equal(state["basis"], asks[0].tensor) for state in states)


@pytest.mark.parametrize("ruin", [math.nan, math.inf])
def test_a_window_forgets_what_is_not_finite(ruin):
    compressor = small(slice=16, components=4)
    gradients = [[plane(40, 16, 4, seed=at)] for at in range(5)]
    gradients[1][0][7] = ruin
    results = run(compressor, gradients, [compressor.new_state(640, 0)])
    assert not results[1][0].isfinite().all()
    assert (results[4][0] - gradients[4][0]).norm() <= 1e-5 * gradients[4][0].norm()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"components": 64}, "components 64 must be fewer than the slice's 64 elements"),
        ({"window": 100}, "window 100 must be shorter than refresh 100"),
        ({"components": 0}, "gradiveq option 'components' is 0"),
        ({"slice": 1}, "gradiveq option 'slice' is 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(BadInput, match=message):
        build("gradiveq", **options)
