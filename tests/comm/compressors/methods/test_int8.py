"""int8's errors are exactly what its definition says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep import lockstep
from samples import FLOAT32, assert_frequencies, assert_unbiased, draws, generator, normal

from gradwire.base.errors import BadInput
from gradwire.comm.compressors import build
from gradwire.comm.compressors.rounds import Context


def int8_scales(x: torch.Tensor, block: int) -> torch.Tensor:
    """Each element's scale, in float64, straight from the definition."""
    scales = [chunk.abs().max() / 127 for chunk in x.double().split(block)]
    return torch.cat([scale.expand(chunk.numel()) for scale, chunk in zip(scales, x.split(block), strict=True)])


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 40),
    block=st.integers(1, 12),
    exponent=st.integers(-44, 37),
    seed=st.integers(0, 2**31),
)
def test_nearest_errs_by_half_a_scale_at_most(size, block, exponent, seed):
    x = (torch.rand(size, generator=generator(seed), dtype=torch.float64) * 2 - 1) * 10.0**exponent
    x = x.to(torch.float32)
    compressor = build("int8", block=block)
    error = (compressor.decode(compressor.encode(x), size).double() - x.double()).abs()
    half = int8_scales(x, block).clamp_min(FLOAT32.tiny) / 2
    assert (error <= half + 2 * FLOAT32.eps * x.double().abs()).all()


def test_nearest_reaches_its_bound_and_its_ends():
    x = torch.tensor([127.0, -127.0, 0.5, 1.5, -2.5, 126.5])
    decoded = build("int8").decode(build("int8").encode(x), 6)
    assert decoded.tolist() == [127.0, -127.0, 0.0, 2.0, -2.0, 126.0]  # ties to even


def test_wire_is_scales_then_codes():
    x = torch.tensor([254.0, -127.0, 4.0, 0.0, -3.0])
    wire = build("int8", block=2).encode(x)
    assert wire[:12].view(torch.float32).tolist() == pytest.approx([2.0, 4.0 / 127, 3.0 / 127])
    assert wire[12:].view(torch.int8).tolist() == [127, -64, 127, 0, -127]


@pytest.mark.parametrize(("bits", "block"), [(8, 100), (4, 100), (2, 60), (4, 7)])
def test_stochastic_rounding_has_the_exact_frequencies(bits, block):
    x, count = normal(300, seed=3), 4000
    drawn = draws(build("int8", rounding="stochastic", num_bits=bits, block=block), x, count)
    scale = int8_scales(x, block) * 127 / (2 ** (bits - 1) - 1)
    level = x.double() / scale
    part = level - level.floor()
    part[(level.abs() - level.abs().round()).abs() < 1e-6] = 0.0  # the block's largest value is its own code
    assert_unbiased(drawn, x, scale**2 * part * (1 - part))
    ups = (drawn / scale > level.floor() + 0.5).sum(dim=0)
    assert_frequencies(torch.where(part == 0, 0, ups), count, part)


@pytest.mark.parametrize(("bits", "block"), [(4, 256), (2, 256), (4, 5), (2, 3)])
def test_few_bits_round_to_nearest_within_their_range(bits, block):
    x, top = normal(1003, seed=6), 2 ** (bits - 1) - 1
    decoded = build("int8", num_bits=bits, block=block).decode(
        build("int8", num_bits=bits, block=block).encode(x), 1003
    )
    scale = int8_scales(x, block) * 127 / top
    assert ((decoded.double() / scale).abs() <= top + 1e-5).all()
    assert ((decoded.double() - x.double()).abs() <= scale / 2 * (1 + 1e-6)).all()


@pytest.mark.parametrize("world", [1, 2, 3, 4, 127])
def test_the_sum_of_codes_cannot_overflow(world):
    x = torch.full((5,), 3.0)
    x[1] = -3.0
    xs = [x.clone() for _ in range(world)]
    means, sents, _ = lockstep(build("int8"), xs, [{} for _ in xs], Context("w", (5,), 0, world, 0))
    assert torch.allclose(means[0], x) and torch.allclose(sents[0], x)


def test_rounds_err_by_half_a_step_of_the_global_scale():
    xs = [normal(501, seed=rank) * (rank + 1) for rank in range(3)]
    means, sents, _ = lockstep(build("int8"), xs, [{} for _ in xs], Context("w", (501,), 0, 3, 0))
    step = max(x.abs().max() for x in xs).double() / (127 // 3)
    for x, sent in zip(xs, sents, strict=True):
        assert ((sent.double() - x.double()).abs() <= step / 2 * (1 + 1e-6)).all()
    exact = torch.stack([sent.double() for sent in sents]).mean(dim=0)
    assert torch.allclose(means[0].double(), exact, rtol=1e-6, atol=1e-6)


def test_more_ranks_than_codes_are_refused():
    xs = [normal(3)] * 128
    with pytest.raises(BadInput, match="at most 127 ranks, not of 128"):
        lockstep(build("int8"), xs, [{} for _ in xs], Context("w", (3,), 0, 128, 0))
