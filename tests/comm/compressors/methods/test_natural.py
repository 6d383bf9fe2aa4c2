"""Natural compression rounds to powers of two with the exact probabilities of its definition."""

from __future__ import annotations

import math

import pytest
import torch
from samples import assert_frequencies, assert_unbiased, draws, generator, normal

from gradwire.base.errors import NonFiniteGradient
from gradwire.comm.compressors import build

both = pytest.mark.parametrize("options", [{}, {"bits": 9}, {"block": 5}], ids=str)


def below(x: torch.Tensor) -> torch.Tensor:
    """The largest power of two up to each magnitude, in float64."""
    _, exponent = torch.frexp(x.double().abs())
    return torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent - 1)


@both
def test_every_element_goes_up_with_its_exact_probability(options):
    x, count = normal(300, seed=3) * 10 ** torch.linspace(-16, 16, 300), 2500
    drawn = draws(build("natural", **options), x, count)
    a, size = below(x), x.double().abs()
    assert (drawn.sign() == x.double().sign()).all()
    assert ((drawn.abs() == a) | (drawn.abs() == 2 * a)).all()
    assert_frequencies((drawn.abs() == 2 * a).sum(dim=0), count, (size - a) / a)
    assert_unbiased(drawn, x, (size - a) * (2 * a - size))


def test_denormal_numbers_become_zero_or_the_smallest_normal_one():
    unit, count = math.ldexp(1, -126), 2000
    x = torch.tensor([0.5, -0.25, 0.75, 2.0**-5, -(2.0**-23), 0.3]) * unit
    for options in ({}, {"bits": 9}):
        drawn = draws(build("natural", **options), x, count)
        share = x.double().abs() / unit
        assert_frequencies((drawn.abs() == unit).sum(dim=0), count, share)
        assert_unbiased(drawn, x, unit**2 * share * (1 - share))


def test_what_is_far_below_the_blocks_largest_becomes_zero_or_its_lowest_power():
    top = 3 * 2.0**60  # may be rounded to 2^62, so the 127 powers are 2^-64 to 2^62
    lowest, count = 2.0**-64, 2000
    x = torch.tensor([top, 2.0**-64, -1.5 * 2.0**-64, 2.0**-65, -1.25 * 2.0**-66, 2.0**-100, 0.0])
    drawn = draws(build("natural"), x, count)
    share = (x.double().abs() / lowest)[3:5]
    assert set(drawn[:, 0].tolist()) == {2.0**61, 2.0**62}
    assert (drawn[:, 1] == lowest).all()
    assert set(drawn[:, 2].tolist()) == {-lowest, -2 * lowest}
    assert_frequencies((drawn[:, 3:5].abs() == lowest).sum(dim=0), count, share)
    assert not drawn[:, 5:].any()
    assert torch.equal(draws(build("natural", block=1), x[5:], 3), x[5:].double().expand(3, -1))


def test_wires_by_hand():
    x = torch.tensor([1.0, -2.0, 0.0, 0.5, -(2.0**40)])
    wire = build("natural", block=3).encode(x, generator=generator())
    # the blocks may go up to 2^2 and 2^41, exponents 129 and 168: 126 below are 3 and 42
    assert wire.tolist() == [3, 42, 127 - 3 + 1, 128 | (128 - 3 + 1), 0, 126 - 42 + 1, 128 | (167 - 42 + 1)]
    assert build("natural", bits=9).encode(x, generator=generator()).tolist() == [127, 128, 0, 126, 167, 0b10010]


@both
def test_what_might_become_infinite_is_refused(options):
    compressor = build("natural", **options)
    x = torch.tensor([2.0**127, 2.0**100])
    assert torch.equal(compressor.decode(compressor.encode(x, generator=generator()), 2), x)
    x[0] = 2.0**127 * (1 + 2.0**-23)
    with pytest.raises(NonFiniteGradient, match="natural"):
        compressor.encode(x, generator=generator())
