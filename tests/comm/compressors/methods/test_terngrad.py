"""TernGrad keeps a sign with the exact probability of its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import assert_frequencies, assert_unbiased, draws, generator, normal

from gradwire.comm.compressors import build


def spread(x: torch.Tensor, block: int, scale) -> torch.Tensor:
    """``scale`` of each block (float64), for each of its elements."""
    return torch.cat([scale(part.double()).expand(part.numel()) for part in x.split(block)])


def largest(part: torch.Tensor) -> torch.Tensor:
    return part.abs().max()


@pytest.mark.parametrize("block", [100, 7, 300])
def test_a_sign_is_kept_with_its_exact_probability(block):
    x, count = normal(300, seed=3), 2000
    scale = spread(x, block, largest)
    drawn = draws(build("terngrad", block=block), x, count)
    assert ((drawn == 0) | (drawn == scale * x.double().sign())).all()
    size = x.double().abs()
    assert_frequencies((drawn != 0).sum(dim=0), count, size / scale)
    assert_unbiased(drawn, x, size * (scale - size))


def test_wires_by_hand():
    x = torch.tensor([2.0, -2.0, 0.0, 4.0, -4.0, 0.0])  # every draw is certain
    wire = build("terngrad", block=3).encode(x, generator=generator())
    assert wire[:8].view(torch.float32).tolist() == [2.0, 4.0]
    assert wire[8:].tolist() == [0b01_00_11_01, 0b00_11]


def test_any_byte_decodes_within_bounds():
    compressor = build("terngrad")
    wire = torch.cat([torch.ones(4).view(torch.uint8), torch.arange(256).to(torch.uint8)])
    assert wire.numel() == compressor.wire_bytes(1024)
    assert set(compressor.decode(wire, 1024).tolist()) == {-2.0, -1.0, 0.0, 1.0}


@settings(max_examples=50, deadline=None)
@given(
    size=st.integers(1, 40),
    block=st.integers(1, 12),
    exponent=st.integers(-44, 38),
    seed=st.integers(0, 2**31),
)
def test_any_element_becomes_zero_or_its_sign_times_the_scale(size, block, exponent, seed):
    x = (torch.rand(size, generator=generator(seed), dtype=torch.float64) * 2 - 1) * 10.0**exponent
    x = x.to(torch.float32)
    compressor = build("terngrad", block=block)
    wire = compressor.encode(x, generator=generator(seed))
    assert torch.equal(wire, compressor.to_wire(x, generator(seed)))
    decoded = compressor.decode(wire, size).double()
    scale = spread(x, block, largest).clamp_min(2.0**-126)
    assert ((decoded == 0) | (decoded == scale * x.double().sign())).all()
    full = x.double().abs() == scale
    assert torch.equal(decoded[full], x.double()[full])
