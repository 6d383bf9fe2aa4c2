"""QSGD rounds to levels of its bucket's norm with the exact probabilities of its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import assert_frequencies, assert_unbiased, draws, generator, normal

from gradwire.base.errors import NonFiniteGradient
from gradwire.comm.compressors import build

NORMS = {"l2": lambda part: part.square().sum().sqrt(), "max": lambda part: part.abs().max()}


def qsgd_norms(x: torch.Tensor, block: int, norm: str) -> torch.Tensor:
    """Each element's bucket's norm, in float64, straight from the definition."""
    return torch.cat([NORMS[norm](part.double()).expand(part.numel()) for part in x.split(block)])


@pytest.mark.parametrize(
    ("levels", "norm", "block"),
    [(127, "l2", 100), (127, "max", 60), (1, "l2", 50), (1, "max", 7), (7, "l2", 64), (5, "max", 300), (300, "l2", 64)],
)  # fmt: skip
def test_every_element_goes_up_with_its_exact_probability(levels, norm, block):
    x, count = normal(300, seed=3), 2000
    drawn = draws(build("qsgd", levels=levels, norm=norm, block=block), x, count)
    step = qsgd_norms(x, block, norm) / levels
    level = x.double().abs() / step
    part = level - level.floor()
    part[(level - level.round()).abs() < 1e-6 * level] = 0.0  # with the maximum norm, the largest is its own level
    assert ((drawn * x.double()) >= 0).all()
    assert_unbiased(drawn, x, step**2 * part * (1 - part))
    ups = (drawn.abs() / step > level.floor() + 0.5).sum(dim=0)
    assert_frequencies(torch.where(part == 0, 0, ups), count, part)


def test_wires_by_hand():
    x = torch.tensor([3.0, -4.0, 0.0, -2.0, 0.0])  # norms 5 and 2; every draw is certain with 5 levels of them
    wire = build("qsgd", levels=5, block=3).encode(x, generator=generator())
    assert wire[:8].view(torch.float32).tolist() == [5.0, 2.0]
    assert wire[8:].tolist() == [0xC3, 0xB0, 0x00]  # 3, -4, 0, -5, 0 in 4 bits
    wire = build("qsgd", levels=4, norm="max", block=4).encode(
        torch.tensor([3.0, -4.0, 0.0, 2.0, 1.0]), generator=generator()
    )
    assert wire[:8].view(torch.float32).tolist() == [4.0, 1.0]
    assert wire[8:].tolist() == [0xC3, 0x20, 0x04]


@settings(max_examples=50, deadline=None)
@given(
    size=st.integers(1, 40),
    block=st.integers(1, 12),
    levels=st.integers(1, 200),
    exponent=st.integers(-44, 37),
    norm=st.sampled_from(["l2", "max"]),
    seed=st.integers(0, 2**31),
)
def test_any_element_errs_by_less_than_a_level(size, block, levels, exponent, norm, seed):
    x = (torch.rand(size, generator=generator(seed), dtype=torch.float64) * 2 - 1) * 10.0**exponent
    x = x.to(torch.float32)
    compressor = build("qsgd", block=block, levels=levels, norm=norm)
    wire = compressor.encode(x, generator=generator(seed))
    assert torch.equal(wire, compressor.to_wire(x, generator(seed)))
    decoded = compressor.decode(wire, size).double()
    step = (qsgd_norms(x, block, norm) / levels).clamp_min(2.0**-126)
    assert ((decoded - x.double()).abs() <= step * (1 + 1e-6) + 4e-7 * x.double().abs()).all()
    assert ((decoded / step).abs() <= levels * (1 + 1e-6)).all()


def test_a_norm_beyond_float32_is_refused():
    x = torch.full((512,), 1e38)
    with pytest.raises(NonFiniteGradient, match="qsgd"):
        build("qsgd").encode(x, generator=generator())
    for fits in (build("qsgd", norm="max"), build("qsgd", block=4)):
        assert fits.decode(fits.encode(x, generator=generator()), 512).isfinite().all()
