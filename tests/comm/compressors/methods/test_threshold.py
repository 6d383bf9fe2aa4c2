"""A threshold sends exactly what reaches it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import FLOAT32, normal

from gradwire.base.errors import BadInput
from gradwire.comm.compressors import build


def sent(x: torch.Tensor, **options) -> torch.Tensor:
    """The values that arrive, in both forms."""
    compressor, shape = build("threshold", **options), tuple(x.shape)
    arrived = compressor.decode(compressor.encode(x), shape)
    assert torch.equal(compressor.from_wire(compressor.to_wire(x, None), shape), arrived)
    return arrived


def least(x: torch.Tensor, threshold: float, scale: str) -> np.float32:
    """The least magnitude sent, by numpy in float64."""
    values = x.double().numpy()
    unit = {"absolute": 1.0, "max": np.abs(values).max(), "rms": math.sqrt(math.fsum(values**2) / values.size)}[scale]
    return np.float32(threshold * unit)


@settings(max_examples=50, deadline=None)
@given(
    n=st.sampled_from([1, 2, 100, 1024, 1500]),
    threshold=st.floats(0.001, 1),
    scale=st.sampled_from(["rms", "max", "absolute"]),
    exponent=st.integers(-40, 37),
    seed=st.integers(0, 2**31),
)
def test_the_sent_set_and_the_error_are_exact(n, threshold, scale, exponent, seed):
    x = (normal(n, seed).double() * 10.0**exponent).clamp(-FLOAT32.max, FLOAT32.max).float()
    v = least(x, threshold, scale)
    kept = sent(x, threshold=threshold, scale=scale)
    assert torch.equal(kept, torch.where(x.abs() >= torch.tensor(v), x, 0.0))
    error = (x - kept).double().square().sum()
    assert error <= min(x.double().square().sum(), n * float(v) ** 2)


@pytest.mark.parametrize("scale", ["rms", "max", "absolute"])
def test_an_element_at_the_threshold_is_sent_and_a_zero_never(scale):
    x = torch.tensor([0.5, -0.5, 0.49999997, 0.0, -0.0, 1.0, -1.0, math.sqrt(5 / 4)])  # its rms is 0.75, its max 1.118
    v = float(least(x, 0.5, scale))
    at = torch.cat([x, torch.tensor([v, -v, np.nextafter(np.float32(v), np.float32(0))])])
    kept = sent(at, threshold=v, scale="absolute")
    assert torch.equal(kept, torch.where(at.abs() >= v, at, 0.0)) and kept[-3:].tolist() == [v, -v, 0.0]
    for zeros in (torch.zeros(300), torch.zeros(0), -torch.zeros(5)):
        compressor = build("threshold", scale=scale, threshold=1e-300)
        wire = compressor.encode(zeros)
        assert wire[:8].view(torch.int64).item() == 0
        assert torch.equal(compressor.decode(wire, zeros.numel()), torch.zeros(zeros.numel()))


def test_the_root_mean_square_is_not_disturbed_by_overflow_or_underflow():
    for factor in (1e30, 1e-30):
        x = normal(10_007) * factor
        assert 50 < sent(x).count_nonzero() < 200  # 1.24 % of a normal lie beyond 2.5


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scale", ["rms", "max", "absolute"])
def test_what_is_not_finite_is_always_sent(scale, value):
    x = normal(100)
    x[7] = value
    flag = torch.zeros(1, dtype=torch.uint8)
    compressor = build("threshold", threshold=1.0, scale=scale)
    assert not compressor.decode(compressor.encode(x, flag=flag), 100)[7].isfinite()
    assert flag.item() == 1


def test_a_count_that_cannot_be_is_refused():
    compressor = build("threshold", threshold=1.0, scale="absolute")
    wire = compressor.encode(normal(100)).clone()
    for count in (-1, 101, 2**62):
        wire[:8] = torch.tensor([count]).view(torch.uint8)
        with pytest.raises(ValueError, match=f"cannot encode {count} places"):
            compressor.decode(wire, 100)
    with pytest.raises(ValueError, match="7 bytes cannot encode"):
        compressor.decode(wire[:7], 100)


def test_a_threshold_that_nothing_reaches_is_refused():
    with pytest.raises(BadInput, match="would never send anything: with scale max it is at most 1"):
        build("threshold", scale="max")
