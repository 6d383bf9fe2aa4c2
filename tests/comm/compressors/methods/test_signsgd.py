"""signsgd's error, scales and votes are exactly what its definition says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from lockstep import lockstep
from samples import normal

from gradwire.comm.compressors import build
from gradwire.comm.compressors.rounds import Context


def expected(x: torch.Tensor, block: int) -> torch.Tensor:
    """Scaled signs in float64, element by element, from the definition; the scale rounded once to float32."""
    values, done = x.double().numpy().ravel(), []
    for at in range(0, values.size, block):
        part = values[at : at + block]
        scale = np.float32(math.fsum(abs(value) for value in part) / part.size)
        done += [-scale if value < 0 else scale for value in part]
    return torch.tensor(np.array(done)).view(x.shape)


def coded(x: torch.Tensor, **options) -> torch.Tensor:
    compressor = build("signsgd", **options)
    return compressor.decode(compressor.encode(x), tuple(x.shape))


def voted(xs: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    context = Context("w", tuple(xs[0].shape), 0, len(xs), 0)
    return lockstep(build("signsgd", scale="none"), xs, [{} for _ in xs], context)


@pytest.mark.parametrize("block", [7, 256, 2048])
@pytest.mark.parametrize("shape", [1, 255, 256, 257, 5003, (33, 40)], ids=str)
def test_every_element_becomes_its_sign_times_the_mean_magnitude(block, shape):
    for scale in (1.0, 2.0**124, 2.0**-140):  # sums that float32 does not hold, and numbers that are not normal
        x = scale * normal(shape, seed=2)
        assert torch.equal(coded(x, block=block), expected(x, block)), scale
    assert torch.equal(coded(x, scale="none"), torch.where(x < 0, -1.0, 1.0))


def test_wire_is_scales_or_a_status_then_bits():
    x = torch.tensor([1.0, -2.0, 3.0, -4.0, 0.0, -0.0, 5.0, -1.0, -1.0, 9.0])
    wire = build("signsgd", block=8).encode(x)
    assert wire[:8].view(torch.float32).tolist() == [2.0, 5.0]
    assert wire[8:].tolist() == [0b10001010, 0b01]
    assert build("signsgd", scale="none").encode(x).tolist() == [0, 0b10001010, 0b01]


def test_plain_signs_show_what_is_not_finite_everywhere():
    x = normal(300)
    x[299] = math.inf
    flag = torch.zeros(1, dtype=torch.uint8)
    compressor = build("signsgd", scale="none")
    wire = compressor.encode(x, flag=flag)
    assert flag.item() == 1 and wire[0].item() == 1
    assert compressor.decode(wire, 300).isnan().all()


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 300])
@pytest.mark.parametrize("size", [1, 8, 37, 257])
def test_the_majority_decides_and_a_tie_is_zero(world, size):
    xs = [normal(size, seed=100 * size + rank) for rank in range(world)]
    means, sents, handed = voted(xs)
    signs = torch.stack([torch.where(x < 0, -1, 1) for x in xs])
    assert torch.equal(means[0], signs.sum(dim=0).sign().float())
    assert torch.equal(torch.stack(sents), signs.float())
    assert handed == 1 + -(-size // 8)
    if world % 2:
        assert (means[0] != 0).all()


def test_zero_votes_for_plus_and_two_opposite_votes_tie():
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.0])
    y = torch.tensor([0.0, 1.0, -1.0, -1.0, -2.0])
    assert voted([x, y])[0][0].tolist() == [1.0, 1.0, 0.0, -1.0, 0.0]


def test_one_ranks_nan_spoils_the_vote_on_every_rank():
    xs = [normal(20, seed=rank) for rank in range(3)]
    xs[1][7] = math.nan
    means, sents, _ = voted(xs)
    assert all(mean.isnan().all() for mean in means)
    assert sents[0].isfinite().all() and sents[1].isnan().all()


def test_only_plain_signs_can_be_voted_on():
    assert build("signsgd", scale="none").has_rounds
    assert not build("signsgd").has_rounds
